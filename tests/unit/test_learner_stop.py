"""The end of a learner whose processes do not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, TaskCancelledError

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.learner import ray_lora
from draco_ray.learner.ray_lora import RayLoraLearner


async def test_a_stopped_command_log_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = asyncio.Event()
    fit: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(*ignored: Any) -> None:
        await killed.wait()
        raise RayActorError

    def cancel(task: asyncio.Future[None], *, force: bool) -> None:
        if force:
            task.set_exception(TaskCancelledError())

    monkeypatch.setattr(ray_lora, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(ray, "kill", lambda log: killed.set())
    monkeypatch.setattr(ray, "cancel", cancel)
    learner = RayLoraLearner(ModelConfig(path="model"), LearnerConfig(), run=tmp_path, seed=0)
    learner._log = SimpleNamespace(stop=SimpleNamespace(remote=answer), fail=SimpleNamespace(remote=answer))
    learner._fit, learner._watch = fit, asyncio.create_task(learner._watch_fit())
    async with asyncio.timeout(600):
        await learner.stop(timeout=0.01)
    assert killed.is_set()
    assert learner._watch.done()
