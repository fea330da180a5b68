"""Kill the processes of a run with SIGKILL, one fault a run, in the middle of a step, and print what became of it.

python jobs/chaos.py [--faults "engine driver"] [--world DIR] [--model DIR]
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from draco_ray.offline.judge_server import MODEL_NAME, JudgeServer
from draco_ray.runs.directory import RunDirectory

STEPS, PROMPTS, GROUP = 2, 2, 3
JUDGE_SECONDS = 1.0
"""Of a reply, so that a fault finds calls under way."""
LIMIT_SECONDS = 900.0


def actors(driver: int, kind: str) -> list[int]:
    """Processes of the run's actors of that class; Ray writes the class at the top of a worker's log."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        for log in glob.glob(f"/tmp/ray/session_*/logs/worker-*-{process.pid}.out"):
            head = Path(log).read_text(encoding="utf-8", errors="replace")[:400]
            if f":actor_name:{kind}\n" in head:
                found.append(process.pid)
                break
    return found


def processes(driver: int, words: str) -> list[int]:
    """Processes of the run whose command line contains ``words``, the innermost last."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if words in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


FAULTS: dict[str, Callable[[int], list[int]]] = {
    "rollout worker": lambda driver: actors(driver, "RolloutWorkerActor")[:1],
    "AppWorld child": lambda driver: processes(driver, "world_template")[-1:],
    "judge worker": lambda driver: actors(driver, "JudgeWorkerActor")[:1],
    "union and judge": lambda driver: actors(driver, "JudgeWorkerActor"),
    "advantage actor": lambda driver: actors(driver, "AdvantageComputerActor"),
    "run store": lambda driver: actors(driver, "RunStoreActor"),
    "engine actor": lambda driver: actors(driver, "PolicyEngineActor")[:1],
    "engine core": lambda driver: processes(driver, "VLLM::EngineCore")[:1],
    "learner worker": lambda driver: processes(driver, "ray::RayTrainWorker")[:1],
    "driver": lambda driver: [driver],
}
"""Fault -> the processes to kill, given the driver's."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    fault: str
    survived: str
    lost: int
    repeated: int
    steps: int
    seconds: float
    last: str


def strike(fault: str, root: Path, world: Path, model: Path) -> Outcome:
    """One run with one fault in its last step."""
    name = fault.replace(" ", "-")
    run = root / name
    began = time.monotonic()
    # Outlives the driver, so that it can tell what was asked twice.
    with JudgeServer(latency=JUDGE_SECONDS) as judge:
        arguments = [
            "sandbox",
            f"data.root={world}",
            f"model.path={model}",
            f"run.root={root}",
            f"run.name={name}",
            "judge.rule_judge.start=false",
            f"judge.model=openai/{MODEL_NAME}",
            f"judge.api_base={judge.base_url}",
            "judge.api_key_env=NO_KEY_IS_ASKED_FOR",
            f"train.prompts_per_step={PROMPTS}",
            f"train.steps={STEPS}",
            "train.evaluate_before_after=false",
            f"algorithm.group_size={GROUP}",
            "learner.minibatch_prompts=1",
            "ray.dashboard=false",
        ]
        process = start(arguments)
        try:
            parts = run / "tables" / "trajectories"
            ready = wait(lambda: any(parts.glob(f"step{STEPS:05d}/*.parquet")), process)
            victims = FAULTS[fault](process.pid) if ready else []
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            output, errors = "", f"hung for {LIMIT_SECONDS:g} s"
        finally:
            process.kill()
        code, how = process.returncode, "goes on"
        if not victims:
            how = "no process to kill found"
        elif code != 0:
            process = start(["--resume", str(run)])
            try:
                output, resumed_errors = process.communicate(timeout=LIMIT_SECONDS)
            finally:
                process.kill()
            errors += resumed_errors
            how = "resumed" if process.returncode == 0 else "no"
        if "Traceback" in errors:
            how += ", with a traceback"
        stats = httpx.get(judge.base_url.removesuffix("/v1") + "/stats", trust_env=False).json()
    metrics = RunDirectory(run).metrics()
    lines = [line for line in (errors if code else output).strip().splitlines() if line.strip()]
    return Outcome(
        fault=fault,
        survived=how,
        lost=sum(line["rollouts_lost"] for line in metrics),
        repeated=stats["repeated"],
        steps=len(metrics),
        seconds=time.monotonic() - began,
        last=lines[-1] if lines else "",
    )


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """``draco train`` with these words."""
    command = [sys.executable, "-m", "draco_ray.cli", "train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait(done: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Until ``done``; False if the process ended or the time ran out before."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def main(
    faults: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(FAULTS)}.")] = ",".join(FAULTS),
    world: Annotated[Path, typer.Option(help="Data root of a sandbox world.")] = Path(".cache/sandbox"),
    model: Annotated[Path, typer.Option(help="The starter policy.")] = Path(".cache/starter"),
) -> None:
    """Run each fault once and print the table; exits with 1 if a run was lost."""
    console = Console(soft_wrap=True)
    table = Table("fault", "survived", "rollouts lost", "judge calls repeated", "steps", "seconds", "last words")
    lost = False
    with tempfile.TemporaryDirectory() as folder:
        for fault in (name.strip() for name in faults.split(",")):
            if fault not in FAULTS:
                sys.exit(f"chaos: unknown fault {fault!r}; expected one of {', '.join(FAULTS)}")
            console.print(f"chaos: {fault} ...")
            outcome = strike(fault, Path(folder), world.resolve(), model.resolve())
            lost = lost or outcome.steps < STEPS
            table.add_row(
                fault,
                outcome.survived,
                str(outcome.lost),
                str(outcome.repeated),
                f"{outcome.steps}/{STEPS}",
                f"{outcome.seconds:.0f}",
                outcome.last[:120],
            )
            console.print(f"chaos: {fault}: {outcome.survived}, {outcome.seconds:.0f} s")
    Console(width=200).print(table)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    typer.run(main)
