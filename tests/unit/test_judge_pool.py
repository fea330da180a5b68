"""Judge phases as the driver asks for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.judge import CallContext, phase_summary
from draco_ray.judging.phases import PHASES
from draco_ray.judging.pool import JudgePool
from draco_ray.records import Judged


class Worker:
    """In the place of a judge worker's handle: answers at once, and notes under which names it was asked."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @property
    def up(self) -> Any:
        return SimpleNamespace(remote=self._there)

    async def _there(self) -> None:
        pass

    @property
    def ask(self) -> Worker:
        return self

    def options(self, name: str) -> Worker:
        self.names.add(name)
        return self

    def remote(self, phase: Any, context: CallContext, **_: Any) -> tuple[None, None, asyncio.Future[Any]]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_result(phase_summary(phase.name, context, Judged(value=()), 0.0))
        return None, None, answer


async def test_the_names_of_calls_do_not_grow_with_the_run() -> None:
    """Ray's metrics keep every name of a task that there ever was, in the driver and in each worker."""
    worker = Worker()
    pool = JudgePool(lambda name: worker, JudgeConfig())
    pool.open()
    try:
        for step in range(20):
            for phase in PHASES.values():
                context = CallContext(group=f"step{step}/t{step}", task_id=f"t{step}", rollout=step)
                assert (await pool.ask(phase, context)).ok
    finally:
        pool.close()
    assert worker.names == set(PHASES)
