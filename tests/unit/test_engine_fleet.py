"""Engines that come, go and come anew, and requests that outlive theirs; nothing of Ray runs."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError

from draco_ray.config.load import load_config
from draco_ray.config.schema import EngineConfig
from draco_ray.engine import actor
from draco_ray.engine.actor import EngineClient, EngineProcess
from draco_ray.engine.fleet import EngineFleet
from draco_ray.errors import CanaryFailed, ConfigError, EngineError, EngineNotReady
from tests.support.actor_errors import ASKED_TO_GO, OUT_OF_REACH


class Method:
    """An actor's method."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name

    def remote(self, *given: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.engine.call(self.name, *given))


class Engine:
    """In the place of an engine's handle. Its process can be lost, another come, and what it does can be held."""

    def __init__(self, *, placed: bool = True) -> None:
        self.process = 0
        self.node = "node-a"
        self.events: list[str] = []
        self.error: Exception | None = None
        self.placed = asyncio.Event()
        self.held: dict[str, asyncio.Event] = {}
        self.raises: dict[str, Exception] = {}
        self.started = self.serves = False
        self.weights: Any = None
        self.killed = False
        if placed:
            self.placed.set()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def hold(self, name: str) -> asyncio.Event:
        """Calls of this method wait until the event is set."""
        self.held[name] = asyncio.Event()
        return self.held[name]

    def lose(self, said: RayActorError = OUT_OF_REACH) -> None:
        """Its process is gone, and there is no room for another."""
        self.error, self.started, self.serves, self.weights = said, False, False, None

    def come_back(self, node: str = "node-a") -> None:
        self.process += 1
        self.node, self.error = node, None

    async def call(self, name: str, *given: Any) -> Any:
        await self.placed.wait()
        if self.error is not None:
            raise self.error
        if name == "look":
            return EngineProcess(identity=str(self.process), node=self.node, serves=self.serves)
        if name != "stop":
            self.events.append(name if not given or name in ("sample", "logprobs") else f"{name} {given[0]}")
        if name in self.held:
            await self.held[name].wait()
        if name in self.raises:
            raise self.raises[name]
        match name:
            case "start":
                self.started = True
            case "load":
                if not self.started:
                    raise EngineNotReady("not started")
                self.weights = given[0]
            case "serve":
                self.serves = True
            case "sample":
                if not self.serves:
                    raise EngineNotReady("does not serve")
                return self.weights
            case "logprobs":
                return [float(len(self.weights))]
        return None


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The nodes that there are."""
    nodes = [{"NodeID": name, "Alive": True} for name in ("node-a", "node-b")]

    def kill(engine: Engine, no_restart: bool = True) -> None:
        engine.killed = True

    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(ray, "cancel", lambda call: call.cancel())
    return nodes


@asynccontextmanager
async def fleet_of(*engines: Engine, fewest: int | None = None, **config: Any) -> AsyncIterator[EngineFleet]:
    settings = EngineConfig(engines=len(engines), min_engines=fewest, **config)
    fleet = EngineFleet(engines, settings)
    fleet._watched.ping_seconds = 0.0
    try:
        yield fleet
    finally:
        fleet._watched.close()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not true():  # noqa: ASYNC110 (the loop's own turns are what is waited for)
            await asyncio.sleep(0)


async def turns(number: int = 50) -> None:
    """Time in which what should not happen could."""
    for _ in range(number):
        await asyncio.sleep(0)


def loaded(engine: Engine, weights: str) -> Any:
    return engine.weights == weights and engine.serves


async def test_a_run_starts_with_the_engines_that_have_room_and_uses_the_others_when_they_come() -> None:
    first, second, third = Engine(), Engine(), Engine(placed=False)
    loading = second.hold("start")
    async with fleet_of(first, second, third, fewest=1) as fleet:
        starting = asyncio.create_task(fleet.start())
        await until(lambda: first.serves)
        await turns()
        # One is enough, but the second has its place and is on its way.
        assert not starting.done()
        loading.set()
        await starting
        assert fleet.workers.up == 2
        await fleet.load("weights 1")  # type: ignore[arg-type]
        third.placed.set()
        await until(lambda: fleet.workers.up == 3 and third.serves)
        assert third.events == ["start", "load weights 1", "serve"]


async def test_without_fewer_all_engines_are_waited_for() -> None:
    first, second = Engine(), Engine(placed=False)
    async with fleet_of(first, second) as fleet:
        starting = asyncio.create_task(fleet.start())
        await until(lambda: first.serves)
        await turns()
        assert not starting.done()
        second.placed.set()
        await starting


@pytest.mark.parametrize("said", [OUT_OF_REACH, ASKED_TO_GO])
async def test_no_sync_waits_for_a_lost_engine_and_another_process_serves_only_with_the_weights_of_that_moment(
    said: RayActorError,
) -> None:
    first, second = Engine(), Engine()
    async with fleet_of(first, second, fewest=1) as fleet:
        await fleet.start()
        await fleet.load("weights 1")  # type: ignore[arg-type]
        second.lose(said)
        await until(lambda: fleet.workers.up == 1)
        await fleet.load("weights 2")  # type: ignore[arg-type]
        assert loaded(first, "weights 2")
        starting = second.hold("start")
        second.events.clear()
        second.come_back("node-b")
        await until(lambda: second.events == ["start"])
        await fleet.load("weights 3")  # type: ignore[arg-type]
        loading = second.hold("load")
        starting.set()
        await until(lambda: second.events[-1] == "load weights 3")
        # Newer weights while it takes in these: it serves with neither the old ones nor half of the new.
        await fleet.load("weights 4")  # type: ignore[arg-type]
        assert not second.serves
        loading.set()
        await until(lambda: fleet.workers.up == 2 and second.serves)
        assert second.events == ["start", "load weights 3", "load weights 4", "serve"]


async def test_an_engine_lost_in_the_middle_of_a_sync_does_not_hold_it_up() -> None:
    first, second = Engine(), Engine()
    async with fleet_of(first, second, fewest=1) as fleet:
        await fleet.start()
        # Between two looks another process has come, which has no model yet.
        fleet._watched.ping_seconds = 3600.0
        await turns()
        second.lose()
        second.come_back()
        await fleet.load("weights 1")  # type: ignore[arg-type]
        assert [place.worker for place in fleet.workers.pooled if place.up] == [0]


async def test_a_sync_waits_while_fewer_than_the_fewest_have_the_weights() -> None:
    engine = Engine()
    async with fleet_of(engine) as fleet:
        await fleet.start()
        engine.lose()
        await until(lambda: fleet.workers.up == 0)
        loading = asyncio.create_task(fleet.load("weights 1"))  # type: ignore[arg-type]
        await turns()
        assert not loading.done()
        engine.come_back()
        await loading
        assert loaded(engine, "weights 1")


async def test_an_engine_out_of_reach_for_a_moment_is_brought_what_it_missed() -> None:
    first, second = Engine(), Engine()
    async with fleet_of(first, second, fewest=1) as fleet:
        await fleet.start()
        second.error = OUT_OF_REACH
        await until(lambda: fleet.workers.up == 1)
        await fleet.load("weights 1")  # type: ignore[arg-type]
        second.events.clear()
        second.error = None
        await until(lambda: fleet.workers.up == 2 and second.serves)
        assert loaded(second, "weights 1")
        assert fleet.replaced == 0


async def test_an_engine_that_joins_passes_the_canary_before_it_serves() -> None:
    first, second = Engine(), Engine(placed=False)
    asked: list[str] = []

    async def canary(scorer: Any) -> str:
        asked.append(scorer.name)
        await scorer.logprobs([1, 2], adapter=True)
        return f"reading of {scorer.name}"

    async with fleet_of(first, second, fewest=1) as fleet:
        await fleet.start()
        await fleet.load("weights 1")  # type: ignore[arg-type]
        assert await fleet.prove(canary) == ["reading of engine-0"]
        second.placed.set()
        await until(lambda: fleet.workers.up == 2 and second.serves)
        assert second.events == ["start", "load weights 1", "logprobs", "serve"]
        assert asked == ["engine-0", "engine-1"]
        # What proves one version says nothing of the next.
        await fleet.load("weights 2")  # type: ignore[arg-type]
        second.lose()
        await until(lambda: fleet.workers.up == 1)
        second.events.clear()
        second.come_back()
        await until(lambda: fleet.workers.up == 2 and second.serves)
        assert second.events == ["start", "load weights 2", "serve"]


async def test_an_engine_that_joins_with_other_weights_ends_the_run() -> None:
    first, second = Engine(), Engine(placed=False)

    async def canary(scorer: Any) -> None:
        if scorer.name == "engine-1":
            raise CanaryFailed("engine engine-1, adapter version 1: differs")

    async with fleet_of(first, second, fewest=1) as fleet:
        await fleet.start()
        await fleet.load("weights 1")  # type: ignore[arg-type]
        await fleet.prove(canary)
        second.placed.set()
        with pytest.raises(CanaryFailed, match="engine-1"):
            await fleet.failure()
        assert not second.serves


async def test_an_engine_lost_under_the_canary_is_left_out() -> None:
    first, second = Engine(), Engine()
    async with fleet_of(first, second, fewest=1) as fleet:
        await fleet.start()
        await fleet.load("weights 1")  # type: ignore[arg-type]
        second.raises["logprobs"] = OUT_OF_REACH

        async def canary(scorer: Any) -> str:
            await scorer.logprobs([1, 2], adapter=True)
            return str(scorer.name)

        assert await fleet.prove(canary) == ["engine-0"]


async def test_processes_that_die_are_counted_and_nodes_that_go_are_not(cluster: list[dict[str, Any]]) -> None:
    first, second = Engine(), Engine()
    second.node = "node-b"
    async with fleet_of(first, second, fewest=1, max_failures=1) as fleet:
        await fleet.start()
        for _ in range(3):
            cluster[1]["Alive"] = False
            second.lose()
            await until(lambda: fleet.workers.up == 1)
            cluster[1]["Alive"] = True
            cluster[1]["NodeID"] += "'"
            second.come_back(cluster[1]["NodeID"])
            await until(lambda: fleet.workers.up == 2 and second.serves)
        assert fleet.replaced == 3
        second.lose()
        second.come_back(second.node)
        await until(lambda: fleet.replaced == 4 and fleet.workers.up == 2)
        second.lose()
        second.come_back(second.node)
        with pytest.raises(EngineError, match=r"died more than engine\.max_failures times \(engine 1, 2 times\)"):
            await fleet.failure()


async def test_what_an_engine_cannot_load_ends_the_start() -> None:
    first, second = Engine(), Engine()
    second.raises["start"] = EngineError("no such model")
    async with fleet_of(first, second, fewest=1) as fleet:
        with pytest.raises(EngineError, match="no such model"):
            await fleet.start()


async def test_an_engine_that_cannot_be_made_ends_the_start() -> None:
    engine = Engine()
    engine.error = ActorDiedError()
    async with fleet_of(engine) as fleet:
        with pytest.raises(EngineError, match="an engine's process has died"):
            await fleet.start()


async def test_the_end_waits_for_no_engine_without_a_place() -> None:
    first, second = Engine(), Engine(placed=False)
    async with fleet_of(first, second, fewest=1) as fleet:
        await fleet.start()
        await fleet.stop()
    assert (first.killed, second.killed) == (False, True)


def test_a_range_without_an_inside_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.min_engines=3 is more than engine\.engines=2"):
        load_config(overrides=["engine.engines=2", "engine.min_engines=3"])
    shared = ("engine.colocate=true", "engine.engines=8", "engine.gpus_per_engine=0.6", "learner.workers=8")
    with pytest.raises(ConfigError, match=r"engine\.min_engines=4: with engine\.colocate the run needs every engine"):
        load_config(overrides=[*shared, "learner.gpus_per_worker=0.4", "engine.min_engines=4"])
    with pytest.raises(ConfigError, match=r"environment\.min_slots=49 is more than environment\.slots=48"):
        load_config(overrides=["environment.min_slots=49"])


class Clients:
    """A worker's clients of some engines, and a clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *engines: Engine) -> None:
        self.now = 1000.0
        self.slept = 0
        names = {f"PolicyEngine-{index}@run": engine for index, engine in enumerate(engines)}

        async def sleep(seconds: float) -> None:
            self.slept += 1
            await turns(1)

        monkeypatch.setattr(ray, "get_actor", names.__getitem__)
        monkeypatch.setattr(actor, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(actor, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        # As they come to a worker.
        self.every = [
            pickle.loads(pickle.dumps(EngineClient(index, "run", len(engines)))) for index in range(len(engines))
        ]


def serving(weights: str) -> Engine:
    engine = Engine()
    engine.started = engine.serves = True
    engine.weights = weights
    return engine


async def test_a_request_goes_to_its_engine_and_elsewhere_while_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = serving("own"), serving("other")
    clients = Clients(monkeypatch, own, other)
    client = clients.every[0]

    async def ask() -> Any:
        return await client.sample([1], max_tokens=1)

    assert [await ask(), await ask()] == ["own", "own"]
    own.lose()
    assert [await ask(), await ask()] == ["other", "other"]
    # Another process has come that does not serve yet.
    own.come_back()
    clients.now += 60
    assert await ask() == "other"
    own.started = own.serves = True
    own.weights = "own again"
    assert await ask() == "other"
    clients.now += 60
    assert await ask() == "own again"


async def test_a_request_under_way_is_asked_again_where_its_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = serving("own"), serving("other")
    client = Clients(monkeypatch, own, other).every[0]
    held = own.hold("sample")
    asking = asyncio.create_task(client.sample([1], max_tokens=1))
    await until(lambda: own.events == ["sample"])
    own.raises["sample"] = OUT_OF_REACH
    own.lose()
    held.set()
    assert await asking == "other"


async def test_a_request_waits_while_no_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "ANSWER_SECONDS", 0.01)
    own, other = Engine(), Engine(placed=False)
    clients = Clients(monkeypatch, own, other)
    asking = asyncio.create_task(clients.every[1].sample([1], max_tokens=1))
    await until(lambda: clients.slept >= 2)
    assert not asking.done()
    own.started = own.serves = True
    own.weights = "own"
    assert await asking == "own"


async def test_a_request_that_an_engine_refuses_is_not_asked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = serving("own"), serving("other")
    own.raises["sample"] = EngineError("prompt of 9 tokens leaves no room")
    client = Clients(monkeypatch, own, other).every[0]
    with pytest.raises(EngineError, match="leaves no room"):
        await client.sample([1], max_tokens=1)
    assert other.events == []
