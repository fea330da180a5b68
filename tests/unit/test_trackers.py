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
from draco_ray.training.held_out import HeldOutEvaluator, HeldOutJudgeEvaluator
from draco_ray.training.progress import RunObserver, StepProgress
from tests.support.evaluations import a_result

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

    def finish(self) -> None:
        self.finished += 1


class MLflow(ModuleType):
    """The module's functions, which act on the run that is active in their thread where they are not told which."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.active = threading.local()
        self.begun: list[dict[str, Any]] = []
        self.files: list[str] = []
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

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    assert [begun["run_name"] for begun in package.begun] == [tmp_path.name]
    assert package.logged == [(3, SCALARS)]


@pytest.mark.parametrize(("name", "variable"), [("wandb", "WANDB_API_KEY"), ("mlflow", "MLFLOW_TRACKING_URI")])
def test_a_tracker_that_refuses_is_one_line(
    name: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("no way in\nand much more")

    package = ModuleType(name)
    package.init = package.start_run = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, package)
    with pytest.raises(
        ConfigError, match=rf"^run.trackers: {name}: no way in; set {variable}, or leave {name} out of run.trackers$"
    ):
        open_trackers((name,), tmp_path, {})


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def step(self, step: int, scalars: Any) -> None:
            raise OSError("the server is away")

        def close(self) -> None: ...

    package = WandB()
    monkeypatch.setitem(sys.modules, "wandb", package)
    observer = RunObserver.__new__(RunObserver)
    observer._trackers = {"mlflow": Broken(), **open_trackers(("wandb",), tmp_path, {})}
    observer.held_out(1, {"tgc": 0.5})
    observer.held_out(2, {"tgc": 1.0})
    assert [*observer._trackers] == ["wandb"]
    assert package.logged == [(1, {"held_out/tgc": 0.5}), (2, {"held_out/tgc": 1.0})]


async def test_what_is_measured_between_steps_is_a_curve_in_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: Any) -> None: ...

    async def played(self: HeldOutEvaluator, pool: Any, step: int, index: int, task: Any, run: int) -> Evaluation:
        return a_result(task.task_id, run, task.task_id == "a_1").evaluation

    async def scored(*_: Any) -> list[JudgedRollout]:
        return [JudgedRollout(task_id="a_1", run=0, verdicts=(1, 1, -1, 1))]

    package = WandB()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(HeldOutEvaluator, "_rollout", played)
    monkeypatch.setattr(HeldOutJudgeEvaluator, "_task", scored)
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
    await HeldOutEvaluator(*about, observer.held_out).measure(4, 4)
    judged = HeldOutJudgeEvaluator(
        *about, prompts=lambda tasks: dict.fromkeys(tasks, ()), static=(), tell=observer.held_out
    )
    await judged.measure(6, 6)
    assert package.logged == [(4, {"held_out/tgc": 0.5, "held_out/sgc": 0.0}), (6, {"held_out/judged_pass_rate": 0.75})]
