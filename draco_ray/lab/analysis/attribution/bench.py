"""Run a judge on planted faults: it scores and credits every rollout, and the algorithm computes step advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from draco_ray.algorithm.group import group_advantages
from draco_ray.algorithm.reward import surviving_criteria
from draco_ray.algorithm.rules import AdvantageRule
from draco_ray.environments.appworld.data_root import load_task
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Credit, Rubric, Score, Stage1, Stage2, Union
from draco_ray.lab.analysis.attribution.plant import PlantedRollout
from draco_ray.lab.analysis.attribution.rubric import known_rubric
from draco_ray.records import Attribution, EpisodeEnd, IntArray, Message, RolloutAdvantage, Trajectory, Turn
from draco_ray.rollout.agent import render_agent_prompt
from draco_ray.traces.judging import as_trajectory
from draco_ray.traces.model import Trace

AGENT_PROMPT = Path("prompts/agent_think.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """A planted rollout, its verdicts, attributions and advantages."""

    planted: PlantedRollout
    truth_K: IntArray
    """Known verdicts: -1 violated, +1 not violated, 0 unknown; empty if the judge wrote the rubric."""
    tokens_M: IntArray
    verdict_K: IntArray | None = None
    """Verdicts of the scoring call; None if it failed."""
    attributions: tuple[Attribution, ...] | None = None
    """Attributions of the credit call, on surviving criteria; None if no call was made or it failed."""
    share: RolloutAdvantage | None = None
    """R, A, Q and a_j; None if there are no scoring verdicts."""
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
    task = load_task(world, group[0].task_id)
    prompt = render_agent_prompt(AGENT_PROMPT, task)
    played = [trajectory(rollout, index, prompt) for index, rollout in enumerate(group)]
    rubric = known_rubric(group[0].rubric, task.instruction) or await _own_rubric(judge, played)
    scored = await asyncio.gather(*(judge.ask(Score(each, rubric), _context(each)) for each in played))
    rows = [index for index, score in enumerate(scored) if score.value is not None]
    verdict_GK = np.array(
        [[int(entry.verdict) for entry in scored[index].value or ()] for index in rows], dtype=np.int8
    ).reshape(len(rows), len(rubric))
    surviving = [int(index) for index in np.flatnonzero(surviving_criteria(verdict_GK))]
    credited = await asyncio.gather(
        *(
            judge.ask(Credit(played[index], rubric, scored[index].value or (), surviving), _context(played[index]))
            for index in rows
        )
    )
    advantages = group_advantages(
        group[0].task_id,
        verdict_GK,
        [credit.value for credit in credited],
        [played[index].tokens_M for index in rows],
        rows,
        rule=AdvantageRule(),
    )
    found = [
        JudgedRollout(planted=rollout, truth_K=rollout.truth_K, tokens_M=each.tokens_M, error=score.error)
        for rollout, each, score in zip(group, played, scored, strict=True)
    ]
    for index, verdict_K, credit, share in zip(rows, verdict_GK, credited, advantages.rollouts, strict=True):
        found[index] = replace(
            found[index], verdict_K=verdict_K, attributions=credit.value, share=share, error=credit.error
        )
    return found


async def _own_rubric(judge: Judge, played: Sequence[Trajectory]) -> Rubric:
    """The rubric that the judge writes: stage1, then stage2 for every rollout, then union.

    Raises:
        JudgeUnavailable: the judge wrote no criteria.
    """
    prompt, whole = played[0].prompt, replace(_context(played[0]), rollout=None)
    first = (await judge.ask(Stage1(prompt), whole)).value or ()
    further = await asyncio.gather(*(judge.ask(Stage2(each, first), _context(each)) for each in played))
    candidates = [*first, *(criterion for judged in further for criterion in judged.value or ())]
    union = await judge.ask(Union(prompt, candidates, played), whole)
    if not union.value:
        raise JudgeUnavailable(f"task {played[0].task_id}: the judge wrote no rubric: {union.error or 'an empty one'}")
    return union.value


def trajectory(rollout: PlantedRollout, index: int, prompt: tuple[Message, ...]) -> Trajectory:
    """The rollout as a judge sees it: a step for each cell, then a closing turn."""
    turns = [
        Turn(text=f"<code>\n{cell}\n</code>", action=cell, observation=output)
        for cell, output in zip(rollout.cells, rollout.outputs, strict=True)
    ]
    turns.append(Turn(text="Done."))
    trace = Trace(
        trace_id=rollout.kind,
        task_id=rollout.task_id,
        prompt=prompt,
        turns=tuple(turns),
        format="planted",
        source=rollout.task_id,
        ended=EpisodeEnd.FINISHED,
    )
    return as_trajectory(trace, f"attribution/{rollout.task_id}", index)


def _context(played: Trajectory) -> CallContext:
    return CallContext(group=played.group, task_id=played.task_id, rollout=played.rollout)
