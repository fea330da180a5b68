"""Executes scripted rollouts in AppWorld and evaluates them. Runs under AppWorld's own Python.

    python -P -B execute.py < jobs.jsonl > results.jsonl

with ``APPWORLD_ROOT`` set. A job is a line ``{"task_id": ..., "cells": [...]}`` and is answered, in order, by a line
``{"outputs": [...], "success": ...}``: what each cell printed, and whether the task's own tests pass at the end. The
scripts are the project's own; what a policy writes runs in confined servers instead.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any, TextIO

from appworld import AppWorld


def play(task_id: str, cells: list[str]) -> dict[str, Any]:
    """What each cell prints, executed one after the other from the task's initial state, and whether it succeeded."""
    with AppWorld(task_id=task_id, experiment_name=f"attribution-{os.getpid()}") as world:
        outputs = [world.execute(cell) for cell in cells]
        return {"outputs": outputs, "success": bool(world.evaluate(suppress_errors=True).success)}


def main(jobs: TextIO, results: TextIO) -> None:
    """Answer every job line as soon as it is done."""
    for line in jobs:
        job: dict[str, Any] = json.loads(line)
        results.write(json.dumps(play(job["task_id"], job["cells"])) + "\n")
        results.flush()


if __name__ == "__main__":
    # AppWorld and IPython print now and then; that must not mix with the results.
    results_stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # What AppWorld leaves behind with every task makes collections ever longer and frees nothing.
    gc.disable()
    main(sys.stdin, results_stream)
    # AppWorld's interactive shells, one a task, would take minutes to shut down.
    os._exit(0)
