"""Executes scripted rollouts in AppWorld, without a server. Runs under AppWorld's own Python.

    python -P -B execute.py [--evaluate] < jobs.jsonl > results.jsonl

with ``APPWORLD_ROOT`` set. A job is a line ``{"task_id": ..., "cells": [...]}`` and is answered, in order, by a line
``{"outputs": [...], "unmet": [...]}``: what each cell printed and, with ``--evaluate``, the unmet requirements of the
task; or by ``{"error": ...}`` if the task cannot be run. Every job starts from the task's initial state. The scripts
are the project's own; what a policy writes runs in confined servers instead.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any, TextIO

from appworld import AppWorld


class UnloggedAppWorld(AppWorld):
    """A world that writes neither state snapshots nor logs."""

    def _save_state(self, directory: str) -> None:
        pass

    def save_logs(self) -> None:
        pass


def run_script(task_id: str, cells: list[str], *, evaluate: bool) -> dict[str, Any]:
    """Execute the cells from the task's initial state; returns the answer to a job."""
    kind = AppWorld if evaluate else UnloggedAppWorld
    try:
        with kind(task_id=task_id, experiment_name=f"scripts-{os.getpid()}", load_ground_truth=evaluate) as world:
            outputs = [world.execute(cell) for cell in cells]
            failures = world.evaluate(suppress_errors=True).failures if evaluate else ()
            return {"outputs": outputs, "unmet": [failure["requirement"] for failure in failures]}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def main(jobs: TextIO, results: TextIO, *, evaluate: bool) -> None:
    """Run each job line, and print its result as soon as the job is done."""
    for line in jobs:
        job: dict[str, Any] = json.loads(line)
        results.write(json.dumps(run_script(job["task_id"], job["cells"], evaluate=evaluate)) + "\n")
        results.flush()


if __name__ == "__main__":
    # AppWorld and IPython print to stdout, which must hold only results.
    results_stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Garbage collections would take ever longer and free nothing: AppWorld keeps objects of every task.
    gc.disable()
    main(sys.stdin, results_stream, evaluate="--evaluate" in sys.argv)
    # AppWorld's interactive shells, one per task, would take minutes to shut down.
    os._exit(0)
