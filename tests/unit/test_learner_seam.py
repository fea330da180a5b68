"""A learner from a user's file trains through the real loop, and its updates reach whoever samples.

The page docs/extending/learner.md is what is run. Model, learner, loop, canary and run store are the real ones; the
engine is a second copy of the model that takes the adapter, in the place of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from rich.console import Console

from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import DracoConfig, ModelConfig
from draco_ray.engine.canary import CanaryReading, Probe
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.errors import CanaryFailed, ConfigError, EngineError, RunStopped
from draco_ray.learner.base import LEARNERS, find_learner
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.ray_lora import RayLoraLearner
from draco_ray.pipeline import Group
from draco_ray.records import Adapter, TrainingSample
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.training.advantage_computer import AdvantageComputerActor
from draco_ray.training.progress import StepProgress
from draco_ray.training.resume import rewind
from draco_ray.training.trainer import BatchScheduler, TaskOrder, Trainer, WeightSync
from tests.support.killed import SimulatedKill
from tests.support.tiny_model import build_tiny_model

PAGE = Path("docs/extending/learner.md")
TASKS = ["t_1", "t_2"]


class Engine:
    """In the place of vLLM: the same base model, and the adapter it was given last."""

    name = "engine-0"

    def __init__(self, config: DracoConfig) -> None:
        self._model = LoraLearner(config.model, config.learner, seed=9)
        self.loaded: list[int] = []
        self.deaf = False
        self.rounding = 0.0
        """Of its log-probs, nats: other for each token, and with and without the adapter."""

    async def load(self, update: Awaitable[Adapter]) -> None:
        """A fleet of one."""
        adapter = await update
        self.loaded.append(adapter.version)
        if not self.deaf:
            tensors = {name: torch.from_numpy(np.array(array)) for name, array in adapter.tensors.items()}
            self._model.policy.load_adapter(tensors, "the learner")

    async def prove(self, proof: Callable[[Engine], Awaitable[CanaryReading]]) -> list[CanaryReading]:
        """A fleet of one."""
        return [await proof(self)]

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """Of all tokens but the first."""
        exact = self._model.token_logprobs(token_ids, adapter=adapter)[1:]
        return list(exact + self.rounding * np.random.default_rng([*token_ids, adapter]).standard_normal(len(exact)))


def samples(task: int) -> list[TrainingSample]:
    random = np.random.default_rng(task)
    mask_T = np.arange(24) > 6
    return [
        TrainingSample(
            group=f"step1/t_{task}",
            task_id=f"t_{task}",
            rollout=rollout,
            policy_version=0,
            token_ids_T=random.integers(0, 400, 24),
            loss_mask_T=mask_T,
            advantage_T=np.where(mask_T, 1.0 - 2.0 * rollout, 0.0).astype(np.float32),
            logprob_T=np.where(mask_T, -6.0, 0.0).astype(np.float32),
            prompt_length=4,
        )
        for rollout in range(2)
    ]


class Reference:
    """In the place of a reference into Ray's object store; made in threads without an event loop as well."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.value


def actor(**methods: Callable[..., Any]) -> Any:
    """An actor's handle, whose methods run here."""

    def remote(method: Callable[..., Any]) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Reference(method(*arguments)))

    return SimpleNamespace(**{name: remote(method) for name, method in methods.items()})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    torch.set_num_threads(1)
    return ModelConfig(path=str(build_tiny_model(tmp_path_factory.mktemp("model"))), dtype="float32")


@pytest.fixture
def config(model: ModelConfig, tmp_path: Path) -> DracoConfig:
    """Two steps of two groups, each in two minibatches, with the learner of the page."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "local_learner.py").write_text(code)
    return load_config(
        "sandbox",
        [
            f"learner.use={tmp_path / 'local_learner.py'}:LocalLearner",
            f"model.path={model.path}",
            "model.dtype=float32",
            "learner.options={device: cpu}",
            "learner.gradient_checkpointing=false",
            "learner.learning_rate=0.01",
            "learner.minibatch_prompts=1",
            "train.prompts_per_step=2",
        ],
    )


async def trainer_of(config: DracoConfig, engine: Engine, run: RunDirectory) -> Trainer:
    learner = find_learner(config.learner.use)(
        config.model, config.learner, run=run.path, seed=config.seed, resume_from=None
    )
    await learner.start()
    store = RunStoreActor(run.path)
    handle = actor(spans=store.spans, metrics=store.metrics, finish_step=store.finish_step)
    computer: Any = AdvantageComputerActor(config.algorithm)
    advantages = actor(probe=lambda group, sampled, most: computer.probe(group.value, sampled, most))

    async def play(group: Group) -> Reference:
        return Reference(samples(int(group.task_id[-1])))

    console = Console(quiet=True)
    fleet: Any = engine
    pipeline: Any = SimpleNamespace(run=play)
    observer: Any = SimpleNamespace(group=lambda group: None, step=lambda line: None)
    return Trainer(
        config,
        batches=BatchScheduler(dict.fromkeys(TASKS, ()), TaskOrder(TASKS, 2, seed=0), pipeline, console),
        learner=learner,
        fleet=fleet,
        weights=WeightSync(learner, fleet, advantages, tolerance=config.engine.canary_tolerance, moved=False),
        store=handle,
        observer=observer,
        progress=StepProgress(console),
        run=run,
        console=console,
    )


@pytest.fixture(autouse=True)
def object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects stay in this process."""
    monkeypatch.setattr(ray, "put", Reference)


async def test_a_learner_from_a_file_trains_two_steps_and_the_engine_follows(
    config: DracoConfig, tmp_path: Path
) -> None:
    engine = Engine(config)
    run = RunDirectory.create(tmp_path / "run", "")
    trainer = await trainer_of(config, engine, run)
    seen: list[tuple[int, int]] = []

    async def between(step: int, last: int) -> None:
        seen.append((step, len(run.metrics())))

    trainer._between = between  # type: ignore[method-assign]
    await trainer.train(1, 2)
    # Whoever looks at a run between two steps finds the step that is done.
    assert seen == [(1, 1), (2, 2)]
    first, second = run.metrics()
    assert (first["step"], second["step"]) == (1, 2)
    for line in (first, second):
        assert line["updates"] == 2
        assert line["grad_norm"] > 0
        assert line["canary_gap"] < 1e-4
        assert line["dual_clip_fraction"] is not None
    assert engine.loaded == [1, 2]
    assert run.checkpoint_steps() == [1, 2]


async def test_a_driver_killed_behind_the_checkpoint_keeps_what_the_step_has_taught(
    config: DracoConfig, tmp_path: Path
) -> None:
    """The checkpoint makes the step one that is done: its metrics and spans are never written again."""
    run = RunDirectory.create(tmp_path / "run", dump_config(config))
    trainer = await trainer_of(config, Engine(config), run)

    finish = trainer.store.finish_step.remote

    def killed(step: int, metrics: Any) -> Any:
        if step == 2:
            raise SimulatedKill
        return finish(step, metrics)

    trainer.store.finish_step = SimpleNamespace(remote=killed)
    with pytest.raises(SimulatedKill):
        await trainer.train(1, 2)
    assert run.checkpoint_steps() == [1, 2]
    assert rewind(run, reuse=True).step == 2
    for step, line in enumerate(run.metrics(), 1):
        assert (line["step"], line["updates"]) == (step, 2)
        assert line["seconds"] > 0
        assert {"learning", "sync", "checkpoint"} <= set(run.table("spans", step).column("stage").to_pylist())


async def test_a_run_that_a_drift_stops_between_two_checkpoints_goes_on_behind_that_step(
    config: DracoConfig, tmp_path: Path
) -> None:
    """Otherwise the step would be repeated, and stop the run again, for ever."""
    config = config.updated(train={"checkpoint_every": 5}, watch={"drift": "stop"})
    run = RunDirectory.create(tmp_path / "run", dump_config(config))
    trainer = await trainer_of(config, Engine(config), run)
    finish = trainer.store.finish_step.remote

    def drifted(step: int, metrics: dict[str, Any]) -> Any:
        metrics |= {"fall_significant": 1, "fall": 0.4, "fall_low": 0.3, "fall_high": 0.5}
        return finish(step, metrics)

    trainer.store.finish_step = SimpleNamespace(remote=drifted)
    with pytest.raises(RunStopped, match=r"watch\.drift=stop"):
        await trainer.train(1, 3)
    assert rewind(run, reuse=True).step == 1


async def test_an_engine_that_rounds_by_more_than_the_tolerance_is_no_reason_to_stop(
    config: DracoConfig, tmp_path: Path
) -> None:
    engine = Engine(config)
    engine.rounding = 0.1
    run = RunDirectory.create(tmp_path / "run", "")
    await (await trainer_of(config, engine, run)).train(1, 2)
    assert engine.loaded == [1, 2]
    assert min(line["canary_gap"] for line in run.metrics()) > config.engine.canary_tolerance


async def test_the_first_steps_gap_is_what_later_ones_are_held_against(tmp_path: Path) -> None:
    held: list[float | None] = []
    gaps = iter([0.06, 0.1, 0.07])

    async def canary(*ignored: Any, first: float | None, **also: Any) -> Any:
        held.append(first)
        return SimpleNamespace(gap_mean=next(gaps), live=True)

    async def weights(version: int) -> Any:
        return Reference(Reference(None))

    engine: Any = SimpleNamespace(load=weights, prove=lambda proof: _one(proof))
    learner: Any = SimpleNamespace(weights=weights)
    for first in (None, 0.04):
        sync = WeightSync(learner, engine, None, tolerance=0.05, moved=True, first_gap=first, canary=canary)
        probe = Probe([1, 2], np.ones(1, dtype=bool), np.zeros(1), np.zeros(1))
        for version in (1, 2) if first is None else (3,):
            await sync.sync(version, probe, updated=True, quiet=True)
    assert held == [None, 0.06, 0.04]


async def _one(proof: Any) -> list[Any]:
    return [await proof("engine")]


@pytest.mark.parametrize("rounding", [0.0, 0.01])
async def test_an_engine_that_ignores_the_update_is_found_out(
    config: DracoConfig, tmp_path: Path, rounding: float
) -> None:
    engine = Engine(config)
    engine.deaf, engine.rounding = True, rounding
    trainer = await trainer_of(config, engine, RunDirectory.create(tmp_path / "run", ""))
    with pytest.raises(CanaryFailed):
        await trainer.train(1, 2)


def test_what_ships_has_every_method_and_refuses_options(
    model: ModelConfig, config: DracoConfig, tmp_path: Path
) -> None:
    assert find_learner("ray_lora") is RayLoraLearner
    assert set(LEARNERS) == {"ray_lora"}
    with pytest.raises(ConfigError, match="learner.options: ray_lora has no options, found device"):
        RayLoraLearner(model, config.learner, run=tmp_path, seed=0)


@pytest.mark.parametrize(
    ("code", "name", "problem"),
    [
        ("class Half:\n    def start(self): ...\n    def step(self): ...\n", "Half", "methods missing: accumulate"),
        ("Nothing = 3\n", "Nothing", "is not a learner; expected a class with the methods of"),
        ("", "Missing", "has no 'Missing'"),
        ("import no_such_package\n", "Any", "cannot be imported"),
    ],
)
def test_what_is_no_learner_is_one_line(tmp_path: Path, code: str, name: str, problem: str) -> None:
    file = tmp_path / "part.py"
    file.write_text(code)
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        find_learner(f"{file}:{name}")
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"learner\.use='ray_lra': unknown \(did you mean 'ray_lora'\?\)"):
        find_learner("ray_lra")


async def test_an_engine_says_which_updates_it_takes() -> None:
    engine: Any = SimpleNamespace(name="engine-0")
    with pytest.raises(EngineError, match="cannot take a weight update of type dict; expected an Adapter"):
        await VllmEngine.load(engine, {})  # type: ignore[arg-type]
