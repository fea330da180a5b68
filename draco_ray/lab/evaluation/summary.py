"""One row of the paper's result table: TGC and SGC at p^1 .. p^k, turns; from one or several training seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from draco_ray.config import plain_yaml
from draco_ray.lab.evaluation import measures
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.evaluation.measures import Measure
from draco_ray.lab.evaluation.setting import compared_measures
from draco_ray.records import Evaluation
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations
from draco_ray.sandbox.world.build import MANIFEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a policy fares on one split. Rates are shares in [0, 1], index 0 is p^1."""

    tgc: tuple[Interval, ...]
    sgc: tuple[Interval, ...]
    turns: float | None
    """Mean agent turns per rollout that was played; None where none was."""
    tasks: int
    rollouts: int
    """All seeds together, lost ones included."""
    lost: int
    """Rollouts that crashed every time; they count as failures, and intervals allow for them."""
    measures: Mapping[str, Measure]
    """What summaries are compared in, by name."""


def summarise(seeds: measures.Seeds, runs: int, most: int = 3) -> Summary:
    """Average over measurements and training seeds, with intervals over scenarios and seeds.

    Args:
        seeds: the evaluated rollouts of each measurement of each training seed, ``runs`` per task.
        runs: n of pass^k.
        most: the largest k, if there are as many runs.

    Raises:
        ValueError: nothing was evaluated, or the seeds differ in their tasks.
    """
    ks = range(1, min(runs, most) + 1)
    tgc = tuple(measures.rate(seeds, runs, k, scenarios=True).interval() for k in ks)
    everything = [evaluation for seed in seeds for measurement in seed for evaluation in measurement]
    return Summary(
        tgc=tgc,
        sgc=tuple(measures.rate(seeds, runs, k, whole=True).interval() for k in ks),
        turns=fmean(played) if (played := measures.turns_played(seeds)) else None,
        tasks=len({evaluation.task_id for evaluation in everything}),
        rollouts=len(everything),
        lost=measures.lost_rollouts(seeds),
        measures=compared_measures(seeds, runs),
    )


def differences(one: Summary, other: Summary) -> dict[str, tuple[Interval, float]]:
    """``one`` minus ``other`` in each measure, paired by task: the interval and the two-sided p-value.

    Raises:
        ValueError: they are not of the same tasks.
    """
    return {
        name: measures.difference(measure, other.measures[name])
        for name, measure in one.measures.items()
        if name in other.measures
    }


def gain_of(run: RunDirectory) -> str | None:
    """How sure a run's gain is, in a line; None where it was not evaluated before and after on the same tasks."""
    found = read_evaluations(run)
    (first, split), (last, _) = min(found, default=(0, "")), max(found, default=(0, ""))
    if first == last or (last, split) not in found:
        return None
    before, after = found[first, split], found[last, split]
    if {(each.task_id, each.run) for each in before} != {(each.task_id, each.run) for each in after}:
        # The run was continued with other tasks or numbers of runs: nothing can be paired.
        return None
    root = Path(plain_yaml.load(run.config_text())["data"]["root"])
    world = " of a generated world" if (root / MANIFEST).is_file() else ""
    return f"on {split}{world}, {before_and_after(before, after, max(each.run for each in before) + 1)}"


def before_and_after(before: Sequence[Evaluation], after: Sequence[Evaluation], runs: int) -> str:
    """How sure ``draco train``'s gain is: 95 % intervals of TGC before and after and of their difference, as a line."""
    first, last = summarise([[before]], runs), summarise([[after]], runs)
    gain, _ = differences(last, first)["TGC p^1"]
    shown = [_percents(first.tgc[0]), _percents(last.tgc[0]), _percents(gain, "+")]
    if None in shown:
        return "one scenario only: no interval"
    clusters = last.measures["TGC p^1"].at_worst.clusters
    line = (
        f"95 % intervals over {clusters} scenarios: before {shown[0]}, after {shown[1]}, difference {shown[2]} points"
    )
    if lost := first.lost + last.lost:
        line += (
            f"; {lost} of {first.rollouts + last.rollouts} rollouts were lost: failures, and the intervals allow for it"
        )
    return f"{line}; one training seed"


def _percents(interval: Interval, sign: str = "") -> str | None:
    if not math.isfinite(interval.low):
        return None
    return f"[{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"
