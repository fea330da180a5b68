"""Runs scripted rollouts in AppWorld processes (`draco_ray.sandbox.execute`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.environments.jail import linux
from draco_ray.errors import WorldError
from draco_ray.temp_dirs import PrivateTempDir

EXECUTE_SCRIPT = Path(__file__).with_name("execute.py")
Script = tuple[str, tuple[str, ...]]
"""Task id, and the code cells to execute."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What the execution of a script gave: the outputs, and which of the task's tests failed."""

    outputs: tuple[str, ...] = ()
    """AppWorld's output of each cell, not truncated."""
    unmet: tuple[str, ...] = ()
    """The requirements of the task's own tests that are not met; empty also if the tests were not run."""
    error: str | None = None
    """Why the task cannot be run."""

    @property
    def success(self) -> bool:
        """Whether the task's own tests pass."""
        return self.error is None and not self.unmet


def run_scripts(
    scripts: Sequence[Script], world: Path, processes: int, *, evaluate: bool = False
) -> list[ScriptResult]:
    """Run every script from its task's initial state; nothing is written to the world.

    Args:
        scripts: equal scripts are run only once.
        world: data root.
        processes: number of AppWorld processes.
        evaluate: load the ground truth and run the tasks' tests.

    Raises:
        WorldError: AppWorld's Python is missing or fails, or a task cannot be run.
    """
    done = try_scripts(scripts, world, processes, evaluate=evaluate)
    for (task_id, _), executed in zip(scripts, done, strict=True):
        if executed.error is not None:
            raise WorldError(
                f"task {task_id} cannot be run: {executed.error}; check the world with `draco sandbox verify`"
            )
    return done


def try_scripts(scripts: Sequence[Script], world: Path, processes: int, *, evaluate: bool) -> list[ScriptResult]:
    """Like `run_scripts`, but a task that cannot be run gives a result with an error."""
    distinct = list(dict.fromkeys(scripts))
    shares = [distinct[start::processes] for start in range(min(processes, len(distinct)))]
    with PrivateTempDir() as root, ThreadPoolExecutor(processes) as pool:
        (root / "data").symlink_to((world / "data").resolve(), target_is_directory=True)
        results = list(pool.map(lambda share: _run(share, root, evaluate), shares))
    known = {
        script: executed
        for share, done in zip(shares, results, strict=True)
        for script, executed in zip(share, done, strict=True)
    }
    return [known[script] for script in scripts]


def _run(scripts: Sequence[Script], root: Path, evaluate: bool) -> list[ScriptResult]:
    done = subprocess.run(
        # Run it as a file: AppWorld's Python lacks our dependencies. -P keeps the file's folder off the path.
        [appworld_python(None), "-P", "-B", str(EXECUTE_SCRIPT), *["--evaluate"] * evaluate],
        input="".join(json.dumps({"task_id": task_id, "cells": cells}) + "\n" for task_id, cells in scripts),
        env={**os.environ, "APPWORLD_ROOT": str(root)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=linux.die_with_parent,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if len(found) != len(scripts):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise WorldError(
            f"AppWorld stopped after {len(found)} of {len(scripts)} scripted rollouts: {last}; "
            "check the world with `draco sandbox verify`"
        )
    return [
        ScriptResult(tuple(each.get("outputs", ())), tuple(each.get("unmet", ())), each.get("error")) for each in found
    ]
