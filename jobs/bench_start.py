"""What a short run costs with workers that are forked and with a new interpreter for each, one after the other.

python jobs/bench_start.py [--world DIR] [--model DIR] [--repeats 3]

One step of two groups on the sandbox without evaluations, most of which is the start. CPU seconds are those of the
whole process tree as each process was last seen, five times a second; memory is the peak that the run itself prints.
Each way takes its turn, after one run that is not counted and brings what is read from disk into memory; the middle of
each is printed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

LOOK_SECONDS = 0.2
WAYS = {"a new interpreter for each worker": "false", "workers forked": "true"}


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    cpu_seconds: float
    wall_seconds: float
    peak_gib: float


def run(world: Path, model: Path, fork_workers: str) -> Cost:
    """Train for one step; a failure ends the program with what the run said last."""
    seconds: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as root, open(Path(root) / "output", "w+", encoding="utf-8") as output:
        words = [
            *("train", "sandbox", f"data.root={world.resolve()}", f"model.path={model.resolve()}", f"run.root={root}"),
            *("train.steps=1", "train.prompts_per_step=2", "train.evaluate_before_after=false"),
            f"ray.fork_workers={fork_workers}",
        ]
        began = time.monotonic()
        driver = psutil.Popen([sys.executable, "-m", "draco_ray.cli", *words], stdout=output, stderr=subprocess.STDOUT)
        while driver.poll() is None:
            with contextlib.suppress(psutil.Error):
                for process in [driver, *driver.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        seconds[process.pid] = times.user + times.system
            time.sleep(LOOK_SECONDS)
        wall = time.monotonic() - began
        output.seek(0)
        said = output.read()
    peak = re.search(r"peak memory ([\d.]+) GiB", said)
    if driver.returncode or peak is None:
        sys.exit(f"the run failed with exit code {driver.returncode}: {said[-2000:]}")
    return Cost(sum(seconds.values()), wall, float(peak[1]))


def table(costs: Mapping[str, Sequence[Cost]]) -> str:
    """Markdown: the middle of each way, and the ratio of both."""
    lines = ["| | CPU seconds | wall, s | peak memory, GiB |", "| --- | ---: | ---: | ---: |"]
    middles = []
    for way, of_way in costs.items():
        figures = zip(*((each.cpu_seconds, each.wall_seconds, each.peak_gib) for each in of_way), strict=True)
        middles.append([statistics.median(each) for each in figures])
        lines.append(f"| {way} | {' | '.join(f'{middle:.1f}' for middle in middles[-1])} |")
    plain, forked = middles
    ratios = (first / second for first, second in zip(plain, forked, strict=True))
    lines.append(f"| ratio | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines)


def main(
    world: Annotated[Path, typer.Option(help="Data root of a sandbox world.")] = Path(".cache/sandbox"),
    model: Annotated[Path, typer.Option(help="The starter policy.")] = Path(".cache/starter"),
    repeats: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Run both ways in turn, and print the table."""
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load average "
        f"{os.getloadavg()[0]:.1f} at the start, {repeats} runs each\n",
        flush=True,
    )
    run(world, model, "true")
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, word in WAYS.items():
            costs[way].append(run(world, model, word))
            print(f"{way}: {costs[way][-1]}", file=sys.stderr, flush=True)
    print(table(costs))


if __name__ == "__main__":
    typer.run(main)
