"""The learner's part of a training step, fed with each group the moment its advantages exist.

The weights do not change before the first update, so until then everything may be done in the order in which groups
finish: gradients of the first minibatch are added up, old log-probs of the later ones are taken. Which group belongs to
which minibatch is the batch's order and no accident of timing: it would make the short groups' update the first one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draco_ray.learner.base import GroupLearner
from draco_ray.learner.messages import UpdateMetrics
from draco_ray.pipeline import gather_or_cancel
from draco_ray.training.overlap import Interval
from draco_ray.training.watchdog import Pending


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
