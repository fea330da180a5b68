"""The policy engine: vLLM's `AsyncLLM`, token-in and token-out, with a LoRA adapter that changes while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import difflib
import gc
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from draco_ray.config.machine import thread_environment
from draco_ray.config.schema import EngineConfig, ModelConfig
from draco_ray.engine.adapter_files import AdapterFiles
from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.model_directory import architectures, check_model_directory, is_local, load_tokenizer
from draco_ray.engine.model_shape import engine_targets
from draco_ray.engine.sampler import EngineStatistics, Sample, collector
from draco_ray.errors import EngineError
from draco_ray.extras import naming_extras, uncollected
from draco_ray.records import Adapter, WeightUpdate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class RequestGate:
    """Counts the requests under way; while it is shut, new ones wait in the order they came."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Count a request as under way inside the block; entering waits while the gate is shut."""
        # Whoever was let out may find it shut again.
        while not self._open.is_set():
            await self._open.wait()
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle.set()

    async def shut(self) -> None:
        """Hold new requests, and return once those under way have ended; open again if this is cancelled."""
        self._open.clear()
        try:
            await self._idle.wait()
        except BaseException:
            self._open.set()
            raise

    def open(self) -> None:
        """Let in what waits, and what comes."""
        self._open.set()


GIB = 1 << 30
CPU_KV_CACHE_GIB = 1.0
"""KV cache of a CPU engine whose configuration names none; vLLM itself would take most of the machine's memory."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allocates room for; an adapter takes the next one up."""
LIVE_ADAPTERS = 2
"""Adapter versions that may generate side by side: the current one, and one that unfinished requests started with;
more where ``train.staleness`` lets a request outlast several syncs."""
SLEEP_LEVEL = 1
"""vLLM's: base weights and adapters go to host memory and come back; level 2 would drop them."""
SOCKET_BYTES = 107
"""Maximum length of a Unix socket path, in bytes."""
SOCKET_NAME_BYTES = 36
"""Length of the names of vLLM's sockets, which are UUIDs, in bytes."""


def live_adapters(staleness: int) -> int:
    """Adapter versions that may generate side by side with this ``train.staleness``."""
    return max(LIVE_ADAPTERS, 1 + staleness)


@dataclass(slots=True)
class _Version:
    """An adapter version inside the engine, and how many requests generate with it."""

    number: int
    request: Any
    path: Path
    users: int = 0


class VllmEngine:
    """One vLLM engine: a front end in this process and an engine core in a child process that dies with it.

    A `draco_ray.engine.sampler.Sampler`. Before the first adapter is loaded it samples from the base model, as
    version 0.
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
        use_adapter: bool = True,
        live_adapters: int = LIVE_ADAPTERS,
    ) -> None:
        """Remember the settings; `start` does the work.

        Args:
            max_model_len: longest sequence, prompt and continuation, tokens.
            lora_rank: of the adapters that will come.
            seed: of requests that bring none.
            name: identity of this engine in the run, recorded with every trajectory.
            run_name: adapters are written below ``<engine.adapter_directory>/<run name>/<engine name>``; vLLM's sockets
                lie there, too.
            use_adapter: False gives an engine of the base model alone, without the cost of LoRA.
            live_adapters: adapter versions that may generate side by side; requests of further ones wait.
        """
        self._config = config
        self._model = model
        self._max_model_len = max_model_len
        self._lora_rank = lora_rank
        self._seed = seed
        self._name = name
        self._use_adapter, self._live_adapters = use_adapter, live_adapters
        self._files = AdapterFiles(config.adapter_directory, run_name, name)
        self._architectures: tuple[str, ...] = ()
        self._stop_ids: list[int] = []
        self._llm: AsyncLLM | None = None
        self._current: _Version | None = None
        self._requests = itertools.count()
        self._unfinished: set[str] = set()
        self._adapter_ids = itertools.count(1)
        self._swap = asyncio.Lock()
        self._gate = RequestGate()
        self._asleep = False
        self.statistics = EngineStatistics()
        """Of this process; filled as the engine goes."""

    @property
    def name(self) -> str:
        """Identity of the engine."""
        return self._name

    @property
    def dead(self) -> bool:
        """Whether the engine core has ended unexpectedly; this engine then serves no more."""
        return self._llm is not None and bool(self._llm.errored)

    @property
    def policy_version(self) -> int:
        """Version that a request starting now samples from."""
        return self._current.number if self._current else 0

    async def start(self) -> None:
        """Load the model and start the engine core.

        Raises: EngineError when the model directory is unusable (before anything slow begins) or vLLM refuses it.
        """
        check_model_directory(self._model.path, self._model.chat_template)
        self._architectures = architectures(self._model.path)
        self._files.claim()
        # Importing vLLM and waiting for its core takes seconds: not in the event loop.
        try:
            await asyncio.to_thread(self._launch)
        except BaseException:
            self._files.remove()
            raise

    async def sample(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        seed: int | None = None,
        temperature: float | None = None,
        stop_at: int | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Sample:
        """Continue ``token_ids`` by at most ``max_tokens`` tokens with the adapter that is current now.

        A swap during generation does not touch it: it ends with the version it began with, and says so.

        Args:
            token_ids: the whole sequence so far; what an earlier call left in the prefix cache is not computed again.
            max_tokens: at least 1; generation also ends where the sequence reaches the model's length.
            seed: makes the draw repeatable for equal log-probs.
            temperature: instead of the configured one, for requests that are not rollouts.
            stop_at: a further token that ends generation, itself included in what is returned.
            schema: JSON schema that the text is held to.
        Returns: the sampled tokens, the end-of-turn token included, with their log-probs under the model as it is:
            temperature 1, nothing cut off. That is what the learner recomputes. It is the distribution sampled from
            only with the default sampling parameters; another temperature, top_p or top_k makes samples that are
            off-policy by exactly that much.
        Raises: EngineError when the prompt leaves no room or the engine core has died.
        """
        if not token_ids:
            raise EngineError(f"engine {self._name}: prompt is empty; expected at least one token")
        if len(token_ids) >= self._max_model_len:
            raise EngineError(
                f"engine {self._name}: prompt of {len(token_ids)} tokens leaves no room to generate; expected fewer "
                f"than {self._max_model_len}; shorten it or raise agent.max_response_length "
                "(of a judge's prompt: judge.self_judge.context_tokens)"
            )
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        parameters = SamplingParams(
            structured_outputs=None if schema is None else StructuredOutputsParams(json=dict(schema)),
            temperature=self._config.temperature if temperature is None else temperature,
            top_p=self._config.top_p,
            top_k=self._config.top_k,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=self._stop_ids if stop_at is None else [*self._stop_ids, stop_at],
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._check_vocabulary(token_ids)
        async with self._gate.request():
            version = self._current
            output = (await self._generate(token_ids, parameters, version)).outputs[0]
        return Sample(
            token_ids=list(output.token_ids),
            logprobs=list(output.logprobs.logprobs),
            finish_reason=output.finish_reason,
            policy_version=version.number if version else 0,
        )

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """Log-prob of each of ``token_ids[1:]`` given what precedes it, at temperature 1, nats.

        Args:
            token_ids: at least 2 tokens, fewer than the engine's length.
            adapter: with the current adapter, or with the base model alone.
        Raises: EngineError.
        """
        if not 2 <= len(token_ids) < self._max_model_len:
            raise EngineError(
                f"engine {self._name}: cannot score a sequence of {len(token_ids)} tokens; expected 2 to "
                f"{self._max_model_len - 1}"
            )
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Log-probs of prompt tokens are computed anew: vLLM does not read the prefix cache for such a request.
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._check_vocabulary(token_ids)
        async with self._gate.request():
            output = await self._generate(token_ids, parameters, self._current if adapter else None)
        return list(output.prompt_logprobs.logprobs)

    async def load(self, update: WeightUpdate) -> float:
        """Make the weights of ``update`` what new requests sample from; returns seconds.

        Raises: EngineError when it cannot take them.
        """
        match update:
            case Adapter():
                return await self.load_adapter(update)
        raise EngineError(
            f"engine {self._name}: cannot take a weight update of type {type(update).__name__}; expected an Adapter"
        )

    async def load_adapter(self, adapter: Adapter) -> float:
        """Make ``adapter`` what new requests sample from, without a restart; returns seconds.

        vLLM gets every version under an id, a name and a path of its own. Requests under way keep the weights they
        began with, and no version finds another's keys and values in the prefix cache. With ``engine.sync: drain`` it
        waits for those requests first, and holds new ones until the adapter is live.

        Raises: EngineError when vLLM refuses it (rank too high, modules the model does not have).
        """
        if not self._use_adapter:
            raise EngineError(f"engine {self._name}: started without adapters; expected use_adapter=True to load one")
        from vllm.lora.request import LoRARequest

        began = time.perf_counter()
        async with self._swap:
            llm = self._awake()
            path = await asyncio.to_thread(self._files.write, adapter, self._architectures)
            number = next(self._adapter_ids)
            request = LoRARequest(f"draco-adapter-{number}", number, str(path))
            try:
                async with self._drained():
                    await llm.add_lora(request)
                    previous, self._current = self._current, _Version(adapter.version, request, path)
            except Exception as error:
                self._files.discard(path)
                self._raise_if_dead(llm, error)
                raise EngineError(
                    f"engine {self._name}: adapter version {adapter.version} cannot be loaded: {_first_line(error)}; "
                    f"expected a PEFT LoRA adapter of rank at most {self._lora_rank} for {self._model.path}"
                ) from error
            if previous is not None:
                self._retire(previous)
        return time.perf_counter() - began

    async def sleep(self) -> None:
        """Give the GPU away: end what is under way, move the base weights to host memory, drop the KV cache.

        Requests that come wait for `wake`. Safe to call again.

        Raises: EngineError unless it was started with ``engine.colocate``.
        """
        if not self._config.colocate:
            raise EngineError(f"engine {self._name}: cannot sleep; expected engine.colocate=true when it was started")
        async with self._swap:
            llm = self._running()
            if self._asleep:
                return
            await self._gate.shut()
            try:
                await llm.sleep(level=SLEEP_LEVEL, mode="wait")
            except Exception as error:
                self._gate.open()
                self._raise_if_dead(llm, error)
                raise EngineError(f"engine {self._name}: vLLM cannot sleep: {_first_line(error)}") from error
            self._asleep = True

    async def wake(self) -> None:
        """Take the GPU back, and serve what has waited. Safe to call again."""
        async with self._swap:
            if not self._asleep:
                return
            llm = self._running()
            try:
                await llm.wake_up()
            except Exception as error:
                self._raise_if_dead(llm, error)
                raise EngineError(
                    f"engine {self._name}: cannot wake: {_first_line(error)}; the learner may have kept more of the "
                    "GPU than engine.gpu_memory_utilization leaves it; lower that"
                ) from error
            self._asleep = False
            self._gate.open()

    async def stop(self) -> None:
        """End the engine core and remove the adapter files; unfinished requests fail with EngineError.

        Safe to call twice, and before `start`.
        """
        llm, self._llm, self._current = self._llm, None, None
        if llm is None:
            return
        # What waits finds no engine.
        self._asleep = False
        self._gate.open()
        with contextlib.suppress(Exception):  # The core may be dead already.
            await llm.abort(list(self._unfinished))
        # The core holds nothing worth seconds of orderly teardown. In this thread, so that vLLM's output handler does
        # not find it dead and report that at length before it is cancelled.
        llm.shutdown(timeout=0)
        self._files.remove()
        # vLLM's front end is part of a reference cycle, with a finalizer that fails if it runs at interpreter exit.
        del llm
        await asyncio.sleep(0)
        gc.collect()

    async def _generate(self, token_ids: list[int], parameters: Any, version: _Version | None) -> Any:
        """Run one request to its end and return vLLM's only output for it."""
        from vllm.inputs.engine import tokens_input

        llm = self._running()
        request = f"{self._name}-{next(self._requests)}"
        lora = version.request if version else None
        self._unfinished.add(request)
        if version is not None:
            version.users += 1
        output = None
        try:
            async for finished in llm.generate(tokens_input(token_ids), parameters, request, lora_request=lora):
                output = finished
        except Exception as error:
            self._raise_if_dead(llm, error)
            raise EngineError(
                f"engine {self._name}: request failed: {_first_line(error)}; see the log above"
            ) from error
        finally:
            self._unfinished.discard(request)
            if version is not None:
                version.users -= 1
                self._retire(version)
        if output is None or output.outputs[0].finish_reason == "abort":
            raise EngineError(f"engine {self._name}: stopped before the request was finished")
        return output

    @contextlib.asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Hold requests back inside the block, where ``engine.sync`` says so."""
        if self._config.sync == "serve":
            yield
            return
        await self._gate.shut()
        try:
            yield
        finally:
            self._gate.open()

    def _awake(self) -> AsyncLLM:
        if self._asleep:
            raise EngineError(f"engine {self._name}: asleep; expected wake() before an adapter is loaded")
        return self._running()

    def _check_vocabulary(self, token_ids: list[int]) -> None:
        """Refuse tokens that the model does not have: without a tokenizer vLLM does not look, and its core dies."""
        words = self._running().model_config.get_vocab_size()
        strange = next((token for token in token_ids if not 0 <= token < words), None)
        if strange is not None:
            raise EngineError(
                f"engine {self._name}: token {strange} is not in the model's vocabulary of {words}; expected tokens of "
                f"its own tokenizer; check that model directory {self._model.path} holds the right one"
            )

    def _retire(self, version: _Version) -> None:
        """Remove a version's files once nothing will ask vLLM for them again."""
        if version is not self._current and version.users == 0:
            self._files.discard(version.path)

    def _raise_if_dead(self, llm: AsyncLLM, error: Exception) -> None:
        if llm.errored:
            raise EngineError(
                f"engine {self._name}: its engine core process has ended unexpectedly, killed or out of memory; its "
                "last words are in the log above; free memory or lower engine.kv_cache_gib and start again"
            ) from error

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError(f"engine {self._name}: not running; expected start() first and no stop() yet")
        return self._llm

    def _launch(self) -> None:
        """Import vLLM, start the engine core and wait until it serves. Blocks for seconds."""
        sockets = socket_environment(self._files.directory)
        with _environment(vllm_environment(self._config, self._model) | sockets):
            with naming_extras(), uncollected():
                import vllm.v1.engine.async_llm  # noqa: F401  # Nearly all that will be imported.
                from vllm.platforms import current_platform

            self._check_platform(current_platform.is_cpu())
            self._stop_ids = _end_of_turn_ids(self._model)
            try:
                # Not returned: the pool's thread would hold on to it after `stop`.
                self._llm = self._construct(current_platform.is_cpu())
            except EngineError:
                raise
            except Exception as error:
                told = f" with engine.vllm={self._config.vllm}" if self._config.vllm else ""
                raise EngineError(
                    f"engine {self._name}: vLLM cannot load model {self._model.path}{told}: {_first_line(error)}; "
                    "the engine core's own report is above"
                ) from error

    def _construct(self, cpu: bool) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self._check_arguments([field.name for field in dataclasses.fields(AsyncEngineArgs)])
        # A copy: vLLM writes into what is nested.
        engine_args = AsyncEngineArgs(**self._arguments(cpu) | copy.deepcopy(self._config.vllm))
        if cpu and engine_args.create_model_config().is_hybrid:
            # The prefix cache of a model with recurrent layers needs prompts computed in parts.
            engine_args.enable_prefix_caching = False
        # As vLLM sizes the parts of long prompts where nobody waits for the first token of an answer.
        vllm_config = engine_args.create_engine_config(usage_context=UsageContext.LLM_CLASS)
        # For a model from the hub the architectures are known only now.
        self._architectures = tuple(vllm_config.model_config.architectures)
        # Those loggers alone: vLLM's own print lines.
        loggers = [collector(self.statistics)]
        return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=loggers, disable_log_stats=True)

    def _check_arguments(self, known: Sequence[str]) -> None:
        """Refuse a name in ``engine.vllm`` that vLLM does not have."""
        for name in self._config.vllm:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=3)
                hint = f"did you mean {' or '.join(close)}?" if close else "vLLM's AsyncEngineArgs lists them"
                raise EngineError(f"engine {self._name}: engine.vllm.{name}: vLLM has no such argument; {hint}")

    def _arguments(self, cpu: bool) -> dict[str, Any]:
        """What vLLM is told beside ``engine.vllm``."""
        from draco_ray.engine.executor import AttachedExecutor, AttachedMultiprocExecutor

        config = self._config
        arguments: dict[str, Any] = {
            "model": self._model.path,
            "dtype": self._model.dtype,
            "seed": self._seed,
            "max_model_len": self._max_model_len,
            # Beside other sequences, and behind a cached prefix, log-probs are rounded differently.
            "max_num_seqs": 1 if config.deterministic else config.max_num_seqs,
            # Nothing is compiled on CPU: with LoRA vLLM cannot, and without it the wait is longer than a run.
            "enforce_eager": cpu or config.enforce_eager,
            "enable_prefix_caching": not config.deterministic,
            "tensor_parallel_size": config.tensor_parallel,
            "distributed_executor_backend": AttachedExecutor
            if config.tensor_parallel == 1
            else AttachedMultiprocExecutor,
            "logprobs_mode": "raw_logprobs",
            "language_model_only": True,
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
        }
        if self._use_adapter:
            rank = next((rank for rank in LORA_RANKS if rank >= self._lora_rank), LORA_RANKS[-1])
            arguments |= {"enable_lora": True, "max_loras": self._live_adapters, "max_lora_rank": rank}
            if (targets := engine_targets(_model_config(self._model.path), self._model.path)) is not None:
                arguments["lora_target_modules"] = targets
        if cpu:
            arguments |= {
                "worker_cls": "draco_ray.engine.cpu_lora.CpuWorker",
                "kv_cache_memory_bytes": int((config.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB),
                # A prompt computed in parts makes vLLM 0.32 rewind the generator of a seeded request, which its CPU
                # generators cannot do: the engine core dies. Whole prompts only, so a batch must hold the longest.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(8192, self._max_model_len),
            }
        else:
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
            arguments["enable_sleep_mode"] = config.colocate
            if config.kv_cache_gib is not None:
                arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
        return arguments

    def _check_platform(self, cpu: bool) -> None:
        if cpu and self._config.gpus_per_engine > 0:
            raise EngineError(
                f"engine {self._name}: the installed vLLM runs on CPU, but engine.gpus_per_engine is "
                f"{self._config.gpus_per_engine:g}; set it to 0, or install the 'gpu' extra on a machine with a GPU"
            )
        if not cpu and self._config.gpus_per_engine == 0:
            raise EngineError(
                f"engine {self._name}: the installed vLLM runs on GPU, but engine.gpus_per_engine is 0; "
                "set it to the GPUs of one engine, or install the 'cpu' extra"
            )


def vllm_environment(config: EngineConfig, model: ModelConfig) -> dict[str, str]:
    """Environment variables that vLLM is imported and its core process starts under."""
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    if is_local(model.path):
        settings |= {"HF_HUB_OFFLINE": "1"}
    return settings | hardware_environment(config)


def socket_environment(folder: Path) -> dict[str, str]:
    """Let vLLM's sockets lie in ``folder``: processes that are killed leave them behind.

    Where their paths would be too long, or somebody has said where they are to be, nothing is changed.
    """
    folder = folder.absolute()
    fits = len(os.fsencode(folder)) + 1 + SOCKET_NAME_BYTES <= SOCKET_BYTES
    return {"VLLM_RPC_BASE_PATH": str(folder)} if fits and "VLLM_RPC_BASE_PATH" not in os.environ else {}


def hardware_environment(config: EngineConfig) -> dict[str, str]:
    """Environment variables of a vLLM process for what it runs on, whoever starts it."""
    if config.gpus_per_engine > 0:
        # vLLM would compile FlashInfer's top-p and top-k kernels at the first start on a machine: a minute and a half,
        # and where nvcc or ninja are not on the PATH the engine core dies of it. It has others.
        name = "VLLM_USE_FLASHINFER_SAMPLER"
        return {name: os.environ.get(name, "0")}
    return cpu_environment(config)


def cpu_environment(config: EngineConfig) -> dict[str, str]:
    """Environment variables of a vLLM process without a GPU."""
    return {
        **thread_environment(1 if config.deterministic else config.cpus_per_engine / config.tensor_parallel),
        # vLLM gives each tensor-parallel rank a NUMA node of its own, and starts none where there are too few.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        # All that is left to compile is a small function of the sampler, which would need a C++ compiler and cost
        # seconds at the first request.
        "TORCHDYNAMO_DISABLE": "1",
    }


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables for the child to inherit, and take back these and whatever vLLM set on its way."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        # Variable by variable: other threads read the environment meanwhile.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _model_config(path: str) -> dict[str, Any]:
    """A model's ``config.json``."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(path)
    return dict(config)


def _end_of_turn_ids(model: ModelConfig) -> list[int]:
    """Every token id that ends a turn: the model's and the tokenizer's end of sequence, and those of the chat template.

    Raises: ConfigError where the template cannot be used.
    """
    from transformers import GenerationConfig

    tokenizer = load_tokenizer(model.path, model.chat_template)
    ends = {tokenizer.eos_token_id, *ChatTokens(tokenizer, thinking=False).ends}
    with contextlib.suppress(OSError):  # A model need not come with a generation_config.json.
        declared = GenerationConfig.from_pretrained(model.path).eos_token_id
        ends.update(declared if isinstance(declared, list) else [declared])
    return sorted(token for token in ends if token is not None)


def _first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, or its type where there is none."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
