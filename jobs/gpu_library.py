"""SmolLM2-135M on the tasks of examples/library, by `draco train` and by TRL's GRPO trainer on the same GPU.

python jobs/gpu_library.py [--seeds 5] [--steps 20] [--root runs/gpu_library] [--out runs/gpu_check.json] [--tiny]

Both sides begin from one policy (`draco sft` on the example's demonstrations) and get the same tools, prompts, group
size, tasks a step, adapter and learning rate; `draco evaluate` plays the same held-out tasks with what they end with.
Ours trains in the setting `outcome`, so that both have the reward that the example's own `evaluate` gives, and in the
setting `draco`, whose judge is the example's rules: a stand-in for a judge model. TRL calls the tools through its
`environment_factory` and generates with vLLM in its colocated mode. Steps an hour leave out start and first step.

After each run the job prints a table of all results so far. After ten minutes it stops; the next call continues there.
Its figures are also added to gpu_check.py's result file. Without a CUDA GPU it says so, with exit code 0. ``--tiny``
does the same on the CPU, without a time limit, with a tiny model made from the demonstrations, and without vLLM on
TRL's side. It needs `make demo-real`'s model and a Python with TRL and this package.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import gpu_check
import typer
from gpu_check import Figure

from draco_ray.lab.evaluation.intervals import ClusteredMean, clustered_mean, rate_difference, rate_interval
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.runs.directory import RunDirectory

EXAMPLE = Path("examples/library/environment.yaml")
SMOLLM = Path(".cache/models/smollm2-135m")
SIDES = ("draco", "outcome", "trl")
"""Two settings of ours, and TRL."""
GROUP, PROMPTS, RANK, LEARNING_RATE = 8, 8, 16, 2e-4
TURNS, TURN_TOKENS = 8, 96
RUNS_A_TASK = 2
SECONDS = 570
"""Time limit of a call: ten minutes of a borrowed machine, minus the time for the table."""


class OutOfTime(Exception):
    """The time of this call is over."""


def run(command: Sequence[str], deadline: float) -> int:
    """Run a command, up to the deadline of `time.monotonic`. Returns: its exit code. Raises: OutOfTime."""
    if time.monotonic() >= deadline or not gpu_check.in_time(process := subprocess.Popen(command), deadline):
        raise OutOfTime
    return process.returncode


def draco(deadline: float, *words: str) -> None:
    """Run a ``draco`` command; its failure ends the program with a message. Raises: OutOfTime."""
    if (code := run([sys.executable, "-m", "draco_ray.cli", *words], deadline)) != 0:
        sys.exit(f"gpu-library: draco {words[0]} failed with exit code {code}; run the job again to continue")


def sizes(*, tiny: bool) -> dict[str, int]:
    """Prompts of a step and rollouts of a group."""
    return {"prompts": 2, "group": 2} if tiny else {"prompts": PROMPTS, "group": GROUP}


def training_words(policy: Path, *, tiny: bool) -> list[str]:
    """Configuration overrides of our runs."""
    size = sizes(tiny=tiny)
    keys = [
        f"model.path={policy}",
        f"train.prompts_per_step={size['prompts']}",
        f"learner.minibatch_prompts={size['prompts']}",
        f"algorithm.group_size={size['group']}",
        f"environment.slots={size['prompts'] * size['group']}",
        f"environment.slots_per_worker={size['prompts'] * size['group']}",
        f"learner.lora_rank={RANK}",
        f"learner.learning_rate={LEARNING_RATE}",
        "train.evaluate_before_after=false",
        "train.staleness=0",
        "ray.dashboard=false",
    ]
    if tiny:
        return keys
    gpu = ["engine.gpus_per_engine=0.6", "engine.colocate=true", "engine.kv_cache_gib=8", "learner.gpus_per_worker=0.4"]
    return [*keys, *gpu, f"engine.max_num_seqs={size['prompts'] * size['group']}", "model.dtype=bfloat16"]


def make_policy(root: Path, deadline: float, *, tiny: bool) -> Path:
    """The policy that every run begins from."""
    policy = root / "policy"
    if not policy.is_dir():
        subprocess.run([sys.executable, "examples/library/demonstrations.py", str(root)], check=True)
        words = ["sft", str(EXAMPLE), str(root / "demonstrations.jsonl"), "--out", str(policy)]
        if tiny:
            draco(deadline, *words, "--new", "--epochs", "1")
        elif not SMOLLM.is_dir():
            sys.exit(f"gpu-library: {SMOLLM} does not exist; fetch it with `draco model fetch smollm2-135m`")
        else:
            draco(deadline, *words, "--epochs", "1", "learner.minibatch_prompts=8", f"model.path={SMOLLM}")
    return policy


def evaluate(policy: Path, out: Path, deadline: float, *, tiny: bool) -> None:
    """Play the held-out tasks, unless they were played already."""
    if not (out / "done").exists():
        few = ["data.eval_tasks=2"] if tiny else []
        where = [] if tiny else ["engine.gpus_per_engine=1"]
        words = ["evaluate", "--policy", str(policy), "--config", str(EXAMPLE), "--split", "dev", "--out", str(out)]
        draco(deadline, *words, "--runs", "1" if tiny else str(RUNS_A_TASK), *few, *where, "ray.dashboard=false")
        (out / "done").touch()


def train_ours(
    side: str, seed: int, steps: int, policy: Path, folder: Path, deadline: float, *, tiny: bool
) -> float | None:
    """Train with `draco train`. Returns: steps per hour; None if there was only one step."""
    keys = [*training_words(policy, tiny=tiny), f"train.steps={steps}", f"seed={seed}"]
    where = ["--resume-or-start", f"run.root={folder.parent}", f"run.name={folder.name}"]
    draco(deadline, "train", str(EXAMPLE), "--setting", side, *where, *keys)
    seconds = [line["seconds"] for line in RunDirectory.open(folder).metrics()[1:]]
    return 3600 / statistics.fmean(seconds) if seconds else None


def load_tools() -> ModuleType:
    """The example's tools, with a library of their own."""
    spec = importlib.util.spec_from_file_location("library_tools", EXAMPLE.parent / "tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def desk() -> type:
    """TRL's environment: the tools as methods, `reset`, and the example's own evaluation as reward."""

    class Desk:
        """The library's desk."""

        def __init__(self) -> None:
            self._tools = load_tools()
            self._task: dict[str, Any] = {}

        def reset(self, **row: Any) -> None:
            """Fill the library."""
            self._task = json.loads(row["task"])
            self._tools.reset(self._task)

        def get_reward(self) -> float:
            """1 if everything that the task expects was done, and nothing else; otherwise 0."""
            return float(all(self._tools.evaluate(self._task, self._tools.end_state()).values()))

    def method(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(self: Any, **arguments: Any) -> str:
            return getattr(self._tools, name)(**arguments)

        signature = inspect.signature(function)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        call.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
        return call

    hooks = ("reset", "end_state", "evaluate")
    for name, function in inspect.getmembers(load_tools(), inspect.isfunction):
        if name not in hooks and not name.startswith("_"):
            setattr(Desk, name, method(name, function))
    return Desk


def tasks() -> list[dict[str, Any]]:
    """Prompts of the training tasks, in the words of the example's own prompt."""
    template = (EXAMPLE.parent / "prompt.txt").read_text(encoding="utf-8")
    system, user = template.split("--- user ---\n")
    rows = [json.loads(line) for line in (EXAMPLE.parent / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    made = []
    for row in (row for row in rows if row["split"] == "train"):
        told = user.format(name=row["name"], card=row["card"], task_description=row["instruction"])
        prompt = [{"role": "system", "content": system.strip()}, {"role": "user", "content": told.strip()}]
        made.append({"prompt": prompt, "task": json.dumps(row)})
    return made


def train_trl(seed: int, steps: int, policy: Path, folder: Path, *, tiny: bool) -> float | None:
    """Train with TRL and save the merged policy. Returns: as `train_ours`."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    ended: list[float] = []

    class Clock(TrainerCallback):
        """Notes when each step ends."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.monotonic())

    tokenizer = AutoTokenizer.from_pretrained(policy)
    # The example's template writes calls as Qwen3's does.
    tokenizer.response_template = qwen3_template
    size = sizes(tiny=tiny)
    trainer = GRPOTrainer(
        model=str(policy),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=size["group"],
            gradient_accumulation_steps=size["prompts"],
            num_generations=size["group"],
            max_completion_length=TURNS * TURN_TOKENS * 2,
            max_tool_calling_iterations=TURNS,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            temperature=1.0,
            use_vllm=not tiny,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            bf16=not tiny,
            use_cpu=tiny,
            seed=seed,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(tasks()),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        environment_factory=desk(),
        callbacks=[Clock()],
    )
    trainer.train()
    trainer.model.merge_and_unload().save_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder / "policy")
    return 3600 * (len(ended) - 1) / (ended[-1] - ended[0]) if len(ended) > 1 else None


def success(evaluations: Sequence[Path]) -> ClusteredMean:
    """Held-out success over seeds, with what each scenario adds to it."""
    plan = EvaluationDirectory.open(evaluations[0])
    scenarios: dict[str, str] = {}
    seeds, trials = [], 0
    for path in evaluations:
        found: dict[str, list[bool]] = {}
        for part in EvaluationDirectory.open(path).complete_results().values():
            for result in part:
                each = result.evaluation
                found.setdefault(each.task_id, []).append(each.success)
                scenarios[each.task_id] = each.scenario or each.task_id
        trials += sum(map(len, found.values()))
        seeds.append({task: sum(passed) / len(passed) for task, passed in found.items()})
    assert plan.plan.tasks
    return clustered_mean(seeds, scenarios.__getitem__, trials=trials)


@dataclass(frozen=True)
class Result:
    """What one side's finished seeds have reached."""

    side: str
    seeds: int
    steps: int
    before: ClusteredMean
    after: ClusteredMean
    hourly: float | None
    """Steps an hour, mean over seeds; None if no run has two steps."""


def results(root: Path) -> list[Result]:
    """The `Result` of every side that has finished a seed."""
    made = []
    for side in SIDES:
        if not (done := sorted(root.glob(f"{side}-*.json"))):
            continue
        found = [json.loads(path.read_text(encoding="utf-8")) for path in done]
        hourly = [each["steps_an_hour"] for each in found if each["steps_an_hour"]]
        made.append(
            Result(
                side,
                seeds=len(done),
                steps=found[0]["steps"],
                before=success([root / "evaluated-policy"] * len(done)),
                after=success([root / f"evaluated-{path.stem}" for path in done]),
                hourly=statistics.fmean(hourly) if hourly else None,
            )
        )
    return made


def table(found: Sequence[Result]) -> str:
    """The results as a Markdown table."""
    lines = ["| side | seeds | steps | held-out before | after | gain, points | steps an hour |", f"|{'---|' * 7}"]
    for each in found:
        gain = rate_difference(each.after, each.before)
        cells = [each.side, str(each.seeds), str(each.steps)]
        cells += [
            f"{100 * rate.mean:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"
            for rate in map(rate_interval, (each.before, each.after))
        ]
        cells += [f"{100 * gain.mean:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"]
        cells += [f"{each.hourly:.0f}" if each.hourly else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(found: Sequence[Result]) -> list[Figure]:
    """The results for the result file."""
    made = []
    for each in found:
        gain = rate_difference(each.after, each.before)
        made += [
            Figure(name=f"{each.side}: seeds of {each.steps} steps", value=each.seeds, unit=""),
            Figure(name=f"{each.side}: held-out success", value=100 * rate_interval(each.after).mean, unit="%"),
            Figure(name=f"{each.side}: gain", value=100 * gain.mean, unit="points"),
        ]
        if each.hourly:
            made.append(Figure(name=f"{each.side}: steps an hour", value=each.hourly, unit=""))
    return made


def report(root: Path, out: Path, *, tiny: bool) -> None:
    """Write the results so far to the result file, and print them."""
    found = results(root)
    kept = {
        "figures": [asdict(each) for each in figures(found)],
        "machine": gpu_check.machine("cpu" if tiny else "cuda"),
    }
    gpu_check.keep(out, "library, smollm2-135m" + (", toy size" if tiny else ""), kept)
    print(f"\n{table(found)}\n", flush=True)


def measure(
    seeds: int, steps: int, sides: Sequence[str], root: Path, out: Path, deadline: float, *, tiny: bool
) -> None:
    """Train and evaluate what is missing. Raises: OutOfTime."""
    policy = make_policy(root.resolve(), deadline, tiny=tiny)
    evaluate(policy, root / "evaluated-policy", deadline, tiny=tiny)
    for seed in range(seeds):
        for side in sides:
            folder, kept = root.resolve() / f"{side}-{seed}", root / f"{side}-{seed}.json"
            if kept.exists():
                continue
            if side == "trl":
                # In a process of its own, which frees the GPU when it ends.
                options = ["--steps", str(steps), "--root", str(root), *(["--tiny"] if tiny else [])]
                if run([sys.executable, __file__, "--trl", str(seed), *options], deadline):
                    sys.exit(f"gpu-library: TRL failed with seed {seed}; see its output above")
                said = json.loads((root / f"trl-{seed}.part").read_text())
            else:
                hourly = train_ours(side, seed, steps, policy, folder, deadline, tiny=tiny)
                said = {"steps": steps, "steps_an_hour": hourly}
            trained = folder / "policy" if side == "trl" else folder
            evaluate(trained, root / f"evaluated-{side}-{seed}", deadline, tiny=tiny)
            kept.write_text(json.dumps(said))
            report(root, out, tiny=tiny)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per side.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per run.")] = 20,
    sides: Annotated[str, typer.Option(help=f"Choices: {' '.join(SIDES)}.")] = " ".join(SIDES),
    root: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("runs/gpu_library"),
    out: Annotated[Path, typer.Option(help="Result file, shared with gpu_check.py.")] = Path("runs/gpu_check.json"),
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model on the CPU, one seed of one step.")] = False,
    trl: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train every side, the first seed of all first, and print the table after each run."""
    if unknown := [side for side in sides.split() if side not in SIDES]:
        sys.exit(f"gpu-library: unknown side {unknown[0]!r}; expected one of {', '.join(SIDES)}")
    if not tiny and (reason := gpu_check.why_skipped()) is not None:
        print(f"gpu-library: skipped: {reason}")
        return
    if tiny:
        seeds, steps = 1, 1
    if trl is None and "trl" in sides.split() and importlib.util.find_spec("trl") is None:
        sys.exit("gpu-library: TRL is not installed for this Python; set it up with `make gpu-library`")
    root.mkdir(parents=True, exist_ok=True)
    if trl is not None:
        hourly = train_trl(int(trl), steps, root.resolve() / "policy", root / f"trl-{trl}", tiny=tiny)
        (root / f"trl-{trl}.part").write_text(json.dumps({"steps": steps, "steps_an_hour": hourly}))
        return
    try:
        measure(seeds, steps, sides.split(), root, out, math.inf if tiny else time.monotonic() + SECONDS, tiny=tiny)
    except OutOfTime:
        report(root, out, tiny=tiny)
        print(f"gpu-library: stopped after {SECONDS} s; the same command goes on from here")


if __name__ == "__main__":
    typer.run(main)
