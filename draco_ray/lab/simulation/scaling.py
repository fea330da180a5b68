"""Predict the duration of a recorded run's steps, and of steps of other sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draco_ray.lab.rows import group_by
from draco_ray.lab.simulation.recorded import Group, RecordedRun, ResourceCounts, Step
from draco_ray.lab.simulation.speeds import fit_speeds
from draco_ray.lab.simulation.step import WAITS, SimulatedStep, Speeds, simulate

SIZES = (96, 1024, 16384)
"""Step sizes, in rollouts per step, that are simulated if none are given."""
NEGLIGIBLE = 0.05
"""A step's longest wait is not reported if it is at most this share of the step."""
DRAWS = 9
"""Number of simulations of a recorded step; their median is used."""
COUNTS, LIMITS = ("slots", "engines", "learners", "judge_workers"), ("requests_per_minute", "tokens_per_minute")
"""Fields of `ResourceCounts` that grow with a step."""
GPUS = (8, 16, 32, 64, 128, 256, 512)
"""Numbers of GPUs at which a throughput curve is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSize:
    """A simulated step of one size."""

    rollouts: int
    setting: ResourceCounts
    step: SimulatedStep
    dollars: float
    """Dollars of the step's judge calls."""
    gpu_hours: float
    """GPU-hours of engines and learner."""


def predict(run: RecordedRun, seed: int, other: RecordedRun | None = None) -> list[tuple[Step, SimulatedStep]]:
    """Simulate recorded steps with speeds that are fitted to other steps.

    Without ``other``, each step of ``run`` is simulated with the speeds of the run's other steps. With ``other``, each
    step of ``other`` is simulated with the speeds of all steps of ``run``. Judge phases (duration, requests, tokens)
    are drawn at random from the steps that give the speeds; everything else is as recorded in the simulated step.

    Returns: each recorded step with the median of `DRAWS` simulations.
    """
    found, predicted = [], other or run
    for step in predicted.steps:
        known = [each for each in run.steps if each is not step]
        speeds, random = fit_speeds(known, run), np.random.default_rng((seed, step.number))
        recorded = (item for each in known for group in each.groups for item in group.phases.items())
        drawn = group_by(recorded, lambda item: (item[0][0], item[1].requests > 0))
        played = []
        for _ in range(DRAWS):
            groups = []
            for group in step.groups:
                phases = {}
                for key, own in group.phases.items():
                    alike = drawn[key[0], own.requests > 0] or [(key, own)]
                    _, phases[key] = alike[random.integers(len(alike))]
                groups.append(replace(group, phases=phases))
            played.append(simulate_step(groups, speeds, predicted.setting))
        found.append((step, sorted(played, key=lambda each: each.seconds)[DRAWS // 2]))
    return found


def relative_error(step: Step, simulated: SimulatedStep) -> float:
    """Relative error: simulated / recorded seconds - 1."""
    return simulated.seconds / step.seconds - 1


def simulate_step(groups: Sequence[Group], speeds: Speeds, setting: ResourceCounts) -> SimulatedStep:
    """Simulate a step; with staleness, the median step of several successive ones."""
    steps = simulate([groups] * (6 if setting.staleness else 1), speeds, setting)
    alike = sorted(steps[2:-1] or steps, key=lambda step: step.seconds)
    return alike[len(alike) // 2]


def simulate_size(run: RecordedRun, setting: ResourceCounts, speeds: Speeds, rollouts: int, seed: int) -> SimulatedSize:
    """Simulate a step of at least ``rollouts`` rollouts, in whole groups drawn from all recorded steps.

    Args:
        run: source of the groups.
        setting: numbers of resources.
        speeds: speeds of the run (`fit_speeds`).
        rollouts: size of the step.
        seed: random seed of the draws.
    """
    groups, drawn = _drawn(run, setting, rollouts, seed)
    step = simulate_step(groups, speeds, drawn)
    learner = 0 if setting.colocate else setting.learners * run.learner_gpus
    return SimulatedSize(
        rollouts=len(groups) * setting.group_size,
        setting=setting,
        step=step,
        dollars=sum(phase.dollars for group in groups for phase in group.phases.values()),
        gpu_hours=(setting.engines * run.gpus_per_engine + learner) * step.seconds / 3600,
    )


def _drawn(run: RecordedRun, setting: ResourceCounts, rollouts: int, seed: int) -> tuple[list[Group], ResourceCounts]:
    """Draw groups of the recorded steps at random for one step of at least ``rollouts`` rollouts.

    Returns: the groups, and the setting with the minibatch that keeps the mean number of updates of a recorded step.
    """
    pool = [group for step in run.steps for group in step.groups]
    count = math.ceil(rollouts / setting.group_size)
    draws = np.random.default_rng((seed, rollouts)).integers(len(pool), size=count)
    minibatch = math.ceil(count / max(1, round(statistics.fmean(step.updates for step in run.steps))))
    return [pool[index] for index in draws], replace(setting, minibatch=minibatch)


def scale_resources(run: RecordedRun, rollouts: int) -> ResourceCounts:
    """The run's resources, scaled in proportion to the groups per step; slots that the run never used do not count."""
    recorded, own_groups = run.setting, statistics.fmean(len(step.groups) for step in run.steps)
    larger = math.ceil(rollouts / recorded.group_size) / own_groups
    used = replace(recorded, slots=min(recorded.slots, round(own_groups * recorded.group_size)))
    return _scaled(used, larger)


def scale_to_gpus(run: RecordedRun, setting: ResourceCounts, gpus: int) -> ResourceCounts:
    """The setting on ``gpus`` GPUs, split over engines and learner as in the run.

    An engine or a learner on CPUs counts as one GPU. Slots, the total number of sequences, judge workers and limits
    scale with the number of engines.
    """
    per_engine, learner = run.gpus_per_engine or 1.0, run.learner_gpus or 1.0
    larger = gpus / (setting.engines * per_engine + learner)
    engines = max(1, min(round(setting.engines * larger), math.floor((gpus - learner) / per_engine)))
    learners = (gpus - engines * per_engine) / learner
    return replace(_scaled(setting, engines / setting.engines), engines=engines, learners=learners)


def _scaled(setting: ResourceCounts, factor: float) -> ResourceCounts:
    """A copy of the setting in which the numbers of resources (rounded up) and limits are multiplied by ``factor``."""
    counts = {name: math.ceil(factor * getattr(setting, name)) for name in COUNTS}
    limits = {name: factor * limit for name in LIMITS if (limit := getattr(setting, name))}
    return replace(setting, **counts, **limits)


def throughput(run: RecordedRun, setting: ResourceCounts, speeds: Speeds, rollouts: int, seed: int) -> float:
    """Rollouts per hour in successive steps of at least ``rollouts`` rollouts, drawn as in `simulate_size`."""
    (groups, drawn), ahead = _drawn(run, setting, rollouts, seed), setting.staleness
    # Leave out the first steps, for which no work was done ahead, and the last ones, which no later step overlaps.
    played = simulate([groups] * (2 * ahead + 4), speeds, drawn)[ahead + 1 : ahead + 4]
    return 3600 * len(groups) * setting.group_size / statistics.fmean(step.seconds for step in played)


def find_bottleneck(step: SimulatedStep) -> str | None:
    """The resource for which the longest path waits most; None if this wait is `NEGLIGIBLE`."""
    resource = max(WAITS, key=lambda each: step.path.get(WAITS[each], 0.0))
    return resource if step.path.get(WAITS[resource], 0.0) > NEGLIGIBLE * step.seconds else None
