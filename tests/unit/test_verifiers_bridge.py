"""When the bridge to verifiers that slots share is replaced, and its socket, with stand-ins for what plays."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.verifiers import options
from draco_ray.verifiers.options import VerifiersOptions
from draco_ray.verifiers.process import BridgeProcess, SharedBridge

CONFIG = EnvironmentConfig(recycle_after_tasks=1, slots_per_worker=2)


class Process:
    """A stand-in for a bridge, whose episodes last until `let_end` is set."""

    def __init__(self) -> None:
        self.alive = True
        self.played = self.playing = self.kills = 0
        self.let_end = asyncio.Event()

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self.played += 1
        self.playing += 1
        await self.let_end.wait()
        self.playing -= 1
        return {"by": self}

    async def kill(self) -> None:
        self.alive = False
        self.kills += 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    every: list[Process] = []

    async def start(*_: object, **__: object) -> Process:
        every.append(Process())
        return every[-1]

    monkeypatch.setattr(BridgeProcess, "start", start)
    return every


async def ordered(shared: SharedBridge, count: int) -> list[asyncio.Task[dict[str, Any]]]:
    """Episodes that have begun."""
    episodes = [asyncio.create_task(shared.play({})) for _ in range(count)]
    for _ in range(20):
        await asyncio.sleep(0)
    return episodes


async def test_a_bridge_that_has_played_its_episodes_is_replaced_and_ends_after_the_last(
    started: list[Process],
) -> None:
    shared = SharedBridge(VerifiersOptions(), CONFIG, ground_truth=False)
    episodes = await ordered(shared, 5)
    assert [each.playing for each in started] == [2, 2, 1]
    assert [each.kills for each in started] == [0, 0, 0]
    for process in started:
        process.let_end.set()
    by = [(await episode)["by"] for episode in episodes]
    assert by == [started[0], started[0], started[1], started[1], started[2]]
    assert [each.kills for each in started] == [1, 1, 0]
    await shared.stop()
    assert [each.kills for each in started] == [1, 1, 1]


async def test_a_bridge_that_has_ended_is_replaced(started: list[Process]) -> None:
    shared = SharedBridge(VerifiersOptions(), CONFIG, ground_truth=False)
    (lost,) = await ordered(shared, 1)
    started[0].alive = False
    (episode,) = await ordered(shared, 1)
    for process in started:
        process.let_end.set()
    assert [(await each)["by"] for each in (lost, episode)] == started
    # Its folder is removed, and what it has left behind ended.
    assert [each.kills for each in started] == [1, 0]


async def test_many_slots_may_order_while_the_bridge_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(options.__file__).parent)
    bridge = importlib.import_module("bridge")
    monkeypatch.setattr(bridge, "_run_scripts_here", lambda folder: None)
    monkeypatch.setattr(bridge, "Player", lambda found: SimpleNamespace(connected=None, running=set()))
    found: Any = SimpleNamespace(env=SimpleNamespace(serving=contextlib.nullcontext))
    ready = asyncio.Event()
    with PrivateTempDir() as folder, contextlib.ExitStack() as orders:
        serving = asyncio.create_task(bridge.serve(found, folder, ready.set))
        await ready.wait()
        # The bridge's event loop does not run meanwhile.
        for _ in range(200):
            order = orders.enter_context(socket.socket(socket.AF_UNIX))
            order.setblocking(False)
            order.connect(str(folder / "episodes"))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
