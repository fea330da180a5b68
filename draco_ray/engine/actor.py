"""The Ray shell of the policy engines, the driver's hold on them, and the sampler a rollout worker reaches one by.

An engine that dies is replaced without anybody's rollout being lost: Ray starts its actor anew and repeats the calls
that were under way, and these wait until the driver has given the new process its model and the current adapter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup

from draco_ray.config.schema import EngineConfig, ModelConfig
from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.placement import actor_resources, shared_gpus, visible_gpus
from draco_ray.engine.sampler import Sample
from draco_ray.engine.statistics import EngineStatistics
from draco_ray.engine.tool_calls import ToolCallReader, ToolUse
from draco_ray.errors import ConfigError, EngineError
from draco_ray.observability.logs import start_run_log
from draco_ray.records import WeightUpdate

log = logging.getLogger(__name__)

STATISTICS_SECONDS = 2.0
"""In which an engine says what it does, or is passed over."""
CORE_CHECK_SECONDS = 1.0
MAX_CALLS = 10_000
"""Of one engine at one time: requests that wait for it must leave room for the calls that bring it its adapter. (Ray's
concurrency groups would, too, but run in event loops of their own, and vLLM's front end belongs to one loop.)"""


class PolicyEngineActor:
    """One vLLM engine (`draco_ray.engine.vllm_engine.VllmEngine`).

    The process ends with its engine core, so that there is one way to die. Calls wait until `start` has returned.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        max_model_len: int,
        lora_rank: int,
        seed: int,
        name: str,
        run_name: str,
        staleness: int = 0,
        group: PlacementGroup | None = None,
    ) -> None:
        from draco_ray.engine.vllm_engine import VllmEngine, live_adapters

        start_run_log()
        self._engine = VllmEngine(
            config,
            model,
            max_model_len=max_model_len,
            lora_rank=lora_rank,
            seed=seed,
            name=name,
            run_name=run_name,
            own_process=True,
            live_adapters=live_adapters(staleness),
        )
        self._config, self._group = config, group
        self._model_path = model.path
        self._readers: dict[tuple[str | None, bool], ToolCallReader] = {}
        self._readers_made = threading.Lock()
        self._serving = asyncio.Event()
        self._core_watch: asyncio.Task[None] | None = None

    async def start(self, update: WeightUpdate | None) -> None:
        """Load the model, then the weights of ``update`` if there is one yet; raises EngineError."""
        if self._serving.is_set():
            return
        if self._group is not None:
            # Ray shows an actor the GPUs of its own bundle only. CUDA reads this when it is first used.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(await visible_gpus(self._config, self._group))
        await self._engine.start()
        if update is not None:
            await self._engine.load(update)
        self._core_watch = asyncio.create_task(self._end_with_core())
        self._serving.set()

    @ray.method(max_task_retries=0)
    async def until_death(self) -> None:
        """Wait for ever; the call fails once this process has ended."""
        await asyncio.Event().wait()

    async def sample(
        self, token_ids: list[int], max_tokens: int, seed: int | None, temperature: float | None
    ) -> Sample:
        """See `draco_ray.engine.vllm_engine.VllmEngine.sample`."""
        async with self._alive():
            return await self._engine.sample(token_ids, max_tokens=max_tokens, seed=seed, temperature=temperature)

    async def load(self, update: WeightUpdate) -> float:
        """Switch new requests to the weights of ``update``; returns seconds."""
        async with self._alive():
            return await self._engine.load(update)

    async def logprobs(self, token_ids: list[int], adapter: bool) -> list[float]:
        """Log-probs of ``token_ids[1:]``, with or without the adapter."""
        async with self._alive():
            return await self._engine.logprobs(token_ids, adapter=adapter)

    async def read_calls(self, text: str, tools: str, parser: str | None, thinking: bool) -> ToolUse | None:
        """See `draco_ray.engine.sampler.Sampler.read_calls`."""
        return await asyncio.to_thread(self._read_calls, text, tools, parser, thinking)

    def _read_calls(self, text: str, tools: str, parser: str | None, thinking: bool) -> ToolUse | None:
        with self._readers_made:
            if (parser, thinking) not in self._readers:
                from transformers import AutoTokenizer

                chat = ChatTokens(AutoTokenizer.from_pretrained(self._model_path), thinking=thinking)
                self._readers[parser, thinking] = ToolCallReader(chat, parser)
            reader = self._readers[parser, thinking]
        return reader.read(text, tools, thinking=reader.opens_thinking)

    async def sleep(self) -> None:
        """Give the GPU away once nothing is under way; calls that come wait for `wake`."""
        async with self._alive():
            await self._engine.sleep()

    async def wake(self) -> None:
        """Take the GPU back and serve."""
        async with self._alive():
            await self._engine.wake()

    @ray.method(max_task_retries=0)
    async def statistics(self) -> EngineStatistics:
        """What the engine does at this moment."""
        return self._engine.statistics

    async def stop(self) -> None:
        """End the engine's processes."""
        if self._core_watch is not None:
            self._core_watch.cancel()
        await self._engine.stop()

    @asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        """Let a call in once the engine serves, and end this process where the call left the engine dead."""
        await self._serving.wait()
        try:
            yield
        except EngineError:
            self._end_if_dead()
            raise

    async def _end_with_core(self) -> None:
        while True:
            self._end_if_dead()
            await asyncio.sleep(CORE_CHECK_SECONDS)

    def _end_if_dead(self) -> None:
        if self._engine.dead:
            # Not by an exception: Ray repeats the calls of a process that died, not of one that refused.
            os._exit(1)


def start_policy_engines(
    config: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int,
    lora_rank: int,
    seed: int,
    run_name: str,
    staleness: int = 0,
) -> list[Any]:
    """One actor handle per engine of the configuration, not started yet; ``staleness`` as of `TrainConfig`."""
    remote = ray.remote(PolicyEngineActor)
    groups = [shared_gpus(config) for _ in range(config.engines)]
    return [
        remote.options(
            name=_actor_name(index, run_name),
            **actor_resources(config, group),
            max_concurrency=MAX_CALLS,
            max_restarts=config.max_failures,
            max_task_retries=-1,
        ).remote(
            config,
            model,
            max_model_len=max_model_len,
            lora_rank=lora_rank,
            seed=seed + index,
            name=f"engine-{index}",
            run_name=run_name,
            staleness=staleness,
            group=group,
        )
        for index, group in enumerate(groups)
    ]


class EngineFleet:
    """The driver's hold on the engines: starts them, brings them adapters, and sets up those that were replaced."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = list(engines)
        self.replaced = 0
        """Engine processes that died and were replaced."""
        self._weights: ray.ObjectRef[Any] | None = None
        self._asleep = False
        self._watches: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Return once every engine serves; from then on dead ones are replaced.

        Raises:
            EngineError: the model cannot be loaded.
        """
        self._failed = asyncio.get_running_loop().create_future()
        # Its error counts as read even if nobody waits for it: calls to a lost engine raise one of their own.
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())
        try:
            await asyncio.gather(*(engine.start.remote(None) for engine in self.engines))
        except RayActorError as error:
            raise _lost(error) from None
        self._watches = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    async def load(self, update: ray.ObjectRef[Any]) -> None:
        """Switch every engine to a weight update; the reference must outlive its maker, for engines replaced later."""
        # Remembered first: an engine that is replaced meanwhile starts with it.
        self._weights = update
        try:
            await asyncio.gather(*(engine.load.remote(update) for engine in self.engines))
        except RayActorError as error:
            raise _lost(error) from None

    async def sleep(self) -> None:
        """Return once every engine has given its GPU away (`engine.colocate`); requests that come wait for `wake`.

        Raises:
            EngineError: an engine is lost for good, or cannot sleep.
        """
        # Remembered first: an engine that is replaced meanwhile is put to sleep as well.
        self._asleep = True
        await self._each("sleep")

    async def wake(self) -> None:
        """Return once every engine serves again; raises EngineError when one is lost for good."""
        self._asleep = False
        await self._each("wake")

    async def _each(self, method: str) -> None:
        try:
            await asyncio.gather(*(getattr(engine, method).remote() for engine in self.engines))
        except RayActorError as error:
            raise _lost(error) from None

    async def failure(self) -> None:
        """Wait until an engine is lost for good.

        Raises:
            EngineError: then.
        """
        assert self._failed is not None
        await asyncio.shield(self._failed)

    async def statistics(self) -> list[EngineStatistics | None]:
        """What each engine does at this moment; None of one that cannot be asked now."""

        async def ask(engine: Any) -> EngineStatistics | None:
            try:
                found: EngineStatistics = await asyncio.wait_for(engine.statistics.remote(), STATISTICS_SECONDS)
            except (RayError, TimeoutError):
                return None
            return found

        return list(await asyncio.gather(*(ask(engine) for engine in self.engines)))

    async def stop(self) -> None:
        """Stop replacing engines that die; the engines themselves go on."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def _watch(self, engine: Any) -> None:
        assert self._failed is not None
        while True:
            try:
                await engine.until_death.remote()
            except RayActorError as error:
                log.warning("an engine's process died (%s); starting another", _first_line(error))
            try:
                await engine.start.remote(self._weights)
                if self._asleep:
                    await engine.sleep.remote()
                self.replaced += 1
            except RayActorError as error:
                self._fail(_lost(error))
                return
            except EngineError as error:
                self._fail(EngineError(f"engine: cannot be started again: {_first_line(error)}"))
                return

    def _fail(self, error: EngineError) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)


def _lost(error: RayActorError) -> EngineError:
    return EngineError(
        f"engine: its process has died more than engine.max_failures times ({_first_line(error)}); look for lack of "
        "memory, lower engine.kv_cache_gib or engine.max_num_seqs"
    )


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    return next(iter(str(cause or error).strip().splitlines()), type(error).__name__)


class EngineClient:
    """A `draco_ray.engine.sampler.Sampler` and `draco_ray.engine.canary.Scorer` that reaches a `PolicyEngineActor`.

    It carries the actor's name rather than its handle, so that a rollout worker holding it can be restarted by Ray.
    """

    def __init__(self, index: int, run_name: str) -> None:
        self._actor_name = _actor_name(index, run_name)
        self.name = f"engine-{index}"

    @cached_property
    def _handle(self) -> Any:
        return ray.get_actor(self._actor_name)

    async def sample(
        self, token_ids: list[int], *, max_tokens: int, seed: int | None = None, temperature: float | None = None
    ) -> Sample:
        """See `draco_ray.engine.vllm_engine.VllmEngine.sample`."""
        asked = self._handle.sample.remote(token_ids, max_tokens, seed, temperature)
        try:
            sample: Sample = await asked
        except asyncio.CancelledError:
            # Cancelling only the wait would leave the engine generating for nobody.
            ray.cancel(asked)
            raise
        return sample

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ToolUse | None:
        """See `draco_ray.engine.sampler.Sampler.read_calls`."""
        try:
            use: ToolUse | None = await self._handle.read_calls.remote(text, tools, parser, thinking)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise
        return use

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """See `draco_ray.engine.canary.Scorer.logprobs`."""
        logprobs: list[float] = await self._handle.logprobs.remote(token_ids, adapter)
        return logprobs


def _actor_name(index: int, run_name: str) -> str:
    return f"PolicyEngine-{index}@{run_name}"
