"""A trace as the judge takes it: a `Trajectory`, and the facts of its world."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from draco_ray.records import GAP, EpisodeEnd, Trajectory, Turn
from draco_ray.traces.entry import AGENT
from draco_ray.traces.model import Trace

UNKNOWN_TOKEN = -1
"""Stands where a trace's tokens are counted but not known."""
MOST_TOOLS = 40
"""Named in the facts."""


def as_trajectory(trace: Trace, group: str, rollout: int) -> Trajectory:
    """A trace as the judge and the advantage rule take it.

    Its tokens are those its agent sampled, as many as the trace counts or its length suggests, all of them unknown.
    """
    counts = [trace.tokens(turn) for turn in trace.turns]
    ends = list(itertools.accumulate(counts))
    steps = itertools.count()
    step_of = [next(steps) if turn.is_step else GAP for turn in trace.turns]
    total = sum(counts)
    return Trajectory(
        task_id=trace.task_id,
        group=group,
        rollout=rollout,
        attempt=0,
        policy_version=0,
        prompt=trace.prompt,
        turns=tuple(
            Turn(
                text=turn.text,
                action=turn.action,
                observation=turn.observation,
                role=turn.role,
                first_token=end - count,
                last_token=end,
                message=turn.message,
            )
            for turn, count, end in zip(trace.turns, counts, ends, strict=True)
        ),
        token_ids_T=np.full(total, UNKNOWN_TOKEN, dtype=np.int32),
        sampled_T=np.ones(total, dtype=np.bool_),
        logprob_T=np.zeros(total, dtype=np.float32),
        step_T=np.repeat(np.array(step_of, dtype=np.int32), counts),
        prompt_length=0,
        ended=trace.ended,
        started_at=0.0,
        ended_at=0.0,
    )


def environment_facts(traces: Sequence[Trace]) -> str:
    """What the judge has to know of these agents' world, from what is seen in their traces.

    Only words of our own and names of tools; what the agents were told stands with their prompt.
    """
    turns = [turn for trace in traces for turn in trace.turns]
    actions = [turn.action for turn in turns if turn.action is not None]
    called = sorted({name for action in actions for name in _called(action)})
    facts = ["A step is a turn of the agent that somebody or something received: an action or a message."]
    if called:
        more = f" and {len(called) - MOST_TOOLS} more" if len(called) > MOST_TOOLS else ""
        facts.append(
            "The agent acts by calling tools: several calls in a turn are made together and are one step, and what "
            "the environment answered follows. Tools seen here: "
            f"{', '.join(called[:MOST_TOOLS])}{more}."
        )
    elif actions:
        facts.append("The agent acts by code that is run, and its output follows.")
    else:
        facts.append("The agent only speaks here: no turn of these runs acts on anything.")
    others = sorted({turn.role for turn in turns if turn.role != AGENT})
    if "user" in others:
        facts.append("It talks with a user: its messages are said to the user, who may answer.")
    if rest := [role for role in others if role not in ("user", "tool")]:
        facts.append(f"Turns under another name ({', '.join(rest[:10])}) are not the agent's own.")
    if any(trace.ended is EpisodeEnd.UNSTATED for trace in traces):
        facts.append("Where a run ends with `unstated`, nothing is known of why it ended.")
    facts.append("Text in brackets such as [image: image/png, 12 kB] stands for what is no text and cannot be shown.")
    return "\n".join(f"- {fact}" for fact in facts)


def _called(action: str) -> list[str]:
    """Names of the tools that an action calls."""
    return re.findall(r"^([A-Za-z_][\w.:-]{0,79})\((?=[{\"\[]|$|\n)", action, re.MULTILINE)
