"""Groups that wait while the learner's workers are busy are sent as one command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import LearnerError
from draco_ray.learner.command_log import Command
from draco_ray.learner.ray_lora import RayLoraLearner
from tests.unit.test_training_metrics import an_update


class Log:
    """A command log whose commands finish when they are told to."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.done: list[asyncio.Future[list[Any]]] = []

    async def submit(self, command: Command) -> list[Any]:
        self.commands.append(command)
        self.done.append(asyncio.get_running_loop().create_future())
        return await self.done[-1]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def learner(log: Log, tmp_path: Path) -> Any:
    made: Any = RayLoraLearner(ModelConfig(path="model"), LearnerConfig(), run=tmp_path, seed=0)
    made._log = SimpleNamespace(submit=SimpleNamespace(remote=log.submit))
    return made


async def test_each_group_is_sent_once_and_those_that_wait_are_sent_together(log: Log, learner: Any) -> None:
    first = asyncio.create_task(learner.accumulate("a"))
    await settle()
    others = [asyncio.create_task(learner.accumulate(each)) for each in "bc"]
    others.append(asyncio.create_task(learner.remember_old_logprobs("d")))
    await settle()
    assert log.commands == [Command("accumulate", groups=("a",))]
    log.done[0].set_result([None])
    await settle()
    assert first.done()
    assert log.commands[1:] == [Command("accumulate", groups=("b", "c"))]
    assert not any(each.done() for each in others)
    log.done[1].set_result([None])
    await settle()
    assert log.commands[2:] == [Command("remember_old_logprobs", groups=("d",))]
    assert [each.done() for each in others] == [True, True, False]
    log.done[2].set_result([None])
    await asyncio.gather(*others)
    step = asyncio.create_task(learner.step())
    await settle()
    assert log.commands[3:] == [Command("step")]
    metrics = an_update(100, kl=0.0)
    log.done[3].set_result([metrics])
    assert await step == metrics


async def test_groups_that_come_at_the_same_time_are_one_command(log: Log, learner: Any) -> None:
    calls = [asyncio.create_task(learner.accumulate(each)) for each in "abc"]
    await settle()
    assert log.commands == [Command("accumulate", groups=("a", "b", "c"))]
    log.done[0].set_result([None])
    await asyncio.gather(*calls)


async def test_a_failure_reaches_every_caller_and_later_groups_are_still_sent(log: Log, learner: Any) -> None:
    calls = [asyncio.create_task(learner.accumulate(each)) for each in "ac"]
    await settle()
    log.done[0].set_exception(LearnerError("lost"))
    for call in calls:
        with pytest.raises(LearnerError, match="lost"):
            await call
    later = asyncio.create_task(learner.accumulate("b"))
    await settle()
    assert log.commands[1:] == [Command("accumulate", groups=("b",))]
    log.done[1].set_result([None])
    await later
