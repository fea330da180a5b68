"""What the loop does with the engines: new weights, the proof that they are live, and turns on a shared GPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray

from draco_ray.engine.canary import CanaryReading, Probe, Scorer, run_canary
from draco_ray.engine.fleet import EngineFleet
from draco_ray.errors import ClusterError
from draco_ray.learner.base import Learner
from draco_ray.training.watchdog import Pending

PROBE_TOKENS, PROBE_LENGTH = 512, 8192
"""Sampled tokens of one of the step's rollouts on which engine and learner are compared after a sync, and all tokens up
to the last of them, at most."""
PUBLISH_ATTEMPTS = 3
"""Times the weights are asked for, should the learner's worker die between handing them out and their being copied."""


class WeightSync:
    """Brings the learner's weights to every engine, and proves that they are live."""

    def __init__(
        self,
        learner: Learner,
        fleet: EngineFleet,
        advantages: Any,
        *,
        tolerance: float,
        moved: bool,
        first_gap: float | None = None,
        canary: Callable[..., Awaitable[CanaryReading]] = run_canary,
    ) -> None:
        """
        Args:
            learner: whose weights.
            fleet: the engines.
            advantages: the advantage actor, which knows how samples begin.
            tolerance: of the canary's mean gap, nats.
            moved: whether the weights differ from the base model's already.
            first_gap: the mean gap of the run's first step, nats; None: it is still to come.
            canary: `draco_ray.engine.canary.run_canary`.
        """
        self._learner = learner
        self._fleet = fleet
        self._advantages = advantages
        self._tolerance = tolerance
        self._moved = moved
        self._first_gap = first_gap
        self._canary = canary
        self.proven = False
        """Whether the canary has seen, on quiet engines, that an update has an effect that is not rounding."""

    async def probe(self, fed: Sequence[ray.ObjectRef[Any]]) -> Probe | None:
        """Let the learner score the beginning of one of these groups' rollouts; None if there is none."""
        for samples in fed:
            begun = await self._advantages.probe.remote(samples, PROBE_TOKENS, PROBE_LENGTH)
            if begun is not None:
                token_ids, compared_T = begun
                on_T = (await self._learner.token_logprobs(token_ids))[1:]
                off_T = (await self._learner.token_logprobs(token_ids, adapter=False))[1:]
                return Probe(token_ids, compared_T, on_T, off_T)
        return None

    async def sync(self, version: int, probe: Probe | None, *, updated: bool, quiet: bool) -> float | None:
        """Bring the new weights to every engine and prove that they are live; returns the mean log-prob gap, nats.

        Args:
            version: of the weights.
            probe: what is compared; None: nothing, and nothing is proven.
            updated: whether the last step changed the weights.
            quiet: whether no rollouts run. Beside rollouts an engine's passes differ by rounding, which the effect of a
                small update may not exceed. So any effect at all is asked of quiet engines only; the gap is bounded and
                the base model looked for always.

        Raises:
            CanaryFailed: an engine serves other weights.
        """
        # A step without any signal leaves the weights as they were: then no effect can be asked for.
        self._moved = self._moved or updated
        await self.publish(version)
        if probe is None:
            return None
        moved, first = self._moved and quiet, self._first_gap

        async def proof(scorer: Scorer) -> CanaryReading:
            return await self._canary(
                scorer, [probe], version=version, moved=moved, tolerance=self._tolerance, first=first
            )

        readings = await self._fleet.prove(proof)
        self.proven = self.proven or (moved and all(reading.live for reading in readings))
        gap = max(reading.gap_mean for reading in readings)
        self._first_gap = gap if first is None else first
        return gap

    async def publish(self, version: int) -> None:
        """Bring the learner's weights to every engine.

        Raises:
            ClusterError: they were lost on the way time and again.
        """
        for _ in range(PUBLISH_ATTEMPTS):
            try:
                # Copied into an object that the driver owns: one owned by the worker is lost when the worker dies.
                update = ray.put(await (await self._learner.weights(version)))
                await self._fleet.load(update)
            except ray.exceptions.ObjectLostError:
                continue
            return
        raise ClusterError(
            f"weights of version {version} were lost {PUBLISH_ATTEMPTS} times on their way to the engines: "
            "the learner's workers keep dying"
        )


@asynccontextmanager
async def engines_asleep(
    fleet: EngineFleet,
    *,
    colocate: bool,
    after: Sequence[asyncio.Future[Any]] = (),
    pending: Pending | None = None,
) -> AsyncIterator[None]:
    """Give the engines' GPUs to the learner inside the block, which begins when ``after`` has ended.

    ``pending`` is told that the engines are waited for.
    """
    pending = pending or Pending()
    if not colocate:
        yield
        return
    if after:
        # Errors are left to the caller, who awaits the same tasks.
        await asyncio.wait(after)
    with pending.of("the engines' going to sleep"):
        await fleet.sleep()
    yield
    with pending.of("the engines' waking up"):
        await fleet.wake()


async def unless_lost(work: Coroutine[Any, Any, None], *losses: Awaitable[None]) -> None:
    """Do ``work``, or raise what became of something that is lost for good, without which it would wait for ever.

    Args:
        losses: each waits for one such loss, and raises.
    """
    task, *watched = (asyncio.ensure_future(each) for each in (work, *losses))
    try:
        await asyncio.wait({task, *watched}, return_when=asyncio.FIRST_COMPLETED)
        for loss in watched:
            if loss.done():
                await loss
        await task
    finally:
        for each in (task, *watched):
            each.cancel()
        await asyncio.gather(task, *watched, return_exceptions=True)
