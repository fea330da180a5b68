"""The driver of a training run: checks, actors, the loop over steps, and leaving nothing behind.

It holds configuration, summaries and references; trajectories, samples and adapters stay in the object store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import ray
from rich.console import Console

from draco_ray.algorithm.rules import find_rule
from draco_ray.config.load import dump_config, load_config, project_file
from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.engine.canary import run_canary
from draco_ray.environments.appworld.data_root import load_split
from draco_ray.errors import BudgetSpent, ClusterError, DracoError
from draco_ray.judging.static_rubric import load_static_rubric
from draco_ray.learner.group import LearnerGroup
from draco_ray.observability.logs import start_run_log, stop_run_log
from draco_ray.pipeline import Group, GroupState, Pipeline
from draco_ray.records import Criterion, Evaluation, FloatArray, Message
from draco_ray.rollout.pool import Member
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations
from draco_ray.runs.goals import scenario_goal_completion, task_goal_completion
from draco_ray.training.advantage_computer import start_advantage_computer
from draco_ray.training.evaluate import evaluate_tasks
from draco_ray.training.memory import PeakMemory
from draco_ray.training.metrics import step_metrics, step_spans, update_metrics
from draco_ray.training.observer import RunObserver
from draco_ray.training.order import TaskOrder
from draco_ray.training.overlap import Interval, busy_seconds, merged
from draco_ray.training.preflight import check_disk
from draco_ray.training.progress import StepProgress, step_line, watch_judge
from draco_ray.training.resume import StartPoint, adopt_config, rewind, sole_driver
from draco_ray.training.session import (
    Actors,
    checked_model,
    open_judge,
    plain_error,
    ray_session,
    stopped_plainly,
    usable_prompts,
)
from draco_ray.training.streaming import streamed_update

PROBE_TOKENS = 512
"""Tokens of one of the step's rollouts on which engine and learner are compared after a sync."""
STALE_IMPORTANCE_CAP = 2.0
"""``learner.importance_cap`` where it is null and ``train.staleness`` is on."""
PUBLISH_ATTEMPTS = 3
"""Times the adapter is asked for, should the learner's worker die between handing it out and its being copied."""


class Probe(NamedTuple):
    """What engine and learner are compared on after a sync."""

    token_ids: list[int]
    logprobs: FloatArray
    """The learner's, of all tokens but the first, nats."""


def train(config: DracoConfig, console: Console | None = None) -> Path:
    """Run a whole training run.

    Returns: the run directory.
    Raises:
        DracoError: what is wrong, in one line; whatever was finished before is in the run directory.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    config, prompts, order = _checked(config, console)
    name = config.run.name or f"{config.setting}-{datetime.now():%Y%m%d-%H%M%S}"
    run = RunDirectory.create(config.run.root.resolve() / name, dump_config(config))
    console.print(f"{name}: setting {config.setting}, model {config.model.path}, tasks {config.data.root}")
    with sole_driver(run):
        return _train(config, prompts, order, run, StartPoint(), console)


def resume(
    directory: Path,
    source: str | None = None,
    overrides: Sequence[str] = (),
    setting: str | None = None,
    *,
    allow_changed: bool = False,
    trust: bool = False,
    console: Console | None = None,
) -> Path:
    """Continue a stopped run at the step, and within the step, where it stopped.

    Args:
        directory: the run's.
        source: a preset or a YAML file that describes the same run; None takes the run's own configuration.
        overrides: as of `draco_ray.config.load.load_config`.
        setting: likewise.
        allow_changed: go on although the configuration differs from the run's.
        trust: as of `draco_ray.config.load.load_config`.

    Returns: the run directory.
    Raises:
        DracoError: as `train` does; ConfigError also for a configuration that has changed.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    run = RunDirectory.open(directory.resolve())
    old = load_config(str(run.path), trust=True)
    config = load_config(source or str(run.path), overrides, setting, trust=trust)
    config, prompts, order = _checked(config, console)
    with sole_driver(run):
        check_disk(config, run.path)
        changes = adopt_config(run, old, config, allow_changed=allow_changed)
        # A rollout carries no verdict of AppWorld's; where that is the reward it is played again, with the same seed.
        start = rewind(run, reuse=not changes and config.algorithm.reward != "outcome")
        if start.step >= _steps(config, order) and _measured(run, config, start.step):
            console.print(f"{run.path.name}: finished with step {start.step}; nothing is left to do")
            return run.path
        console.print(f"{run.path.name}: continues after step {start.step}")
        for change in changes:
            console.print(f"changed: {change}", markup=False)
        return _train(config, prompts, order, run, start, console)


def _checked(config: DracoConfig, console: Console) -> tuple[DracoConfig, dict[str, tuple[Message, ...]], TaskOrder]:
    """The configuration as it is run, the prompts of usable tasks, and their order."""
    load_split(config.data.root, config.data.train_split)
    if config.train.evaluate_before_after:
        load_split(config.data.root, config.data.eval_split)
    find_rule(config.algorithm.rule)
    config = checked_model(config)
    prompts = usable_prompts(config, console)
    return config, prompts, TaskOrder(list(prompts), config.train.prompts_per_step, config.seed)


def _steps(config: DracoConfig, order: TaskOrder) -> int:
    train = config.train
    return train.steps if train.steps is not None else train.epochs * order.steps_per_epoch


def _measured(run: RunDirectory, config: DracoConfig, step: int) -> bool:
    """Whether the evaluation after the last step is done, or not asked for."""
    return not config.train.evaluate_before_after or (step, config.data.eval_split) in read_evaluations(run)


def _train(
    config: DracoConfig,
    prompts: Mapping[str, tuple[Message, ...]],
    order: TaskOrder,
    run: RunDirectory,
    start: StartPoint,
    console: Console,
) -> Path:
    # The log and the trackers write before a node is asked anything.
    check_disk(config, run.path)
    start_run_log(run.path)
    with stopped_plainly(run, console, resumable=True), open_judge(config, console) as judge, ray_session(config):
        asyncio.run(Trainer(config, judge, prompts, order, run, console, start).run())
    return run.path


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one training step, on their way through the pipeline."""

    groups: list[Group]
    work: list[asyncio.Task[Any]]
    """Each ends with a reference to the group's samples, or None."""

    async def cancel(self) -> None:
        """End what is not done; errors that follow from the one that is reported are no news."""
        for task in self.work:
            task.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)


class Trainer:
    """One run: its actors and its loop.

    With ``train.staleness`` the rollouts of the next step begin as soon as those of this one leave slots free. They are
    sampled with the adapter that is live then, so at most one version before the one they are learned with.
    """

    def __init__(
        self,
        config: DracoConfig,
        judge: JudgeConfig,
        prompts: Mapping[str, tuple[Message, ...]],
        order: TaskOrder,
        run: RunDirectory,
        console: Console,
        start: StartPoint,
    ) -> None:
        self._config = config
        self._judge = judge if judge.cache is not None else judge.model_copy(update={"cache": run.judge_cache})
        self._prompts = prompts
        self._order = order
        self._run = run
        self._name = run.path.name
        self._console = console
        self._progress = StepProgress(console)
        self._begin = start
        self._moved = start.moved
        """Whether the adapter differs from the base model yet."""
        self._ahead: Batch | None = None
        """The next step's, if it has begun."""
        self._proven = False
        """Whether the canary has seen, on quiet engines, that an adapter has an effect."""
        self._at = start.step
        """The step that is shown and counted."""

    @property
    def steps(self) -> int:
        """Training steps of the run."""
        return _steps(self._config, self._order)

    async def run(self) -> None:
        """Start the actors, train, and report before and after."""
        started = time.time()
        try:
            with PeakMemory() as memory:
                await self._start()
                self._console.print(f"actors ready in {time.time() - started:.0f}s")
                watching = asyncio.create_task(watch_judge(self._actors.judge_pause, self._progress, self._console))
                try:
                    await self._unless_engines_fail(self._train())
                finally:
                    watching.cancel()
        except (DracoError, ray.exceptions.RayError) as error:
            if isinstance(plain_error(error), BudgetSpent):
                # The rest of what was asked within the budget is on its way.
                await self._actors.judges.drain(self._judge.request_timeout_seconds)
            raise
        finally:
            self._progress.stop()
            await self._stop()
        self._console.print(
            f"done in {time.time() - started:.0f}s, peak memory {memory.peak_bytes / 2**30:.1f} GiB in all: "
            f"{self._run.path}"
        )

    async def _train(self) -> None:
        before = await self._evaluation(0)
        try:
            for step in range(self._begin.step + 1, self.steps + 1):
                metrics = await self._step(step)
                self._console.print(step_line(metrics, self.steps))
        finally:
            if self._ahead is not None:
                await self._ahead.cancel()
        if before and self.steps and (after := await self._evaluation(self.steps)):
            self._report(before, after)

    async def _unless_engines_fail(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it, or raise what became of an engine that was lost for good, which rollouts would wait for."""
        task, failure = asyncio.ensure_future(work), asyncio.ensure_future(self._actors.fleet.failure())
        try:
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                await failure
            await task
        finally:
            for each in (task, failure):
                each.cancel()
            await asyncio.gather(task, failure, return_exceptions=True)

    async def _start(self) -> None:
        config = self._config
        self._observer = RunObserver(config, self._run.path)
        self._actors = Actors(config, self._judge, self._run, self._name)
        learner = config.learner
        if config.train.staleness and learner.importance_cap is None:
            learner = learner.model_copy(update={"importance_cap": STALE_IMPORTANCE_CAP})
        self._learner = LearnerGroup(
            config.model, learner, run=self._run.path, seed=config.seed, resume_from=self._begin.checkpoint
        )
        self._advantages = start_advantage_computer(config.algorithm, self._name)
        if config.engine.colocate:
            # One after the other: Ray gives each engine a GPU of its own first, and vLLM measures what is free there.
            await self._actors.start()
            async with self._engines_asleep():
                await self._learner.start()
        else:
            await asyncio.gather(self._actors.start(), self._learner.start())
        if self._begin.step:
            await self._publish(self._begin.step)
        self._pool = self._actors.pool(self._actors.workers)
        self._observer.watch_pools(self._pool, self._actors.judges)
        self._pipeline = Pipeline(
            config.algorithm,
            self._pool,
            self._actors.judges,
            self._advantages,
            self._actors.store,
            static_rubric=self._static_rubric(),
            seed=config.seed,
            watch=self._watch,
        )

    async def _step(self, step: int) -> dict[str, Any]:
        config = self._config
        check_disk(config, self._run.path)
        started = time.time()
        batch, self._ahead = self._ahead or await self._begin_step(step), None
        groups = batch.groups
        self._progress.start(f"step {step}/{self.steps}", len(groups), len(groups) * config.algorithm.group_size)
        self._at = step
        for group in groups:
            self._watch(group)
        try:
            if config.train.staleness and self._proven and step < self.steps:
                self._ahead = await self._begin_step(step + 1)
            update, probe, learning = await self._learn(batch)
        finally:
            await batch.cancel()
            self._progress.stop()
        synced = time.time()
        # A step without any signal leaves a new adapter without effect, and that is no fault of the engine.
        self._moved = self._moved or (update["updates"] > 0 and update["grad_norm"] > 0)
        gap = await self._sync(step, probe, self._moved)
        rest = {"learning": learning, "sync": [(synced, time.time())]}
        if step % config.train.checkpoint_every == 0 or step == self.steps:
            began = time.time()
            await self._learner.checkpoint(self._run.checkpoint(step))
            rest["checkpoint"] = [(began, time.time())]
        metrics = {
            **step_metrics(step, groups, config.algorithm.group_size),
            **update,
            "canary_gap": gap,
            "seconds_sync": time.time() - synced,
            "seconds": time.time() - started,
        }
        await self._actors.store.spans.remote(step, "spans", step_spans(groups, rest))
        self._observer.step(metrics)
        await self._actors.store.finish_step.remote(step, metrics)
        return metrics

    async def _begin_step(self, step: int) -> Batch:
        """Send a step's groups into the pipeline; earlier steps' rollouts come first."""
        groups = [
            Group(step=step, index=index, task_id=task_id, prompt=self._prompts[task_id])
            for index, task_id in enumerate(self._order.tasks(step))
        ]
        await self._take_over(groups)
        return Batch(groups, [asyncio.create_task(self._pipeline.run(group)) for group in groups])

    async def _take_over(self, groups: Sequence[Group]) -> None:
        """Hand the pool the rollouts of these groups that an earlier process has finished."""
        step, store = groups[0].step, self._actors.store
        if step not in self._begin.recorded:
            return
        nothing = ray.put(None)
        by_task = {group.task_id: group.name for group in groups}
        taken = 0
        for version in range(max(0, step - 1 - self._config.train.staleness), step):
            for task_id, rollout in await store.recorded.remote(step, version):
                if task_id in by_task and rollout < self._config.algorithm.group_size:
                    trajectory, summary = store.trajectory_again.remote(step, task_id, rollout)
                    member = Member(rollout=rollout, trajectory=trajectory, evaluation=nothing, summary=await summary)
                    self._pool.take_over(by_task[task_id], member)
                    taken += 1
        self._console.print(f"step {step}: {taken} finished rollouts taken from the run directory")

    def _watch(self, group: Group) -> None:
        # A group that runs ahead is taken in, with all that has become of it, when its step begins.
        if group.step == self._at:
            self._progress.update(group)
            self._observer.group(group)

    async def _learn(self, batch: Batch) -> tuple[dict[str, Any], Probe | None, list[Interval]]:
        """Update the policy with the groups as they finish.

        Returns: metrics, what the canary compares, and when the learner was at work.
        """
        async with self._engines_asleep(batch.work):
            update = await streamed_update(self._learner, batch.work, self._config.learner.minibatch_prompts)
            # Before engines on the same GPU take the memory that a pass of the learner's needs.
            probe = await self._probe(update.fed)
        for group in batch.groups:
            if group.state is GroupState.CREDITED:
                group.state = GroupState.TRAINED
        metrics = {**update_metrics(update.updates), "seconds_learning": busy_seconds(update.busy)}
        return metrics, probe, merged(update.busy)

    @asynccontextmanager
    async def _engines_asleep(self, work: Sequence[asyncio.Task[Any]] = ()) -> AsyncIterator[None]:
        """With `engine.colocate`: inside, which begins when ``work`` has ended, their GPUs are the learner's."""
        if not self._config.engine.colocate:
            yield
            return
        if work:
            # What failed is reported by who takes the results.
            await asyncio.wait(work)
        await self._actors.fleet.sleep()
        yield
        await self._actors.fleet.wake()

    async def _probe(self, fed: Sequence[ray.ObjectRef[Any]]) -> Probe | None:
        """The beginning of one of these groups' rollouts, scored by the learner; None if there is none."""
        for samples in fed:
            token_ids = await self._advantages.probe.remote(samples, PROBE_TOKENS)
            if len(token_ids) >= 2:
                return Probe(token_ids, (await self._learner.token_logprobs(token_ids))[1:])
        return None

    async def _sync(self, version: int, probe: Probe | None, moved: bool) -> float | None:
        """Bring the new adapter to every engine and prove that it is live; returns the mean log-prob gap, nats.

        Beside rollouts an engine's passes differ by rounding, which a small adapter's effect may not exceed. So that
        it has one is asked of quiet engines only, and none run ahead before it was; the gap is bounded always.
        """
        await self._publish(version)
        if probe is None:
            return None
        tolerance = self._config.engine.canary_tolerance
        moved = moved and self._ahead is None
        readings = await asyncio.gather(
            *(
                run_canary(
                    client, [probe.token_ids], [probe.logprobs], version=version, moved=moved, tolerance=tolerance
                )
                for client in self._actors.clients
            )
        )
        self._proven = self._proven or moved
        return max(reading.gap_mean for reading in readings)

    async def _publish(self, version: int) -> None:
        """Bring the learner's adapter to every engine."""
        for _ in range(PUBLISH_ATTEMPTS):
            try:
                # An object of the driver's: the worker that made the adapter may die, or its node be taken away.
                adapter = ray.put(await (await self._learner.adapter(version)))
                await self._actors.fleet.load(adapter)
            except ray.exceptions.ObjectLostError:
                continue
            return
        raise ClusterError(
            f"adapter version {version} was lost {PUBLISH_ATTEMPTS} times on its way to the engines: "
            "the learner's workers keep dying"
        )

    async def _evaluation(self, step: int) -> list[Evaluation] | None:
        """What the policy of ``step`` achieves; measured before if it was, None if it is not asked or gone."""
        if not self._config.train.evaluate_before_after:
            return None
        if (known := read_evaluations(self._run).get((step, self._config.data.eval_split))) is not None:
            return known
        return await self._evaluate(step) if step >= self._begin.step else None

    async def _evaluate(self, step: int) -> list[Evaluation]:
        config = self._config
        tasks = load_split(config.data.root, config.data.eval_split)[: config.data.eval_tasks]
        runs = config.train.evaluation_runs
        workers = self._actors.evaluation_workers()
        self._progress.start(f"evaluating {config.data.eval_split}", 0, len(tasks) * runs)
        try:
            pool = self._actors.pool(workers)
            evaluations = await evaluate_tasks(pool, tasks, runs, step=step, done=self._progress.advance)
        finally:
            self._progress.stop()
            await asyncio.gather(*(worker.stop.remote() for worker in workers))
        await self._actors.store.evaluations.remote(step, config.data.eval_split, evaluations)
        lost = sum(evaluation.lost for evaluation in evaluations)
        moment = "before" if step == 0 else f"after step {step}"
        self._console.print(
            f"{moment}: TGC {task_goal_completion(evaluations):.1%} SGC {scenario_goal_completion(evaluations):.1%} "
            f"on {config.data.eval_split} ({len(tasks)} tasks x {runs})"
            + (f"; {lost} rollouts were lost and count as failures" if lost else "")
        )
        return evaluations

    def _report(self, before: Sequence[Evaluation], after: Sequence[Evaluation]) -> None:
        first, last = task_goal_completion(before), task_goal_completion(after)
        self._console.print(
            f"held-out TGC {first:.1%} -> {last:.1%} ({100 * (last - first):+.1f} points), setting "
            f"{self._config.setting}, seed {self._config.seed}"
        )

    def _static_rubric(self) -> tuple[Criterion, ...]:
        algorithm = self._config.algorithm
        if algorithm.reward != "rubric" or algorithm.rubric != "static":
            return ()
        return load_static_rubric(project_file(algorithm.static_rubric))

    async def _stop(self) -> None:
        """End the processes; also what a failed start left."""
        if hasattr(self, "_observer"):
            self._observer.close()
        stop_run_log()
        if hasattr(self, "_actors"):
            await self._actors.stop()
        if hasattr(self, "_learner"):
            await self._learner.stop()
