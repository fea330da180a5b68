"""What W&B and MLflow are sent. Their packages are extras: stand-ins with the signatures in use take their place."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.observability.trackers import open_trackers, scalars
from draco_ray.records import Evaluation, JudgedRollout
from draco_ray.runs.directory import RunDirectory
from draco_ray.training import held_out
from draco_ray.training.held_out import BeforeAfter, JudgedBeforeAfter
from draco_ray.training.progress import RunObserver, StepProgress, rollout_table
from tests.support.evaluations import a_result
from tests.support.small_run import small_run

LINE = {
    "step": 3,
    "reward": 0.5,
    "kl": None,
    "ended": {"finished": 5, "turn_limit": 1},
    "judge": {"score": {"dollars": 0.25}},
    "task_pass_rates": {"82e2fac_1": 0.5},
    "updates_skipped": ["norm is nan"],
}
SCALARS = {"step": 3.0, "reward": 0.5, "ended/finished": 5.0, "ended/turn_limit": 1.0, "judge/score/dollars": 0.25}


class WandB(ModuleType):
    """``init`` and the run it returns."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, Mapping[str, Any]]] = []
        self.finished = 0

    def init(self, *, name: str, dir: str, config: dict[str, Any], resume: str, id: str) -> Any:
        self.begun.append({"name": name, "dir": dir, "config": config, "resume": resume, "id": id})
        return self

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((step, data))

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
        return columns, data

    def finish(self) -> None:
        self.finished += 1


class MLflow(ModuleType):
    """The module's functions, which act on the run that is active in their thread where they are not told which."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.active = threading.local()
        self.begun: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.tables: dict[str, dict[str, list[Any]]] = {}
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.finished = 0

    def start_run(self, run_id: str | None = None, *, run_name: str | None = None) -> Any:
        self.begun.append({"run_id": run_id, "run_name": run_name})
        self.active.run = True
        return SimpleNamespace(info=SimpleNamespace(run_id="0123abcd"))

    def log_dict(self, dictionary: dict[str, Any], artifact_file: str, run_id: str | None = None) -> None:
        self._or_start(run_id)
        self.files.append(artifact_file)

    def log_metrics(self, metrics: dict[str, float], step: int, *, run_id: str | None = None) -> None:
        self._or_start(run_id)
        self.logged.append((step, metrics))

    def log_table(self, data: dict[str, list[Any]], artifact_file: str, run_id: str | None = None) -> None:
        self._or_start(run_id)
        self.tables[artifact_file] = data

    def end_run(self) -> None:
        self.finished += 1

    def _or_start(self, run_id: str | None) -> None:
        if run_id is None and not hasattr(self.active, "run"):
            self.start_run()


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


def test_what_another_thread_sends_to_mlflow_belongs_to_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    (tracker,) = open_trackers(("mlflow",), tmp_path, {}).values()

    def send() -> None:
        tracker.step(3, scalars(LINE))
        tracker.rollouts(3, {"task_id": ["82e2fac_1"]})

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    assert [begun["run_name"] for begun in package.begun] == [tmp_path.name]
    assert (package.logged, list(package.tables)) == ([(3, SCALARS)], ["rollouts/step00003.json"])


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


async def test_what_is_measured_between_steps_is_a_curve_in_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: Any) -> None: ...

    async def played(*_: Any, **__: Any) -> list[Evaluation]:
        return [a_result(task, 0, task == "a_1").evaluation for task in ("a_1", "a_2")]

    async def scored(*_: Any) -> list[JudgedRollout]:
        return [JudgedRollout(task_id="a_1", run=0, verdicts=(1, 1, -1, 1))]

    package = WandB()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(held_out, "evaluate_tasks", played)
    monkeypatch.setattr(JudgedBeforeAfter, "_task", scored)
    environment = SimpleNamespace(tasks=lambda split: ["a_1", "a_2"], task=lambda name: SimpleNamespace(task_id=name))
    for module in (held_out,):
        monkeypatch.setattr(module, "make_environment", lambda *_: environment)
    config = load_config("sandbox")
    run, console = RunDirectory.create(tmp_path / "run", ""), Console(quiet=True)
    # Not through its constructor, whose gauges are Ray's.
    observer = RunObserver.__new__(RunObserver)
    observer._trackers = open_trackers(("wandb",), run.path, {})
    workers, store = SimpleNamespace(stop=nothing), SimpleNamespace(evaluations=SimpleNamespace(remote=nothing))
    actors: Any = SimpleNamespace(
        evaluation_workers=lambda: workers, workers=workers, pool=lambda workers: None, store=store
    )
    about = (config, actors, run, StepProgress(console), console)
    await BeforeAfter(*about, observer.held_out).measure(4, 4)
    judged = JudgedBeforeAfter(
        *about, prompts=lambda tasks: dict.fromkeys(tasks, ()), static=(), tell=observer.held_out
    )
    await judged.measure(6, 6)
    assert package.logged == [(4, {"held_out/tgc": 0.5, "held_out/sgc": 0.0}), (6, {"held_out/judged_pass_rate": 0.75})]


def test_a_step_is_a_table_of_its_rollouts_with_their_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path / "run")
    table = rollout_table(run, 2)
    assert len(table["rollout"]) == run.table("trajectories", 2).num_rows > 0
    assert len({len(column) for column in table.values()}) == 1
    verdicts = run.table("verdicts", 2).to_pylist()
    titles = {(row["task_id"], row["criterion"]): row["title"] for row in run.table("criteria", 2).to_pylist()}
    for number, (task, rollout) in enumerate(zip(table["task_id"], table["rollout"], strict=True)):
        for verdict, name in ((1, "passed"), (-1, "failed"), (0, "not_applicable")):
            given = [
                titles[task, row["criterion"]]
                for row in verdicts
                if (row["task_id"], row["rollout"], row["verdict"]) == (task, rollout, verdict)
            ]
            assert table[name][number] == "\n".join(given)
    assert any(table["passed"])
    assert any(table["failed"])
    rewards = {(row["task_id"], row["rollout"]): row["reward"] for row in run.table("advantages", 2).to_pylist()}
    assert table["reward"] == [rewards[key] for key in zip(table["task_id"], table["rollout"], strict=True)]

    wandb, mlflow = WandB(), MLflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trackers = open_trackers(("wandb", "mlflow", "tensorboard"), run.path, {})
    assert [tracker.shows_tables for tracker in trackers.values()] == [True, True, False]
    for tracker in trackers.values():
        tracker.rollouts(2, table)
        tracker.close()
    ((step, sent),) = wandb.logged
    assert (step, sent["rollouts"][0], len(sent["rollouts"][1])) == (2, list(table), len(table["rollout"]))
    assert [row[0] for row in sent["rollouts"][1]] == table["task_id"]
    assert mlflow.tables == {"rollouts/step00002.json": table}


def test_a_step_whose_groups_were_dropped_is_a_table_too(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    for name in ("advantages", "verdicts", "criteria"):
        (run.tables / name / "step00002.parquet").unlink()
    table = rollout_table(run, 2)
    assert set(table["reward"]) == {None}
    assert set(table["failed"]) == {""}
    assert rollout_table(run, 9)["rollout"] == []
