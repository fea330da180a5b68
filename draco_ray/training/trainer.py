"""The loop over training steps. What it works with is put together in `draco_ray.training.session`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rich.console import Console

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.canary import Probe
from draco_ray.engine.fleet import EngineFleet
from draco_ray.errors import RunStopped
from draco_ray.judging.outage import span
from draco_ray.learner.base import Learner
from draco_ray.pipeline import GroupState
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.batches import Batch, Batches
from draco_ray.training.engines import WeightSync, engines_asleep
from draco_ray.training.metrics import step_metrics, step_spans, update_metrics
from draco_ray.training.observer import RunObserver, StepWatch
from draco_ray.training.overlap import busy_seconds, merged
from draco_ray.training.preflight import check_disk
from draco_ray.training.progress import step_line
from draco_ray.training.resume import drop_checkpoints
from draco_ray.training.streaming import StreamedUpdate, streamed_update
from draco_ray.training.watchdog import Pending, Watchdog, in_time

STOPPING_SECONDS = 60.0
"""A checkpoint has to reach the disk when the run is stopped."""


class Trainer:
    """Trains on one step's groups after the other."""

    def __init__(
        self,
        config: DracoConfig,
        *,
        batches: Batches,
        learner: Learner,
        fleet: EngineFleet,
        weights: WeightSync,
        store: Any,
        observer: RunObserver,
        watch: StepWatch,
        run: RunDirectory,
        console: Console,
        pending: Pending | None = None,
    ) -> None:
        """
        Args:
            config: the run's.
            batches: the groups of each step.
            learner: updates the weights.
            fleet: the engines, where they share the learner's GPUs.
            weights: brings updates to the engines.
            store: the run store's actor.
            observer: is told of each step.
            watch: is told of each group.
            run: where checkpoints are written.
            console: takes a line a step.
            pending: is told what is waited for.
        """
        self._config, self._console, self._run = config, console, run
        self._batches, self._learner, self._fleet, self._weights = batches, learner, fleet, weights
        self._store, self._observer, self._watch = store, observer, watch
        self._pending, self._watchdog = pending or Pending(), Watchdog(config.watch)
        self._writing: asyncio.Task[None] | None = None
        """The checkpoint that is not on disk yet."""

    async def train(self, first: int, last: int, between: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Train from step ``first`` to step ``last``.

        Args:
            first: of the steps.
            last: of the steps.
            between: called with each step that is done, and waited for before the next one.

        Raises:
            RunStopped: a step teaches nothing, or takes too long (`draco_ray.training.watchdog`).
        """
        seconds = self._config.watch.step_seconds
        try:
            for step in range(first, last + 1):
                began = time.monotonic()
                metrics = await in_time(self._step(step, last), seconds, partial(self._late, step))
                self._console.print(step_line(metrics, last))
                if step == first < last:
                    left = span((last - step) * (time.monotonic() - began))
                    self._console.print(f"{last - step} steps are left: about {left} at this rate")
                if between is not None:
                    await between(step)
            self._watchdog.end()
        finally:
            await self._batches.cancel()
            # Of a run that is stopped: what its last step has taught is kept if it can be.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._written(), STOPPING_SECONDS)

    def _late(self, step: int) -> RunStopped:
        seconds = self._config.watch.step_seconds
        return RunStopped(f"step {step} has not ended in watch.step_seconds={seconds:g}, waiting for: {self._pending}")

    async def _step(self, step: int, last: int) -> dict[str, Any]:
        config, started = self._config, time.time()
        check_disk(config, self._run.path)
        if self._writing is not None and self._writing.done():
            await self._written()
        with self._pending.of("the run store"):
            batch = await self._batches.take(step)
        self._watch.begin(f"step {step}/{last}", batch.groups, config.algorithm.group_size)
        try:
            if self._weights.proven:
                with self._pending.of("the run store"):
                    await self._batches.run_ahead(range(step + 1, min(step + config.train.staleness, last) + 1))
            update, probe = await self._learn(batch)
        finally:
            await batch.cancel()
        played = step_metrics(step, batch.groups, config.algorithm.group_size)
        # Before the checkpoint: a step that taught nothing is done again when the run is continued.
        self._watchdog.check(played, Counter(group.reason for group in batch.groups if group.reason is not None))

        self._batches.note(step, played["solved_tasks"], played["task_pass_rates"])

        learned, learned_at = update_metrics(update.updates), time.time()
        updated = learned["updates"] > 0 and learned["grad_norm"] > 0
        with self._pending.of("sync of the adapter to the engines"):
            gap = await self._weights.sync(step, probe, updated=updated, quiet=not self._batches.ahead)
        rest = {"learning": merged(update.busy), "sync": [(learned_at, time.time())]}
        learning = {**played, **learned, "seconds_learning": busy_seconds(update.busy), "canary_gap": gap}
        # The checkpoint makes the step one that is done: what it has taught is on disk by then.
        with self._pending.of("the run store"):
            await self._store.spans.remote(step, "spans", step_spans(batch.groups, rest))
            await self._store.metrics.remote(step, {**learning, **_seconds(learned_at, started)})
        if step % config.train.checkpoint_every == 0 or step == last:
            began = time.time()
            await self._checkpoint(step)
            if step == last:
                await self._written()
            spans = step_spans((), {"checkpoint": [(began, time.time())]})
            with self._pending.of("the run store"):
                await self._store.spans.remote(step, "checkpoint", spans)
        metrics = {**learning, **_seconds(learned_at, started)}
        with self._pending.of("the trackers"):
            # A server of theirs that hangs stops no watch, nor the line on a terminal.
            await asyncio.to_thread(self._observer.step, metrics)
        with self._pending.of("the run store"):
            await self._store.finish_step.remote(step, metrics)
        with self._pending.of("the trackers"):
            await asyncio.to_thread(self._observer.rollouts, step, self._run)
        return metrics

    async def _checkpoint(self, step: int) -> None:
        """Have the step's checkpoint written beside the next step, once the one before it is on disk."""
        await self._written()
        self._writing = asyncio.create_task(self._learner.checkpoint(self._run.checkpoint(step)))
        # Let it ask the learner: what the learner is asked from here on comes after it.
        await asyncio.sleep(0)

    async def _written(self) -> None:
        """Wait until the last checkpoint is on disk, and drop those that do not stay."""
        if self._writing is None:
            return
        with self._pending.of("the learner's checkpoint"):
            # Whoever is tired of waiting does not take the checkpoint away from those who come later.
            await asyncio.shield(self._writing)
        self._writing = None
        drop_checkpoints(self._run, self._config.train)

    async def _learn(self, batch: Batch) -> tuple[StreamedUpdate, Probe | None]:
        """Update the policy with the groups as they finish; returns what became of it and what the canary compares."""
        asleep = engines_asleep(
            self._fleet, colocate=self._config.engine.colocate, after=batch.work, pending=self._pending
        )
        async with asleep:
            update = await streamed_update(
                self._learner, batch.work, self._config.learner.minibatch_prompts, self._pending
            )
            # Before engines on the same GPU take the memory that a pass of the learner's needs.
            with self._pending.of("the learner's log-probs for the canary"):
                probe = await self._weights.probe(update.fed)
        for group in batch.groups:
            if group.state is GroupState.CREDITED:
                group.state = GroupState.TRAINED
        return update, probe


def _seconds(learned_at: float, started: float) -> dict[str, float]:
    """Seconds since the update, and since the step began."""
    now = time.time()
    return {"seconds_sync": now - learned_at, "seconds": now - started}
