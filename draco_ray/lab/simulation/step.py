"""A training step as discrete events.

What decides in a run decides here: `Pipeline` (what waits for what), `ElasticWorkers`, the limiter's
windows, `streamed_update`. Only what takes time is replaced (`draco_ray.lab.simulation.stand_ins`), by waits on a clock
that jumps (`draco_ray.lab.simulation.virtual_time`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.config.schema import AlgorithmConfig
from draco_ray.lab.simulation import virtual_time
from draco_ray.lab.simulation.critical import Entry, longest_path
from draco_ray.lab.simulation.stand_ins import Advantages, Book, Judges, Keep, Rollouts, SimulatedLearner, now, pause
from draco_ray.lab.simulation.work import WAITS, GroupWork, Setting, Speeds
from draco_ray.pipeline import Group, Pipeline
from draco_ray.training.streaming import streamed_update


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step that was played."""

    began: float
    seconds: float
    path: dict[str, float]
    """Part of the longest path -> seconds, in the order of `draco_ray.lab.simulation.work.PARTS`; adds up to
    ``seconds``."""
    generated: float
    """Seconds from the step's beginning until its last rollout ended; less than 0 where all had run ahead."""
    judged: float
    """The same of its last judge phase."""
    waited: dict[str, float]
    """Resource of `WAITS` -> seconds for which something waited for it, all of them together."""
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What became of a simulation; seconds are on its clock."""

    steps: tuple[SimulatedStep, ...]
    calls: tuple[tuple[float, float], ...]
    """Start and end of every phase at a judge worker."""
    requests: tuple[tuple[float, float], ...]
    """Second and tokens of every request to the judge."""


def simulate(steps: Sequence[Sequence[GroupWork]], speeds: Speeds, setting: Setting) -> Simulated:
    """Play training steps one after the other, as far as ``setting.staleness`` lets them.

    Args:
        steps: the groups of each, in the batch's order.
        speeds: of engines, learner and hand-overs.
        setting: how many there are of each thing.
    """
    return virtual_time.run(_play(steps, speeds, setting))


async def _play(steps: Sequence[Sequence[GroupWork]], speeds: Speeds, setting: Setting) -> Simulated:
    """The loop of `draco_ray.training.trainer.Trainer`."""
    book = Book()
    learner = SimulatedLearner(book, speeds, setting)
    pipeline = Pipeline(
        _algorithm(setting),
        Rollouts(book, speeds, setting),  # type: ignore[arg-type]
        Judges(book, speeds, setting),  # type: ignore[arg-type]
        Advantages(book),
        Keep(),
    )

    def begin(step: int) -> list[asyncio.Task[Any]]:
        work = []
        for index, each in enumerate(steps[step]):
            group = Group(step=step, index=index, task_id=f"{step}.{index}", prompt=())
            book.work[group.task_id] = each
            work.append(asyncio.create_task(pipeline.run(group)))
        return work

    begun: dict[int, list[asyncio.Task[Any]]] = {}
    played, windows = [], []
    for step in range(len(steps)):
        started = now()
        if step not in begun:
            await pause(speeds.head)
            begun[step] = begin(step)
        if step:
            # Not beside the first step: then the canary has not seen quiet engines yet.
            for ahead in range(step + 1, min(step + setting.staleness + 1, len(steps))):
                begun[ahead] = begun.get(ahead) or begin(ahead)
        if setting.colocate:
            await asyncio.wait(begun[step])
        learner.begin()
        await streamed_update(learner, begun.pop(step), setting.minibatch or len(steps[step]))
        await pause(speeds.tail)
        windows.append((started, now()))
    for step, (started, ended) in enumerate(windows):
        played.append(_step(book, step, started, ended, speeds))
    return Simulated(steps=tuple(played), calls=tuple(book.calls), requests=tuple(book.requests))


def _algorithm(setting: Setting) -> AlgorithmConfig:
    """What makes the pipeline ask for exactly what the record holds."""
    return AlgorithmConfig.model_validate(
        {
            "group_size": setting.group_size,
            "reward": setting.reward,
            "rubric": setting.rubric,
            "skip_useless_credit_calls": True,
            "skip_inert_credit_calls": True,
            "credit_surviving_only": True,
        }
    )


def _step(book: Book, step: int, started: float, ended: float, speeds: Speeds) -> SimulatedStep:
    prefix = f"step{step}/"
    entries = [
        entry
        for entry in book.entries
        if entry.group.startswith(prefix)
        # Of no group, but of this step.
        or ("/" not in entry.group and started <= entry.ready and entry.ended <= ended)
    ]
    parts = [part for entry in entries for part in entry.parts.items()]
    generated = max((entry.ended for entry in entries if entry.stage == "rollout"), default=started)
    phases = [entry.ended for entry in entries if WAITS["judge workers"] in entry.parts]
    return SimulatedStep(
        began=started,
        seconds=ended - started,
        path=longest_path(entries, started, ended, speeds.tail),
        generated=generated - started,
        judged=max(phases, default=generated) - started,
        waited={
            resource: math.fsum(seconds for part, seconds in parts if part == name) for resource, name in WAITS.items()
        },
        entries=tuple(entries),
    )
