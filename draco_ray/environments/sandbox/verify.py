"""Runs a sandbox's tasks in AppWorld's own engine and evaluator. Needs AppWorld's own Python.

The reference solution of every task must pass; doing nothing, and every fatal fault of its family, must fail.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from draco_ray.environments.sandbox.build import MANIFEST, read_manifest
from draco_ray.environments.sandbox.scripts import FATAL, Fault, families
from draco_ray.errors import ConfigError, WorldError

Progress = Callable[[str], None]


def verify(root: Path, jobs: int = 2, progress: Progress = print) -> list[str]:
    """Check every task of a sandbox; returns one line for each that is wrong.

    Args:
        root: a folder made by ``build``. Nothing in it is changed: the engine's outputs go to a folder beside the
            data that is removed in the end.
        jobs: processes.
    Raises: WorldError if ``root`` holds no sandbox; ConfigError if ``jobs`` is not positive.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}, expected at least 1")
    root = root.absolute()
    manifest = read_manifest(root)
    if manifest is None:
        raise WorldError(f"{root} holds no {MANIFEST}: expected a folder made by `sandbox build`")
    tasks = [(task_id, entry["family"]) for task_id, entry in manifest["tasks"].items()]
    started = time.monotonic()
    problems: list[str] = []
    scratch = root / f".verify-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    try:
        with context.Pool(jobs, _start_worker, (str(root), str(scratch))) as pool:
            for done, found in enumerate(pool.imap_unordered(check_task, tasks, chunksize=1), start=1):
                problems += found
                for line in found:
                    progress(line)
                if done % 20 == 0 or done == len(tasks):
                    progress(f"verify: {done}/{len(tasks)} tasks [{time.monotonic() - started:.0f} s]")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return problems


def _start_worker(root: str, scratch: str) -> None:
    """Give this process an AppWorld root of its own whose data is the sandbox's."""
    own = Path(scratch) / str(os.getpid())
    own.mkdir(parents=True)
    (own / "data").symlink_to(Path(root) / "data", target_is_directory=True)
    sys.dont_write_bytecode = True  # evaluation.py is imported from the task's folder
    os.environ["APPWORLD_ROOT"] = str(own)
    from appworld.common.path_store import path_store

    path_store.update_root(str(own))


def check_task(task: tuple[str, str]) -> list[str]:
    """The complaints about one (task id, family)."""
    from appworld.environment import AppWorld

    task_id, name = task
    family = families()[name]
    problems: list[str] = []

    def complain(what: str) -> None:
        problems.append(f"verify: {task_id} ({name}): {what}")

    with contextlib.redirect_stdout(io.StringIO()):
        with AppWorld(task_id=task_id, experiment_name="verify") as world:
            tracker = world.evaluate()
            if tracker.success:
                complain("doing nothing passes")
            wrong = [p["requirement"] for p in tracker.passes if p["label"] != "no_op_pass"]
            wrong += [f["requirement"] for f in tracker.failures if f["label"] != "no_op_fail"]
            for requirement in wrong:
                complain(f"mislabelled requirement: {requirement}")
            *before, completion = family.script()
            outputs = [world.execute(code) for code in before]
            # The fault NO_COMPLETION is this prefix of the reference.
            if world.evaluate().success:
                complain(f"the fault {Fault.NO_COMPLETION} passes")
            outputs.append(world.execute(completion))
            for output in outputs:
                if "Execution failed" in output:
                    complain("the reference raises: " + output.strip().splitlines()[-1])
            for failure in world.evaluate().failures:
                complain(f"the reference fails: {failure['requirement']} {' '.join(failure['trace'].split())[-300:]}")
        for fault in sorted(family.fatal & FATAL - {Fault.NO_COMPLETION}):
            with AppWorld(task_id=task_id, experiment_name="verify") as world:
                for code in family.script(frozenset({fault})):
                    world.execute(code)
                if world.evaluate().success:
                    complain(f"the fault {fault} passes")
    return problems
