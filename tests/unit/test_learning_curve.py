"""When held-out tasks are measured: before the first step, after the last one, and every so many between."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError, RunStopped
from draco_ray.training.trainer import Trainer


class Session:
    """Notes what is trained and measured, in order."""

    def __init__(self, known: tuple[int, ...] = (), every: int | None = None) -> None:
        self.happened: list[str] = []
        config = load_config("sandbox", [f"train.evaluate_every={every or 'null'}", "watch.step_seconds=3600"])
        evaluation: Any = SimpleNamespace(measure=self._measure, report=lambda before, after: self._note("report"))
        nothing: Any = SimpleNamespace(settle=SimpleNamespace(remote=self._settle))
        others = ("batches", "learner", "fleet", "weights", "store", "observer", "progress", "run", "console")
        self.real = Trainer(config, **dict.fromkeys(others, nothing), evaluation=evaluation)
        self.real.train = self._train  # type: ignore[method-assign]
        self.pending = self.real.pending
        self.hangs = False
        self._known = known

    def _note(self, what: str) -> None:
        self.happened.append(what)

    async def _measure(self, step: int, done: int) -> list[str] | None:
        if step in self._known:
            return ["known"]
        if step < done:
            return None
        self._note(f"measure {step}")
        if self.hangs:
            with self.pending.of("rollout", f"evaluation{step}/a_1/0"):
                await asyncio.Event().wait()
        return ["measured"]

    async def _train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self._note(f"train {step}")
            await self.real._between(step, last)

    async def _settle(self, step: int) -> None:
        self._note(f"settle {step}")


async def happened(session: Session, done: int, last: int) -> list[str]:
    await session.real.run_steps(done, last)
    return session.happened


async def test_before_and_after_alone() -> None:
    order = ["measure 0", "train 1", "train 2", "train 3", "measure 3", "report", "settle 3"]
    assert await happened(Session(), 0, 3) == order


async def test_every_second_step_and_the_last_one_once() -> None:
    order = ["measure 0", "train 1", "train 2", "measure 2", "train 3", "train 4", "measure 4", "report", "settle 4"]
    assert await happened(Session(every=2), 0, 4) == order
    assert (await happened(Session(every=2), 0, 5))[-5:] == ["measure 4", "train 5", "measure 5", "report", "settle 5"]


async def test_a_run_that_goes_on_measures_what_it_stopped_at_and_nothing_twice() -> None:
    # Stopped in the evaluation after step 2.
    assert (await happened(Session((0,), every=2), 2, 4))[:2] == ["measure 2", "train 3"]
    # Stopped in step 3.
    assert (await happened(Session((0, 2), every=2), 2, 4))[0] == "train 3"
    # The policy of step 0 is gone, and was never measured: there is nothing to compare with.
    assert await happened(Session(every=2), 3, 4) == ["train 4", "settle 4"]


async def test_an_evaluation_that_does_not_end_stops_the_run_and_what_it_waits_for_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, loop = Session(), asyncio.get_running_loop()
    session.hangs = True
    now = loop.time
    training = asyncio.create_task(happened(session, 0, 3))
    while not session.pending.kinds:  # noqa: ASYNC110 (the loop's own turns are what is waited for)
        await asyncio.sleep(0)
    monkeypatch.setattr(loop, "time", lambda: now() + 3600.0)
    with pytest.raises(
        RunStopped,
        match=r"^the evaluation of step 0 has not ended in watch.step_seconds=3600, waiting for: rollout evaluation0/a",
    ):
        await training
    assert session.happened == ["measure 0"]


def test_a_curve_without_its_ends_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train.evaluate_every=2 has no effect with train.evaluate_before_after=fals"
    ):
        load_config("qwen3.6-27b", overrides=["train.evaluate_every=2"])
