"""``learner.use=ray_lora``: GRPO on a LoRA adapter, by Ray Train's workers."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import ray

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import ConfigError, LearnerError
from draco_ray.learner.base import UpdateMetrics, over_workers
from draco_ray.learner.command_log import Command, start_command_log
from draco_ray.learner.train_loop import LoopSettings, fit
from draco_ray.placement import driver_node_affinity
from draco_ray.records import FloatArray, IntArray

PATIENCE_SECONDS = 30.0
"""Timeout for a regular stop, and for each step of a forced one."""


class RayLoraLearner:
    """All workers, as one `draco_ray.learner.base.Learner`.

    Each call raises LearnerError once workers are lost for good. Before that, a dead worker costs the work since the
    last checkpoint, which is repeated automatically.
    """

    def __init__(
        self, model: ModelConfig, config: LearnerConfig, *, run: Path, seed: int, resume_from: Path | None = None
    ) -> None:
        """
        Args:
            model: the frozen base model.
            config: hyperparameters, workers and their resources.
            run: the run directory, on this machine.
            seed: seed of the adapter's initial values.
            resume_from: checkpoint to continue from.

        Raises:
            ConfigError: ``learner.options`` are set.
        """
        if config.options:
            raise ConfigError(f"learner.options: ray_lora has no options, found {', '.join(config.options)}")
        self._config = config
        # Ray Train's workers have another working directory.
        path = Path(model.path)
        self._model = model.model_copy(update={"path": str(path.resolve())}) if path.is_dir() else model
        self._run = run.resolve()
        self._seed = seed
        self._resume_from = str(resume_from.resolve()) if resume_from is not None else None
        self._log: Any = None
        self._unsent: dict[str, tuple[list[Any], asyncio.Task[None]]] = {}
        """Name of a workers' method -> groups that wait to be sent to it, and the task that sends them."""
        self._sending = asyncio.Lock()
        self._fit: Any = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the workers and wait until each has loaded its model."""
        self._log = start_command_log(
            self._config.workers, self._resume_from, self._config.max_failures, self._run.name
        )
        storage = self._run / "checkpoints"
        # Create the folder here, because Ray Train's controller would make it readable for all users.
        storage.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = LoopSettings(
            log=self._log,
            model=self._model,
            config=self._config,
            seed=self._seed,
            storage=str(storage),
        )
        trainer = ray.remote(fit).options(
            name=f"LearnerTrainer@{self._run.name}",
            num_cpus=0,
            # Ray Train's controller runs on the same node as this task.
            scheduling_strategy=driver_node_affinity(),
            max_retries=0,
        )
        self._fit = trainer.remote(settings)
        self._watch = asyncio.create_task(self._watch_fit())
        await self.token_logprobs([0, 0])

    async def accumulate(self, group: ray.ObjectRef[Any]) -> None:
        """Add the gradients of one group's samples."""
        await self._submit_together("accumulate", group)

    async def remember_old_logprobs(self, group: ray.ObjectRef[Any]) -> None:
        """Store log-probs of a later minibatch's group, computed with the weights at the step's start."""
        await self._submit_together("remember_old_logprobs", group)

    async def step(self) -> UpdateMetrics:
        """One optimizer update from everything accumulated."""
        return over_workers(await self._submit("step"))

    async def weights(self, version: int) -> ray.ObjectRef[Any]:
        """A reference to the current Adapter; groups that are accumulated later count as sampled with it."""
        adapter, *_ = await self._submit("weights", version=version)
        return adapter

    async def checkpoint(self, directory: Path) -> None:
        """Write a complete checkpoint: PEFT adapter, optimizer, counters."""
        await self._call(self._log.save, str(directory.resolve()))

    async def token_logprobs(self, token_ids: IntArray | list[int], *, adapter: bool = True) -> FloatArray:
        """Log-prob of every token, 0.0 for the first; `draco_ray.engine.canary` compares them with an engine's."""
        ids = [int(token) for token in token_ids]
        logprobs, *_ = await self._submit("token_logprobs", token_ids=ids, adapter=adapter)
        return logprobs

    async def stop(self, timeout: float = PATIENCE_SECONDS) -> None:
        """End the Ray Train loop and its processes; after ``timeout`` seconds they are interrupted, then killed."""
        if self._log is None or self._watch is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                with contextlib.suppress(LearnerError):
                    await self._call(self._log.stop)
                await asyncio.shield(self._watch)
        # Interrupt first: Ray Train then frees its placement group. After a kill, Ray keeps the group until the job
        # ends.
        for force in (False, True):
            if not self._watch.done():
                ray.cancel(self._fit, force=force)
                await asyncio.wait([self._watch], timeout=PATIENCE_SECONDS)
        # `_watch_fit` may still wait for the command log.
        ray.kill(self._log)
        await asyncio.wait([self._watch], timeout=PATIENCE_SECONDS)
        self._log = None

    async def _submit_together(self, method: str, group: ray.ObjectRef[Any]) -> None:
        """Submit together all groups that arrive while the workers are busy, to share micro-batches and prefixes."""
        if method not in self._unsent:
            groups: list[Any] = []
            self._unsent[method] = groups, asyncio.create_task(self._send(method, groups))
        groups, sent = self._unsent[method]
        groups.append(group)
        await sent

    async def _send(self, method: str, groups: list[Any]) -> None:
        async with self._sending:
            del self._unsent[method]
            await self._submit(method, *groups)

    async def _submit(self, method: str, *groups: Any, **options: Any) -> list[Any]:
        """Call a method of the workers; returns their results, by rank."""
        results: list[Any] = await self._call(self._log.submit, Command(method, groups, options))
        return results

    async def _call(self, method: Any, *given: Any) -> Any:
        """Call a method of the command log's actor."""
        try:
            return await method.remote(*given)
        except ray.exceptions.ActorDiedError:
            raise LearnerError(
                "the learner's actor was lost; check for lack of memory on the driver's node, then resume the run"
            ) from None

    async def _watch_fit(self) -> None:
        """Wait for the end of the Ray Train loop, and fail every call that still waits for a result."""
        message = "the learner has stopped"
        try:
            await self._fit
        except Exception as error:
            reason = str(error).strip().splitlines()
            said = reason[-1] if reason else type(error).__name__
            message = f"the learner failed: {said}; see its log in the Ray dashboard"
        with contextlib.suppress(ray.exceptions.RayActorError):
            await self._log.fail.remote(message)
