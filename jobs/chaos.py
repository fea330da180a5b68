"""Kill the processes of a run with SIGKILL, one fault a run, in the middle of a step, and print what became of it.

python jobs/chaos.py [--faults "engine actor,driver"] [--world DIR] [--model DIR]
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer

STEPS, PROMPTS, GROUP = 2, 2, 3
JUDGE_SECONDS = 1.0
"""Of a reply, so that a fault finds calls under way."""
LIMIT_SECONDS = 900.0
RAY_FOLDER = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")
"""Where Ray keeps the sessions that it starts itself."""
SETTLE_SECONDS = 20.0
"""For replies to be stored, and for processes to end."""
HEAD_ATTEMPTS = 3
"""Ray gives a head 30 s to start, which a busy machine may miss."""


def actors(driver: int, kind: str) -> list[int]:
    """Processes of the run's actors of that class; Ray writes the class at the top of a worker's log.

    Only in the newest session that this driver started: process ids come again, and others move `session_latest`.
    """
    found = []
    for session in sorted(glob.glob(f"{RAY_FOLDER}/session_[0-9]*_{driver}"))[-1:]:
        for process in psutil.Process(driver).children(recursive=True):
            for log in glob.glob(f"{session}/logs/worker-*-{process.pid}.out"):
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
JUDGE_SERVER, NODE = "judge server", "node"
"""Faults of what is not below the driver: the judge's own process; every process of a Ray head of its own."""
ALL = (*FAULTS, JUDGE_SERVER, NODE)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    fault: str
    survived: str
    rollouts: int
    lost: int
    repeated: int
    steps: int
    seconds: float
    last: str


def strike(fault: str, root: Path, world: Path, model: Path) -> Outcome:
    """One run with one fault in its last step, continued if it ended."""
    name = fault.replace(" ", "-")
    run = root / name
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        # It outlives the driver and, by what it wrote, itself: so it can tell what was asked twice.
        book = root / f"{name}.answered"
        judge = stack.enter_context(JudgeServer(latency=JUDGE_SECONDS, answered=book))
        head = stack.enter_context(ray_head(root)) if fault == NODE else None
        process = start(
            [
                "sandbox",
                f"data.root={world}",
                f"model.path={model}",
                f"run.root={root}",
                f"run.name={name}",
                "judge.rule_judge.start=false",
                f"judge.model=openai/{MODEL_NAME}",
                f"judge.api_base={judge.base_url}",
                "judge.api_key_env=NO_KEY_IS_ASKED_FOR",
                # A judge that is gone is given up on in seconds rather than minutes.
                "judge.max_outage_seconds=10",
                f"train.prompts_per_step={PROMPTS}",
                f"train.steps={STEPS}",
                "train.evaluate_before_after=false",
                f"algorithm.group_size={GROUP}",
                "learner.minibatch_prompts=1",
                "ray.dashboard=false",
            ],
            head,
        )
        victims: list[int] = []
        try:
            parts = run / "tables" / "trajectories"
            if wait(lambda: any(parts.glob(f"step{STEPS:05d}/*.arrow")), process):
                if fault == JUDGE_SERVER:
                    victims = [judge.pid]
                elif head is not None:
                    victims = [child.pid for child in psutil.Process(head.pid).children(recursive=True)]
                else:
                    victims = find(fault, process)
            if fault == JUDGE_SERVER:
                kill(victims)
            else:
                with held(judge, book, run):
                    kill(victims)
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            output, errors = "", f"hung for {LIMIT_SECONDS:g} s"
        finally:
            process.kill()
        code, how = process.returncode, "goes on"
        if not victims:
            how = "no process to kill found"
        elif code != 0:
            if fault == JUDGE_SERVER:
                port = int(judge.base_url.removesuffix("/v1").rsplit(":", 1)[-1])
                judge = stack.enter_context(JudgeServer(latency=JUDGE_SECONDS, answered=book, port=port))
            head = stack.enter_context(ray_head(root)) if fault == NODE else None
            process = start(["--resume", str(run)], head)
            try:
                output, resumed_errors = process.communicate(timeout=LIMIT_SECONDS)
            finally:
                process.kill()
            how = "resumed" if process.returncode == 0 else "no"
            if process.returncode != 0:
                errors = resumed_errors
        if "Traceback" in errors:
            how += ", with a traceback"
        if how != "goes on" and how != "resumed":
            print(f"chaos: {fault}: {how}:\n{output}\n{errors}", file=sys.stderr)
        stats = httpx.get(judge.base_url.removesuffix("/v1") + "/stats", trust_env=False).json()
    directory = RunDirectory(run)
    metrics = directory.metrics()
    # What the run said when it was struck, else at its end; Ray's own messages come between its lines.
    said = [line for line in (*output.splitlines(), *errors.splitlines()) if line.startswith(("draco: ", "done in "))]
    return Outcome(
        fault=fault,
        survived=how,
        rollouts=directory.table("trajectories", columns=["rollout"]).num_rows,
        lost=sum(line["rollouts_lost"] for line in metrics),
        repeated=stats["repeated"],
        steps=len(metrics),
        seconds=time.monotonic() - began,
        last=said[-1] if said else "",
    )


@dataclass(frozen=True, kw_only=True)
class Head:
    """A Ray head that is no child of the driver's, and what a driver needs to join it."""

    pid: int
    environment: dict[str, str]


@contextlib.contextmanager
def ray_head(root: Path) -> Iterator[Head]:
    """``ray start --head`` on a free port, for as long as the block lasts."""
    # Ray's sockets lie in its folder, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        token, log = root / "token", Path(folder) / "head.log"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment.pop("RAY_ADDRESS", None)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}"),
            *("--include-dashboard=false", "--num-cpus=4", "--resources", '{"judge": 8}'),
            f"--object-store-memory={512 << 20}",
        ]
        for _ in range(HEAD_ATTEMPTS):
            process = subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)
            while "--block" not in log.read_text(encoding="utf-8") and process.poll() is None:
                time.sleep(0.2)
            if process.poll() is None:
                break
        else:
            sys.exit(f"chaos: ray start: {log.read_text(encoding='utf-8').strip().splitlines()[-1]}")
        try:
            yield Head(pid=process.pid, environment={**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"})
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(arguments: list[str], head: Head | None) -> subprocess.Popen[str]:
    """``draco train`` with these words, on that head or a Ray of its own."""
    command = [sys.executable, "-m", "draco_ray.cli", "train", *arguments]
    environment = None if head is None else head.environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def held(judge: JudgeServer, book: Path, run: Path) -> Iterator[None]:
    """Inside, the judge answers nothing and all that it has answered is stored.

    A reply on its way when its reader dies has to be asked for again; without this, chance would decide whether one is.
    """
    server = psutil.Process(judge.pid)
    server.suspend()
    try:
        replies = ReplyCache(RunDirectory(run).judge_cache)
        until(
            lambda: len(replies) >= len(set(book.read_text(encoding="ascii").split() if book.exists() else ())),
            "replies that were answered are not stored",
        )
        yield
    finally:
        server.resume()


def kill(victims: Sequence[int]) -> None:
    """SIGKILL, and wait until they are gone, and what reads the judge's replies below them, with their connections."""
    ending = set(victims)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            ending.update(actors(victim, "JudgeWorkerActor"))
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    until(lambda: not any(map(runs, ending)), "processes outlive the one that started them")


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; a zombie has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(done: Callable[[], bool], otherwise: str) -> None:
    """Wait for what normally takes a moment; says ``otherwise`` and goes on without it after `SETTLE_SECONDS`."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            print(f"chaos: after {SETTLE_SECONDS:g} s {otherwise}", file=sys.stderr)
            return
        time.sleep(0.05)


def find(fault: str, process: subprocess.Popen[str]) -> list[int]:
    """The processes to kill, as soon as there are any: one that died by itself may be on its way back.

    Returns: none if the run ended or `LIMIT_SECONDS` passed before.
    """
    found: list[int] = []

    def there() -> bool:
        found[:] = FAULTS[fault](process.pid)
        return bool(found)

    return found if wait(there, process) else []


def wait(done: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Until ``done``; False if the process ended or the time ran out before."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def main(
    faults: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(ALL)}.")] = ",".join(ALL),
    world: Annotated[Path, typer.Option(help="Data root of a sandbox world.")] = Path(".cache/sandbox"),
    model: Annotated[Path, typer.Option(help="The starter policy.")] = Path(".cache/starter"),
) -> None:
    """Run each fault once and print the table; exits with 1 if a run was lost."""
    # So that what was started is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(soft_wrap=True)
    table = Table(
        "fault", "survived", "rollouts", "rollouts lost", "judge calls repeated", "steps", "seconds", "last words"
    )
    lost = False
    with tempfile.TemporaryDirectory() as folder:
        for fault in (name.strip() for name in faults.split(",")):
            if fault not in ALL:
                sys.exit(f"chaos: unknown fault {fault!r}; expected one of {', '.join(ALL)}")
            console.print(f"chaos: {fault} ...")
            outcome = strike(fault, Path(folder), world.resolve(), model.resolve())
            lost = lost or outcome.steps < STEPS
            table.add_row(
                fault,
                outcome.survived,
                f"{outcome.rollouts}/{STEPS * PROMPTS * GROUP}",
                str(outcome.lost),
                str(outcome.repeated),
                f"{outcome.steps}/{STEPS}",
                f"{outcome.seconds:.0f}",
                outcome.last[:120],
            )
            console.print(
                f"chaos: {fault}: {outcome.survived}, {outcome.steps} of {STEPS} steps, {outcome.lost} rollouts lost, "
                f"{outcome.repeated} judge calls repeated, {outcome.seconds:.0f} s: {outcome.last}",
                markup=False,
            )
    Console(width=200).print(table)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    typer.run(main)
