"""Experiment trackers: send each step's metrics to TensorBoard (default), W&B or MLflow.

TensorBoard event files are written with ``tensorboardX``, a dependency of Ray Train; viewing them needs the
``tensorboard`` package, which this project does not install. W&B and MLflow are extras, configured by their own
environment variables.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draco_ray.config.config_signature import write_private
from draco_ray.config.keys import flat
from draco_ray.errors import ConfigError, first_line


class Tracker(Protocol):
    """A destination of scalars."""

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of a step."""

    def close(self) -> None:
        """Write buffered data."""


PER_TASK = frozenset({"task_pass_rates"})
"""Metrics with one value per task, which are left out because each task would become a curve."""


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics line, nested keys joined by ``/``, without nulls, texts, lists and `PER_TASK`."""
    curves = {key: value for key, value in line.items() if key not in PER_TASK}
    return {name: float(value) for name, value in flat(curves, by="/") if isinstance(value, int | float)}


def open_trackers(names: Sequence[str], run: Path, config: Mapping[str, Any]) -> dict[str, Tracker]:
    """The trackers of ``run.trackers``, by name.

    Args:
        names: any of ``tensorboard``, ``wandb``, ``mlflow``.
        run: the run directory; its name is the tracked run's name.
        config: the resolved configuration, shown with the curves.
    Raises:
        ConfigError: a tracker's package is not installed, or it cannot be reached.
    """
    return {name: TRACKERS[name](run, config) for name in names}


class TensorBoard:
    """Event files in the run directory's ``tensorboard`` folder."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        package = _package("tensorboardX", "tensorboard")
        self._writer = package.SummaryWriter(str(run / "tensorboard"))

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker.step`."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class WandB:
    """Weights & Biases; the project is WANDB_PROJECT, the key WANDB_API_KEY."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._package = package = _package("wandb", "wandb")
        try:
            self._run = package.init(name=run.name, dir=str(run), config=dict(config), resume="allow", id=run.name)
        except Exception as error:
            raise ConfigError(
                f"run.trackers: wandb: {first_line(error)}; set WANDB_API_KEY, or leave wandb out of run.trackers"
            ) from None

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker.step`."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


class MLflow:
    """MLflow; the server is MLFLOW_TRACKING_URI, the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._package = _package("mlflow", "mlflow")
        try:
            # A resumed run continues its MLflow run.
            known = run / "mlflow_run_id"
            if known.exists():
                self._run_id = known.read_text(encoding="ascii")
                self._package.start_run(run_id=self._run_id)
            else:
                self._run_id = self._package.start_run(run_name=run.name).info.run_id
                write_private(known, self._run_id)
            self._package.log_dict(dict(config), "config.yaml", run_id=self._run_id)
        except Exception as error:
            raise ConfigError(
                f"run.trackers: mlflow: {first_line(error)}; set MLFLOW_TRACKING_URI, or leave mlflow out of "
                "run.trackers"
            ) from None

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker.step`."""
        # Pass the run's id, because MLflow's active run belongs to the thread that started it; other threads would
        # start a second run.
        self._package.log_metrics(dict(scalars), step=step, run_id=self._run_id)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._package.end_run()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"run.trackers names {extra}, but the package {module} is not installed: pip install 'draco-ray[{extra}]', "
            "or leave it out of run.trackers"
        ) from None
