"""Cause a fault in the middle of a run's step, one fault per run, and print what becomes of the run.

Processes are killed, stopped for a while, or told to end; memory and disks are filled; data is taken away.

python jobs/chaos.py [--faults "engine actor,driver"] [--world DIR] [--model DIR]
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from rich.table import Table

from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer
from draco_ray.terminal import PlainConsole

STEPS, PROMPTS, GROUP = 2, 2, 3
JUDGE_SECONDS = 1.0
"""Seconds per reply, so that a fault finds calls in flight."""
LIMIT_SECONDS = 900.0
RAY_FOLDER = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray")
"""Where Ray keeps the sessions that it starts itself."""
SETTLE_SECONDS = 60.0
"""Time for replies to be stored and processes to end."""
SAID = ("draco: ", "done in ", "stopped; ")
"""Beginnings of a run's last line."""
CATCH_SECONDS = 3.0
"""Time for a reply in flight to be stored."""
STOP_SECONDS = 90.0
BETWEEN_SIGNALS_SECONDS = 1.0
SMALL_STORE_MIB, SMALL_FOLDER_MIB = 80, 512
FILLER = f"""
import numpy, ray, sys
ray.init(log_to_driver=False)
kept = [ray.put(numpy.zeros(8 << 20, dtype=numpy.uint8)) for _ in range({2 * SMALL_STORE_MIB} // 8)]
print("full", flush=True)
sys.stdin.read()
"""
"""Keeps twice what the object store holds; Ray writes the rest to disk."""
RAY = ("-m", "ray.scripts.scripts")
"""Arguments of Python that run `ray`."""
HEAD_ATTEMPTS = 3
"""Ray gives a head 30 s to start, which a busy machine may miss."""


ADAPTERS, CACHE, CLOCK, BALLAST = "adapters", "replies", "clock", "ballast"
"""Names in the folder of the runs."""
SMALL_CACHE_MIB = 64
SPARE_GIB, MEMORY_LIMIT = 8, "RAY_memory_usage_threshold"
SMALL_RAY_STORE_MIB = 150
LOUD = """
from draco_ray.environments.appworld.environment import AppWorldEnvironment


class LoudWorld:
    def __init__(self, world):
        self._world = world

    def __getattr__(self, name):
        return getattr(self._world, name)

    async def act(self, action):
        return await self._world.act("print('x' * 50_000_000)\\n" + action)


class LoudEnvironment(AppWorldEnvironment):
    async def open(self, task_id):
        return LoudWorld(await super().open(task_id))
"""
OWN_CLOCK = """
import os, time
_back, _time = os.path.join(os.path.dirname(__file__), "back"), time.time
time.time = lambda: _time() - 3600 * os.path.exists(_back)
"""
"""Stands in for the machine's clock, which a job cannot change: Python's `time.time`, without Ray's own C++."""


def actors(driver: int, kind: str) -> list[int]:
    """Processes of the run's actors of that class; Ray writes the class at the top of a worker's log.

    Searches only this driver's newest session: process ids are reused, and other sessions move `session_latest`.
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
    """Processes of the run whose command line contains ``words``, parents before their children."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if words in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class Head:
    """A Ray head that is not a child of the driver, and what a driver needs to join it."""

    pid: int
    folder: Path
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Processes and data that a fault may affect."""

    driver: int
    judge: int
    run: Path
    world: Path
    head: Head | None
    stack: contextlib.ExitStack
    """Closed when the run ends."""


def kill(scene: Scene, victims: Sequence[int]) -> None:
    """SIGKILL, and wait until they are gone."""
    send((signal.SIGKILL,), victims)


def kill_and_hold(scene: Scene, victims: Sequence[int]) -> None:
    """SIGKILL, then wait `STOP_SECONDS`: if the judge is held meanwhile, the run notices the fault before it ends."""
    kill(scene, victims)
    time.sleep(STOP_SECONDS)


def terminate(scene: Scene, victims: Sequence[int]) -> None:
    """SIGTERM, as `ray job stop` and the end of a container, and wait until they are gone."""
    send((signal.SIGTERM,), victims)


def interrupt_twice(scene: Scene, victims: Sequence[int]) -> None:
    """Ctrl-C, and a second time, as by an impatient user."""
    send((signal.SIGINT, signal.SIGINT), victims)


def stop(scene: Scene, victims: Sequence[int]) -> None:
    """SIGSTOP until the run has ended."""
    for victim in victims:
        os.kill(victim, signal.SIGSTOP)


def stop_and_hold(scene: Scene, victims: Sequence[int]) -> None:
    """SIGSTOP until the run has ended; the judge is held meanwhile, so the run notices the fault before it ends."""
    stop(scene, victims)
    time.sleep(STOP_SECONDS)


def stop_for_a_while(scene: Scene, victims: Sequence[int]) -> None:
    """SIGSTOP for `STOP_SECONDS`, unless the process is ended meanwhile."""
    stop(scene, victims)
    time.sleep(STOP_SECONDS)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)


def fill_object_store(scene: Scene, victims: Sequence[int]) -> None:
    """Store more objects than the object store holds, until the run has ended."""
    assert scene.head is not None
    filler = scene.stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", FILLER],
            env=scene.head.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    )
    scene.stack.callback(filler.kill)
    assert filler.stdout is not None
    if filler.stdout.readline() != "full\n":
        sys.exit("chaos: the object store could not be filled")


def fill_folder(scene: Scene, victims: Sequence[int]) -> None:
    """Write until nothing more fits into Ray's folder."""
    assert scene.head is not None
    fill(scene.head.folder)


def take_data(scene: Scene, victims: Sequence[int]) -> None:
    """Move the world away, until the run has ended."""
    scene.world.rename(gone(scene.world))


def make_read_only(scene: Scene, victims: Sequence[int]) -> None:
    """Make the run's folder read-only until the run has ended, as the kernel does with a disk that has errors.

    A stand-in: the disk itself stays writable, so a file that is open already can still be written.
    """
    for options in (["--bind", str(scene.run)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, str(scene.run)], check=True)
    scene.stack.callback(subprocess.run, ["umount", "--lazy", str(scene.run)], check=False)


def little_memory(root: Path, stack: contextlib.ExitStack) -> Sequence[str]:
    """Let Ray kill workers when `SPARE_GIB` more memory than now is in use, not when the machine is full."""
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + (SPARE_GIB << 30)) / memory.total
    os.environ[MEMORY_LIMIT] = str(threshold)
    stack.callback(os.environ.pop, MEMORY_LIMIT)
    return ()


def fill_memory(scene: Scene, victims: Sequence[int]) -> None:
    """Take memory until Ray has killed one of the run's workers, then give it back."""
    # Idle workers of Ray end by themselves.
    working = set(processes(scene.driver, "ray::")) - set(processes(scene.driver, "ray::IDLE"))
    kept = list[bytes]()
    while all(map(psutil.pid_exists, working)):
        if len(kept) == SPARE_GIB:
            raise RuntimeError(f"Ray has killed no worker with {SPARE_GIB} GiB more in use")
        kept.append(b"x" * (1 << 30))
        time.sleep(0.5)


def gone(path: Path) -> Path:
    """The path to which `take_data` moves ``path``."""
    return path.with_name(f"{path.name}.gone")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: its victims and its action."""

    find: Callable[[Scene], list[int]]
    strike: Callable[[Scene, Sequence[int]], None] = kill
    held: bool = True
    """Whether the judge is held meanwhile: see `held`."""
    settings: tuple[str, ...] = ()
    """Configuration overrides of the run."""
    head: Callable[[Path], contextlib.AbstractContextManager[Head]] | None = None
    """Starts the Ray that the run joins; None: it starts one itself."""
    own_world: bool = False
    at: Callable[[Path, int], bool] | None = None
    """(run directory, driver) -> whether to strike now; None: once a rollout of the last step is on disk."""
    prepare: Callable[[Path, contextlib.ExitStack], Sequence[str]] | None = None
    """Prepares a folder for the fault, until the run has ended; returns more overrides."""
    between: Callable[[Path, Path], None] | None = None
    """Changes run directory or world before the run is continued."""
    refused: bool = False
    """Whether the run must not be continued."""


def nothing(scene: Scene, victims: Sequence[int]) -> None:
    """The run's own settings are the fault."""


def in_the_last_step(run: Path, driver: int) -> bool:
    """Whether a rollout of the last step is on disk."""
    return any((run / "tables" / "trajectories").glob(f"step{STEPS:05d}/*.arrow"))


def in_the_first_start(run: Path, driver: int) -> bool:
    """Whether the first engine's process has started."""
    return bool(processes(driver, "VLLM::EngineCore"))


def in_an_evaluation(run: Path, driver: int) -> bool:
    """Whether a held-out rollout of the untrained policy is on disk, so that no step has begun."""
    return any((run / "tables" / "evaluation_trajectories").glob("step00000/*"))


def in_a_sync(run: Path, driver: int) -> bool:
    """Whether the first trained adapter is being loaded into an engine."""
    return any((run.parent / ADAPTERS).glob("*/v1-*")) or any((run.parent / ADAPTERS).glob("*/*/v1-*"))


def own_adapters(root: Path, stack: contextlib.ExitStack) -> Sequence[str]:
    """A folder of adapters that no other run uses."""
    return (f"engine.adapter_directory={root / ADAPTERS}",)


def small_cache(root: Path, stack: contextlib.ExitStack) -> Sequence[str]:
    """Judge replies on a file system of their own."""
    (root / CACHE).mkdir(exist_ok=True)
    stack.enter_context(mounted(root / CACHE, SMALL_CACHE_MIB))
    return (f"judge.cache={root / CACHE}",)


def fill_cache(scene: Scene, victims: Sequence[int]) -> None:
    """Write until no byte more fits beside the judge's replies."""
    fill(scene.world.parent / CACHE)


def empty_cache(run: Path, world: Path) -> None:
    """Free disk space, as a user would before continuing the run."""
    (run.parent / CACHE / BALLAST).unlink()


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    with contextlib.suppress(OSError), (folder / BALLAST).open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1):
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(bytes(size))


def loud_world(root: Path, stack: contextlib.ExitStack) -> Sequence[str]:
    """Every action prints 50 MB first."""
    (root / "loud.py").write_text(LOUD, encoding="utf-8")
    return (f"environment.use={root / 'loud.py'}:LoudEnvironment",)


def own_clock(root: Path, stack: contextlib.ExitStack) -> Sequence[str]:
    """Every Python process of the run reads its time from a clock that `set_clock_back` changes."""
    (root / CLOCK).mkdir(exist_ok=True)
    (root / CLOCK / "sitecustomize.py").write_text(OWN_CLOCK, encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / CLOCK), *([before] if before else [])])

    def restore() -> None:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})

    stack.callback(restore)
    return ()


def set_clock_back(scene: Scene, victims: Sequence[int]) -> None:
    """Set the clock back by an hour, for the rest of the run."""
    (scene.world.parent / CLOCK / "back").touch()


def set_clock_back_and_kill(scene: Scene, victims: Sequence[int]) -> None:
    """Set the clock back and kill, so that the run continues at an earlier time than it began."""
    set_clock_back(scene, victims)
    kill(scene, victims)


def edit_tasks(run: Path, world: Path) -> None:
    """Change the instruction of every task."""
    for specs in world.glob("data/tasks/*/specs.json"):
        told = json.loads(specs.read_text(encoding="utf-8"))
        specs.write_text(json.dumps(told | {"instruction": f"{told['instruction']} Now."}), encoding="utf-8")


def upgrade_packages(run: Path, world: Path) -> None:
    """Change the package versions in the manifest, as if older packages had made the run."""
    manifest = run / "manifest.json"
    if manifest.exists():
        said = json.loads(manifest.read_text(encoding="utf-8"))
        said["machine"] |= dict.fromkeys(said["machine"].keys() - {"machine", "instructions"}, "0.0.1")
        manifest.write_text(json.dumps(said), encoding="utf-8")


def another_schema(run: Path, world: Path) -> None:
    """Give the run directory another schema version."""
    file = run / "run.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(said | {"schema_version": said["schema_version"] + 1}), encoding="utf-8")


def everything(scene: Scene) -> list[int]:
    """Every process of the head."""
    assert scene.head is not None
    return [child.pid for child in psutil.Process(scene.head.pid).children(recursive=True)]


def of_head(scene: Scene) -> list[int]:
    """The head's first process."""
    assert scene.head is not None
    return [scene.head.pid]


def of_kind(kind: str, most: int | None = None) -> Callable[[Scene], list[int]]:
    """Finds actors of that class."""
    return lambda scene: actors(scene.driver, kind)[:most]


def of_words(words: str) -> Callable[[Scene], list[int]]:
    """Finds the outermost process with those words: what it starts has them too, until it runs its own program."""
    return lambda scene: processes(scene.driver, words)[:1]


def a_world(scene: Scene) -> list[int]:
    """Finds a world, a child of AppWorld's template with the same words; the template where there is none."""
    return processes(scene.driver, "world_template")[-1:]


def the_driver(scene: Scene) -> list[int]:
    """Finds the driver."""
    return [scene.driver]


def the_judge(scene: Scene) -> list[int]:
    """Finds the judge's own process, which is not below the driver."""
    return [scene.judge]


@contextlib.contextmanager
def ray_head(root: Path, store_mib: int = 512, folder_mib: int | None = None) -> Iterator[Head]:
    """``ray start --head`` on a free port, for as long as the block lasts.

    Args:
        root: folder for the file with its token.
        store_mib: size of its object store.
        folder_mib: size of a file system for its folder, which requires the right to mount; None: a folder in /tmp.
    """
    # Ray's sockets lie in its folder, and the path of a socket must be short.
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        contextlib.nullcontext() if folder_mib is None else mounted(Path(folder), folder_mib),
    ):
        token, log = root / "token", Path(folder) / "head.log"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment.pop("RAY_ADDRESS", None)
        command = [
            *(sys.executable, *RAY, "start", "--head", "--block", "--disable-usage-stats"),
            # No log is read elsewhere, and no node is added.
            *("--include-log-monitor=false", "--no-monitor"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}"),
            *("--include-dashboard=false", "--num-cpus=4", "--resources", '{"judge": 8}'),
            f"--object-store-memory={store_mib << 20}",
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
            yield Head(
                pid=process.pid, folder=Path(folder), environment={**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
            )
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def mounted(folder: Path, mib: int) -> Iterator[None]:
    """A file system in memory of that size at ``folder``."""
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "chaos", str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"chaos: a small file system cannot be mounted ({error}); run as root, or leave out this fault")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


JUDGE_SERVER, NODE = "judge server", "node"
EVALUATED = ("train.evaluate_before_after=true", "data.eval_tasks=8")
FAULTS: dict[str, Fault] = {
    "rollout worker": Fault(find=of_kind("RolloutWorkerActor", 1)),
    "AppWorld child": Fault(find=a_world),
    "judge worker": Fault(find=of_kind("JudgeWorkerActor", 1)),
    "union and judge": Fault(find=of_kind("JudgeWorkerActor")),
    "advantage actor": Fault(find=of_kind("AdvantageComputerActor")),
    "run store": Fault(find=of_kind("RunStoreActor")),
    "engine actor": Fault(find=of_kind("PolicyEngineActor", 1)),
    "engine core": Fault(find=of_words("VLLM::EngineCore")),
    "one of two engines": Fault(
        find=of_kind("PolicyEngineActor", 1),
        settings=("engine.engines=2", "engine.min_engines=1"),
    ),
    "learner worker": Fault(find=of_words("ray::RayTrainWorker")),
    "driver": Fault(find=the_driver),
    JUDGE_SERVER: Fault(find=the_judge, held=False),
    NODE: Fault(find=everything, head=ray_head),
    "judge hangs": Fault(find=the_judge, strike=stop, held=False, settings=("judge.request_timeout_seconds=10",)),
    "engine core stopped": Fault(
        find=of_words("VLLM::EngineCore"),
        strike=stop_for_a_while,
        held=False,
        settings=("engine.stall_seconds=30",),
    ),
    "engine actor stopped": Fault(find=of_kind("PolicyEngineActor", 1), strike=stop_for_a_while, held=False),
    "AppWorld child stopped": Fault(find=a_world, strike=stop_for_a_while, held=False),
    "rollout worker stopped": Fault(find=of_kind("RolloutWorkerActor", 1), strike=stop_for_a_while, held=False),
    "learner worker stopped": Fault(
        find=of_words("ray::RayTrainWorker"),
        strike=stop_for_a_while,
        held=False,
        settings=("learner.stall_seconds=30",),
    ),
    "SIGTERM": Fault(find=the_driver, strike=terminate),
    "two Ctrl-C": Fault(find=the_driver, strike=interrupt_twice),
    "GCS": Fault(find=of_words("gcs_server"), strike=kill_and_hold),
    "GCS stopped": Fault(find=of_words("gcs_server"), strike=stop_and_hold),
    "object store full": Fault(
        find=of_head, strike=fill_object_store, head=partial(ray_head, store_mib=SMALL_STORE_MIB)
    ),
    "Ray's folder full": Fault(find=of_head, strike=fill_folder, head=partial(ray_head, folder_mib=SMALL_FOLDER_MIB)),
    "data gone": Fault(find=the_driver, strike=take_data, own_world=True),
    "run store stopped": Fault(find=of_kind("RunStoreActor"), strike=stop_for_a_while, held=False),
    "driver at first start": Fault(find=the_driver, held=False, at=in_the_first_start),
    "engine core at first start": Fault(find=of_words("VLLM::EngineCore"), held=False, at=in_the_first_start),
    "driver in evaluation": Fault(find=the_driver, held=False, at=in_an_evaluation, settings=EVALUATED),
    "engine core in evaluation": Fault(
        find=of_words("VLLM::EngineCore"), held=False, at=in_an_evaluation, settings=EVALUATED
    ),
    "driver in sync": Fault(find=the_driver, held=False, at=in_a_sync, prepare=own_adapters),
    "engine core in sync": Fault(find=of_words("VLLM::EngineCore"), held=False, at=in_a_sync, prepare=own_adapters),
    "cache's disk full": Fault(
        find=the_driver, strike=fill_cache, held=False, own_world=True, prepare=small_cache, between=empty_cache
    ),
    "object store of 150 MB": Fault(
        find=the_driver, strike=nothing, held=False, settings=(f"ray.object_store_mib={SMALL_RAY_STORE_MIB}",)
    ),
    "outputs of 50 MB": Fault(find=the_driver, strike=nothing, held=False, prepare=loud_world),
    "clock set back": Fault(find=the_driver, strike=set_clock_back, held=False, own_world=True, prepare=own_clock),
    "driver with clock set back": Fault(
        find=the_driver,
        strike=set_clock_back_and_kill,
        own_world=True,
        prepare=own_clock,
    ),
    "run folder read-only": Fault(find=the_driver, strike=make_read_only, held=False),
    "memory full": Fault(find=the_driver, strike=fill_memory, held=False, prepare=little_memory),
    "tasks edited": Fault(find=the_driver, own_world=True, between=edit_tasks),
    "packages upgraded": Fault(find=the_driver, between=upgrade_packages),
    "another schema": Fault(find=the_driver, between=another_schema, refused=True),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a run."""

    fault: str
    survived: str
    rollouts: int
    lost: int
    repeated: int
    steps: int
    seconds: float
    last: str


def strike(name: str, root: Path, world: Path, model: Path) -> Outcome:
    """One run with one fault in its last step, continued if it ended."""
    fault, called = FAULTS[name], "".join(each if each.isalnum() else "-" for each in name)
    run = root / called
    began = time.monotonic()
    if fault.own_world:
        world = Path(shutil.copytree(world, root / f"{called}.world"))
    with contextlib.ExitStack() as stack:
        # The judge outlives the driver, and its successor reads this file, so that repeated calls are counted.
        book = root / f"{called}.answered"
        judge = stack.enter_context(JudgeServer(latency=JUDGE_SECONDS, answered=book))
        head = None if fault.head is None else stack.enter_context(fault.head(root))
        struck = stack.enter_context(contextlib.ExitStack())
        prepared = () if fault.prepare is None else fault.prepare(root, stack)
        process = start(
            [
                "sandbox",
                f"data.root={world}",
                f"model.path={model}",
                f"run.root={root}",
                f"run.name={called}",
                "judge.rule_judge.start=false",
                f"judge.model=openai/{MODEL_NAME}",
                f"judge.api_base={judge.base_url}",
                "judge.api_key_env=NO_KEY_IS_ASKED_FOR",
                # Give up on a dead judge within seconds.
                "judge.max_outage_seconds=10",
                f"train.prompts_per_step={PROMPTS}",
                f"train.steps={STEPS}",
                "train.evaluate_before_after=false",
                f"algorithm.group_size={GROUP}",
                "learner.minibatch_prompts=1",
                "ray.dashboard=false",
                *fault.settings,
                *prepared,
            ],
            head,
        )
        victims: list[int] = []
        scene = Scene(driver=process.pid, judge=judge.pid, run=run, world=world, head=head, stack=struck)
        try:
            moment = fault.at or in_the_last_step
            if wait(lambda: moment(run, process.pid), process):
                victims = find(name, process, scene)
            if victims:
                with held(judge, book, run) if fault.held else contextlib.nullcontext():
                    fault.strike(scene, victims)
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            output, errors = "", f"hung for {LIMIT_SECONDS:g} s"
        finally:
            process.kill()
        struck.close()
        if gone(world).exists():
            gone(world).rename(world)
        if runs(judge.pid):
            psutil.Process(judge.pid).resume()
        else:
            port = int(judge.base_url.removesuffix("/v1").rsplit(":", 1)[-1])
            judge = stack.enter_context(JudgeServer(latency=JUDGE_SECONDS, answered=book, port=port))
        code, how = process.returncode, "goes on"
        if not victims:
            how = "found no process to kill"
        elif code != 0:
            if fault.between is not None:
                fault.between(run, world)
            head = None if head is None else stack.enter_context(ray_head(root))
            process = start(["--resume", str(run)], head)
            try:
                output_resumed, resumed_errors = process.communicate(timeout=LIMIT_SECONDS)
            finally:
                process.kill()
            how = "resumed" if process.returncode == 0 else "refused" if fault.refused else "no"
            if process.returncode != 0:
                output, errors = output + output_resumed, errors + resumed_errors
        if "Traceback" in errors:
            how += ", with a traceback"
        if how not in ("goes on", "resumed", "refused"):
            print(f"chaos: {name}: {how}:\n{output}\n{errors}", file=sys.stderr)
        stats = httpx.get(judge.base_url.removesuffix("/v1") + "/stats", trust_env=False).json()
    directory = RunDirectory(run)
    metrics = directory.metrics()
    # What the run said when it was struck, else at its end; Ray's own messages come between its lines.
    said = [line for line in (*output.splitlines(), *errors.splitlines()) if line.startswith(SAID)]
    return Outcome(
        fault=name,
        survived=how,
        rollouts=directory.table("trajectories", columns=["rollout"]).num_rows,
        lost=sum(line["rollouts_lost"] for line in metrics),
        repeated=stats["repeated"],
        steps=len(metrics),
        seconds=time.monotonic() - began,
        last=said[-1] if said else "",
    )


def start(arguments: list[str], head: Head | None) -> subprocess.Popen[str]:
    """Start ``draco train`` with these arguments, on ``head`` or on a Ray of its own."""
    command = [sys.executable, "-m", "draco_ray.cli", "train", *arguments]
    environment = None if head is None else head.environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def held(judge: JudgeServer, book: Path, run: Path) -> Iterator[None]:
    """During the block the judge answers nothing, and all its earlier replies are stored.

    A reply in flight when its reader dies must be requested again; without this block that would be a matter of chance.
    """
    server, replies = psutil.Process(judge.pid), ReplyCache(RunDirectory(run).judge_cache)

    def stored() -> bool:
        return len(replies) >= len(set(book.read_text(encoding="ascii").split() if book.exists() else ()))

    def caught() -> bool:
        server.suspend()
        deadline = time.monotonic() + CATCH_SECONDS
        while not stored():
            if time.monotonic() > deadline:
                # The judge may have recorded a reply but not sent it yet: let it send the reply.
                server.resume()
                return False
            time.sleep(0.05)
        return True

    try:
        until(caught, "replies that were answered are not stored")
        server.suspend()
        yield
    finally:
        server.resume()


def send(signals: Sequence[signal.Signals], victims: Sequence[int]) -> None:
    """Send the signals; wait until the victims and the judge workers below them are gone, with their connections."""
    ending = set(victims)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            ending.update(actors(victim, "JudgeWorkerActor"))
    for index, number in enumerate(signals):
        time.sleep(BETWEEN_SIGNALS_SECONDS if index else 0.0)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)
    until(lambda: not any(map(runs, ending)), "processes are still running after the process that started them ended")


def runs(pid: int) -> bool:
    """Whether a process is there and holds its connections.

    A zombie has ended; but a killed process whose first thread is a zombie may have others that still hold its files.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def until(done: Callable[[], bool], otherwise: str) -> None:
    """Wait for what normally takes a moment; after `SETTLE_SECONDS` print ``otherwise`` and continue."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            print(f"chaos: after {SETTLE_SECONDS:g} s {otherwise}", file=sys.stderr)
            return
        time.sleep(0.05)


def find(fault: str, process: subprocess.Popen[str], scene: Scene | None = None) -> list[int]:
    """Wait for the processes to strike: one that died by itself may be restarting.

    ``scene``: None if only the driver is known. Returns: empty if the run ended or `LIMIT_SECONDS` passed before.
    """
    found: list[int] = []
    known = scene or Scene(
        driver=process.pid, judge=0, run=Path(), world=Path(), head=None, stack=contextlib.ExitStack()
    )

    def there() -> bool:
        found[:] = FAULTS[fault].find(known)
        return bool(found)

    return found if wait(there, process) else []


def wait(done: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Wait until ``done``; False if the process ended or the time ran out before."""
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
    # Exit as usual, so that everything that was started is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = PlainConsole()
    table = Table(
        "fault", "survived", "rollouts", "rollouts lost", "judge calls repeated", "steps", "seconds", "last words"
    )
    lost = False
    with tempfile.TemporaryDirectory() as folder:
        for fault in (name.strip() for name in faults.split(",")):
            if fault not in FAULTS:
                sys.exit(f"chaos: unknown fault {fault!r}; expected one of {', '.join(FAULTS)}")
            console.print(f"chaos: {fault} ...")
            outcome = strike(fault, Path(folder), world.resolve(), model.resolve())
            lost = lost or (outcome.survived != "refused" if FAULTS[fault].refused else outcome.steps < STEPS)
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
            )
    PlainConsole(width=200, soft_wrap=False).print(table)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    typer.run(main)
