"""Run a judge on planted faults: it scores and credits every rollout, and the algorithm computes step advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from draco_ray.config.schema import AlgorithmConfig
from draco_ray.environments.appworld.data_root import load_task
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.judge import Judge, ask_phase
from draco_ray.judging.phases import Credit, Score
from draco_ray.lab.analysis.attribution.plant import PlantedRollout
from draco_ray.lab.analysis.attribution.rubric import known_rubric
from draco_ray.records import Attribution, EpisodeEnd, IntArray, Message, RolloutAdvantage, Turn
from draco_ray.rollout.agent import render_agent_prompt
from draco_ray.traces.judging import GroupJudgement, as_trajectory, run_group_pipeline
from draco_ray.traces.model import Trace

AGENT_PROMPT = Path("prompts/agent_think.txt")
EVERY_CREDIT = AlgorithmConfig(skip_useless_credit_calls=False)
"""Credit calls for every scored rollout, even if a group's rewards are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """A rollout with a planted fault, its verdicts, attributions and advantages."""

    planted: PlantedRollout
    truth_K: IntArray
    """Known verdicts: -1 violated, +1 not violated, 0 unknown; empty if the judge wrote the rubric."""
    tokens_M: IntArray
    verdict_K: IntArray | None = None
    """Verdicts of the scoring call; None if it failed."""
    attributions: tuple[Attribution, ...] | None = None
    """Attributions of the credit call, on surviving criteria; None if no call was made or it failed."""
    share: RolloutAdvantage | None = None
    """Reward R, advantage A, step qualities Q and step advantages a_j; None if there are no scoring verdicts."""
    error: str | None = None

    @property
    def steps(self) -> int:
        """M, the number of steps."""
        return len(self.planted.cells)


async def judge_groups(judge: Judge, groups: Sequence[Sequence[PlantedRollout]], world: Path) -> list[JudgedRollout]:
    """Let a judge score and credit every group against its known rubric, or against a rubric that the judge writes.

    Args:
        judge: the judge to measure.
        groups: confirmed rollouts, one group per task.
        world: sandbox folder with the tasks' instructions.

    Raises:
        JudgeUnavailable: the judge cannot be reached.
    """
    judged = await asyncio.gather(*(_judge_group(judge, group, world) for group in groups))
    return [rollout for group in judged for rollout in group]


async def _judge_group(judge: Judge, group: Sequence[PlantedRollout], world: Path) -> list[JudgedRollout]:
    """Judge one group. Raises: JudgeUnavailable: the judge wrote no criteria."""
    task_id = group[0].task_id
    task = load_task(world, task_id)
    prompt = render_agent_prompt(AGENT_PROMPT, task)
    traces = tuple(_trace(rollout, prompt) for rollout in group)
    state = GroupJudgement(
        index=0,
        task_id=task_id,
        traces=traces,
        trajectories=tuple(as_trajectory(each, f"attribution/{task_id}", index) for index, each in enumerate(traces)),
        static=known_rubric(group[0].rubric, task.instruction) or None,
    )
    await run_group_pipeline(state, EVERY_CREDIT, partial(ask_phase, judge), most=0, least=1)
    if not state.rubric:
        raise JudgeUnavailable(f"task {task_id}: the judge wrote {state.row['reason']}")
    return [_judged(state, index, rollout) for index, rollout in enumerate(group)]


def _judged(state: GroupJudgement, index: int, rollout: PlantedRollout) -> JudgedRollout:
    scored, credit = state.found(index, Score), state.found(index, Credit)
    verdicts = None if scored.value is None else [int(each.verdict) for each in scored.value]
    return JudgedRollout(
        planted=rollout,
        truth_K=rollout.truth_K,
        tokens_M=state.trajectories[index].tokens_M,
        verdict_K=None if verdicts is None else np.array(verdicts, dtype=np.int8),
        attributions=credit.value,
        share=state.share(index),
        error=scored.error or credit.error,
    )


def _trace(rollout: PlantedRollout, prompt: tuple[Message, ...]) -> Trace:
    """The rollout as a judge sees it: a step for each cell, then a closing turn."""
    turns = [
        Turn(text=f"<code>\n{cell}\n</code>", action=cell, observation=output)
        for cell, output in zip(rollout.cells, rollout.outputs, strict=True)
    ]
    turns.append(Turn(text="Done."))
    return Trace(
        trace_id=rollout.kind,
        task_id=rollout.task_id,
        prompt=prompt,
        turns=tuple(turns),
        format="planted",
        source=rollout.task_id,
        ended=EpisodeEnd.FINISHED,
    )
