"""What `draco plan --simulate RUN` prints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draco_ray.errors import ConfigError
from draco_ray.lab.files import check_file
from draco_ray.lab.simulation.page import curves, write_page
from draco_ray.lab.simulation.recorded import RecordedRun, read_run
from draco_ray.lab.simulation.scaling import ALLOWANCE, SIZES, Foretold, Scale, Size, foretell, foretell_other
from draco_ray.lab.simulation.scaling import median_error as median_error_of
from draco_ray.lab.simulation.speeds import fit
from draco_ray.lab.simulation.work import WAITS, Setting, Speeds
from draco_ray.runs.directory import RunDirectory
from draco_ray.terminal import PlainConsole

LONGEST_PARTS = 4
"""Of a path, that are printed."""


def simulate_run(
    directory: Path,
    *,
    other: Path | None = None,
    rollouts: Sequence[int] = (),
    setting: Mapping[str, Any],
    seed: int = 0,
    gpu_dollars: float | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> None:
    """Print how well a recorded run's steps are foretold, and what other sizes of step would take.

    Args:
        directory: the run.
        other: another run whose steps are foretold by this one, at its own setting.
        rollouts: sizes; empty: `SIZES`.
        setting: fields of `Setting` that differ from the run's.
        seed: of what is drawn.
        gpu_dollars: of a GPU for an hour.
        out: where a page of it goes.

    Raises:
        ConfigError: the run records too little, or ``out`` cannot be written.
        DamagedRun: a file of it cannot be read.
    """
    console = console or PlainConsole()
    if out is not None:
        check_file(out)
    # The name in charts is the directory's own, also where it was given as "." or through "..".
    run = read_run(RunDirectory.open(directory.resolve()))
    changed = {name: value for name, value in setting.items() if value is not None}
    asked = replace(run.setting, **changed)
    _print_speeds(console, run, fit(run.steps, run))
    foretold = foretell(run, seed)
    _print_foretold(console, foretold, "each by the speeds of the others")
    if other is not None:
        compared = read_run(RunDirectory.open(other.resolve()))
        if compared.setting.reward != run.setting.reward or compared.setting.rubric != run.setting.rubric:
            raise ConfigError(f"{other}: another kind of reward than {directory}: nothing of its judge is known there")
        _print_foretold(console, foretell_other(run, compared, seed), f"{compared.name}, by the speeds of {run.name}")
    scale, sizes = Scale(run, asked, seed), []
    for size in rollouts or SIZES:
        with console.status(f"simulating {size:,} rollouts"):
            sizes.append(scale.at(size))
    said = ", ".join(f"{name}={value:g}" for name, value in changed.items())
    _print_sizes(console, sizes, said, gpu_dollars)
    if out is not None:
        with console.status("simulating curves"):
            drawn = curves(scale, asked, min(rollouts or SIZES))
        write_page(out, run, foretold, sorted(sizes, key=lambda size: size.rollouts), drawn, said=said)
        console.print(f"wrote {out}")


def _print_speeds(console: Console, run: RecordedRun, speeds: Speeds) -> None:
    engine, learner = speeds.engine, speeds.learner
    turns = [len(rollout.turns) for step in run.steps for group in step.groups for rollout in group.rollouts]
    console.print(
        f"{run.name}: {len(run.steps)} steps (the first finished one is left out: it is cold), "
        f"{statistics.fmean(sum(len(g.rollouts) for g in step.groups) for step in run.steps):.0f} rollouts a step, "
        f"{statistics.fmean(turns):.1f} turns a rollout",
    )
    console.print(
        f"engine: {1000 * engine.seconds_per_turn:.0f} ms a turn, {1000 * engine.seconds_per_sampled_token:.2f} ms a "
        f"sampled token, {1000 * engine.seconds_per_read_token:.2f} ms a token read; a sequence beside it: "
        f"+{engine.slowdown_per_sequence:.1%}"
    )
    for phase, seconds in _phase_seconds(run).items():
        console.print(
            f"judge's {phase}: {statistics.fmean(seconds):.1f} s a call, {max(seconds):.1f} s the slowest of "
            f"{len(seconds)}"
        )
    console.print(
        f"learner: {1000 * learner.seconds_per_token:.2f} ms a token, {1000 * learner.seconds_per_sampled_token:.2f} "
        f"ms more if sampled, {learner.update_seconds:.1f} s an update; sync and checkpoint {speeds.tail:.1f} s"
    )


def _phase_seconds(run: RecordedRun) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for step in run.steps:
        for group in step.groups:
            for (phase, _), made in group.phases.items():
                asked = [call.seconds for calls in made.work.rounds for call in calls if call.requests]
                if asked:
                    found.setdefault(phase, []).extend(asked)
    return found


def _print_foretold(console: Console, foretold: Sequence[Foretold], how: str) -> None:
    console.print(f"\nrecorded steps, {how}")
    for each in foretold:
        console.print(
            f"step {each.step.number}: recorded {each.step.seconds:.1f} s, simulated {each.simulated.seconds:.1f} s "
            f"({each.error:+.1%}): {_path(each.simulated.path)}"
        )
    console.print(f"median error {median_error_of(foretold):.1%}")


def _path(path: Mapping[str, float]) -> str:
    longest = set(sorted(path, key=lambda part: -path[part])[:LONGEST_PARTS])
    parts = [f"{part} {seconds:,.1f}" for part, seconds in path.items() if part in longest]
    rest = sum(seconds for part, seconds in path.items() if part not in longest)
    return ", ".join([*parts, *([f"other {rest:,.1f}"] if len(path) > LONGEST_PARTS else [])])


def _print_sizes(console: Console, sizes: Sequence[Size], changed: str, gpu_dollars: float | None) -> None:
    console.print(
        f"\nother sizes, as the run was set{' but for ' + changed if changed else ''}; and with what judging and "
        "learning keep up with generation: slots, engines and learner workers as many a rollout as recorded, of the "
        f"judge's the least with which a step is at most {ALLOWANCE:.0%} longer",
    )
    for size in sizes:
        step, enough = size.as_set, size.enough
        stalls = "waits for nothing"
        if size.stalls is not None:
            stalls = f"stalls at {size.stalls}, {step.path[WAITS[size.stalls]] / step.seconds:.0%} of it"
        console.print(
            f"\n{size.rollouts:,} rollouts: a step of {step.seconds:,.0f} s {stalls}; "
            f"{_cost(size.dollars, size.gpu_hours, gpu_dollars)}"
        )
        console.print(f"  longest path: {_path(step.path)}")
        console.print(
            f"  keeps up with {_number(enough.engines, 'engine')}, {_number(enough.slots, 'slot')}, "
            f"{enough.learners:,.0f} x the learner workers, {_number(enough.judge_workers, 'judge worker')}"
            f"{_limits(enough)}: {size.unstalled.seconds:,.0f} s; "
            f"{_cost(size.dollars, size.enough_gpu_hours, gpu_dollars)}"
        )


def _limits(setting: Setting) -> str:
    if setting.requests_per_minute is None or setting.tokens_per_minute is None:
        return ""
    return f", {setting.requests_per_minute:,.0f} requests and {setting.tokens_per_minute:,.0f} tokens a minute"


def _number(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' if count != 1 else ''}"


def _cost(judge: float, gpu_hours: float, gpu_dollars: float | None) -> str:
    cost = f"judge ${judge:,.2f}, {gpu_hours:,.2f} GPU-hours"
    return cost if gpu_dollars is None else f"{cost}, together ${judge + gpu_hours * gpu_dollars:,.2f}"
