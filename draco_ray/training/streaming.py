"""The learner's part of a training step, fed with each group the moment its advantages exist.

The weights do not change before the first update, so until then everything may be done in the order in which groups
finish: gradients of the first minibatch are added up, old log-probs of the later ones are taken. Which group belongs to
which minibatch is the batch's order and no accident of timing: it would make the short groups' update the first one.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from draco_ray.learner.base import GroupLearner
from draco_ray.learner.messages import UpdateMetrics
from draco_ray.pipeline import gather_or_cancel
from draco_ray.training.watchdog import Pending

Interval = tuple[float, float]
"""Start and end, seconds."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in ascending order.

    >>> merged([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def busy_seconds(intervals: Iterable[Interval]) -> float:
    """Seconds during which at least one of the intervals runs.

    >>> busy_seconds([(0, 2), (1, 3), (5, 6)])
    4
    """
    return sum(end - start for start, end in merged(intervals))


def hidden_seconds(work: Iterable[Interval], behind: Iterable[Interval]) -> float:
    """Seconds of ``work``, each interval counted in full, during which something in ``behind`` runs as well.

    >>> hidden_seconds([(0, 2), (0, 2), (9, 10)], behind=[(1, 5)])
    2
    """
    cover = merged(behind)
    begins = [begin for begin, _ in cover]
    before = [0, *accumulate(stop - begin for begin, stop in cover)]

    def covered(until: float) -> float:
        begun = bisect_right(begins, until)
        # The last one that has begun may still run.
        return before[begun] - (max(0, cover[begun - 1][1] - until) if begun else 0)

    return sum(max(0, covered(end) - covered(start)) for start, end in work)


def seconds_together(lanes: Mapping[str, Iterable[Interval]]) -> dict[frozenset[str], float]:
    """Seconds for which exactly these lanes run at the same time, so that they add up to when any does.

    >>> seconds_together({"a": [(0, 2), (0, 1)], "b": [(1, 4)]}) == {
    ...     frozenset({"a"}): 1, frozenset({"a", "b"}): 1, frozenset({"b"}): 2
    ... }
    True
    """
    changes = sorted(
        change for lane, work in lanes.items() for start, end in merged(work) for change in ((start, lane), (end, lane))
    )
    running: frozenset[str] = frozenset()
    found: dict[frozenset[str], float] = {}
    for index, (moment, lane) in enumerate(changes):
        if running and moment > changes[index - 1][0]:
            found[running] = found.get(running, 0) + moment - changes[index - 1][0]
        running = running ^ {lane}
    return found


def hidden_share(work: Iterable[Interval], behind: Iterable[Interval]) -> float | None:
    """`hidden_seconds` as a share of all of ``work``; None when there was no work.

    >>> hidden_share([(0, 2), (4, 6)], behind=[(0, 3)])
    0.5
    """
    work = list(work)
    total = sum(end - start for start, end in work)
    return hidden_seconds(work, behind) / total if total > 0 else None


@dataclass(slots=True)
class StreamedUpdate:
    """What became of a training step's groups in the learner."""

    updates: list[UpdateMetrics] = field(default_factory=list)
    """One a minibatch."""
    fed: list[Any] = field(default_factory=list)
    """The groups' samples, in the order in which the learner was given them."""
    busy: list[Interval] = field(default_factory=list)
    """When the learner had something to do, Unix seconds."""


async def streamed_update(
    learner: GroupLearner,
    groups: Sequence[Awaitable[Any | None]],
    minibatch_prompts: int,
    pending: Pending | None = None,
) -> StreamedUpdate:
    """Give the learner every group as soon as it is there, and update once a minibatch.

    Equal to float tolerance to accumulating whole minibatches one after the other. A group that takes long holds up no
    other: what can be done for the others before the first update has been done when it arrives.

    Args:
        learner: at the weights that sampled the groups.
        groups: each ends with a reference to its samples, or None if the group failed; in the batch's order.
        minibatch_prompts: groups an update.
        pending: is told when the learner is waited for.
    Raises: the first error of a group or of the learner.
    """
    result, pending = StreamedUpdate(), pending or Pending()

    async def ask(order: Callable[[Any], Awaitable[Any]], samples: Any) -> None:
        began = time.time()
        with pending.of("a group's gradients in the learner"):
            await order(samples)
        result.busy.append((began, time.time()))

    async def first_pass(position: int, group: Awaitable[Any | None]) -> Any | None:
        samples = await group
        if samples is not None:
            result.fed.append(samples)
            await ask(learner.accumulate if position < minibatch_prompts else learner.remember_old_logprobs, samples)
        return samples

    async def update() -> None:
        began = time.time()
        with pending.of("the learner's update"):
            result.updates.append(await learner.step())
        result.busy.append((began, time.time()))

    finished = await gather_or_cancel(first_pass(position, group) for position, group in enumerate(groups))
    await update()
    for start in range(minibatch_prompts, len(finished), minibatch_prompts):
        minibatch = finished[start : start + minibatch_prompts]
        # Awaited before the update: calls to an asynchronous actor may be carried out in another order.
        await gather_or_cancel(ask(learner.accumulate, samples) for samples in minibatch if samples is not None)
        await update()
    return result
