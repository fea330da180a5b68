"""Experiment trackers: every finished step's metrics as scalars for TensorBoard (default), W&B or MLflow, to which its
rollouts with their verdicts go as a table as well.

TensorBoard event files come from ``tensorboardX``, which Ray Train brings along; looking at them needs the
``tensorboard`` package, which this project does not install. W&B and MLflow are extras and read their address and key
from their own environment variables.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draco_ray.errors import ConfigError

Table = Mapping[str, Sequence[Any]]
"""Columns by name, all of one length."""


class Tracker(Protocol):
    """Where scalars and tables go."""

    shows_tables: bool
    """Whether `rollouts` does anything."""

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep the scalars of one training step."""

    def rollouts(self, step: int, table: Table) -> None:
        """Keep the rollouts of one training step, a row each."""

    def close(self) -> None:
        """Write what is buffered."""


PER_TASK = frozenset({"task_pass_rates"})
"""Mappings that would make a curve of every task."""


def scalars(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a metrics line, nested keys joined by ``/``; nulls, texts, lists and `PER_TASK` are left out."""
    flat: dict[str, float] = {}
    for key, value in line.items():
        name = f"{prefix}{key}"
        if key in PER_TASK:
            continue
        if isinstance(value, Mapping):
            flat |= scalars(value, f"{name}/")
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat


def open_trackers(names: Sequence[str], run: Path, config: Mapping[str, Any]) -> dict[str, Tracker]:
    """The trackers of ``run.trackers``, by name.

    Args:
        names: of ``tensorboard``, ``wandb``, ``mlflow``.
        run: the run directory; its name is the tracked run's name.
        config: the resolved configuration, shown beside the curves.
    Raises:
        ConfigError: a tracker's package is not installed, or it cannot be reached.
    """
    return {name: TRACKERS[name](run, config) for name in names}


class TensorBoard:
    """Event files in the run directory's ``tensorboard`` folder, which hold no tables."""

    shows_tables = False

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        package = _package("tensorboardX", "tensorboard")
        self._writer = package.SummaryWriter(str(run / "tensorboard"))

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker.step`."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rollouts(self, step: int, table: Table) -> None:
        """See `Tracker.rollouts`."""

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class WandB:
    """Weights & Biases; the project is WANDB_PROJECT, the key WANDB_API_KEY."""

    shows_tables = True

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._package = package = _package("wandb", "wandb")
        try:
            self._run = package.init(name=run.name, dir=str(run), config=dict(config), resume="allow", id=run.name)
        except Exception as error:
            raise ConfigError(f"run.trackers: wandb: {_first_line(error)}; set WANDB_API_KEY or leave it out") from None

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker.step`."""
        self._run.log(dict(scalars), step=step)

    def rollouts(self, step: int, table: Table) -> None:
        """See `Tracker.rollouts`."""
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        self._run.log({"rollouts": self._package.Table(columns=list(table), data=rows)}, step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


class MLflow:
    """MLflow; the server is MLFLOW_TRACKING_URI, the experiment MLFLOW_EXPERIMENT_NAME."""

    shows_tables = True

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._package = _package("mlflow", "mlflow")
        try:
            # A resumed run goes on in the same one.
            known = run / "mlflow_run_id"
            if known.exists():
                self._run_id = known.read_text(encoding="ascii")
                self._package.start_run(run_id=self._run_id)
            else:
                self._run_id = self._package.start_run(run_name=run.name).info.run_id
                known.write_text(self._run_id, encoding="ascii")
            self._package.log_dict(dict(config), "config.yaml", run_id=self._run_id)
        except Exception as error:
            raise ConfigError(
                f"run.trackers: mlflow: {_first_line(error)}; set MLFLOW_TRACKING_URI or leave it out"
            ) from None

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker.step`."""
        # By its id: a run is active in the thread that started it, and in another one MLflow would start a second run.
        self._package.log_metrics(dict(scalars), step=step, run_id=self._run_id)

    def rollouts(self, step: int, table: Table) -> None:
        """See `Tracker.rollouts`."""
        columns = {name: list(values) for name, values in table.items()}
        self._package.log_table(columns, f"rollouts/step{step:05d}.json", run_id=self._run_id)

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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
