"""The Ray actors of the policy engines, and the client by which a rollout worker samples from one.

If an engine dies or its node is lost, no rollout is lost: its requests are sent to another engine with the same seeds.
Ray restarts the actor wherever there is room. The driver (`draco_ray.engine.fleet`) loads the model and the current
adapter into the new process before it serves requests.

Ray can give an actor a fraction of one GPU, or several whole GPUs, but not fractions of several. So a tensor-parallel
engine that takes turns with the learner (``engine.colocate``) reserves a placement group with a fraction of one GPU in
each bundle, and runs in the first bundle.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from draco_ray.config.schema import EngineConfig, ModelConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.model_directory import load_tokenizer
from draco_ray.engine.sampler import EngineStatistics, Sample
from draco_ray.engine.tool_calls import ParsedToolCalls, ToolCallReader
from draco_ray.engine.vllm_engine import VllmEngine, live_adapters
from draco_ray.errors import ConfigError, EngineError, EngineNotReady, first_line
from draco_ray.observability.logs import start_run_log
from draco_ray.records import WeightUpdate

RESOLUTION = 4
"""Number of decimals of a resource amount in Ray."""


def gpu_share(config: EngineConfig) -> float:
    """Fraction of each of its GPUs that an engine reserves."""
    return round(config.gpus_per_engine / config.tensor_parallel, RESOLUTION)


def reserve_gpu_shares(config: EngineConfig) -> PlacementGroup | None:
    """Reserve a fraction of each GPU of one engine, all on one node; None if the actor can request its GPUs itself."""
    if not config.colocate or config.tensor_parallel == 1:
        return None
    # The configuration only allows fractions above one half, so no two bundles share a GPU.
    bundles = [{"GPU": gpu_share(config)} for _ in range(config.tensor_parallel)]
    bundles[0]["CPU"] = config.cpus_per_engine
    return placement_group(
        [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles], strategy="STRICT_PACK"
    )


def actor_resources(config: EngineConfig, group: PlacementGroup | None) -> dict[str, Any]:
    """Ray's actor options for an engine."""
    if group is None:
        return {"num_gpus": config.gpus_per_engine, "num_cpus": config.cpus_per_engine}
    return {
        "num_gpus": gpu_share(config),
        "num_cpus": config.cpus_per_engine,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }


async def visible_gpus(config: EngineConfig, group: PlacementGroup) -> list[str]:
    """Ids of the GPUs of a group's bundles, in order. They change when Ray replaces a lost node."""
    ask = ray.remote(_gpu_ids)
    others = [
        ask.options(
            num_gpus=gpu_share(config),
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(1, config.tensor_parallel)
    ]
    return [gpu for gpus in (_gpu_ids(), *await asyncio.gather(*others)) for gpu in gpus]


def _gpu_ids() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


class StallDetector:
    """Detects a stall: no progress over several checks while calls are running.

    It counts checks instead of measuring time, because time also passes while this process is suspended.
    """

    def __init__(self, stall_seconds: float, look_seconds: float) -> None:
        """
        Args:
            stall_seconds: time without progress that counts as a stall.
            look_seconds: interval between two checks.
        """
        self._most = math.ceil(stall_seconds / look_seconds)
        self._calls = self._answered = self._still = 0
        self._seen = (0, 0)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the block as a running call."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._answered += 1

    def stands_still(self, iterations: int) -> bool:
        """Check for progress, and return whether there has been none for ``stall_seconds``.

        Args:
            iterations: the engine's counter of iterations, which grows with progress.
        """
        now = (iterations, self._answered)
        self._still = self._still + 1 if self._calls and now == self._seen else 0
        self._seen = now
        return self._still >= self._most


log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Timeout for an engine's reply on whether it serves requests."""
HOME_SECONDS = 10.0
"""Interval at which a client that uses another engine checks whether its own engine serves again."""
PAUSE_SECONDS = 1.0
"""Interval between two checks of a client while no engine serves."""
CORE_CHECK_SECONDS = 1.0
MAX_CALLS = 10_000
"""Maximum number of concurrent calls to one engine: waiting requests must leave room for the calls that load adapters.
(Ray's concurrency groups do not help: each has its own event loop, and vLLM's front end is bound to one loop.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """State of an engine's process."""

    identity: str
    """Random id, unique to the process."""
    node: str
    """Ray's id of the node."""
    serves: bool


class PolicyEngineActor:
    """One vLLM engine (`draco_ray.engine.vllm_engine.VllmEngine`).

    The process exits when its engine core dies or stalls (``engine.stall_seconds``), so Ray sees every failure as a
    dead process. It refuses requests until `serve` is called.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        group: PlacementGroup | None = None,
        **given: Any,
    ) -> None:
        """``group``: see `reserve_gpu_shares`; ``given``: more of `VllmEngine`'s arguments."""
        start_run_log()
        self._engine = VllmEngine(config, model, **given)
        self._config, self._group = config, group
        self._model = model
        self._readers: dict[tuple[str | None, bool], ToolCallReader] = {}
        self._readers_made = threading.Lock()
        self._identity = uuid.uuid4().hex
        self._starting = asyncio.Lock()
        self._started = asyncio.Event()
        self._serves = False
        self._watch = StallDetector(config.stall_seconds, CORE_CHECK_SECONDS)
        self._core_watch: asyncio.Task[None] | None = None

    @ray.method(max_task_retries=0)
    async def look(self) -> EngineProcess:
        """Return the state of this process."""
        node = ray.get_runtime_context().get_node_id()
        return EngineProcess(identity=self._identity, node=node, serves=self._serves)

    @ray.method(max_task_retries=0)
    async def start(self) -> None:
        """Load the model, unless it is loaded. Raises: EngineError."""
        async with self._starting:
            if self._started.is_set():
                return
            if self._group is not None:
                # Ray makes only the GPUs of the actor's own bundle visible. CUDA reads the variable at its first use.
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(await visible_gpus(self._config, self._group))
            await self._engine.start()
            self._core_watch = asyncio.create_task(self._end_with_core())
            self._started.set()

    @ray.method(max_task_retries=0)
    async def serve(self) -> None:
        """Accept requests from now on."""
        self._serves = True

    @ray.method(max_task_retries=0)
    async def sample(self, token_ids: list[int], max_tokens: int, **given: Any) -> Sample:
        """See `draco_ray.engine.vllm_engine.VllmEngine.sample`. Raises: EngineNotReady before `serve`."""
        self._check(self._serves)
        async with self._alive():
            return await self._engine.sample(token_ids, max_tokens=max_tokens, **given)

    @ray.method(max_task_retries=0)
    async def load(self, update: WeightUpdate) -> float:
        """Load ``update`` for new requests; returns the seconds it took. Raises: EngineNotReady before `start`."""
        self._check(self._started.is_set())
        async with self._alive():
            return await self._engine.load(update)

    @ray.method(max_task_retries=0)
    async def logprobs(self, token_ids: list[int], adapter: bool) -> list[float]:
        """Log-probs of ``token_ids[1:]``, with or without the adapter. Raises: EngineNotReady before `start`."""
        self._check(self._started.is_set())
        async with self._alive():
            return await self._engine.logprobs(token_ids, adapter=adapter)

    @ray.method(max_task_retries=0)
    async def read_calls(self, text: str, tools: str, parser: str | None, thinking: bool) -> ParsedToolCalls | None:
        """See `draco_ray.engine.sampler.Sampler.read_calls`."""
        return await asyncio.to_thread(self._read_calls, text, tools, parser, thinking)

    def _read_calls(self, text: str, tools: str, parser: str | None, thinking: bool) -> ParsedToolCalls | None:
        with self._readers_made:
            if (parser, thinking) not in self._readers:
                tokenizer = load_tokenizer(self._model.path, self._model.chat_template)
                chat = ChatTokenizer(tokenizer, thinking=thinking)
                self._readers[parser, thinking] = ToolCallReader(chat, parser)
            reader = self._readers[parser, thinking]
        return reader.read(text, tools, thinking=reader.opens_thinking)

    async def sleep(self) -> None:
        """Free the GPU once no request is running; new calls wait for `wake`."""
        await self._started.wait()
        async with self._alive():
            await self._engine.sleep()

    async def wake(self) -> None:
        """Load the weights onto the GPU again and admit waiting calls."""
        await self._started.wait()
        async with self._alive():
            await self._engine.wake()

    @ray.method(max_task_retries=0)
    async def statistics(self) -> EngineStatistics:
        """Return the current statistics."""
        return self._engine.statistics

    async def stop(self) -> None:
        """End the engine's processes."""
        if self._core_watch is not None:
            self._core_watch.cancel()
        await self._engine.stop()

    @asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        """Watch a call for stalls, and end this process if the call killed the engine."""
        try:
            with self._watch.call():
                yield
        except EngineError:
            self._end_if_dead()
            raise

    def _check(self, there: bool) -> None:
        if not there:
            raise EngineNotReady("this engine is not ready yet")

    async def _end_with_core(self) -> None:
        while True:
            self._end_if_dead()
            if self._watch.stands_still(self._engine.statistics.iterations):
                log.error(
                    "the engine core has made no progress for %g s and will be killed", self._config.stall_seconds
                )
                _end_process()
            await asyncio.sleep(CORE_CHECK_SECONDS)

    def _end_if_dead(self) -> None:
        if self._engine.dead:
            _end_process()


def _end_process() -> None:
    """Kill this process and its children, since a suspended child would not notice the end of its parent.

    An exception would not do: Ray retries calls whose process died, but not calls that raised.
    """
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
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
    """One actor handle per configured engine, not started yet; ``staleness``: see `TrainConfig`."""
    remote = ray.remote(PolicyEngineActor)
    groups = [reserve_gpu_shares(config) for _ in range(config.engines)]
    return [
        remote.options(
            name=_actor_name(index, run_name),
            **actor_resources(config, group),
            max_concurrency=MAX_CALLS,
            # Ray restarts without limit; `EngineFleet` enforces engine.max_failures and does not count lost nodes.
            max_restarts=-1,
            max_task_retries=-1,
        ).remote(
            config,
            model,
            group,
            max_model_len=max_model_len,
            lora_rank=lora_rank,
            seed=seed + index,
            name=f"engine-{index}",
            live_adapters=live_adapters(staleness),
        )
        for index, group in enumerate(groups)
    ]


class EngineClient:
    """A `draco_ray.engine.sampler.Sampler` for one `PolicyEngineActor`; while that is unavailable, it uses another.

    It holds actor names instead of handles, so that Ray can restart a rollout worker that has a copy of this client.
    """

    def __init__(self, index: int, run_name: str, engines: int = 1) -> None:
        """Make the client of engine ``index``; ``engines``: number of engines."""
        others = (each for each in range(engines) if each != index)
        self._actor_names = [_actor_name(each, run_name) for each in (index, *others)]
        self.name = f"engine-{index}"
        self._at: int | None = None
        """Index in `_actor_names` of the engine in use: 0 is its own engine; None: not chosen yet."""
        self._looked_at = 0.0
        self._looking = asyncio.Lock()

    @cached_property
    def _handles(self) -> list[Any]:
        return [ray.get_actor(name) for name in self._actor_names]

    async def sample(self, token_ids: list[int], *, max_tokens: int, **given: Any) -> Sample:
        """See `draco_ray.engine.vllm_engine.VllmEngine.sample`."""
        sample: Sample = await self._ask("sample", token_ids, max_tokens, **given)
        return sample

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ParsedToolCalls | None:
        """See `draco_ray.engine.sampler.Sampler.read_calls`."""
        try:
            use: ParsedToolCalls | None = await self._ask("read_calls", text, tools, parser, thinking)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise
        return use

    async def _ask(self, method: str, *given: Any, **named: Any) -> Any:
        while True:
            asked = getattr(await self._serving(), method).remote(*given, **named)
            try:
                return await asked
            except asyncio.CancelledError:
                # Cancel the call; otherwise the engine would go on generating.
                ray.cancel(asked)
                raise
            except (RayActorError, EngineNotReady) as error:
                log.warning(
                    "%s is unavailable, so its request is sent to another engine: %s", self.name, first_line(error)
                )
                self._at = None

    async def _serving(self) -> Any:
        """Handle of the client's own engine if that serves, else of another that does; waits while none serves."""
        async with self._looking:
            while not self._known:
                self._looked_at = time.monotonic()
                found = await asyncio.gather(*(_serves(handle) for handle in self._handles))
                there = [index for index, serves in enumerate(found) if serves]
                # Choose at random to spread the load; the choice does not change the tokens.
                self._at = 0 if found[0] else random.choice(there) if there else None
                if self._at is None:
                    await asyncio.sleep(PAUSE_SECONDS)
            assert self._at is not None
            return self._handles[self._at]

    @property
    def _known(self) -> bool:
        return self._at == 0 or (self._at is not None and time.monotonic() - self._looked_at < HOME_SECONDS)


async def _serves(engine: Any) -> bool:
    asked = engine.look.remote()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            found: EngineProcess = await asked
    except (RayError, TimeoutError):
        # Cancel, because an actor without a node would queue the call until it has one.
        ray.cancel(asked)
        return False
    return found.serves


def _actor_name(index: int, run_name: str) -> str:
    return f"PolicyEngine-{index}@{run_name}"
