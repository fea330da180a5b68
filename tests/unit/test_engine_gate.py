"""The gate in front of an engine: who waits, for whom, and that nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from draco_ray.engine.vllm_engine import RequestGate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Requests:
    """Requests that end when told to."""

    def __init__(self, gate: RequestGate) -> None:
        self.gate = gate
        self.began: list[str] = []
        self.end = asyncio.Event()

    async def run(self, name: str) -> None:
        async with self.gate.request():
            self.began.append(name)
            await self.end.wait()


async def test_an_open_gate_holds_nobody_and_an_idle_one_shuts_at_once() -> None:
    gate = RequestGate()
    await gate.shut()
    gate.open()
    requests = Requests(gate)
    requests.end.set()
    await requests.run("a")
    assert requests.began == ["a"]


async def test_shutting_waits_for_those_under_way_and_holds_those_that_come() -> None:
    requests = Requests(gate := RequestGate())
    early = [asyncio.create_task(requests.run(name)) for name in "ab"]
    await settle()
    shut = asyncio.create_task(gate.shut())
    await settle()
    late = [asyncio.create_task(requests.run(name)) for name in "cd"]
    await settle()
    assert not shut.done()
    assert requests.began == ["a", "b"]
    requests.end.set()
    await asyncio.gather(shut, *early)
    await settle()
    assert requests.began == ["a", "b"]
    gate.open()
    await asyncio.gather(*late)
    assert requests.began == ["a", "b", "c", "d"]


async def test_a_request_that_is_cancelled_or_fails_is_not_under_way() -> None:
    requests = Requests(gate := RequestGate())
    task = asyncio.create_task(requests.run("a"))
    await settle()
    shut = asyncio.create_task(gate.shut())
    await settle()
    waiting = asyncio.create_task(requests.run("b"))
    await settle()
    waiting.cancel()
    task.cancel()
    await asyncio.wait_for(shut, 5)
    gate.open()
    with pytest.raises(RuntimeError, match="broken"):
        async with gate.request():
            raise RuntimeError("broken")
    await asyncio.wait_for(gate.shut(), 5)


async def test_giving_up_to_shut_it_opens_it_again() -> None:
    requests = Requests(gate := RequestGate())
    first = asyncio.create_task(requests.run("a"))
    await settle()
    shut = asyncio.create_task(gate.shut())
    await settle()
    shut.cancel()
    await settle()
    requests.end.set()
    await asyncio.wait_for(requests.run("b"), 5)
    await first
    assert requests.began == ["a", "b"]
