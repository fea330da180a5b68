"""Runs a sandbox's tasks in AppWorld's own engine and evaluator. Needs AppWorld's own Python.

The reference solution of every task must pass, also with each harmless fault; doing nothing, and every fatal fault of
the task's family, must fail.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draco_ray.errors import ConfigError, WorldError
from draco_ray.sandbox.world.build import MANIFEST, read_manifest
from draco_ray.sandbox.world.scripts import FATAL, Family, Fault, families
from draco_ray.temp_dirs import PrivateTempDir

LOADED = "draco_ray.sandbox.world.loaded"
TASKS_A_WORKER = 10
"""A process is replaced after this many tasks, because AppWorld leaves objects behind (`loaded`)."""

Progress = Callable[[str], None]


def verify(root: Path, jobs: int = 2, progress: Progress = print) -> list[str]:
    """Check every task of a sandbox; returns one line for each task that is wrong.

    Args:
        root: a folder made by ``build``. Nothing in it is changed: the engine's outputs go to a temporary folder.
        jobs: processes.
    Raises: WorldError if ``root`` holds no sandbox; ConfigError if ``jobs`` is not positive.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}, expected at least 1")
    root = root.absolute()
    manifest = read_manifest(root)
    if manifest is None:
        raise WorldError(f"{root} has no {MANIFEST}; expected a folder made by `draco sandbox build`")
    entries = manifest["tasks"]
    if strange := {entry["family"] for entry in entries.values()} - set(families()):
        raise WorldError(f"{root} has tasks of unknown families ({', '.join(sorted(strange))}); build it again")
    tasks = [(task_id, entry["family"]) for task_id, entry in entries.items()]
    started = time.monotonic()
    problems: list[str] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([LOADED])
    with (
        PrivateTempDir() as scratch,
        context.Pool(jobs, _start_worker, (str(root), str(scratch)), TASKS_A_WORKER) as pool,
    ):
        for done, (task_id, family, found) in enumerate(pool.imap_unordered(check_task, tasks), start=1):
            if found:
                problems.append(f"verify: {task_id} ({family}): {'; '.join(found)}")
                progress(problems[-1])
            if done % 20 == 0 or done == len(tasks):
                progress(f"verify: {done}/{len(tasks)} tasks [{time.monotonic() - started:.0f} s]")
    return problems


def _start_worker(root: str, scratch: str) -> None:
    """Give this process its own AppWorld root, linked to the sandbox's data."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    own = Path(scratch) / str(os.getpid())
    own.mkdir(parents=True)
    (own / "data").symlink_to(Path(root) / "data", target_is_directory=True)
    sys.dont_write_bytecode = True  # evaluation.py is imported from the task's folder
    os.environ["APPWORLD_ROOT"] = str(own)
    from appworld.common.path_store import path_store

    path_store.update_root(str(own))


def check_task(task: tuple[str, str]) -> tuple[str, str, list[str]]:
    """Run one (task id, family) in every way; a task that cannot be run counts as a problem.

    Returns: the two, and what is wrong.
    """
    task_id, name = task
    check = _Check(task_id, families()[name])
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the engine prints
            check.idle_and_reference()
            for fault in sorted(check.family.faults - {Fault.NO_COMPLETION, Fault.CONTINUE_AFTER_COMPLETION}):
                check.faulty(fault)
    except Exception as error:
        check.problems.append(f"cannot be run: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}")
    return task_id, name, check.problems


class _Check:
    """The runs of one task."""

    def __init__(self, task_id: str, family: Family) -> None:
        self.task_id, self.family = task_id, family
        self.problems: list[str] = []

    def idle_and_reference(self) -> None:
        """Check doing nothing, then the reference: with a report instead of its completion, complete, and with one more
        cell."""
        *before, completion = self.family.script()
        after = self.family.script(frozenset({Fault.CONTINUE_AFTER_COMPLETION}))[-1]
        report = self.family.script(frozenset({Fault.NO_COMPLETION}))[-1]
        with self._open() as world:
            tracker = world.evaluate()
            if tracker.success:
                self.problems.append("the task passes although nothing was done")
            wrong = [p["requirement"] for p in tracker.passes if p["label"] != "no_op_pass"]
            wrong += [f["requirement"] for f in tracker.failures if f["label"] != "no_op_fail"]
            self.problems += [f"mislabelled requirement: {requirement}" for requirement in wrong]
            outputs = [world.execute(code) for code in before]
            world.execute(report)
            if world.evaluate().success:
                self.problems.append(f"the fault {Fault.NO_COMPLETION} passes")
            outputs.append(world.execute(completion))
            raised = [output.strip().splitlines()[-1] for output in outputs if "Execution failed" in output]
            self.problems += [f"the reference raises: {line}" for line in raised]
            failures = world.evaluate().failures
            for failure in failures:
                why = " ".join(failure["trace"].split())[-300:]
                self.problems.append(f"the reference fails: {failure['requirement']} {why}")
            world.execute(after)
            if not failures and not world.evaluate().success:
                self.problems.append(f"the fault {Fault.CONTINUE_AFTER_COMPLETION} fails")

    def faulty(self, fault: Fault) -> None:
        """The script with one fault: it fails if the fault is fatal, and passes if not."""
        with self._open() as world:
            for code in self.family.script(frozenset({fault})):
                world.execute(code)
            success = world.evaluate().success
        if success == (fault in FATAL):
            self.problems.append(f"the fault {fault} {'passes' if success else 'fails'}")

    def _open(self) -> Any:
        from appworld.environment import AppWorld

        return AppWorld(task_id=self.task_id, experiment_name="verify")
