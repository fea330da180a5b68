"""What a killed process leaves among the temporary folders, by what it was doing: the next start removes it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.support.worlds import Tasks

pytestmark = pytest.mark.slow

WORLD = """\
import asyncio, json, sys
from pathlib import Path
from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import make_environment

async def main(config, root, task):
    config = EnvironmentConfig(**config)
    world = await make_environment(config, DataConfig(root=Path(root)), ground_truth=False, name="killed").open(task)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*json.loads(sys.argv[1])))
"""
BRIDGE = """\
import asyncio, json, sys
from draco_ray.config.schema import EnvironmentConfig
from draco_ray.verifiers.options import VerifiersOptions
from draco_ray.verifiers.process import BridgeProcess

async def main(options):
    config = EnvironmentConfig(start_timeout_seconds=600)
    bridge = await BridgeProcess.start(VerifiersOptions(**options), config, ground_truth=False)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(json.loads(sys.argv[1])))
"""
AGENT = """\
import asyncio, json, sys
from pathlib import Path
from tests.support.endpoint_episode import END, ScriptedSampler
from tests.unit.test_program_agent import Rollouts

def answer(prompt):
    print("ready", flush=True)
    return f"Done.{END}"

rollouts = Rollouts(Path(json.loads(sys.argv[1])), ScriptedSampler(answer))
asyncio.run(rollouts.play("import time; ask('a'); time.sleep(600)"))
"""
NEXT = "from draco_ray.temp_dirs import PrivateTempDir; PrivateTempDir().remove()"
TOOLS = '''
def orders() -> list[str]:
    """List the orders."""
    return []
'''


def command_line(process: psutil.Process) -> list[str]:
    """A process's words; none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextmanager
def running(program: str, told: Any, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(told)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def start_another(temporary: Path) -> None:
    subprocess.run([sys.executable, "-c", NEXT], env={**os.environ, "TMPDIR": str(temporary)}, check=True)


def killed_with_all(process: subprocess.Popen[str]) -> None:
    """Kill a process and all below it, none of which can notice before."""
    every = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for signals in (signal.SIGSTOP, signal.SIGKILL):
        for each in every:
            # One that is killed takes what is in its namespace with it.
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signals)
    process.wait()
    assert psutil.wait_procs(every, timeout=600)[1] == []


def environment(kind: str, folder: Path, request: pytest.FixtureRequest) -> tuple[dict[str, Any], str, str]:
    (folder / "tasks.jsonl").write_text('{"id": "a", "instruction": "Write a note."}')
    (folder / "tools.py").write_text(TOOLS)
    server = str(REPOSITORY / "tests/support/raw_mcp_server.py")
    if kind == "rlimits":
        root = request.getfixturevalue("sandbox_root")
        return {"isolation": kind, "start_timeout_seconds": 600}, str(root), Tasks(root).next()
    every: dict[str, dict[str, Any]] = {
        "tasks": {},
        "tools": {"tools": [str(folder / "tools.py")]},
        "mcp": {"mcp": {"desk": {"command": ["python", server], "reads": [server]}}},
    }
    use = "tasks" if kind == "tasks" else "tools"
    return {"use": use, "options": every[kind], "start_timeout_seconds": 600}, str(folder), "a"


# AppWorld's without mounts has the most there; at the level that ``auto`` finds is the jail of the tools.
@pytest.mark.parametrize("kind", ["rlimits", "tools", "mcp", "tasks"])
def test_what_a_world_leaves_goes_with_the_next_start(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check(WORLD, environment(kind, tmp_path, request), tmp_path / "temporary")


@pytest.mark.usefixtures("verifiers")
def test_what_verifiers_server_leaves_goes_with_the_next_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = {
        "taskset": {"id": str(REPOSITORY / "tests/support/verifiers_tasks.py")},
        "path": [str(REPOSITORY / "examples/parcels")],
        "splits": {"all": {}},
    }
    # A short name: the path of a socket has 107 bytes at most.
    check(BRIDGE, options, tmp_path_factory.mktemp("t"))


def test_what_an_agents_program_leaves_goes_with_the_next_start(tmp_path: Path) -> None:
    check(AGENT, str(tmp_path), tmp_path / "temporary")


def check(program: str, told: Any, temporary: Path) -> None:
    temporary.mkdir(exist_ok=True)
    with running(program, told, temporary) as process:
        made = sorted(temporary.glob("*/*"))
        assert made
        start_another(temporary)
        assert sorted(temporary.glob("*/*")) == made
        killed_with_all(process)
    assert sorted(temporary.glob("*/*")) == made
    start_another(temporary)
    assert list(temporary.iterdir()) == []


# With mounts, and without.
@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_the_folder_of_a_jail_stays_while_anything_runs_in_it(
    tmp_path: Path, request: pytest.FixtureRequest, isolation: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    config, *world = environment("tools", tmp_path, request)
    with running(WORLD, ({**config, "isolation": isolation}, *world), temporary) as process:
        below = psutil.Process(process.pid).children(recursive=True)
        inside = [each for each in below if "draco_ray.environments.tools.server" in command_line(each)]
        assert inside
        for each in inside:
            each.suspend()
        process.kill()
        process.wait()
        start_another(temporary)
        assert len(list(temporary.glob("*/*/program"))) == 1
        for each in inside:
            each.resume()
        # What watches over the jail removes it without another start.
        while list(temporary.iterdir()):
            time.sleep(0.1)
