"""How fast a training step could have been: the longest path through what it did, from its recorded durations.

Every task keeps the duration it was recorded with (at the worker that did it, so that neither Ray's calls nor waiting
are part of it) and starts the moment that everything it needs is there. It needs:

==============  =====================================================================================================
rollout         an environment slot. Rollouts take slots in the order in which they were recorded to start, each the
                one that is free first: ``slots`` of them run at a time
stage1          nothing
stage2          its rollout and its group's stage1, if there is one
proposals       (in place of stage2) every rollout of its group, and its stage1
union           every stage2 of its group, or its proposals
score           its group's union
verdicts        (in place of score and credit) as score
credit          every score of its group (which criteria survive is known only then)
accumulate      every score and credit of its group; the learner. Of a later minibatch also the update before it
remember        (old log-probs of a later minibatch) as accumulate; the learner
update          the accumulated groups of its minibatch; the first update also everything remembered; the learner
==============  =====================================================================================================

The learner does one task at a time, in the order in which tasks become ready; no other order lets an update end
earlier. Judge calls are assumed not to wait for each other (their limits must not bind), and advantages to take no
time. So a measured step exceeds this bound by the program's own overhead: calls between processes, results that wait,
work that starts late.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draco_ray.judging.phases import Credit, Proposals, Score, Stage1, Stage2, Union, Verdicts
from draco_ray.pipeline import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTask:
    """Something the learner did."""

    kind: str
    """``accumulate``, ``remember`` or ``update``."""
    group: str
    """Name of the group; empty for an update."""
    started_at: float
    ended_at: float
    """Unix seconds, at the learner."""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.ended_at - self.started_at


@dataclass(slots=True)
class Task:
    """A node of the graph: it starts when the last of ``after`` has ended."""

    stage: str
    seconds: float
    after: Sequence[Task] = ()
    last: Task | None = field(init=False)
    """What it waited for longest."""
    end: float = field(init=False)
    """Seconds after the step's start."""

    def __post_init__(self) -> None:
        self.last = max(self.after, key=lambda task: task.end, default=None)
        self.end = self.seconds + (self.last.end if self.last is not None else 0.0)


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The bound of a step."""

    seconds: float
    by_stage: dict[str, float]
    """Stage -> its seconds on the longest path, in the order of the path."""


def critical_path(
    groups: Sequence[Group], learned: Sequence[LearnerTask], *, slots: int, minibatch_prompts: int
) -> CriticalPath:
    """The bound of a step that ran.

    Args:
        groups: of the step, in the batch's order, as the pipeline left them; none of them failed.
        learned: everything the learner did for them.
        slots: environment slots.
        minibatch_prompts: groups an update.
    Raises: ValueError where the learner's tasks are not those of these groups.
    """
    played = _rollouts(groups, slots)
    ready = {group.name: _judged(group, played) for group in groups}
    end = _learner(groups, ready, learned, minibatch_prompts)
    by_stage: dict[str, float] = {}
    task: Task | None = end
    while task is not None:
        by_stage[task.stage] = by_stage.get(task.stage, 0.0) + task.seconds
        task = task.last
    return CriticalPath(end.end, dict(reversed(by_stage.items())))


def _rollouts(groups: Sequence[Group], slots: int) -> dict[tuple[str, int], Task]:
    """The rollouts by group and number, dealt to the slots."""
    recorded = [(summary.started_at, group.name, summary) for group in groups for summary in group.rollouts]
    free: list[tuple[float, int, Task | None]] = [(0.0, slot, None) for slot in range(slots)]
    played = {}
    for _, name, summary in sorted(recorded, key=lambda entry: entry[0]):
        _, slot, before = heapq.heappop(free)
        task = Task("rollout", summary.ended_at - summary.started_at, () if before is None else (before,))
        heapq.heappush(free, (task.end, slot, task))
        played[name, summary.rollout] = task
    return played


def _judged(group: Group, played: Mapping[tuple[str, int], Task]) -> list[Task]:
    """The tasks that must have ended before the learner can process the group."""
    phases = {(phase.phase, phase.rollout): phase.ended_at - phase.started_at for phase in group.phases}
    numbers = sorted(summary.rollout for summary in group.rollouts)
    rollouts = {number: played[group.name, number] for number in numbers}

    def judge(phase: str, after: Mapping[int, Sequence[Task]]) -> list[Task]:
        return [Task(phase, phases[phase, number], after[number]) for number in numbers if (phase, number) in phases]

    stage1 = [Task(Stage1.name, phases[Stage1.name, None])] if (Stage1.name, None) in phases else []
    done: list[Task] = [*rollouts.values(), *stage1]
    if (Proposals.name, None) in phases:
        done = [Task(Proposals.name, phases[Proposals.name, None], done)]
    else:
        done = judge(Stage2.name, {number: (rollout, *stage1) for number, rollout in rollouts.items()}) or done
    if (Union.name, None) in phases:
        done = [Task(Union.name, phases[Union.name, None], done)]
    scores = judge(Score.name, dict.fromkeys(numbers, done)) or judge(Verdicts.name, dict.fromkeys(numbers, done))
    credits = judge(Credit.name, dict.fromkeys(numbers, scores))
    return credits or scores or done


def _learner(
    groups: Sequence[Group], ready: Mapping[str, Sequence[Task]], learned: Sequence[LearnerTask], size: int
) -> Task:
    """The task of the last update."""
    seconds = {(task.kind, task.group): task.seconds for task in learned if task.kind != "update"}
    updates = [task.seconds for task in learned if task.kind == "update"]
    wanted = {("accumulate" if at < size else "remember", group.name) for at, group in enumerate(groups)}
    wanted |= {("accumulate", group.name) for group in groups}
    minibatches = [groups[at : at + size] for at in range(0, len(groups), size)]
    if set(seconds) != wanted or len(updates) != len(minibatches):
        raise ValueError(f"the learner's tasks {sorted(seconds)} and {len(updates)} updates are not those of the step")
    before: tuple[Task, ...] = ()
    for at in sorted(range(len(groups)), key=lambda at: max(task.end for task in ready[groups[at].name])):
        kind, name = "accumulate" if at < size else "remember", groups[at].name
        before = (Task(kind, seconds[kind, name], (*ready[name], *before)),)
    for number, (minibatch, update) in enumerate(zip(minibatches, updates, strict=True)):
        for group in minibatch if number else ():
            before = (Task("accumulate", seconds["accumulate", group.name], before),)
        before = (Task("update", update, before),)
    return before[0]
