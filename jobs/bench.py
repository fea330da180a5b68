"""Print the numbers of docs/benchmarks.md as Markdown: three seeds of the demo, and the overlap behind a slow judge.

python jobs/bench.py [--seeds 3] [--only learning|overlap|deterministic|mcp]
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import make_environment
from draco_ray.lab.evaluation.measures import difference, pass_k_measure
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations, scenario_goal_completion, task_goal_completion

RUNS_PER_TASK = 2
"""Rollouts per held-out task: a TGC over 45 tasks alone is uncertain by seven points."""
SLOW_JUDGE_SECONDS = 2.0
MCP_SERVER = """\
from mcp.server import MCPServer

server = MCPServer("desk")


@server.tool()
def note(text: str) -> str:
    \"\"\"Write a note.\"\"\"
    return text


server.run()
"""


def run(root: Path, name: str, *arguments: str) -> tuple[RunDirectory, float, str]:
    """Train the sandbox preset; returns the run, its seconds, and what it printed."""
    began = time.monotonic()
    command = [sys.executable, "-m", "draco_ray.cli", "train", "sandbox", f"run.root={root}", f"run.name={name}"]
    process = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        sys.exit(f"bench: {' '.join(command[3:])} {' '.join(arguments)} failed with exit code {process.returncode}")
    return RunDirectory.open(root / name), time.monotonic() - began, process.stdout


def learning(root: Path, seeds: int) -> None:
    """Held-out success before and after, per seed."""
    print(f"\n## Held-out TGC, {seeds} seeds (test_normal, {RUNS_PER_TASK} rollouts per task)\n")
    print("| seed | TGC before | TGC after | points | SGC before | SGC after | seconds | peak memory |")
    print("|---|---|---|---|---|---|---|---|")
    gains, firsts, lasts = [], [], []
    for seed in range(seeds):
        directory, seconds, printed = run(root, f"seed{seed}", f"seed={seed}", f"train.evaluation_runs={RUNS_PER_TASK}")
        evaluations = list(read_evaluations(directory).values())
        before, after = evaluations[0], evaluations[-1]
        firsts.append([before])
        lasts.append([after])
        first, final = task_goal_completion(before), task_goal_completion(after)
        gains.append(100 * (final - first))
        memory = printed.partition("peak memory ")[2].partition(" GiB")[0]
        print(
            f"| {seed} | {first:.1%} | {final:.1%} | {gains[-1]:+.1f} | {scenario_goal_completion(before):.1%} | "
            f"{scenario_goal_completion(after):.1%} | {seconds:.0f} | {memory} GiB |",
            flush=True,
        )
    gain, _ = difference(*(pass_k_measure(seeds, RUNS_PER_TASK, scenarios=True) for seeds in (lasts, firsts)))
    over = "seeds and scenarios" if seeds > 1 else "scenarios of one seed"
    print(
        f"\nmean of {seeds} seeds: {100 * gain.mean:+.1f} points, 95 % interval over {over} "
        f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
    )


def overlap(root: Path) -> None:
    """Share of judge seconds that ran while some rollout was still generating."""
    print(f"\n## Judging that overlaps generation (with a judge that takes {SLOW_JUDGE_SECONDS:g} s per reply)\n")
    directory, _, _ = run(
        root,
        "overlap",
        f"judge.rule_judge.latency_seconds={SLOW_JUDGE_SECONDS}",
        "train.steps=3",
        "train.prompts_per_step=16",
        "train.evaluate_before_after=false",
    )
    print("| step | judge seconds | hidden | generation (s) | judging (s) | step (s) |")
    print("|---|---|---|---|---|---|")
    metrics = directory.metrics()
    for line in metrics:
        print(
            f"| {line['step']} | {line['judge_seconds']:.0f} | {line['judge_hidden_share']:.0%} | "
            f"{line['seconds_generation']:.0f} | {line['seconds_judging']:.0f} | {line['seconds']:.0f} |"
        )
    total = sum(line["judge_seconds"] for line in metrics)
    hidden = sum(line["judge_seconds"] * line["judge_hidden_share"] for line in metrics)
    print(f"\nhidden over all steps: {hidden / total:.0%}")


def deterministic(root: Path) -> None:
    """What `engine.deterministic` costs: sampled tokens a second of generation, seconds of learning and of a step."""
    print("\n## What engine.deterministic costs (the second of two steps)\n")
    print("| engine.deterministic | sampled tokens/s | learning (s) | step (s) | load average |")
    print("|---|---|---|---|---|")
    rates = {}
    for value in ("false", "true"):
        directory, _, _ = run(
            root,
            f"deterministic-{value}",
            f"engine.deterministic={value}",
            "train.steps=2",
            "train.evaluate_before_after=false",
        )
        line = directory.metrics()[-1]
        sampled = sum(int(sum(mask)) for mask in directory.table("trajectories", 2, ["sampled"])["sampled"].to_pylist())
        rates[value] = sampled / line["seconds_generation"]
        print(
            f"| {value} | {rates[value]:.0f} | {line['seconds_learning']:.0f} | {line['seconds']:.0f} | "
            f"{os.getloadavg()[0]:.1f} |",
            flush=True,
        )
    print(f"\ndeterministic sampling has {rates['true'] / rates['false']:.0%} of the usual speed")


async def mcp(root: Path) -> None:
    """Seconds to open and close a task whose tools are an MCP server's, over standard input and output in the jail."""
    root.chmod(0o755)
    server, tasks = root / "server.py", root / "tasks.jsonl"
    server.write_text(MCP_SERVER)
    tasks.write_text('{"id": "a", "instruction": "Write a note."}')
    options = {"mcp": {"desk": {"command": ["python", str(server)], "reads": [str(server)]}}}
    config = EnvironmentConfig(use="tools", options=options, start_timeout_seconds=600)
    environment = make_environment(config, DataConfig(root=root), ground_truth=False, name="bench")
    opened, closed = [], []
    for _ in range(11):
        began = time.monotonic()
        world = await environment.open("a")
        opened.append(time.monotonic() - began)
        await world.close()
        closed.append(time.monotonic() - began - opened[-1])
    await environment.stop()
    print("\n## Sessions of an MCP server\n")
    print("| first open (s) | later opens, median of 10 (s) | closes, median (s) | load average |")
    print("|---|---|---|---|")
    later, ends = statistics.median(opened[1:]), statistics.median(closed)
    print(f"| {opened[0]:.2f} | {later:.2f} | {ends:.2f} | {os.getloadavg()[0]:.1f} |")


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds of the demo to train.")] = 3,
    only: Annotated[
        str | None, typer.Option(help="learning, overlap, deterministic or mcp; the first two by default.")
    ] = None,
) -> None:
    """Run the benchmarks; takes about seven minutes a seed and three for the overlap."""
    memory = psutil.virtual_memory().total / 2**30
    print(
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory() as folder:
        if only in (None, "learning"):
            learning(Path(folder), seeds)
        if only in (None, "overlap"):
            overlap(Path(folder))
        if only == "deterministic":
            deterministic(Path(folder))
        if only == "mcp":
            asyncio.run(mcp(Path(folder)))


if __name__ == "__main__":
    typer.run(main)
