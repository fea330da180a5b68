"""What W&B and MLflow are sent. Their packages are extras: stand-ins with the signatures in use take their place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draco_ray.errors import ConfigError
from draco_ray.observability.trackers import open_trackers, scalars

LINE = {
    "step": 3,
    "reward": 0.5,
    "kl": None,
    "ended": {"finished": 5, "turn_limit": 1},
    "judge": {"score": {"dollars": 0.25}},
    "updates_skipped": ["norm is nan"],
}
SCALARS = {"step": 3.0, "reward": 0.5, "ended/finished": 5.0, "ended/turn_limit": 1.0, "judge/score/dollars": 0.25}


class WandB(ModuleType):
    """``init`` and the run it returns."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.finished = 0

    def init(self, *, name: str, dir: str, config: dict[str, Any], resume: str, id: str) -> Any:
        self.begun.append({"name": name, "dir": dir, "config": config, "resume": resume, "id": id})
        return self

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((step, data))

    def finish(self) -> None:
        self.finished += 1


class MLflow(ModuleType):
    """The module's functions, which act on the run that is active."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.begun: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.finished = 0

    def start_run(self, run_id: str | None = None, *, run_name: str | None = None) -> Any:
        self.begun.append({"run_id": run_id, "run_name": run_name})
        return SimpleNamespace(info=SimpleNamespace(run_id="0123abcd"))

    def log_dict(self, dictionary: dict[str, Any], artifact_file: str) -> None:
        self.files.append(artifact_file)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def end_run(self) -> None:
        self.finished += 1


def tracked(name: str, package: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a run."""
    monkeypatch.setitem(sys.modules, name, package)
    run.mkdir(exist_ok=True)
    (tracker,) = open_trackers((name,), run, {"seed": 0}).values()
    tracker.step(3, scalars(LINE))
    tracker.close()


def test_scalars_are_the_numbers_by_their_place() -> None:
    assert scalars(LINE) == SCALARS


def test_wandb_goes_on_with_the_run_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, run = WandB(), tmp_path / "first"
    tracked("wandb", package, run, monkeypatch)
    (begun,) = package.begun
    assert begun == {"name": "first", "dir": str(run), "config": {"seed": 0}, "resume": "allow", "id": "first"}
    assert (package.logged, package.finished) == ([(3, SCALARS)], 1)


def test_mlflow_goes_on_with_the_run_that_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, run = MLflow(), tmp_path / "first"
    tracked("mlflow", package, run, monkeypatch)
    tracked("mlflow", package, run, monkeypatch)
    assert package.begun == [{"run_id": None, "run_name": "first"}, {"run_id": "0123abcd", "run_name": None}]
    assert package.files == ["config.yaml", "config.yaml"]
    assert (package.logged, package.finished) == ([(3, SCALARS), (3, SCALARS)], 2)


@pytest.mark.parametrize(("name", "variable"), [("wandb", "WANDB_API_KEY"), ("mlflow", "MLFLOW_TRACKING_URI")])
def test_a_tracker_that_refuses_is_one_line(
    name: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("no way in\nand much more")

    package = ModuleType(name)
    package.init = package.start_run = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, package)
    with pytest.raises(ConfigError, match=rf"^run.trackers: {name}: no way in; set {variable} or leave it out$"):
        open_trackers((name,), tmp_path, {})
