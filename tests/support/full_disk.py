"""Fills the disk of a run directory and prints the error messages as one JSON object, for `test_full_disk`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from draco_ray.config.load import dump_config, load_config
from draco_ray.errors import ConfigError, StoreError
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.observability.logs import start_run_log
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.training.resume import StartPoint
from draco_ray.training.run import _train
from draco_ray.training.trainer import TaskOrder
from tests.support.small_run import a_trajectory, small_run

TRIES = 10_000


def error_when_full(work: Callable[[int], Any]) -> str:
    """Repeat ``work`` until it fails; returns the error message."""
    try:
        for number in range(TRIES):
            work(number)
    except (StoreError, ConfigError) as error:
        return str(error)
    return "the disk is not full"


def main(folder: Path) -> None:
    """``folder`` is the root of a small file system."""
    run = small_run(folder / "run", steps=1)
    cache, store = ReplyCache(run.judge_cache), RunStoreActor(run.path)
    config = load_config("sandbox")
    before = error_when_full(
        lambda number: _train(config, {}, TaskOrder(["t_1"], 1, 0), run, StartPoint(), Console(quiet=True))
    )
    answers = error_when_full(lambda number: asyncio.run(cache.put(str(number), {"text": os.urandom(2000).hex()})))
    written = error_when_full(lambda number: store.trajectory(2, a_trajectory(2, f"t{number}_1", 0)))
    later = error_when_full(lambda number: store.flush())
    created = error_when_full(lambda number: RunDirectory.create(folder / f"another-{number}", dump_config(config)))
    start_run_log(run.path)
    logging.getLogger("draco_ray").warning("x" * 10_000)
    kept = run.table("trajectories", 1).num_rows
    first = asyncio.run(ReplyCache(run.judge_cache).get("0")) is not None
    print(
        json.dumps(
            {
                "messages": [before, answers, written, later, created],
                "rows of step 1": kept,
                "first answer": first,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
