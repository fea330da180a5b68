"""Which checkpoints of a run stay: the last ones, every so many steps, and the best."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from draco_ray.config.schema import TrainConfig
from draco_ray.runs.directory import RunDirectory

log = logging.getLogger(__name__)


def checkpoints_to_keep(steps: Iterable[int], metrics: Iterable[Mapping[str, Any]], config: TrainConfig) -> set[int]:
    """Which of the checkpoints after ``steps`` stay; all of them where ``train.keep_last`` is null.

    Args:
        steps: that have a checkpoint.
        metrics: of the finished steps. A step's rollouts measure the policy that played them: that of the step before,
            or with ``train.staleness`` of the one before that.
        config: ``keep_last``, ``keep_every``, ``keep_best``.
    """
    present = sorted(steps)
    if config.keep_last is None:
        return set(present)
    keep = set(present[-config.keep_last :])
    if config.keep_every is not None:
        keep |= {step for step in present if step % config.keep_every == 0}
    rates = {line["step"] - 1 - config.staleness: _rate(line) for line in metrics}
    measured = [step for step in present if rates.get(step) is not None]
    # Of equals the later one.
    best = sorted(measured, key=lambda step: (rates[step], step), reverse=True)
    return keep | set(best[: config.keep_best])


def _rate(line: Mapping[str, Any]) -> float | None:
    """A step's pass rate; its mean reward where no judge gives one."""
    rate = line.get("pass_rate")
    return line.get("reward") if rate is None else rate


def drop_checkpoints(run: RunDirectory, config: TrainConfig) -> None:
    """Remove the checkpoints of a run that do not stay, each at once or not at all."""
    if config.keep_last is None:
        return
    present = run.checkpoint_steps()
    for step in set(present) - checkpoints_to_keep(present, run.metrics(), config):
        folder = run.checkpoint(step)
        dropped = folder.with_name(f".{folder.name}.dropped")
        shutil.rmtree(dropped, ignore_errors=True)
        try:
            folder.rename(dropped)
        except OSError as error:
            log.warning("checkpoint %s cannot be removed: %s", folder, error.strerror)
            continue
        shutil.rmtree(dropped, ignore_errors=True)
