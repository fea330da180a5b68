"""The loop over training steps; `draco_ray.training.session` creates its parts.

The learner gets each group as soon as its advantages exist. Until the first update the weights do not change, so groups
may arrive in any order: gradients of the first minibatch are accumulated, and old log-probs of the later minibatches
are computed. A group's position in the batch decides its minibatch; if the order of arrival did, the first minibatch
would hold the short groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import numpy as np
import ray
from pydantic import ConfigDict
from rich.console import Console

from draco_ray.config.schema import DracoConfig, TrainConfig
from draco_ray.engine.canary import CanaryReading, Probe, Scorer, run_canary
from draco_ray.engine.fleet import EngineFleet
from draco_ray.errors import ClusterError, ConfigError, RunStopped
from draco_ray.judging.outage import format_duration
from draco_ray.learner.base import GroupLearner, Learner, UpdateMetrics
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Message
from draco_ray.rollout.finished import FinishedRollout
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.held_out import HeldOutEvaluator, HeldOutJudgeEvaluator
from draco_ray.training.metrics import held_out_metrics, step_metrics, step_spans, update_metrics
from draco_ray.training.overlap import Interval, busy_seconds, merged
from draco_ray.training.preflight import check_disk
from draco_ray.training.progress import RunObserver, StepProgress, step_line
from draco_ray.training.watchdog import PendingOperations, Watchdog, run_with_timeout
from draco_ray.workers.tasks import gather_or_cancel


@dataclass(slots=True)
class StreamedUpdate:
    """The results of the learner for one training step."""

    updates: list[UpdateMetrics] = field(default_factory=list)
    """Metrics of the optimizer updates, one per minibatch."""
    fed: list[Any] = field(default_factory=list)
    """The groups' samples, in the order in which the learner got them."""
    busy: list[Interval] = field(default_factory=list)
    """Intervals in which the learner was busy, in Unix seconds."""


async def streamed_update(
    learner: GroupLearner,
    groups: Sequence[Awaitable[Any | None]],
    minibatch_prompts: int,
    pending: PendingOperations | None = None,
    *,
    in_order: bool = False,
) -> StreamedUpdate:
    """Give the learner each group as soon as it is ready; update once per minibatch.

    Up to rounding this equals accumulating whole minibatches one after another. A slow group delays only the updates:
    whatever can be computed for the other groups before the first update is computed while waiting for it.

    Args:
        learner: it holds the weights that sampled the groups. The learner ``ray_lora`` runs each call on every
            `draco_ray.learner.worker.LearnerWorker`, in the same order.
        groups: each resolves to a reference to its samples, or None if the group failed; in the batch's order.
        minibatch_prompts: groups per update.
        pending: records when the learner is being waited for.
        in_order: feed the first pass in the batch's order, so that gradients are always added in the same order.
    Raises: the first error of a group or of the learner.
    """
    result, pending = StreamedUpdate(), pending or PendingOperations()

    async def all_of(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        return [await work for work in works] if in_order else await gather_or_cancel(works)

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

    finished = await all_of(first_pass(position, group) for position, group in enumerate(groups))
    await update()
    for start in range(minibatch_prompts, len(finished), minibatch_prompts):
        minibatch = finished[start : start + minibatch_prompts]
        # Await these calls before the update, because an asynchronous actor may run calls in another order.
        await all_of(ask(learner.accumulate, samples) for samples in minibatch if samples is not None)
        await update()
    return result


PROBE_TOKENS, PROBE_LENGTH = 512, 8192
"""Maximum number of sampled tokens on which engine and learner are compared after a sync, and maximum length of the
sequence they are taken from."""
PUBLISH_ATTEMPTS = 3
"""Attempts to get the weights: the learner's worker may die before they are copied."""


@dataclass
class WeightSync:
    """Sends the learner's weights to every engine, and verifies that the engines use them."""

    learner: Learner
    """The source of the weights."""
    fleet: EngineFleet
    advantages: Any
    """The advantage actor, which selects the probe tokens."""
    tolerance: float
    """Mean gap that the canary always accepts, nats."""
    moved: bool
    """Whether the weights differ from the base model."""
    first_gap: float | None = None
    """The mean gap of the run's first step, nats; None: not measured yet."""
    canary: Callable[..., Awaitable[CanaryReading]] = run_canary
    """`draco_ray.engine.canary.run_canary`, or a fake in tests."""
    proven: bool = field(default=False, init=False)
    """Whether the canary has measured, on idle engines, that an update has a larger effect than rounding."""

    async def probe(self, fed: Sequence[ray.ObjectRef[Any]]) -> Probe | None:
        """The learner's log-probs of a prefix of one rollout of these groups; None if no rollout is usable."""
        for samples in fed:
            begun = await self.advantages.probe.remote(samples, PROBE_TOKENS, PROBE_LENGTH)
            if begun is not None:
                token_ids, compared_T = begun
                on_T = (await self.learner.token_logprobs(token_ids))[1:]
                off_T = (await self.learner.token_logprobs(token_ids, adapter=False))[1:]
                return Probe(token_ids, compared_T, on_T, off_T)
        return None

    async def sync(self, version: int, probe: Probe | None, *, updated: bool, quiet: bool) -> float | None:
        """Send the new weights to every engine and verify that it uses them; returns the mean log-prob gap, nats.

        Args:
            version: of the weights.
            probe: what is compared; None: nothing is compared.
            updated: whether the last step changed the weights.
            quiet: whether no rollouts are running. While rollouts run, batching changes an engine's rounding by
                possibly more than the effect of a small update. So an effect is required only on idle engines; the
                bound on the gap and the comparison with the base model always apply.

        Raises:
            CanaryFailed: an engine serves other weights.
        """
        # A step without an update changes no weights, so the canary cannot require an effect.
        self.moved = self.moved or updated
        await self.publish(version)
        if probe is None:
            return None
        moved, first = self.moved and quiet, self.first_gap

        async def proof(scorer: Scorer) -> CanaryReading:
            return await self.canary(
                scorer, [probe], version=version, moved=moved, tolerance=self.tolerance, first=first
            )

        readings = await self.fleet.prove(proof)
        self.proven = self.proven or (moved and all(reading.live for reading in readings))
        gap = max(reading.gap_mean for reading in readings)
        self.first_gap = gap if first is None else first
        return gap

    async def publish(self, version: int) -> None:
        """Send the learner's weights to every engine.

        Raises:
            ClusterError: the weights were lost in transfer `PUBLISH_ATTEMPTS` times.
        """
        for _ in range(PUBLISH_ATTEMPTS):
            try:
                # Copied into an object owned by the driver: one owned by the worker is lost when the worker dies.
                update = ray.put(await (await self.learner.weights(version)))
                await self.fleet.load(update)
            except ray.exceptions.ObjectLostError:
                continue
            return
        raise ClusterError(
            f"weights of version {version} were lost {PUBLISH_ATTEMPTS} times before they reached the engines, "
            "because learner workers keep dying; check for lack of memory or lost nodes"
        )


@asynccontextmanager
async def engines_asleep(
    fleet: EngineFleet,
    *,
    colocate: bool,
    after: Sequence[asyncio.Future[Any]] = (),
    pending: PendingOperations | None = None,
) -> AsyncIterator[None]:
    """Free the engines' GPUs for the learner during the block, which begins when ``after`` is done.

    ``pending`` records that the engines are being waited for.
    """
    pending = pending or PendingOperations()
    if not colocate:
        yield
        return
    if after:
        # The caller awaits the same tasks and handles their errors.
        await asyncio.wait(after)
    await pending.wait("the engines to go to sleep", fleet.sleep())
    yield
    await pending.wait("the engines to wake up", fleet.wake())


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRules:
    """Rules by which tasks are chosen; see `TaskOrder`."""

    # Forbid unknown fields. Otherwise `recorded_order` would ignore a newer version's rule and return a wrong order.
    __pydantic_config__ = ConfigDict(extra="forbid")

    per_step: int
    seed: int
    skip_solved: int | None
    behind: int


@dataclass(frozen=True, slots=True)
class TaskPart:
    """A part of a run with the same training tasks and rules; resuming the run with others begins a new part."""

    first_step: int
    tasks: tuple[str, ...]
    """In ascending order."""
    rules: OrderRules


class TaskOrder:
    """Which tasks each step trains on: a new shuffle every epoch, without the last tasks if they do not fill a step.

    90 tasks at 16 a step give 5 steps an epoch (appendix "Training Hyperparameters": 100 steps in 20 epochs).

    With ``skip_solved`` = n, a task whose rollouts failed no criterion in n consecutive visits rests (is left out) for
    n epochs. Steps are filled from the other tasks. If these are too few for a step, no task rests in that epoch.

    After a resume, added tasks take part from the next epoch on; removed tasks are left out at once, so the current
    epoch is shorter. Steps that were chosen under earlier rules do not change: new rules apply from the first step
    after the resume.

    Args:
        tasks: the training tasks as they are now.
        per_step: B, tasks a step.
        seed: of the shuffles.
        skip_solved: n; None: no task is left out.
        behind: number of latest steps whose verdicts are not known when a step begins (``train.staleness``).

    Raises:
        ConfigError: if there are fewer tasks than one step needs.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        per_step: int,
        seed: int,
        *,
        skip_solved: int | None = None,
        behind: int = 0,
    ) -> None:
        if len(tasks) < per_step:
            raise ConfigError(
                f"train.prompts_per_step is {per_step}, but the training split has {len(tasks)} usable tasks; lower "
                "train.prompts_per_step, or add tasks"
            )
        rules = OrderRules(per_step=per_step, seed=seed, skip_solved=skip_solved, behind=behind)
        self.parts = [TaskPart(1, tuple(sorted(tasks)), rules)]
        """Parts of the run, oldest first; set by a resume."""
        self._solved: dict[int, frozenset[str]] = {}

    @property
    def rules(self) -> OrderRules:
        """The rules in force now: those of the last part of the run."""
        return self.parts[-1].rules

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole steps in an epoch of the present tasks if no task is skipped."""
        return len(self.parts[-1].tasks) // self.rules.per_step

    def last_step(self, epochs: int) -> int:
        """Number of steps that ``epochs`` epochs have if no task rests."""
        return sum(1 for _ in takewhile(lambda step: step[0] < epochs, self._steps(resting=False)))

    def note(self, step: int, solved: Collection[str]) -> None:
        """Record, for a finished step, the tasks whose rollouts failed no criterion."""
        self._solved[step] = frozenset(solved)

    def tasks(self, step: int) -> list[str]:
        """The B tasks of a step; the first step is 1. If solved tasks rest, call `note` for all earlier steps first."""
        return next(islice(self._steps(resting=True), step - 1, None))[1]

    def _steps(self, *, resting: bool) -> Iterator[tuple[int, list[str]]]:
        """Yield epoch and tasks of every step, beginning with step 1.

        With ``resting``, solved tasks rest. For each step, only verdicts that were known when it began are used.
        """
        epoch, left = -1, list[str]()
        streak: Counter[str] = Counter()
        rests_until: dict[str, int] = {}
        visited: list[tuple[int, list[str]]] = []
        heard = 0
        while True:
            step = len(visited) + 1
            part = self._part(step)
            rules = part.rules
            patience = rules.skip_solved if resting else None
            while heard < step - 1 - rules.behind:
                of_epoch, played = visited[heard]
                heard += 1
                for task in played:
                    streak[task] = streak[task] + 1 if task in self._solved.get(heard, ()) else 0
                    if patience is not None and streak[task] >= patience:
                        rests_until[task] = of_epoch + patience
            # Drop tasks from the current epoch if a resume removed them from the run, or if they rest.
            if step == part.first_step or patience is not None:
                there = {task for task in part.tasks if patience is None or rests_until.get(task, -1) < epoch}
                left = [task for task in left if task in there]
            if len(left) < rules.per_step:
                epoch += 1
                order = np.random.default_rng((rules.seed, epoch)).permutation(len(part.tasks))
                shuffled = [part.tasks[index] for index in order]
                awake = [task for task in shuffled if patience is None or rests_until.get(task, -1) < epoch]
                left = awake if len(awake) >= rules.per_step else shuffled
            chosen, left = left[: rules.per_step], left[rules.per_step :]
            visited.append((epoch, chosen))
            yield epoch, chosen

    def _part(self, step: int) -> TaskPart:
        return next(part for part in reversed(self.parts) if part.first_step <= step)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one training step."""

    groups: list[Group]
    work: list[asyncio.Task[Any]]
    """Each resolves to a reference to the group's samples, or None."""

    async def cancel(self) -> None:
        """Cancel the tasks that are not done and ignore all errors, since the caller reports the first one."""
        tasks = [*self.work, *self.held_out]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def held_out(self) -> list[asyncio.Task[Any]]:
        """The scorings by the held-out judge that have begun."""
        return [group.held_out for group in self.groups if group.held_out is not None]


@dataclass(frozen=True)
class BatchScheduler:
    """Sends the tasks of each step into the pipeline.

    With ``train.staleness`` = n, the rollouts of the next n steps begin as soon as this step leaves slots free. Each
    turn is sampled with the current weights, which are at most n versions older than the weights that learn from it. A
    step always waits for its own groups: taking the first to finish would favour short ones.
    """

    prompts: Mapping[str, tuple[Message, ...]]
    order: TaskOrder
    pipeline: Pipeline
    console: Console
    """Gets a line on how many rollouts are reused."""
    recorded: frozenset[int] = frozenset()
    """Steps that have finished rollouts of an earlier process of this run, which are reused."""
    _ahead: dict[int, Batch] = field(default_factory=dict, init=False)
    """Later step that has begun -> its groups."""

    @property
    def ahead(self) -> bool:
        """Whether a later step has begun."""
        return bool(self._ahead)

    async def take(self, step: int) -> Batch:
        """The step's groups: those begun by `run_ahead`, or new ones."""
        return self._ahead.pop(step, None) or await self._begin(step)

    async def run_ahead(self, steps: Sequence[int]) -> None:
        """Begin those of ``steps`` that have not begun, while the current step is judged and learned from."""
        for step in steps:
            if step not in self._ahead:
                self._ahead[step] = await self._begin(step)

    async def cancel(self) -> None:
        """Cancel steps that run ahead."""
        await asyncio.gather(*(batch.cancel() for batch in self._ahead.values()))

    async def _begin(self, step: int) -> Batch:
        """Begin a step; rollouts of earlier steps have priority."""
        groups = [
            Group(step=step, index=index, task_id=task_id, prompt=self.prompts[task_id])
            for index, task_id in enumerate(self.order.tasks(step))
        ]
        if step in self.recorded:
            await self._take_over(step, {group.task_id: group.name for group in groups})
        return Batch(groups, [asyncio.create_task(self.pipeline.run(group)) for group in groups])

    async def _take_over(self, step: int, groups: Mapping[str, str]) -> None:
        """Give a step's recorded rollouts to the pool, which returns them instead of playing new ones.

        Recorded rollouts that the step does not need are dropped, such as those of tasks that no longer exist.

        ``groups``: name of each group, by task id.
        """
        store, nothing, taken = self.pipeline.keep, ray.put(None), list[str]()
        for version in range(max(0, step - 1 - self.order.rules.behind), step):
            for task_id, rollout in await store.recorded.remote(step, version):
                if task_id in groups and rollout < self.pipeline.config.group_size:
                    trajectory, summary = store.trajectory_again.remote(step, task_id, rollout)
                    member = FinishedRollout(
                        rollout=rollout, trajectory=trajectory, evaluation=nothing, summary=await summary
                    )
                    self.pipeline.rollouts.take_over(groups[task_id], member)
                    taken.append(f"{task_id}-{rollout}")
        await store.drop_rollouts.remote(step, taken)
        self.console.print(f"step {step}: {len(taken)} finished rollouts are reused from the run directory")


log = logging.getLogger(__name__)


def checkpoints_to_keep(steps: Iterable[int], metrics: Iterable[Mapping[str, Any]], config: TrainConfig) -> set[int]:
    """The steps whose checkpoints are kept; all if ``train.keep_last`` is null.

    Args:
        steps: those with a checkpoint.
        metrics: of the finished steps. A step's rollouts measure the policy that played them, which is the policy of
            ``1 + train.staleness`` steps before.
        config: ``keep_last``, ``keep_every``, ``keep_best``.
    """
    present = sorted(steps)
    if config.keep_last is None:
        return set(present)
    keep = set(present[-config.keep_last :])
    if config.keep_every is not None:
        keep |= {step for step in present if step % config.keep_every == 0}
    rates = {line["step"] - 1 - config.staleness: _rate(line) for line in metrics}
    measured = [step for step in present if rates.get(step) is not None]
    # Ties go to the later step.
    best = sorted(measured, key=lambda step: (rates[step], step), reverse=True)
    return keep | set(best[: config.keep_best])


def _rate(line: Mapping[str, Any]) -> float | None:
    """A step's pass rate, or its mean reward if there is no judge."""
    rate = line.get("pass_rate")
    return line.get("reward") if rate is None else rate


def drop_checkpoints(run: RunDirectory, config: TrainConfig) -> None:
    """Remove the checkpoints of a run that are not kept, each atomically."""
    if config.keep_last is None:
        return
    present = run.checkpoint_steps()
    for step in set(present) - checkpoints_to_keep(present, run.metrics(), config):
        folder = run.checkpoint(step)
        dropped = folder.with_name(f".{folder.name}.dropped")
        shutil.rmtree(dropped, ignore_errors=True)
        try:
            folder.rename(dropped)
        except OSError as error:
            log.warning("checkpoint %s cannot be removed: %s", folder, error.strerror)
            continue
        shutil.rmtree(dropped, ignore_errors=True)


STOPPING_SECONDS = 60.0
"""Time for the last checkpoint to be written when the run is stopped."""


@dataclass
class Trainer:
    """Runs the training steps one after another."""

    config: DracoConfig
    batches: BatchScheduler
    """The groups of each step."""
    learner: Learner
    """Each call of ``ray_lora`` runs on every `draco_ray.learner.worker.LearnerWorker`, in the same order."""
    fleet: EngineFleet
    """The engines, which may share the learner's GPUs."""
    weights: WeightSync
    """Sends updates to the engines."""
    store: Any
    """The run store's actor."""
    observer: RunObserver
    """Gets the metrics of each step."""
    progress: StepProgress
    """Shows the groups of the current step."""
    run: RunDirectory
    """Where checkpoints are written."""
    console: Console
    """Gets a line per step."""
    pending: PendingOperations = field(default_factory=PendingOperations)
    """Records what is being waited for."""
    evaluation: HeldOutEvaluator | HeldOutJudgeEvaluator | None = None
    """Measures held-out tasks."""
    _writing: asyncio.Task[None] | None = field(default=None, init=False)
    """The checkpoint being written."""

    def __post_init__(self) -> None:
        self._watchdog = Watchdog(self.config.watch)

    async def run_steps(self, done: int, last: int) -> None:
        """Train from the step after ``done`` to step ``last``, and measure held-out tasks before, between and after.

        Raises: as `train`.
        """
        before = await self._measure(0, done)
        # The run may have been stopped between step ``done`` and the evaluation after it.
        await self._between(done, last)
        await self.train(done + 1, last)
        if self.evaluation and before and last and (after := await self._measure(last, done)):
            self.evaluation.report(before, after)
        await self.pending.wait("the run store", self.store.settle.remote(last))

    async def train(self, first: int, last: int) -> None:
        """Train from step ``first`` to step ``last``, inclusive.

        Raises:
            RunStopped: see `Watchdog`; or a step or an evaluation took too long.
        """
        try:
            for step in range(first, last + 1):
                began = time.monotonic()
                metrics = await self._in_time(self._step(step, last), f"step {step}")
                self.console.print(step_line(metrics, last))
                try:
                    self._watchdog.check_drift(metrics, self.console.print)
                except RunStopped:
                    # Write a checkpoint: resumed from an earlier one, the run would repeat this step and stop again.
                    if step % self.config.train.checkpoint_every and step < last:
                        await self._checkpoint(step)
                    raise
                if step == first < last:
                    left = format_duration((last - step) * (time.monotonic() - began))
                    self.console.print(f"{last - step} steps left, about {left} at this rate")
                await self._between(step, last)
            self._watchdog.end()
        finally:
            await self.batches.cancel()
            # Wait for the checkpoint even if the run is stopped, to keep what its last step has learned.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._written(), STOPPING_SECONDS)

    async def _between(self, step: int, last: int) -> None:
        every = self.config.train.evaluate_every
        if every is not None and 0 < step < last and step % every == 0:
            await self._measure(step, step)

    async def _measure(self, step: int, done: int) -> Any:
        """See `HeldOutEvaluator.measure`; None without an evaluation."""
        if self.evaluation is None:
            return None
        measuring: Coroutine[Any, Any, Any] = self.evaluation.measure(step, done)
        return await self._in_time(measuring, f"the evaluation of step {step}")

    async def _in_time(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        seconds = self.config.watch.step_seconds

        def late() -> RunStopped:
            return RunStopped(f"{what} has not ended in watch.step_seconds={seconds:g}, waiting for: {self.pending}")

        return await run_with_timeout(work, seconds, late)

    async def _step(self, step: int, last: int) -> dict[str, Any]:
        config, started = self.config, time.monotonic()
        check_disk(config, self.run.path)
        if self._writing is not None and self._writing.done():
            await self._written()
        batch = await self.pending.wait("the run store", self.batches.take(step))
        rollouts = len(batch.groups) * config.algorithm.group_size
        self.progress.start(f"step {step}/{last}", batch.groups, rollouts)
        try:
            if self.weights.proven:
                with self.pending.of("the run store"):
                    await self.batches.run_ahead(range(step + 1, min(step + config.train.staleness, last) + 1))
            update, probe = await self._learn(batch)
            with self.pending.of("the held-out judge"):
                scored = [found for found in await asyncio.gather(*batch.held_out) if found is not None]
        finally:
            await batch.cancel()
        played = step_metrics(step, batch.groups, config.algorithm.group_size)
        # Check before the checkpoint is written, so that a resumed run repeats a step without a group.
        self._watchdog.check(played, Counter(group.reason for group in batch.groups if group.reason is not None))

        self.batches.order.note(step, played["solved_tasks"])

        learned, learned_at = update_metrics(update.updates), time.time()
        update_ended = time.monotonic()
        updated = learned["updates"] > 0 and learned["grad_norm"] > 0
        with self.pending.of("sync of the adapter to the engines"):
            gap = await self.weights.sync(step, probe, updated=updated, quiet=not self.batches.ahead)
        rest = {"learning": merged(update.busy), "sync": [(learned_at, time.time())]}
        compared = {}
        if config.judge.held_out is not None:
            compared = held_out_metrics(scored, [line for line in self.run.metrics() if line["step"] < step])
        learning = {**played, **compared, **learned, "seconds_learning": busy_seconds(update.busy), "canary_gap": gap}
        # The checkpoint marks the step as done, so its tables are written first.
        with self.pending.of("the run store"):
            await self.store.spans.remote(step, "spans", step_spans(batch.groups, rest))
            await self.store.metrics.remote(step, {**learning, **_seconds(update_ended, started)})
        if step % config.train.checkpoint_every == 0 or step == last:
            began = time.time()
            await self._checkpoint(step)
            if step == last:
                await self._written()
            spans = step_spans((), {"checkpoint": [(began, time.time())]})
            await self.pending.wait("the run store", self.store.spans.remote(step, "checkpoint", spans))
        metrics = {**learning, **_seconds(update_ended, started)}
        # Run in a thread, so that a tracker's hanging server blocks neither the watchdog nor the terminal.
        await self.pending.wait("the trackers", asyncio.to_thread(self.observer.step, metrics))
        await self.pending.wait("the run store", self.store.finish_step.remote(step, metrics))
        return metrics

    async def _checkpoint(self, step: int) -> None:
        """Start writing the step's checkpoint, concurrently with the next step, once the previous one is on disk."""
        await self._written()
        self._writing = asyncio.create_task(self.learner.checkpoint(self.run.checkpoint(step)))
        # Let the task send its request first, so that the learner receives later requests after it.
        await asyncio.sleep(0)

    async def _written(self) -> None:
        """Wait until the last checkpoint is on disk, and remove those that are not kept."""
        if self._writing is None:
            return
        # Shielded: cancelling this wait must not cancel the write.
        await self.pending.wait("the learner's checkpoint", asyncio.shield(self._writing))
        self._writing = None
        drop_checkpoints(self.run, self.config.train)

    async def _learn(self, batch: Batch) -> tuple[StreamedUpdate, Probe | None]:
        """Update the policy with the groups as they finish; returns the results and the canary's probe."""
        asleep = engines_asleep(
            self.fleet, colocate=self.config.engine.colocate, after=batch.work, pending=self.pending
        )
        async with asleep:
            update = await streamed_update(
                self.learner,
                batch.work,
                self.config.learner.minibatch_prompts,
                self.pending,
                in_order=self.config.engine.deterministic,
            )
            # Compute the probe before engines on the same GPU wake up and take the memory that its forward pass needs.
            probe = await self.pending.wait("the learner's log-probs for the canary", self.weights.probe(update.fed))
        return update, probe


def _seconds(update_ended: float, started: float) -> dict[str, float]:
    """The metrics ``seconds_sync`` and ``seconds``: time since the step's update ended, and since the step began.

    Both arguments are values of `time.monotonic`.
    """
    now = time.monotonic()
    return {"seconds_sync": now - update_ended, "seconds": now - started}
