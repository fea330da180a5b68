"""Plays the sandbox's tasks in a slot, correctly and incorrectly."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import psutil

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld import template_process
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.environments.base import WorldVerdict
from draco_ray.errors import EnvironmentCrashed
from draco_ray.sandbox.world.scripts import families

# AppWorld's guard does not block this way to import, nor these modules.
PRELUDE = """
load = json.codecs.builtins.__import__
posix, ctypes, sys_, thread, signal = map(load, ("posix", "ctypes", "sys", "_thread", "signal"))
libc = ctypes.CDLL(None, use_errno=True)

def attempt(name, action):
    try:
        print(name, "DONE", action())
    except BaseException as error:
        print(name, "REFUSED", type(error).__name__, error)

def read(path):
    file = posix.open(path, posix.O_RDONLY)
    data = posix.read(file, 100000)
    posix.close(file)
    return data

def found(kind):
    return [each for each in load("gc").get_objects() if type(each).__name__ == kind][0]
"""


LOAD_SECONDS = 600
"""Time limit for loading AppWorld on a busy machine, in seconds."""


class Tasks:
    """The training tasks of a generated world, handed out in turn."""

    def __init__(self, root: Path) -> None:
        entries = json.loads((root / "sandbox.json").read_text(encoding="utf-8"))["tasks"]
        self._families = {task: entry["family"] for task, entry in entries.items()}
        self._turns = cycle([task for task, entry in entries.items() if entry["split"] == "train"])

    def next(self) -> str:
        """A different task than the previous one."""
        return next(self._turns)

    def solution(self, task_id: str) -> list[str]:
        """Code cells that solve a task."""
        return families()[self._families[task_id]].script()


def files(root: Path) -> dict[Path, bytes]:
    """Content of every file of a generated world, by path."""
    return {
        path.relative_to(root): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@contextmanager
def appworld_loaded(config: EnvironmentConfig, root: Path) -> Iterator[None]:
    """Load AppWorld, however long that takes, for all slots of this process with that configuration."""
    key = AppWorldSlot(config, root, load_ground_truth=True, name="loads")._key
    template_process.shared_template(key, LOAD_SECONDS)
    yield
    template_process._templates.pop(key).kill()


async def play(slot: AppWorldSlot, tasks: Tasks) -> WorldVerdict:
    """Open the next task, solve it and have it evaluated."""
    task_id = tasks.next()
    await slot.open(task_id)
    for cell in tasks.solution(task_id):
        output = await slot.act(cell)
        assert "Execution failed" not in output, output
    return await slot.evaluate()


async def attack(slot: AppWorldSlot, *cells: str) -> str:
    """Run hostile cells in the open task. Returns what they printed, and how the world was lost if it was."""
    outputs = []
    # AppWorld's guard must let this through, or the attack would show nothing.
    assert await slot.act(PRELUDE) == "Execution successful."
    for cell in cells:
        try:
            outputs.append(await slot.act(textwrap.dedent(cell)))
        except EnvironmentCrashed as error:
            outputs.append(f"CRASHED {error}")
            break
    return "\n".join(outputs)


async def check_next_task_runs_clean(slot: AppWorldSlot, tasks: Tasks) -> None:
    """Another task on the same slot knows nothing of the last one, and AppWorld's evaluator passes it."""
    task_id = tasks.next()
    await slot.open(task_id)
    assert await slot.act("print('posix' in globals())") == "False\n"
    assert len(processes_of(slot)) <= 3
    for cell in tasks.solution(task_id):
        output = await slot.act(cell)
        assert "Execution failed" not in output, output
    verdict = await slot.evaluate()
    assert verdict.success, verdict.failures


def processes_of(slot: AppWorldSlot) -> list[psutil.Process]:
    """Processes of a slot, outermost first."""
    if slot.pid is None:
        return []
    return [psutil.Process(slot.pid), *psutil.Process(slot.pid).children(recursive=True)]
