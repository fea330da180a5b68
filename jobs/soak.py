"""Many small training steps, and what each process of the run takes in memory meanwhile.

python jobs/soak.py [--steps 200] [--world DIR] [--model DIR]

Memory is what a process has for itself (Pss_Anon: no page of a file or of the object store, and of what n forked
processes share an n-th), all processes of a kind together, when a step has ended. A line through the second half of the
steps says by how much it grows.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer

from draco_ray.runs.directory import RunDirectory

PROMPTS, GROUP = 1, 2
LOOK_SECONDS = 1.0
KINDS = {
    "gcs_server": "Ray: GCS",
    "raylet/raylet": "Ray: raylet",
    "world_template": "AppWorld",
    "VLLM::": "engine core",
    "judge_server": "rule judge",
    "log_monitor.py": "Ray: log monitor",
    "dashboard/agent.py": "Ray: agents",
    "runtime_env/agent": "Ray: agents",
    "dashboard/dashboard.py": "Ray: dashboard",
}
"""Words of a command line -> what the process is called."""
ACTOR = re.compile(r"ray::(_?[A-Z]\w*?)(?:Actor)?\b")
"""How Ray calls the process of an actor by its class; while it carries out a call that has a name, by that."""

Samples = Mapping[str, Mapping[int, float]]
"""Kind of a process -> step -> MiB."""


def kind_of(words: Sequence[str]) -> str | None:
    """What a process of a run is called; None: one that comes and goes and is of no interest."""
    line = " ".join(words)
    known = next((name for part, name in KINDS.items() if part in line), None)
    if known is not None:
        return known
    if line.startswith("ray::IDLE"):
        return "Ray: idle workers"
    found = ACTOR.match(line)
    return None if found is None else found[1]


def own_mib(pid: int) -> float:
    """Memory that a process has for itself; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) / 1024
    return 0.0


class Run:
    """The processes of a run."""

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self._kinds: dict[int, str] = {}
        """Of the actors that were seen while nothing hid what they are."""

    def memory(self) -> dict[str, float]:
        """MiB by kind of process."""
        found: dict[str, float] = defaultdict(float)
        found["driver"] = own_mib(self._driver)
        for process in psutil.Process(self._driver).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (kind := kind_of(process.cmdline())) is not None:
                    self._kinds[process.pid] = kind
                if (kind := self._kinds.get(process.pid)) is not None:
                    found[kind] += own_mib(process.pid)
        return dict(found)


def growth(samples: Mapping[int, float]) -> float:
    """MiB in 100 steps, by a line through the second half of the steps."""
    steps = sorted(samples)
    later = steps[len(steps) // 2 :]
    if len(later) < 2:
        return 0.0
    return 100 * float(np.polyfit(later, [samples[step] for step in later], 1)[0])


def table(samples: Samples, steps: Sequence[int]) -> list[str]:
    """Lines of Markdown: each kind at these steps, and how it grows; the largest first."""
    lines = [
        f"| MiB after step | {' | '.join(map(str, steps))} | growth in 100 steps |",
        "|---" * (len(steps) + 2) + "|",
    ]
    for kind, of_kind in sorted(samples.items(), key=lambda each: -max(each[1].values())):
        cells = [f"{of_kind[step]:.0f}" if step in of_kind else "" for step in steps]
        lines.append(f"| {kind} | {' | '.join(cells)} | {growth(of_kind):+.1f} |")
    return lines


def main(
    steps: Annotated[int, typer.Option(min=1)] = 200,
    world: Annotated[Path, typer.Option(help="Data root of a sandbox world.")] = Path(".cache/sandbox"),
    model: Annotated[Path, typer.Option(help="The starter policy.")] = Path(".cache/starter"),
    minutes: Annotated[float, typer.Option(help="After which the run is stopped, and what was seen printed.")] = 240.0,
) -> None:
    """Train, and print what each process takes; exits with 1 if the run fails."""
    print(
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load average "
        f"{os.getloadavg()[0]:.1f} at the start; steps of {PROMPTS} prompt x {GROUP} rollouts",
        flush=True,
    )
    samples: dict[str, dict[int, float]] = defaultdict(dict)
    seconds: dict[int, float] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root, open(Path(root) / "output", "w+", encoding="utf-8") as output:
        words = [
            *("train", "sandbox", f"data.root={world.resolve()}", f"model.path={model.resolve()}", f"run.root={root}"),
            *("run.name=soak", f"train.steps={steps}", "train.evaluate_before_after=false", "train.keep_last=1"),
            *(f"train.prompts_per_step={PROMPTS}", f"algorithm.group_size={GROUP}", "learner.minibatch_prompts=1"),
            *("environment.slots=2", "environment.slots_per_worker=2", "watch.empty_steps=1000000"),
        ]
        driver = subprocess.Popen(
            [sys.executable, "-m", "draco_ray.cli", *words], stdout=output, stderr=subprocess.STDOUT
        )
        run, metrics = Run(driver.pid), Path(root) / "soak" / "metrics.jsonl"
        try:
            while driver.poll() is None and time.monotonic() - began < 60 * minutes:
                time.sleep(LOOK_SECONDS)
                done, found = len(RunDirectory(metrics.parent).metrics()), run.memory()
                if done and done not in seconds:
                    seconds[done] = time.monotonic() - began
                    for kind, mib in found.items():
                        samples[kind][done] = mib
        finally:
            if driver.poll() is None:
                driver.terminate()
            driver.wait()
        if driver.returncode not in (0, 130):
            output.seek(0)
            sys.exit(f"soak: the run failed:\n{output.read()[-2000:]}")
    last = max(seconds, default=0)
    if not last:
        sys.exit("soak: no step was done in time")
    shown = sorted({min(seconds), *(round(last * share) for share in (0.1, 0.25, 0.5, 0.75)), last} & seconds.keys())
    print(f"{last} of {steps} steps in {seconds[last] / 60:.0f} minutes\n")
    print("\n".join(table(samples, shown)))


if __name__ == "__main__":
    typer.run(main)
