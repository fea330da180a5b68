"""A GRPO step of a whole model on one GPU, by `draco train` itself, compared with the prediction of `draco plan`.

python jobs/gpu_step.py [--model qwen3.6-27b] [--layers 0] [--rollouts 24] [--out runs/gpu_check.json] [--tiny]

The model has random weights in its real shape and is built here, with as many layers as fit (the table says how many).
Engine and learner take turns on the GPU (`engine.colocate`); the learner's base is in 8 bits. Two steps are trained, of
which the second counts: the first builds kernels. Rewards are random (`--setting random`) and episodes of a fixed size
(`gpu_step_world.py`), because a random policy says nothing that could be judged. It takes ten minutes at most.
Without a CUDA GPU it says so, with exit code 0. ``--tiny`` does the same on the CPU with a tiny model.

MFU: floating-point operations by `draco plan`'s count, recomputed activations included, over the seconds in which the
learner worked and the GPU's dense bfloat16 peak. Tokens of the learner are all tokens of a trajectory, prompt included.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import gpu_check
import psutil
import torch
import typer
from gpu_check import GIB, Figure

from draco_ray.commands.plan import memory_problems
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.model_config import PUBLIC_CONFIGS
from draco_ray.lab.planning.memory import engine_memory, learner_memory, total
from draco_ray.lab.planning.model_shape import ModelShape, model_shape
from draco_ray.lab.planning.step_time import Assumptions, learner_flops, step_time
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.starter.tokenizer import CHAT_TEMPLATE, PADDING, TURN_END, TURN_START
from draco_ray.training.sizes import with_gradient_checkpointing

SECONDS = 570
"""Time limit of the job: ten minutes of a borrowed machine, minus the time for the table."""
GROUP, STEPS = 6, 2
WORLD = Path(__file__).with_name("gpu_step_world.py")
TORCHVISION_STUB = Path(__file__).resolve().parents[1] / "tests" / "support" / "torchvision_stub"
"""vLLM's class of Qwen3.6 imports torchvision, which only the GPU lock installs; nothing here uses it."""
LEAST_MFU = 40
"""Target of the learner, in %."""
MOST_OFF = {"step": 15, "peak": 10}
"""First word of a figure's name -> maximum distance of the plan from it, in %, as a target."""
PUBLISHED = """
| system | model | tokens/s a GPU | counted | MFU | step |
|---|---|---|---|---|---|
| [prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks/baselines), 2026-02-07, 8 H100 | \
Qwen3-30B-A3B, LoRA | 4,100 | tokens of the trainer, by its seconds | 15 % | |
| [NeMo RL](https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html) 0.6, 32 H100 | Qwen3-30B-A3B | \
1,102 | tokens of a step, by its seconds, all GPUs | | 192 s |
"""
"""Published figures, not ours: other models, lengths and GPUs, so only the definitions can be compared.

prime-rl's is its file `benchmark-8xh100-Qwen--Qwen3-30B-A3B-Instruct-2507-rl-16-8gpu-...-16384-cp1-ep1.json`: 32,529
tokens/s of 8 GPUs.
"""
LAYERS_AT_A_TIME = 4
"""Layers that Qwen3.6 repeats: three delta nets and an attention layer."""


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are words: every sample can be decoded, and n words have n tokens."""
    import transformers
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    known = [PADDING, TURN_END, TURN_START, *(f"w{token}" for token in range(3, vocabulary))]
    backend = Tokenizer(WordLevel({word: token for token, word in enumerate(known)}, unk_token=PADDING))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=TURN_END, pad_token=PADDING, additional_special_tokens=[TURN_START]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def overrides(folder: Path, rollouts: int, *, tiny: bool) -> list[str]:
    """Configuration overrides of the run, with its model at ``folder/model``."""
    turns, turn, asked, observed = (3, 16, 24, 8) if tiny else (8, 256, 512, 256)
    length = turns * (turn + observed + 16)
    keys = [
        f"model.path={folder / 'model'}",
        f"run.root={folder}",
        "run.name=step",
        f"environment.use={WORLD}:Words",
        f"environment.options={{asked: {asked}, observed: {observed}}}",
        f"environment.slots={rollouts}",
        f"environment.slots_per_worker={rollouts}",
        f"agent.use={WORLD}:EveryTurnActs",
        "agent.thinking=false",
        f"agent.max_turns={turns}",
        f"agent.max_turn_tokens={turn}",
        f"agent.max_prompt_length={asked + 64}",
        f"agent.max_response_length={length}",
        f"agent.max_output_characters={16 * observed}",
        f"algorithm.group_size={GROUP}",
        f"train.prompts_per_step={rollouts // GROUP}",
        f"train.steps={STEPS}",
        f"learner.minibatch_prompts={rollouts // GROUP}",
        "train.evaluate_before_after=false",
        "ray.dashboard=false",
    ]
    if tiny:
        # On CPUs vLLM has delta nets in bfloat16 only.
        return [*keys, "model.dtype=bfloat16", "learner.micro_batch_tokens=512"]
    return [
        *keys,
        "engine.engines=1",
        "engine.tensor_parallel=1",
        "engine.colocate=true",
        "engine.gpus_per_engine=0.6",
        # Share of the GPU, beside a resting learner.
        "engine.gpu_memory_utilization=0.65",
        "engine.kv_cache_gib=12",
        f"engine.max_num_seqs={rollouts}",
        "learner.workers=1",
        "learner.gpus_per_worker=0.4",
        "learner.base_precision=int8",
        f"learner.micro_batch_tokens={asked + 64 + length}",
    ]


def configured(keys: Sequence[str], *, tiny: bool) -> DracoConfig:
    """The run's configuration as `draco train` resolves it."""
    return with_gradient_checkpointing(load_config("cpu" if tiny else "qwen3.6-27b", list(keys), setting="random"))


def layers_that_fit(config: DracoConfig, model: str, gpu: int, folder: Path) -> int:
    """The largest number of layers that `draco plan` accepts; 0 if it accepts none."""
    reserved, file = int(Assumptions().reserved_gib * GIB), folder / "planned.json"
    public = PUBLIC_CONFIGS[gpu_check.MODELS[model]]
    for layers in range(public["num_hidden_layers"], 0, -LAYERS_AT_A_TIME):
        file.write_text(json.dumps(public | {"num_hidden_layers": layers}), encoding="utf-8")
        if not memory_problems(config, model_shape(config.model.path, file), gpu, reserved):
            return layers
    return 0


def targets(found: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each target, with whether the figures meet it; none on a CPU."""
    lines = []

    def say(what: str, target: str, *, met: bool) -> None:
        lines.append(f"{what} %, target {target} %: {'met' if met else 'missed'}")

    for each in found:
        name, value, plan = each["name"], each["value"], each["plan"]
        if name == "learner: MFU":
            say(f"{name} {value:.1f}", f"at least {LEAST_MFU}", met=value >= LEAST_MFU)
        elif plan is not None and (most := MOST_OFF.get(name.split()[0])) is not None:
            off = 100 * (plan / value - 1)
            say(f"plan of {name} {off:+.1f}", f"within {most}", met=abs(off) <= most)
    return lines


def comparison(found: Sequence[dict[str, Any]], model: str) -> str:
    """Published figures, with our line in each of their two definitions."""
    ours = {each["name"]: each["value"] for each in found}
    mfu = f"{ours['learner: MFU']:.0f} %" if "learner: MFU" in ours else ""
    step = next((f"{value:.0f} s" for name, value in ours.items() if name.startswith("step ")), "")
    rows = [
        f"| ours | {model}, LoRA | {ours['learning: tokens']:,.0f} | as prime-rl's | {mfu} | |",
        f"| ours | {model}, LoRA | {ours['step: tokens']:,.0f} | as NeMo RL's; one GPU does both | | {step} |",
    ]
    return PUBLISHED + "\n".join(rows)


@contextlib.contextmanager
def peak_memory(*, on_gpu: bool) -> Iterator[Callable[[], float]]:
    """Watch the GPU's used memory, or on a CPU that of this process's children; yields a function for its peak, GiB."""
    ended, peak = threading.Event(), [0.0]
    me = psutil.Process()

    def used() -> float:
        if on_gpu:
            command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
            return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024
        found = 0
        for child in me.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += child.memory_info().rss - child.memory_info().shared
        return found / GIB

    def watch() -> None:
        while not ended.wait(0.5):
            peak[0] = max(peak[0], used())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: peak[0]
    finally:
        ended.set()
        watcher.join()


def train(keys: Sequence[str], log: Path, deadline: float, *, tiny: bool) -> str | None:
    """`draco train`, ended at the deadline (of `time.monotonic`). Returns: why it failed, or None."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if tiny and importlib.util.find_spec("torchvision") is None:
        paths.append(str(TORCHVISION_STUB))
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    words = ["train", "cpu" if tiny else "qwen3.6-27b", "--setting", "random", *keys]
    with log.open("w", encoding="utf-8") as printed:
        command = [sys.executable, "-m", "draco_ray.cli", *words]
        process = subprocess.Popen(command, stdout=printed, stderr=printed, env=variables)
        if not gpu_check.in_time(process, deadline):
            return f"not finished in time; see {log}"
    if process.returncode == 0:
        return None
    return f"{log.read_text(encoding='utf-8', errors='replace').strip()[-2000:]}\n(see {log})"


def figures(run: RunDirectory, config: DracoConfig, shape: ModelShape, peak: float, gpu: int) -> list[Figure]:
    """Figures of the last finished step, with the plan of a step with the same number of tokens."""
    line, on_gpu = run.metrics()[-1], config.learner.gpus_per_worker > 0
    rows = run.table("trajectories", line["step"], ["token_ids", "sampled"]).to_pylist()
    tokens = sum(len(row["token_ids"]) for row in rows)
    sampled = sum(sum(row["sampled"]) for row in rows)
    longest = config.agent.max_prompt_length + config.agent.max_response_length
    given = Assumptions(length_share=min(1.0, tokens / len(rows) / longest), sampled_share=sampled / tokens)
    engine = engine_memory(config, shape, gpu, int(given.reserved_gib * GIB))
    plan = step_time(config, shape, engine, given)
    flops = learner_flops(config, shape, length=tokens / len(rows), sampled_share=sampled / tokens) * len(rows)
    learning, generation = line["seconds_learning"], line["seconds_generation"]
    # Engine and learner take turns: the engine beside a resting learner, or the learner at its peak.
    resting = total(learner_memory(config, shape).resident)
    awake = total(engine.items) + engine.kv_cache + resting
    planned = (max(awake, learner_memory(config, shape).peak) + given.reserved_gib * GIB) / GIB

    def beside(value: float) -> float | None:
        """``value`` if on a GPU: the plan is for GPUs."""
        return value if on_gpu else None

    found = [
        Figure(name=f"step {line['step']}", value=line["seconds"], unit="s", plan=beside(plan.serial)),
        Figure(name="generation", value=generation, unit="s", plan=beside(plan.generation)),
        Figure(name="learning", value=learning, unit="s", plan=beside(plan.learning)),
        Figure(name="sync, canary, checkpoint", value=line["seconds_sync"], unit="s", plan=beside(plan.sync)),
        Figure(name="rollouts", value=len(rows), unit=""),
        Figure(name="tokens", value=tokens, unit=""),
        Figure(name="sampled tokens", value=sampled, unit=""),
        Figure(
            name="generation: sampled tokens",
            value=sampled / generation,
            unit="tokens/s",
            plan=beside(sampled / plan.generation),
        ),
        Figure(
            name="learning: tokens",
            value=tokens / learning,
            unit="tokens/s",
            plan=beside(plan.learner_tokens_per_second),
        ),
        Figure(name="step: tokens", value=tokens / line["seconds"], unit="tokens/s", plan=beside(tokens / plan.serial)),
        Figure(name="peak memory", value=peak, unit="GiB", plan=beside(planned)),
    ]
    if on_gpu:
        mfu = 100 * flops / learning / (given.gpu_tflops * 1e12)
        found.append(Figure(name="learner: MFU", value=mfu, unit="%", plan=100 * given.learner_efficiency))
    return found


def measured(model: str, layers: int, rollouts: int, log: Path, *, tiny: bool) -> dict[str, Any]:
    """Build, train, measure: figures, or why it failed, or both."""
    deadline = time.monotonic() + (3600 if tiny else SECONDS)
    device = "cpu" if tiny else "cuda"
    gpu = 80 * GIB if tiny else torch.cuda.mem_get_info()[1]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        keys = overrides(root, rollouts, tiny=tiny)
        if tiny:
            layers = layers or LAYERS_AT_A_TIME
        else:
            layers = layers or layers_that_fit(configured(keys, tiny=False), model, gpu, root)
            if layers == 0:
                return {"failed": f"{model}: no layer fits into {gpu / GIB:.0f} GiB beside embeddings and caches"}
        began = time.monotonic()
        parameters = gpu_check.build_model(model, layers, root / "model", tiny=tiny, device=device)
        if not tiny:
            torch.cuda.empty_cache()
        config = json.loads((root / "model" / "config.json").read_text(encoding="utf-8"))
        write_tokenizer(root / "model", (config.get("text_config") or config)["vocab_size"])
        shape = model_shape(str(root / "model"))
        made = [
            Figure(name="layers", value=layers, unit=""),
            Figure(name="parameters", value=parameters / 1e9, unit="B"),
            Figure(name="model built and saved", value=time.monotonic() - began, unit="s"),
        ]
        began = time.monotonic()
        with peak_memory(on_gpu=not tiny) as peak:
            failed = train(keys, log, deadline, tiny=tiny)
        made.append(Figure(name="draco train, start and end included", value=time.monotonic() - began, unit="s"))
        run = root / "step"
        if run.is_dir() and (directory := RunDirectory.open(run)).metrics():
            made += figures(directory, configured(keys, tiny=tiny), shape, peak(), gpu)
        elif failed is None:
            failed = f"no step was finished; see {log}"
        return {"figures": [asdict(figure) for figure in made]} | ({"failed": failed} if failed else {})


def main(
    model: Annotated[str, typer.Option(help=f"Choices: {' '.join(gpu_check.MODELS)}.")] = "qwen3.6-27b",
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; 0: as many as fit.")] = 0,
    rollouts: Annotated[int, typer.Option(min=GROUP, help=f"Rollouts per step, {GROUP} per task.")] = 4 * GROUP,
    out: Annotated[Path, typer.Option(help="Result file, shared with gpu_check.py.")] = Path("runs/gpu_check.json"),
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model on the CPU.")] = False,
) -> None:
    """Train the step and print its table; the exit code is 1 if it fails."""
    if model not in gpu_check.MODELS:
        sys.exit(f"gpu-step: unknown model {model!r}; expected one of {', '.join(gpu_check.MODELS)}")
    if rollouts % GROUP:
        sys.exit(f"gpu-step: --rollouts {rollouts}; expected a multiple of {GROUP}, the rollouts of a task")
    if not tiny and (reason := gpu_check.why_skipped()) is not None:
        print(f"gpu-step: skipped: {reason}")
        return
    os.environ.pop("RAY_ADDRESS", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_name(f"{out.stem}-step-{model}.log").resolve()
    key = f"step, {model}" + (", toy size" if tiny else "")
    found = measured(model, layers, rollouts, log, tiny=tiny) | {
        "machine": gpu_check.machine("cpu" if tiny else "cuda")
    }
    gpu_check.keep(out, key, found)
    print(gpu_check.table({"parts": {key: found}}))
    if any(each["name"] == "learning: tokens" for each in found.get("figures", ())):
        print("\n".join(["", *targets(found["figures"])]))
        print(comparison(found["figures"], key.removeprefix("step, ")))
    if "failed" in found:
        sys.exit("gpu-step: failed")


if __name__ == "__main__":
    typer.run(main)
