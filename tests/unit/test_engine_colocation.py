"""Engines and learner on the same GPUs: what is accepted, and who has the GPU when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.training import trainer as trainer_module
from draco_ray.training.trainer import Trainer
from tests.unit.test_training_metrics import an_update

SHARED = (
    "engine.colocate=true",
    "engine.engines=8",
    "engine.gpus_per_engine=0.6",
    "learner.workers=8",
    "learner.gpus_per_worker=0.4",
)


def test_one_engine_and_one_worker_on_each_gpu_are_accepted() -> None:
    assert load_config(overrides=SHARED).engine.colocate


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("engine.gpus_per_engine=0",), "vLLM cannot sleep on the CPU"),
        (("learner.gpus_per_worker=0",), "vLLM cannot sleep on the CPU"),
        (("engine.tensor_parallel=2",), "8 engines of 2 GPUs and 8 learner workers; expected engine.tensor_parallel=1"),
        (("learner.workers=4",), "8 engines of 1 GPUs and 4 learner workers"),
        # Two engines fit one GPU; two workers do; the pair does not.
        (("engine.gpus_per_engine=0.5",), "shares of 0.5 GPU an engine and 0.4 a learner worker do not put one"),
        (("learner.gpus_per_worker=0.2",), "shares of 0.6 GPU an engine and 0.2 a learner worker"),
        (("learner.gpus_per_worker=0.5",), "shares of 0.6 GPU an engine and 0.5 a learner worker"),
        (("train.staleness=1",), "expected train.staleness=0"),
    ],
)
def test_what_cannot_share_is_one_clear_line(changes: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config: engine\.colocate: .*{problem}") as e:
        load_config(overrides=[*SHARED, *changes])
    assert "\n" not in str(e.value)


def test_the_cpu_preset_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"^config: engine\.colocate: vLLM cannot sleep on the CPU"):
        load_config("sandbox", ["engine.colocate=true"])


async def test_the_canarys_pass_of_the_learner_comes_before_the_engines_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def update(*ignored: object) -> SimpleNamespace:
        events.append("learn")
        return SimpleNamespace(fed=["samples"], updates=[an_update(100, kl=0.0, grad_norm=1.0)], busy=[])

    async def probe(samples: str, most: int) -> list[int]:
        return [1, 2, 3]

    async def logprobs(token_ids: list[int]) -> list[float]:
        events.append("score")
        return [0.0, -1.0, -2.0]

    monkeypatch.setattr(trainer_module, "streamed_update", update)
    trainer: Any = Trainer.__new__(Trainer)
    trainer._config = load_config(overrides=SHARED)
    trainer._actors = SimpleNamespace(fleet=Fleet(events))
    trainer._advantages = SimpleNamespace(probe=SimpleNamespace(remote=probe))
    trainer._learner = SimpleNamespace(token_logprobs=logprobs)
    _, found, _ = await trainer._learn(SimpleNamespace(work=[], groups=[]))
    assert events == ["sleep", "learn", "score", "wake"]
    assert found == ([1, 2, 3], [-1.0, -2.0])


class Fleet:
    """Notes when engines sleep and wake."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def sleep(self) -> None:
        self._events.append("sleep")

    async def wake(self) -> None:
        self._events.append("wake")


@pytest.mark.parametrize("colocate", [True, False])
async def test_the_learner_begins_when_the_step_is_generated_and_the_engines_sleep(colocate: bool) -> None:
    events: list[str] = []
    config = load_config(overrides=SHARED if colocate else ())
    trainer: Any = SimpleNamespace(_config=config, _actors=SimpleNamespace(fleet=Fleet(events)))

    async def generate(name: str) -> None:
        await asyncio.sleep(0.01)
        events.append(name)

    work = [asyncio.create_task(generate(name)) for name in ("group 0", "group 1")]
    async with Trainer._engines_asleep(trainer, work):
        events.append("learn")
    await asyncio.gather(*work)
    if colocate:
        assert events == ["group 0", "group 1", "sleep", "learn", "wake"]
    else:
        assert events == ["learn", "group 0", "group 1"]
