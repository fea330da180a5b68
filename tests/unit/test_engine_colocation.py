"""Engines and learner on the same GPUs: what is accepted, and who has the GPU when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.engine.actor import gpu_share
from draco_ray.errors import ConfigError
from draco_ray.learner.base import UpdateMetrics
from draco_ray.pipeline import Group
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.cluster import check_resources
from draco_ray.training.progress import StepProgress
from draco_ray.training.trainer import BatchScheduler, TaskOrder, Trainer, WeightSync, engines_asleep
from tests.unit.test_training_metrics import an_update

SHARED = (
    "engine.colocate=true",
    "engine.engines=8",
    "engine.gpus_per_engine=0.6",
    "learner.workers=8",
    "learner.gpus_per_worker=0.4",
)


SPLIT = (*SHARED, "engine.engines=4", "engine.tensor_parallel=2", "engine.gpus_per_engine=1.2")


@pytest.mark.parametrize("overrides", [SHARED, SPLIT, [*SPLIT, "engine.engines=1", "learner.workers=2"]])
def test_one_rank_of_an_engine_and_one_worker_on_each_gpu_are_accepted(overrides: Sequence[str]) -> None:
    config = load_config(overrides=overrides)
    assert gpu_share(config.engine) == 0.6
    cluster = {"GPU": float(config.learner.workers), "CPU": 1000.0, "judge": 16.0}
    check_resources(config, [cluster])


def test_the_gpus_of_an_engine_are_on_one_node() -> None:
    config = load_config(overrides=SPLIT)
    node = {"GPU": 1.0, "CPU": 1000.0, "judge": 16.0}
    with pytest.raises(ConfigError, match=r"^engine\.tensor_parallel=2, but no node .* more than 1 GPUs"):
        check_resources(config, [node] * 8)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("engine.gpus_per_engine=0",), "vLLM cannot sleep on the CPU"),
        (("learner.gpus_per_worker=0",), "vLLM cannot sleep on the CPU"),
        (
            ("engine.tensor_parallel=2",),
            "8 engines of 2 GPUs do not match 8 learner workers; expected engine.engines times engi",
        ),
        (("learner.workers=4",), "8 engines of 1 GPUs do not match 4 learner workers"),
        # Two engines fit one GPU; two workers do; the pair does not.
        (("engine.gpus_per_engine=0.5",), "but their shares are 0.5 and 0.4; expected more than half"),
        (("learner.gpus_per_worker=0.2",), "but their shares are 0.6 and 0.2"),
        (("learner.gpus_per_worker=0.5",), "but their shares are 0.6 and 0.5"),
        (
            ("engine.engines=4", "engine.tensor_parallel=2", "engine.gpus_per_engine=0.6"),
            "but their shares are 0.3 and .* engine.gpus_per_engine=1.2 and learner.gpus_per_worker=0.4",
        ),
        (("train.staleness=1",), "set train.staleness=0"),
    ],
)
def test_what_cannot_share_is_one_clear_line(changes: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config: engine\.colocate: .*{problem}") as e:
        load_config(overrides=[*SHARED, *changes])
    assert "\n" not in str(e.value)


def test_the_cpu_preset_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"^config: engine\.colocate: vLLM cannot sleep on the CPU"):
        load_config("sandbox", ["engine.colocate=true"])


async def test_the_canarys_pass_of_the_learner_comes_before_the_engines_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step on a GPU that is shared: the learner has it from the first group's samples to the canary's scores."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    events: list[str] = []
    seen: list[Any] = []

    async def accumulate(samples: str) -> None:
        events.append("learn")

    async def update() -> UpdateMetrics:
        return an_update(100, kl=0.0, grad_norm=1.0)

    async def probe(samples: str, sampled: int, most: int) -> tuple[list[int], list[bool]]:
        return [1, 2, 3], [False, True]

    async def logprobs(token_ids: list[int], *, adapter: bool = True) -> list[float]:
        events.append("score" if adapter else "score the base")
        return [0.0, -1.0, -2.0] if adapter else [0.0, -1.5, -2.5]

    async def nothing(*ignored: object) -> None:
        return None

    async def weights(version: int) -> Awaitable[None]:
        return nothing()

    async def canary(scorer: str, probes: Any, **ignored: object) -> Any:
        seen.extend(probes)
        return SimpleNamespace(gap_mean=0.0, live=True)

    async def run(group: Group) -> str:
        return "samples"

    config = load_config(overrides=[*SHARED, "train.prompts_per_step=1", "learner.minibatch_prompts=1"])
    console = Console(quiet=True)
    fleet: Any = Fleet(events)
    learner: Any = SimpleNamespace(
        accumulate=accumulate, step=update, token_logprobs=logprobs, weights=weights, checkpoint=nothing
    )
    store: Any = SimpleNamespace(
        spans=SimpleNamespace(remote=nothing),
        metrics=SimpleNamespace(remote=nothing),
        finish_step=SimpleNamespace(remote=nothing),
        recorded=None,
    )
    observer: Any = SimpleNamespace(group=lambda group: None, step=lambda line: None)
    pipeline: Any = SimpleNamespace(run=run)
    advantages = SimpleNamespace(probe=SimpleNamespace(remote=probe))
    trainer = Trainer(
        config,
        batches=BatchScheduler({"t_1": ()}, TaskOrder(["t_1"], 1, seed=0), pipeline, console),
        learner=learner,
        fleet=fleet,
        weights=WeightSync(learner, fleet, advantages, tolerance=1.0, moved=True, canary=canary),
        store=store,
        observer=observer,
        progress=StepProgress(console),
        run=RunDirectory.create(tmp_path / "run", ""),
        console=console,
    )
    await trainer.train(1, 1)
    assert events == ["sleep", "learn", "score", "score the base", "wake", "load"]
    assert seen == [([1, 2, 3], [False, True], [-1.0, -2.0], [-1.5, -2.5])]


class Fleet:
    """Notes when engines sleep and wake."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def sleep(self) -> None:
        self._events.append("sleep")

    async def wake(self) -> None:
        self._events.append("wake")

    async def load(self, update: object) -> None:
        self._events.append("load")

    async def prove(self, proof: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        return [await proof("engine")]


@pytest.mark.parametrize("colocate", [True, False])
async def test_the_learner_begins_when_the_step_is_generated_and_the_engines_sleep(colocate: bool) -> None:
    events: list[str] = []
    fleet: Any = Fleet(events)

    async def generate(name: str) -> None:
        await asyncio.sleep(0.01)
        events.append(name)

    work = [asyncio.create_task(generate(name)) for name in ("group 0", "group 1")]
    async with engines_asleep(fleet, colocate=colocate, after=work):
        events.append("learn")
    await asyncio.gather(*work)
    if colocate:
        assert events == ["group 0", "group 1", "sleep", "learn", "wake"]
    else:
        assert events == ["learn", "group 0", "group 1"]
