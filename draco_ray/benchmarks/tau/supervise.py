"""Running tau2's process to the end of its job: where it crashes or stalls, it goes on from the finished episodes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draco_ray.benchmarks.tau.episodes import count_episodes
from draco_ray.benchmarks.tau.installation import RUNNER
from draco_ray.benchmarks.tau.tau2_runner import REFUSED
from draco_ray.config.schema import TauBenchConfig
from draco_ray.engine.child import Child, Scrubber
from draco_ray.errors import TauBenchError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2


def run_job(
    job: Mapping[str, Any],
    python: str,
    environment: Mapping[str, str],
    folder: Path,
    tmp: Path,
    config: TauBenchConfig,
    scrubber: Scrubber,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Run the job's episodes that are not in ``folder`` yet.

    Args:
        folder: tau2's results; ``runner.log`` there receives what it prints, keys masked.
        tmp: private folder, its working directory.
        progress: told how many episodes there are, whenever that changes.

    Raises:
        TauBenchError: it refused, or failed more often than ``config.restarts``.
    """
    job_file = tmp / "job.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    logged = folder / "runner.log"
    planned = len(job["tasks"]) * int(job["trials"])
    for start in range(config.restarts + 1):
        child = Child([python, "-P", str(RUNNER), "run", str(job_file)], environment, logged, scrubber, folder=tmp)
        try:
            problem = _attend(child, folder, config.stall_timeout_seconds, progress)
        finally:
            child.end()
            _mask(folder, scrubber)
        if problem is None:
            return
        if child.returncode == REFUSED:
            raise TauBenchError(f"tau2 is not run: {child.last_line}")
        there = f"{count_episodes(folder)} of {planned} episodes are kept"
        if start == config.restarts:
            raise TauBenchError(
                f"tau2 {problem}, {start + 1} times in all; {there}; its last words are in {logged}; the same command "
                "goes on from there"
            )
        log.warning("tau2 %s; %s, starting it again", problem, there)


def _attend(child: Child, folder: Path, stall_seconds: float, progress: Callable[[int], None]) -> str | None:
    """Wait for its end; returns what went wrong, None if nothing did."""
    done, changed = -1, time.monotonic()
    while True:
        code = child.wait(POLL_SECONDS)
        if (now := count_episodes(folder)) != done:
            done, changed = now, time.monotonic()
            progress(done)
        if code is not None:
            return None if code == 0 else f"ended with exit code {code}"
        if time.monotonic() - changed > stall_seconds:
            return f"finished no episode in {stall_seconds:g} s"


def _mask(folder: Path, scrubber: Scrubber) -> None:
    """tau2 keeps the errors of its calls, and a provider may have quoted the key."""
    for file in folder.rglob("*.json*"):
        scrubber.file(file)
