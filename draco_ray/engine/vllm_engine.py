"""The policy engine: vLLM's `AsyncLLM`, token-in and token-out, with a LoRA adapter that can be replaced."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import difflib
import gc
import itertools
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from draco_ray.config.machine import thread_env_vars
from draco_ray.config.schema import EngineConfig, ModelConfig
from draco_ray.engine.adapter_files import AdapterFiles
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.model_config import engine_lora_modules
from draco_ray.engine.model_directory import check_model_directory, is_local, load_tokenizer
from draco_ray.engine.sampler import EngineStatistics, Sample, make_stat_logger_class
from draco_ray.errors import ConfigError, EngineError, first_line
from draco_ray.extras import explain_missing_extras
from draco_ray.records import Adapter, WeightUpdate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


GIB = 1 << 30
CPU_KV_CACHE_GIB = 1.0
"""Default size of a CPU engine's KV cache; vLLM's own default takes most of the machine's memory."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates; an adapter's rank is rounded up to the next one."""
LIVE_ADAPTERS = 2
"""Minimum number of adapter versions to keep: the current one, and the one that running requests began with.
With ``train.staleness`` a request may outlast several syncs, so more are needed."""
SLEEP_LEVEL = 1
"""vLLM's sleep level 1 moves base weights and adapters to host memory; level 2 would discard them."""
SOCKET_BYTES = 107
"""Maximum length of a Unix socket path, in bytes."""
SOCKET_NAME_BYTES = 36
"""Length of the names of vLLM's sockets, which are UUIDs, in bytes."""


def live_adapters(staleness: int) -> int:
    """Number of adapter versions that may be in use at a time with this ``train.staleness``."""
    return max(LIVE_ADAPTERS, 1 + staleness)


@dataclass(slots=True)
class _Version:
    """An adapter version in the engine, and the number of requests that use it."""

    number: int
    request: Any
    path: Path
    users: int = 0


class VllmEngine:
    """One vLLM engine: a front end in this process, and an engine core in a child process that ends with it.

    It is a `draco_ray.engine.sampler.Sampler`. Before the first adapter is loaded, it samples from the base model,
    which is version 0.
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
        live_adapters: int = LIVE_ADAPTERS,
    ) -> None:
        """Remember the settings; `start` does the work.

        Args:
            max_model_len: maximum length of a sequence, prompt and continuation, in tokens.
            lora_rank: maximum rank of the adapters.
            seed: for requests without their own.
            live_adapters: maximum number of adapter versions in use at a time; requests with further versions wait.
        """
        self._config = config
        self._model = model
        self._max_model_len = max_model_len
        self._lora_rank = lora_rank
        self._seed = seed
        self.name = name
        """Identity of the engine in the run, recorded with every trajectory."""
        self._live_adapters = live_adapters
        self._files = AdapterFiles(config.adapter_directory)
        self._architectures: tuple[str, ...] = ()
        self._stop_ids: list[int] = []
        self._llm: AsyncLLM | None = None
        self._current: _Version | None = None
        self._requests = itertools.count()
        self._unfinished: set[str] = set()
        self._adapter_ids = itertools.count(1)
        self._swap = asyncio.Lock()
        self._asleep = False
        self.statistics = EngineStatistics()
        """Statistics of this process, updated continuously."""

    @property
    def dead(self) -> bool:
        """Whether the engine core has died."""
        return self._llm is not None and bool(self._llm.errored)

    @property
    def policy_version(self) -> int:
        """Adapter version of new requests."""
        return self._current.number if self._current else 0

    async def start(self) -> None:
        """Load the model and start the engine core.

        Raises: EngineError when the model directory is unusable (before anything slow begins) or vLLM refuses it.
        """
        check_model_directory(self._model.path, self._model.chat_template)
        self._files.open()
        # Launch in a thread, because importing vLLM and starting its core takes seconds.
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
        """Continue ``token_ids`` by at most ``max_tokens`` tokens with the current adapter.

        A request keeps the adapter version that it began with.

        Args:
            token_ids: the whole sequence so far.
            max_tokens: at least 1; generation also ends at ``max_model_len``.
            seed: makes sampling reproducible for equal log-probs.
            temperature: replaces the configured temperature, for requests that are not rollouts.
            stop_at: another token id that ends generation; it is part of the result.
            schema: JSON schema that constrains the text.
        Returns: the sampled tokens, including the end-of-turn token, with their log-probs at temperature 1 without
            truncation, as the learner recomputes them. With another temperature, top_p or top_k the samples are
            off-policy by the difference.
        Raises: EngineError if the prompt leaves no room or the engine core has died.
        """
        if not token_ids:
            raise EngineError(f"engine {self.name}: prompt is empty; expected at least one token")
        if len(token_ids) >= self._max_model_len:
            raise EngineError(
                f"engine {self.name}: prompt of {len(token_ids)} tokens leaves no room to generate; expected fewer "
                f"than {self._max_model_len}; shorten the prompt or raise agent.max_response_length (for a judge's "
                "prompt judge.self_judge.context_tokens)"
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
        version = self._current
        output = (await self._generate(token_ids, parameters, version)).outputs[0]
        return Sample(
            token_ids=list(output.token_ids),
            logprobs=list(output.logprobs.logprobs),
            finish_reason=output.finish_reason,
            policy_version=version.number if version else 0,
        )

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """Log-prob of each of ``token_ids[1:]`` given the tokens before it, at temperature 1, nats.

        Args:
            token_ids: at least 2 tokens, fewer than ``max_model_len``.
            adapter: use the current adapter, or only the base model.
        Raises: EngineError.
        """
        if not 2 <= len(token_ids) < self._max_model_len:
            raise EngineError(
                f"engine {self.name}: cannot score a sequence of {len(token_ids)} tokens; expected 2 to "
                f"{self._max_model_len - 1}"
            )
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # vLLM does not use the prefix cache for requests with prompt log-probs.
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._check_vocabulary(token_ids)
        output = await self._generate(token_ids, parameters, self._current if adapter else None)
        return list(output.prompt_logprobs.logprobs)

    async def load(self, update: WeightUpdate) -> float:
        """Load ``update`` for new requests; returns the seconds it took. Raises: EngineError."""
        match update:
            case Adapter():
                return await self.load_adapter(update)
        raise EngineError(
            f"engine {self.name}: cannot take a weight update of type {type(update).__name__}; expected an Adapter"
        )

    async def load_adapter(self, adapter: Adapter) -> float:
        """Load ``adapter`` for new requests; returns the seconds it took.

        Every version has its own id, name and path in vLLM. So running requests keep the weights they began with, and
        no version uses another version's keys and values from the prefix cache.

        Raises: EngineError when vLLM refuses it (rank too high, modules the model does not have).
        """
        from vllm.lora.request import LoRARequest

        began = time.perf_counter()
        async with self._swap:
            if self._asleep:
                raise EngineError(f"engine {self.name}: the engine is asleep; call wake() before loading an adapter")
            llm = self._running()
            path = await asyncio.to_thread(self._files.write, adapter, self._architectures)
            number = next(self._adapter_ids)
            request = LoRARequest(f"draco-adapter-{number}", number, str(path))
            expected = f"expected a PEFT LoRA adapter of rank at most {self._lora_rank} for {self._model.path}"
            version = _Version(adapter.version, request, path)
            unused: _Version | None = version
            try:
                with self._explaining(llm, f"adapter version {adapter.version} cannot be loaded", expected):
                    await llm.add_lora(request)
                unused, self._current = self._current, version
            finally:
                if unused is not None:
                    self._retire(unused)
        return time.perf_counter() - began

    async def sleep(self) -> None:
        """Free the GPU: finish running requests, move the base weights to host memory, drop the KV cache.

        New requests wait for `wake`. Safe to call again.

        Raises: EngineError unless the engine was started with ``engine.colocate``.
        """
        if not self._config.colocate:
            raise EngineError(f"engine {self.name}: cannot sleep, because it was started without engine.colocate=true")
        async with self._swap:
            llm = self._running()
            if self._asleep:
                return
            # Set this before calling vLLM, so that `wake` also wakes an engine whose sleep was cancelled.
            self._asleep = True
            with self._explaining(llm, "vLLM cannot sleep", "see the log above"):
                await llm.sleep(level=SLEEP_LEVEL, mode="wait")

    async def wake(self) -> None:
        """Load the weights back to the GPU and admit waiting requests. Safe to call again."""
        async with self._swap:
            if not self._asleep:
                return
            llm = self._running()
            advice = (
                "the learner may use more GPU memory than engine.gpu_memory_utilization leaves; lower "
                "engine.gpu_memory_utilization"
            )
            with self._explaining(llm, "cannot wake", advice):
                await llm.wake_up()
            self._asleep = False

    async def stop(self) -> None:
        """End the engine core and remove the adapter files; unfinished requests fail with EngineError.

        Safe to call twice, and before `start`.
        """
        llm, self._llm, self._current = self._llm, None, None
        if llm is None:
            return
        self._asleep = False
        with contextlib.suppress(Exception):  # The core may be dead already.
            await llm.abort(list(self._unfinished))
        # The timeout is 0, because the core has nothing to save. The call runs in this thread, so that vLLM's output
        # handler is cancelled before it notices and reports the end of the core.
        llm.shutdown(timeout=0)
        self._files.remove()
        # Collect vLLM's front end now: it is in a reference cycle, and its finalizer fails at interpreter exit.
        del llm
        await asyncio.sleep(0)
        gc.collect()

    async def _generate(self, token_ids: list[int], parameters: Any, version: _Version | None) -> Any:
        """Run one request and return vLLM's final output."""
        from vllm.inputs.engine import tokens_input

        llm = self._running()
        request = f"{self.name}-{next(self._requests)}"
        lora = version.request if version else None
        self._unfinished.add(request)
        if version is not None:
            version.users += 1
        output = None
        try:
            with self._explaining(llm, "request failed", "see the log above"):
                async for finished in llm.generate(tokens_input(token_ids), parameters, request, lora_request=lora):
                    output = finished
        finally:
            self._unfinished.discard(request)
            if version is not None:
                version.users -= 1
                self._retire(version)
        if output is None or output.outputs[0].finish_reason == "abort":
            raise EngineError(f"engine {self.name}: the engine was stopped before the request was finished")
        return output

    def _check_vocabulary(self, token_ids: list[int]) -> None:
        """Refuse token ids outside the vocabulary, which vLLM does not check and which kill its core."""
        words = self._running().model_config.get_vocab_size()
        strange = next((token for token in token_ids if not 0 <= token < words), None)
        if strange is not None:
            raise EngineError(
                f"engine {self.name}: token {strange} is not in the model's vocabulary of {words}; check that the "
                f"tokenizer in model directory {self._model.path} belongs to the model"
            )

    def _retire(self, version: _Version) -> None:
        """Remove a version's files once it is neither current nor in use."""
        if version is not self._current and version.users == 0:
            shutil.rmtree(version.path, ignore_errors=True)

    @contextlib.contextmanager
    def _explaining(self, llm: AsyncLLM, failure: str, advice: str) -> Iterator[None]:
        """Raise vLLM's errors as EngineError, with a message of ``failure``, vLLM's own message and ``advice``."""
        try:
            yield
        except Exception as error:
            if llm.errored:
                raise EngineError(
                    f"engine {self.name}: the engine core process has ended unexpectedly, perhaps killed for lack of "
                    "memory; see its last output in the log above; free memory or lower engine.kv_cache_gib, and "
                    "start again"
                ) from error
            raise EngineError(f"engine {self.name}: {failure}: {_first_line(error)}; {advice}") from error

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError(f"engine {self.name}: the engine is not running; call start() first")
        return self._llm

    def _launch(self) -> None:
        """Import vLLM, start the engine core and wait until it serves. Blocks for seconds."""
        sockets = socket_env_vars(self._files.directory)
        with _environment(vllm_env_vars(self._config, self._model) | sockets):
            with explain_missing_extras():
                import vllm.v1.engine.async_llm  # noqa: F401  # This imports nearly everything that is needed.
                from vllm.platforms import current_platform

            self._check_platform(current_platform.is_cpu())
            check_argument_names(self._config.vllm)
            self._stop_ids = _end_of_turn_ids(self._model)
            try:
                # Do not return the engine, because the thread pool would keep a reference to it after `stop`.
                self._llm = self._construct(current_platform.is_cpu())
            except Exception as error:
                told = f" with engine.vllm={self._config.vllm}" if self._config.vllm else ""
                raise EngineError(
                    f"engine {self.name}: vLLM cannot load model {self._model.path}{told}: {_first_line(error)}; "
                    "the cause is in the engine's output (under Ray: worker-*.err in the session's logs)"
                ) from error

    def _construct(self, cpu: bool) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # A deep copy, because vLLM changes nested values.
        engine_args = AsyncEngineArgs(**self._arguments(cpu) | copy.deepcopy(self._config.vllm))
        if cpu and engine_args.create_model_config().is_hybrid:
            # For models with recurrent layers, the prefix cache needs chunked prefill, which is off on CPUs.
            engine_args.enable_prefix_caching = False
        # Use vLLM's offline defaults for chunked prefill, because nobody waits for the first token.
        vllm_config = engine_args.create_engine_config(usage_context=UsageContext.LLM_CLASS)
        self._architectures = tuple(vllm_config.model_config.architectures)
        # Use only this logger, because vLLM's own loggers print.
        loggers = [make_stat_logger_class(self.statistics)]
        return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=loggers, disable_log_stats=True)

    def _arguments(self, cpu: bool) -> dict[str, Any]:
        """vLLM's arguments, without those of ``engine.vllm``."""
        from draco_ray.engine.executor import AttachedExecutor, AttachedMultiprocExecutor

        config = self._config
        arguments: dict[str, Any] = {
            "model": self._model.path,
            "dtype": self._model.dtype,
            "seed": self._seed,
            "max_model_len": self._max_model_len,
            # Log-probs are rounded differently in a batch with other sequences, and after a cached prefix.
            "max_num_seqs": 1 if config.deterministic else config.max_num_seqs,
            # No compilation on CPUs: vLLM cannot compile with LoRA, and without LoRA compiling takes longer than a run.
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
            "enable_lora": True,
            "max_loras": self._live_adapters,
            "max_lora_rank": next((rank for rank in LORA_RANKS if rank >= self._lora_rank), LORA_RANKS[-1]),
        }
        if (targets := engine_lora_modules(_model_config(self._model.path), self._model.path)) is not None:
            arguments["lora_target_modules"] = targets
        if cpu:
            arguments |= {
                "worker_cls": "draco_ray.engine.cpu_lora.CpuWorker",
                # The prefix cache holds whole blocks: with vLLM's 128 tokens, a turn recomputes up to 127 old tokens.
                "block_size": 32,
                "kv_cache_memory_bytes": int((config.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB),
                # With chunked prefill vLLM 0.32 rewinds the generator of a seeded request, which CPU generators cannot
                # do: the engine core dies. Without it, a batch must hold the longest prompt. Prompts of one batch
                # cannot share a prefix; those of the next batch find it in the cache.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(2048, self._max_model_len),
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
                f"engine {self.name}: the installed vLLM runs on CPU, but engine.gpus_per_engine is "
                f"{self._config.gpus_per_engine:g}; set it to 0, or install the 'gpu' extra on a machine with a GPU"
            )
        if not cpu and self._config.gpus_per_engine == 0:
            raise EngineError(
                f"engine {self.name}: the installed vLLM runs on GPU, but engine.gpus_per_engine is 0; "
                "set it to the number of GPUs per engine, or install the 'cpu' extra"
            )


def check_argument_names(arguments: Collection[str]) -> None:
    """Check that vLLM knows the names in ``engine.vllm``; importing it takes seconds. Raises: ConfigError.

    Where vLLM is not installed nothing is checked; the engines check the names when they start.
    """
    if not arguments or find_spec("vllm") is None:
        return
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see vLLM's AsyncEngineArgs for all names"
            raise ConfigError(f"engine.vllm.{name}: vLLM has no such argument; {hint}")


def vllm_env_vars(config: EngineConfig, model: ModelConfig) -> dict[str, str]:
    """Environment variables for importing vLLM and starting its core process."""
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    if is_local(model.path):
        settings |= {"HF_HUB_OFFLINE": "1"}
    return settings | hardware_env_vars(config)


def socket_env_vars(folder: Path) -> dict[str, str]:
    """Environment variable that puts vLLM's sockets, which killed processes leave behind, into ``folder``.

    Returns: an empty dictionary if the paths would be too long, or the user has set the variable.
    """
    folder = folder.absolute()
    fits = len(os.fsencode(folder)) + 1 + SOCKET_NAME_BYTES <= SOCKET_BYTES
    return {"VLLM_RPC_BASE_PATH": str(folder)} if fits and "VLLM_RPC_BASE_PATH" not in os.environ else {}


def hardware_env_vars(config: EngineConfig) -> dict[str, str]:
    """Environment variables of a vLLM process that depend on its hardware."""
    if config.gpus_per_engine > 0:
        # vLLM would compile FlashInfer's top-p and top-k kernels at the first start on a machine, which takes 90
        # seconds and kills the engine core if nvcc or ninja is missing. Without FlashInfer it uses other kernels.
        name = "VLLM_USE_FLASHINFER_SAMPLER"
        return {name: os.environ.get(name, "0")}
    return {
        **thread_env_vars(1 if config.deterministic else config.cpus_per_engine / config.tensor_parallel),
        # vLLM binds each tensor-parallel rank to its own NUMA node, and fails if there are too few.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        # Otherwise a small function of the sampler is compiled at the first request, which needs a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block; afterwards restore these and all that vLLM has changed."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        # One variable at a time, because other threads may read the environment.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _model_config(path: str) -> dict[str, Any]:
    """A model's ``config.json``."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(path)
    return dict(config)


def _end_of_turn_ids(model: ModelConfig) -> list[int]:
    """All token ids that end a turn: end-of-sequence tokens of model and tokenizer, and those of the chat template.

    Raises: ConfigError where the template cannot be used.
    """
    from transformers import GenerationConfig

    tokenizer = load_tokenizer(model.path, model.chat_template)
    ends = {tokenizer.eos_token_id, *ChatTokenizer(tokenizer, thinking=False).ends}
    with contextlib.suppress(OSError):  # A model need not come with a generation_config.json.
        declared = GenerationConfig.from_pretrained(model.path).eos_token_id
        ends.update(declared if isinstance(declared, list) else [declared])
    return sorted(token for token in ends if token is not None)


def _first_line(error: BaseException) -> str:
    return first_line(error.errors()[0]["msg"] if isinstance(error, ValidationError) else error)
