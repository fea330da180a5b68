"""CPU seconds of a step by part, compared with the minimum for its work, and the cores that an idle run uses.

python jobs/bench_cpu.py [KEY=VALUE ...] [--preset sandbox] [--only step|idle] [--seconds 60]

The floor of a step with AppWorld: its cells executed again in one process that has loaded AppWorld, and its token
sequences through the same model in PyTorch on one thread, a forward pass for sampling and a forward and a backward pass
for learning. The environment's processes end with their tasks, so its part is the machine's busy time minus the other
parts: nothing else may run meanwhile. The idle run waits for a judge that does not answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer

from draco_ray.runs.directory import RunDirectory

TRAIN = (sys.executable, "-m", "draco_ray.cli", "train")
STEPS, STEP = 4, 3
"""Number of steps of the run, and the step that is printed: the first steps compile and import, and in the last one
nothing is generated ahead."""
PARTS = {
    "world_template": "environment",
    "jail.confine": "environment",
    "environments.tools.server": "environment",
    "PolicyEngineActor": "engine",
    "EngineCore": "engine",
    "TrainController": "learner",
    "RayTrainWorker": "learner",
    "RolloutWorkerActor": "rollout workers",
    "JudgeWorkerActor": "judge workers",
    "judge_server": "rule judge (a stand-in)",
    **dict.fromkeys(
        ("LimiterActor", "RepliesActor", "AdvantageComputerActor", "RunStoreActor", "CommandLog", "LearnerTrainer"),
        "other actors",
    ),
    "site-packages/ray/": "Ray",
}
"""Text in a process's command line -> its part of the run. A process without any of these counts with its parent."""
BARE_RAY = """\
import ray, sys, time

class Idle:
    pass

ray.init(address="local", num_cpus=2, log_to_driver=False)
actors = [ray.remote(num_cpus=0)(Idle).remote() for _ in range(int(sys.argv[1]))]
time.sleep(1e6)
"""
REPLAY = """\
import json, sys, time
from appworld import AppWorld, update_root

OPTIONS = {"experiment_name": "bench", "load_ground_truth": False, "raise_on_unsafe_syntax": False}
root, found = sys.argv[1], json.load(sys.stdin)
update_root(root)
with AppWorld(task_id=found[0][0], **OPTIONS):
    pass
began = time.process_time()
for task_id, cells in found:
    with AppWorld(task_id=task_id, **OPTIONS) as world:
        for cell in cells:
            world.execute(cell)
print(time.process_time() - began)
"""


def part_of(process: psutil.Process, parent: str) -> str:
    """The part of a process; that of its parent if its command line names none."""
    words = " ".join(process.cmdline())
    return next((part for word, part in PARTS.items() if word in words), parent)


def cpu_seconds(root: psutil.Process) -> dict[int, tuple[str, float]]:
    """Process id -> (part, CPU seconds), for ``root`` and its descendants."""
    found: dict[int, tuple[str, float]] = {}

    def visit(process: psutil.Process, parent: str) -> None:
        try:
            part = part_of(process, parent)
            found[process.pid] = part, sum(process.cpu_times()[:2])
            for child in process.children():
                visit(child, part)
        except psutil.Error:
            return

    visit(root, "driver")
    return found


def spent(root: psutil.Process, seconds: float) -> Iterator[dict[str, float]]:
    """Yield CPU seconds by part since the last time, every ``seconds``, without processes that have ended."""
    before: dict[int, tuple[str, float]] = {}
    while True:
        time.sleep(seconds)
        now = cpu_seconds(root)
        by_part: dict[str, float] = defaultdict(float)
        for pid, (part, used) in now.items():
            by_part[part] += used - before.get(pid, (part, 0.0))[1]
        before = now
        yield by_part


def steps(run: Path) -> int:
    """The number of finished steps of the run."""
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def machine_seconds() -> float:
    """CPU seconds used on this machine by all other processes since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system) - time.process_time()


def stop(process: psutil.Popen) -> None:
    """End a process that this one started, and wait for it."""
    process.terminate()
    process.wait(timeout=120)


def step(root: Path, config: Sequence[str]) -> None:
    """Train `STEPS` steps; print the CPU seconds of `STEP` by part and, with AppWorld, its floor."""
    run = root / "step"
    command = [*TRAIN, *config, f"train.steps={STEPS}", f"run.root={root}", "run.name=step"]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    parts: dict[str, float] = defaultdict(float)
    busy = machine_seconds()
    for slice_ in spent(process, 0.5):
        before, busy = busy, machine_seconds()
        if process.poll() is not None or steps(run) >= STEP:
            break
        if steps(run) == STEP - 1:
            for part, seconds in slice_.items():
                parts[part] += seconds
            parts["environment"] += busy - before - sum(slice_.values())
    if process.wait():
        sys.exit(f"bench_cpu: {' '.join(command)} failed with exit code {process.returncode}")
    directory = RunDirectory.open(run)
    sequences = directory.table("trajectories", STEP, ["token_ids"])["token_ids"].to_pylist()
    whole, rollouts = sum(parts.values()), len(sequences)
    print(f"\n## CPU seconds of step {STEP}, {rollouts} rollouts\n\n| part | CPU s | a rollout |\n|---|---|---|")
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"| {part} | {seconds:.1f} | {seconds / rollouts:.2f} |")
    print(f"| all | {whole:.1f} | {whole / rollouts:.2f} |", flush=True)
    if directory.setting("environment.use") != "appworld":
        return
    floor = {"AppWorld alone": appworld_alone(directory), "arithmetic alone": arithmetic(directory, sequences)}
    for part, seconds in floor.items():
        print(f"| {part} | {seconds:.1f} | {seconds / rollouts:.2f} |")
    print(f"\nstep / floor: {whole / sum(floor.values()):.1f}")


def appworld_alone(run: RunDirectory) -> float:
    """CPU seconds of the last step's cells in AppWorld, without a jail, slots or HTTP."""
    columns = ["task_id", "rollout", "turn", "action"]
    cells: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in sorted(run.table("steps", STEP, columns).to_pylist(), key=lambda row: row["turn"]):
        if row["action"]:
            cells[row["task_id"], row["rollout"]].append(row["action"])
    done = subprocess.run(
        [
            os.environ.get("DRACO_APPWORLD_PYTHON", ".venv-appworld/bin/python"),
            "-c",
            REPLAY,
            str(run.setting("data.root")),
        ],
        input=json.dumps([(task_id, of_one) for (task_id, _), of_one in cells.items()]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def arithmetic(run: RunDirectory, sequences: Sequence[Sequence[int]]) -> float:
    """CPU seconds of two forward passes and a backward pass over these token sequences, on one thread."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(run.setting("model.path"))
    began = time.process_time()
    for tokens in sequences:
        batch = torch.tensor([tokens])
        with torch.no_grad():
            model(batch)
        model(batch, labels=batch).loss.backward()
    return time.process_time() - began


def idle(root: Path, seconds: float, config: Sequence[str]) -> None:
    """Print the cores of a run that waits for its judge, of Ray, and of Ray with as many idle actors."""
    questions = root / "questions"
    questions.mkdir()
    command = [*TRAIN, *config, f"judge.model=files:{questions}", "judge.rule_judge.start=false", f"run.root={root}"]
    run = psutil.Popen([*command, "run.name=idle", "train.prompts_per_step=1"], stdout=subprocess.DEVNULL)
    while not list(questions.glob("*.prompt.txt")):
        if run.poll() is not None:
            sys.exit(f"bench_cpu: {' '.join(command)} ended with exit code {run.returncode} before it asked its judge")
        time.sleep(1)
    actors = sum(" ".join(each.cmdline()).startswith("ray::") for each in run.children(recursive=True))
    of_run = while_idle(run, seconds)
    alone, with_actors = (while_idle(bare_ray(number), seconds) for number in (0, actors))
    print(f"\n## Cores of an idle run, over {seconds:.0f} s\n")
    print(f"| part | Ray alone | Ray with {actors} idle actors | run |\n|---|---|---|---|")
    columns = (alone, with_actors, of_run)
    for part in sorted(set().union(*columns)):
        print(f"| {part} | {' | '.join(f'{column.get(part, 0):.3f}' for column in columns)} |")
    print(f"| all | {' | '.join(f'{sum(column.values()):.3f}' for column in columns)} |")


def bare_ray(actors: int) -> psutil.Popen:
    """Start Ray with this many idle actors, each a process, as in a run."""
    command = [sys.executable, "-c", BARE_RAY, str(actors)]
    return psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def while_idle(process: psutil.Popen, seconds: float) -> dict[str, float]:
    """Mean number of busy cores by part over ``seconds``, measured once the rollouts have ended; stops the process."""
    slices = spent(process, seconds)
    for _ in range(3):
        next(slices)
    found = {part: used / seconds for part, used in next(slices).items()}
    stop(process)
    return found


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Configuration keys.")] = None,
    preset: Annotated[str, typer.Option(help="A preset or a YAML file.")] = "sandbox",
    only: Annotated[str | None, typer.Option(help="step or idle; both by default.")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="How long idle processes are watched.")] = 60.0,
) -> None:
    """Run the benchmark: about ten minutes."""
    config = [preset, "train.evaluate_before_after=false", *(overrides or ())]
    with tempfile.TemporaryDirectory() as folder:
        if only in (None, "step"):
            step(Path(folder), config)
        if only in (None, "idle"):
            idle(Path(folder), seconds, config)


if __name__ == "__main__":
    typer.run(main)
