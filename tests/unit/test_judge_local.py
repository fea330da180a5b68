"""The judge's servers: how many, which of them takes a call, and what becomes of the calls of one that is gone."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from draco_ray.config.schema import DracoConfig, JudgeConfig, LocalJudgeConfig, OtherJudgeConfig
from draco_ray.errors import ConfigError, JudgeUnavailable
from draco_ray.judging.endpoint import Server
from draco_ray.judging.local.server import (
    MAX_FAILED_STARTS,
    VllmJudgeServer,
    reasoning_words,
    serve_command,
)
from draco_ray.judging.local.servers import SILENT_SECONDS, JudgeServers
from draco_ray.judging.panel import member_config
from draco_ray.training.cluster import check_resources
from draco_ray.workers import monitor
from draco_ray.workers.monitor import ADJUST_SECONDS, PING_SECONDS, TIMEOUT_PARTS
from tests.support.tiny_model import tiny_tokenizer
from tests.support.turns import LoopClock, outcome, yield_turns, yield_until

MODEL = "hosted_vllm/Qwen/Qwen3.6-27B"


class Replica:
    """In the place of an actor's handle: answers what the test sets."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = False
        self.restarts = 0
        self.found: Server | str | BaseException = "loads"
        self.looks = 0
        self.there = asyncio.Event()
        """Cleared: it does not answer."""
        self.there.set()
        self.look = SimpleNamespace(remote=self._look)
        self.end = SimpleNamespace(remote=self._end)
        self.__ray_terminate__ = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: None))

    async def _look(self) -> Server | str:
        self.looks += 1
        await self.there.wait()
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found

    def _end(self) -> None:
        self.ended = True

    def restart(self) -> None:
        self.restarts += 1
        self.there.set()

    def serve(self, port: int = 0) -> None:
        self.found = Server(f"http://127.0.0.1:{port or 8000 + self.number}/v1", "key")


class Fleet:
    """`JudgeServers` of two calls each, and a clock that is set by hand."""

    def __init__(self, *, ping_seconds: float = 0.0, **keys: object) -> None:
        self.now = 100.0
        self.replicas: list[Replica] = []
        self.fails: Exception | None = None
        config = LocalJudgeConfig.model_validate(
            {"replicas": 2, "max_replicas": 3, "calls_per_replica": 2, "idle_seconds": 60, **keys}
        )
        self.servers = JudgeServers(self._start, config, lease_seconds=660, clock=lambda: self.now)
        self.servers.ping_seconds = ping_seconds

    def _start(self, number: int) -> Replica:
        if self.fails is not None:
            raise self.fails
        self.replicas.append(Replica(number))
        return self.replicas[-1]

    async def up(self, count: int) -> None:
        """Wait until so many serve."""
        for replica in self.replicas:
            if not replica.ended and isinstance(replica.found, str):
                replica.serve()
        await yield_until(lambda: self.servers.workers.up == count)

    @property
    def numbers(self) -> list[int]:
        return [each.number for each in self.servers.workers.pooled]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of servers is adjusted at once; so do looks follow each other."""
    monkeypatch.setattr(monitor, "ADJUST_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "restart", Replica.restart)


@asynccontextmanager
async def opened(*, ping_seconds: float = 0.0, **keys: object) -> AsyncIterator[Fleet]:
    fleet = Fleet(ping_seconds=ping_seconds, **keys)
    fleet.servers.open()
    try:
        yield fleet
    finally:
        fleet.servers.close()


pytestmark = pytest.mark.usefixtures("quick")


async def test_calls_of_a_group_go_to_one_server_and_others_share_the_load() -> None:
    async with opened() as fleet:
        await fleet.up(2)
        first, second = await fleet.servers.acquire("a"), await fleet.servers.acquire("b")
        assert first.server != second.server
        fleet.servers.release(first.number)
        fleet.servers.release(second.number)
        again = [await fleet.servers.acquire(group) for group in ("b", "a")]
        assert [lease.server for lease in again] == [second.server, first.server]
        # Full: a third call of the group goes where there is room, rather than wait.
        more = [await fleet.servers.acquire("a") for _ in range(2)]
        assert [lease.server for lease in more] == [first.server, second.server]
        for lease in (*again, *more):
            fleet.servers.release(lease.number)
        # Calls without a group are none.
        assert len({(await fleet.servers.acquire()).server.api_base for _ in range(2)}) == 2


async def test_servers_come_with_the_calls_and_go_when_they_are_not_needed() -> None:
    async with opened() as fleet:
        await fleet.up(2)
        calls = [asyncio.create_task(fleet.servers.acquire(f"g{n}")) for n in range(5)]
        await yield_until(lambda: fleet.numbers == [0, 1, 2])
        assert sum(call.done() for call in calls) == 4
        await fleet.up(3)
        leases = [await outcome(call) for call in calls]
        for lease in leases:
            fleet.servers.release(lease.number)
        fleet.servers.adjust()
        assert fleet.numbers == [0, 1, 2]
        fleet.now += 61
        fleet.servers.adjust()
        assert fleet.numbers == [0, 1]
        assert [replica.ended for replica in fleet.replicas] == [False, False, True]


async def test_a_server_that_a_call_found_gone_gets_no_more_until_it_answers_a_look() -> None:
    async with opened() as fleet:
        await fleet.up(2)
        lease = await fleet.servers.acquire("a")
        broken = next(each for each in fleet.replicas if each.found == lease.server)
        broken.found = "loads again"
        fleet.servers.release(lease.number, lost=True)
        others = [await fleet.servers.acquire("a") for _ in range(2)]
        assert lease.server not in [each.server for each in others]
        said = [f"judge server {broken.number} loads again (for 0 s)"]
        await yield_until(lambda: fleet.servers.pending() == said)
        broken.serve(port=9999)
        waiting = await outcome(fleet.servers.acquire("c"))
        assert waiting.server.api_base == "http://127.0.0.1:9999/v1"


async def test_one_that_is_gone_for_good_is_replaced_and_calls_wait_meanwhile() -> None:
    async with opened(replicas=1, max_replicas=1) as fleet:
        await fleet.up(1)
        fleet.replicas[0].found = RuntimeError("the node\nis gone")
        await yield_until(lambda: not fleet.numbers)
        waiting = asyncio.create_task(fleet.servers.acquire("a"))
        fleet.now += 61
        await yield_until(lambda: len(fleet.replicas) == 2)
        await fleet.up(1)
        assert (await outcome(waiting)).server.api_base == "http://127.0.0.1:8001/v1"
        assert fleet.replicas[0].ended


async def test_what_cannot_be_started_ends_the_calls_that_wait_for_it() -> None:
    async with opened(replicas=1, max_replicas=1) as fleet:
        waiting = asyncio.create_task(fleet.servers.acquire("a"))
        await asyncio.sleep(0)
        fleet.replicas[0].found = JudgeUnavailable("judge.local: ended with exit code 1 3 times")
        with pytest.raises(JudgeUnavailable, match=r"^judge\.local: ended with exit code 1 3 times$"):
            await outcome(waiting)


async def test_servers_that_never_come_up_are_named_with_what_they_wait_for() -> None:
    fleet = Fleet(start_timeout_seconds=1800)
    # Of the time before it is opened nobody has waited.
    fleet.now += 5000
    fleet.servers.open()
    for replica in fleet.replicas:
        replica.there.clear()
    fleet.replicas[1].there.set()
    waiting = asyncio.create_task(fleet.servers.acquire("a"))
    await yield_turns(5)
    fleet.now += 1799
    await yield_turns(50)
    assert not waiting.done()
    fleet.now += 1
    with pytest.raises(JudgeUnavailable) as refusal:
        await outcome(waiting)
    assert str(refusal.value) == (
        "no judge server is up after judge.local.start_timeout_seconds=1800: judge server 0 waits for a node with "
        "enough resources (for 1800 s); judge server 1 loads (for 1800 s); check the cluster's resources with `ray "
        "status`"
    )
    fleet.servers.close()


async def test_the_time_without_a_server_begins_when_the_last_one_is_gone() -> None:
    async with opened(replicas=1, max_replicas=1, idle_seconds=1e6, start_timeout_seconds=1800) as fleet:
        await fleet.up(1)
        fleet.now += 5000
        await yield_turns(50)
        fleet.replicas[0].found = RuntimeError("the node is gone")
        await yield_until(lambda: not fleet.numbers)
        waiting = asyncio.create_task(fleet.servers.acquire())
        fleet.now += 1799
        await yield_turns(50)
        assert not waiting.done()
        fleet.now += 1
        with pytest.raises(JudgeUnavailable, match="start_timeout_seconds=1800: no server could be started; check"):
            await outcome(waiting)


async def test_the_slots_of_a_caller_that_died_are_free_again() -> None:
    async with opened(replicas=1, max_replicas=1) as fleet:
        await fleet.up(1)
        held = [await fleet.servers.acquire() for _ in range(2)]
        waiting = asyncio.create_task(fleet.servers.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        fleet.now += 660
        await yield_turns(50)
        assert not waiting.done()
        fleet.now += 1
        assert (await outcome(waiting)).number not in [lease.number for lease in held]
        # Should it not have died after all, its slot is not given back twice.
        fleet.servers.release(held[0].number)


async def test_the_lowest_rank_waits_least_and_a_call_that_names_none_has_rank_0() -> None:
    async with opened(replicas=1, max_replicas=1, calls_per_replica=1) as fleet:
        await fleet.up(1)
        held = await fleet.servers.acquire()
        ranks = [{"rank": 1}, {}, {"rank": -1}, {"rank": 0}]
        waiting = [asyncio.create_task(fleet.servers.acquire("a", **rank)) for rank in ranks]
        await yield_turns(5)
        served: list[int] = []
        for _ in ranks:
            fleet.servers.release(held.number)
            await yield_turns(5)
            served += [number for number, call in enumerate(waiting) if call.done() and number not in served]
            held = waiting[served[-1]].result()
        assert served == [2, 1, 3, 0]
        assert held.number == 4


async def test_servers_are_looked_at_now_and_then_and_one_that_does_not_answer_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "ADJUST_SECONDS", ADJUST_SECONDS)
    clock = LoopClock(monkeypatch)
    keys = {"replicas": 1, "max_replicas": 2, "calls_per_replica": 1, "stall_seconds": 60}
    part = (60 + SILENT_SECONDS) / TIMEOUT_PARTS
    async with opened(ping_seconds=PING_SECONDS, **keys) as fleet:
        (replica,) = fleet.replicas
        replica.there.clear()
        await yield_turns(5)
        # Until it has answered a first time it may wait for a node for as long as that takes.
        for _ in range(2 * TIMEOUT_PARTS):
            await clock.pass_(part)
        assert fleet.servers.pending() == ["judge server 0 waits for a node with enough resources (for 0 s)"]
        replica.there.set()
        await yield_turns(50)
        await clock.pass_(PING_SECONDS - 0.1)
        assert replica.looks == 1
        replica.serve()
        await clock.pass_(0.1)
        assert (replica.looks, fleet.servers.workers.up, fleet.servers.pending()) == (2, 1, [])
        await clock.pass_(PING_SECONDS - 0.1)
        assert replica.looks == 2
        await clock.pass_(0.1)
        assert replica.looks == 3
        replica.there.clear()
        await clock.pass_(PING_SECONDS)
        # A server may take its `stall_seconds` to find out for itself.
        for _ in range(TIMEOUT_PARTS - 1):
            await clock.pass_(part)
        await clock.pass_(part - 0.1)
        assert fleet.servers.workers.up == 1
        await clock.pass_(0.1)
        assert (fleet.servers.workers.up, replica.looks, replica.restarts) == (0, 4, 0)
        assert fleet.servers.pending() == ["judge server 0 does not answer (for 0 s)"]
        # The look itself goes on, and says when it is there again.
        replica.there.set()
        await yield_turns(50)
        assert (fleet.servers.workers.up, replica.looks, replica.ended) == (1, 4, False)
        await clock.pass_(ADJUST_SECONDS)
        calls = [asyncio.create_task(fleet.servers.acquire()) for _ in range(2)]
        await clock.pass_(ADJUST_SECONDS - 0.1)
        assert fleet.numbers == [0]
        await clock.pass_(0.1)
        assert fleet.numbers == [0, 1]
        assert [call.done() for call in calls] == [True, False]
        calls[1].cancel()


async def test_one_that_does_not_answer_is_restarted_while_another_answers(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as fleet:
        await fleet.up(2)
        fleet.servers.timeout_seconds = 0.0
        await yield_turns(50)
        fleet.replicas[0].there.clear()
        await yield_until(lambda: fleet.replicas[0].restarts)
        await yield_until(lambda: fleet.servers.workers.up == 2)
        assert caplog.messages == ["judge server 0 does not answer", "judge server 0 is restarted"]
        assert [replica.restarts for replica in fleet.replicas] == [1, 0]


async def test_what_a_server_does_is_told_with_the_time_since_it_does_that(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(replicas=1, max_replicas=1) as fleet:
        (replica,) = fleet.replicas
        for seconds in (7, 8):
            fleet.now += seconds
            replica.found = "loads Qwen"
            await yield_turns(50)
        assert fleet.servers.pending() == ["judge server 0 loads Qwen (for 8 s)"]
        replica.serve()
        await yield_until(lambda: fleet.servers.workers.up)
        assert (fleet.servers.pending(), caplog.messages) == ([], [])
        fleet.now += 100
        replica.found = "loads Qwen, as the one before ended"
        await yield_until(lambda: not fleet.servers.workers.up)
        fleet.now += 3
        await yield_turns(50)
        assert fleet.servers.pending() == ["judge server 0 loads Qwen, as the one before ended (for 3 s)"]
        assert caplog.messages == ["judge server 0 cannot be reached: loads Qwen, as the one before ended"]
        replica.serve()
        lease = await outcome(fleet.servers.acquire())
        fleet.servers.release(lease.number, lost=True)
        assert fleet.servers.pending() == ["judge server 0 does not answer (for 0 s)"]


async def test_calls_of_one_server_that_find_it_gone_say_so_once() -> None:
    async with opened(replicas=1, max_replicas=1) as fleet:
        await fleet.up(1)
        held = [await fleet.servers.acquire() for _ in range(2)]
        fleet.replicas[0].there.clear()
        await yield_turns(5)
        fleet.servers.release(held[0].number, lost=True)
        fleet.now += 9
        fleet.servers.release(held[1].number, lost=True)
        assert fleet.servers.pending() == ["judge server 0 does not answer (for 9 s)"]


async def test_a_server_that_is_lost_is_named_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(replicas=1, max_replicas=1) as fleet:
        await fleet.up(1)
        waiting = [asyncio.create_task(fleet.servers.acquire()) for _ in range(3)]
        await yield_turns(5)
        fleet.replicas[0].found = RuntimeError("the node\nis gone" + "!" * 600)
        said = ("the node is gone" + "!" * 600)[:500]
        with pytest.raises(JudgeUnavailable) as refusal:
            await outcome(waiting[2])
        assert str(refusal.value) == f"judge server: {said}"
        assert caplog.messages == [f"judge server 0 is lost: {f'judge server: {said}'[:300]}"]
        assert (fleet.replicas[0].ended, fleet.servers.pending()) == (True, [])
        looks = fleet.replicas[0].looks
        # Calls that it had are made elsewhere by whoever made them.
        for call in waiting[:2]:
            fleet.servers.release((await outcome(call)).number, lost=True)
        assert fleet.replicas[0].looks == looks


async def test_servers_that_are_not_needed_and_those_of_a_closed_pool_are_looked_at_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    Fleet().servers.close()
    async with opened(replicas=1, max_replicas=2, calls_per_replica=1) as fleet:
        assert caplog.messages == ["judge servers: 0 up, 1 requested, 0 calls in flight, 0 waiting"]
        await fleet.up(1)
        calls = [asyncio.create_task(fleet.servers.acquire()) for _ in range(2)]
        await yield_until(lambda: len(fleet.replicas) == 2)
        assert caplog.messages[1:] == ["judge servers: 1 up, 2 requested, 1 calls in flight, 1 waiting"]
        await fleet.up(2)
        for call in calls:
            fleet.servers.release((await outcome(call)).number)
        await yield_turns(5)
        fleet.now += 60
        await yield_until(lambda: fleet.numbers == [0])
        assert caplog.messages[2:] == ["judge servers: 1 up, 1 requested, 0 calls in flight, 0 waiting"]
        assert [replica.ended for replica in fleet.replicas] == [False, True]
        await yield_turns(5)
        looks = fleet.replicas[1].looks
        await yield_turns(50)
        assert fleet.replicas[1].looks == looks
        fleet.servers.close()
        await yield_turns(5)
        looks = fleet.replicas[0].looks
        waiting = [asyncio.create_task(fleet.servers.acquire()) for _ in range(2)]
        await yield_turns(50)
        assert (fleet.replicas[0].looks, len(fleet.replicas), fleet.replicas[0].ended) == (looks, 2, True)
        assert [call.done() for call in waiting] == [True, False]
        waiting[1].cancel()


async def test_servers_that_cannot_be_asked_for_now_are_asked_for_later(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(replicas=1, max_replicas=2, calls_per_replica=1) as fleet:
        await fleet.up(1)
        fleet.fails = RuntimeError("the head is away")
        calls = [asyncio.create_task(fleet.servers.acquire()) for _ in range(2)]
        await yield_until(lambda: caplog.messages)
        assert set(caplog.messages) == {"the number of judge servers could not be adjusted"}
        assert "the head is away" in caplog.text
        fleet.fails = None
        await yield_until(lambda: len(fleet.replicas) == 2)
        await fleet.up(2)
        assert [(await outcome(call)).number for call in calls] == [0, 1]


def config(tmp_path: Path | None = None, **local: object) -> JudgeConfig:
    model = MODEL if tmp_path is None else f"hosted_vllm/{tmp_path / 'missing'}"
    return JudgeConfig.model_validate({"model": model, "local": {"enabled": True, **local}})


def test_one_that_ends_before_it_answers_is_started_again_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draco_ray.engine.openai_server.SERVER_COMMAND", [sys.executable, "-m", "no_such_module"])
    server = VllmJudgeServer(config(tmp_path, gpus_per_replica=0), "127.0.0.1", tmp_path / "server.log")
    pids = set()
    for _ in range(MAX_FAILED_STARTS):
        assert isinstance(server.look(), str)
        pids.add(server.pid)
        assert server._child is not None
        server._child.wait(600)
    with pytest.raises(
        JudgeUnavailable, match=f"ended with exit code 1 {MAX_FAILED_STARTS} times .*no_such_module"
    ) as refusal:
        server.look()
    assert "\n" not in str(refusal.value)
    assert len(pids) == MAX_FAILED_STARTS


def test_one_that_does_not_load_in_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draco_ray.judging.local.server.serve_command", lambda *_: ["sleep", "600"])
    now = 0.0
    server = VllmJudgeServer(config(start_timeout_seconds=100), "127.0.0.1", tmp_path / "server.log", lambda: now)
    server.look()
    now = 99.0
    assert server.look() == "loads Qwen/Qwen3.6-27B"
    now = 100.0
    with pytest.raises(JudgeUnavailable, match="did not answer within judge.local.start_timeout_seconds=100"):
        server.look()
    assert server.pid is None


def test_the_command_line_names_the_model_and_holds_no_key() -> None:
    words = serve_command(
        config(tensor_parallel=2, gpus_per_replica=2, arguments=("--reasoning-parser", "qwen3")), "::", 1
    )
    assert words[words.index("--model") + 1] == words[words.index("--served-model-name") + 1] == "Qwen/Qwen3.6-27B"
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--max-num-seqs") + 1] == "32"
    assert words[-2:] == ["--reasoning-parser", "qwen3"]
    assert not [word for word in words if "key" in word]
    assert "secret" not in repr(Server("http://10.0.0.7:8123/v1", "secret"))


OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
SILENT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HYBRID = SILENT + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
ON_REQUEST = SILENT + "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "tokens", "thinks"),
    [
        (OPENS, ["<think>", "</think>"], True),
        (HYBRID, ["<think>", "</think>"], True),
        (ON_REQUEST, ["<think>", "</think>"], False),
        (SILENT, ["<think>", "</think>"], False),
        (OPENS, [], False),
    ],
)
def test_a_judge_that_thinks_is_served_with_a_reasoning_parser(
    tmp_path: Path, template: str, tokens: list[str], thinks: bool
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    assert reasoning_words(str(tmp_path), ()) == (["--reasoning-parser", "deepseek_r1"] if thinks else [])
    assert reasoning_words(str(tmp_path), ("--reasoning-parser=qwen3",)) == []
    assert reasoning_words(str(tmp_path / "missing"), ()) == []


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"model": "openai/gpt-5.4"},
            "judge.model=openai/gpt-5.4: judge.local.enabled cannot serve this model; expected hosted_vllm/",
        ),
        ({"model": "hosted_vllm/"}, "cannot serve this model"),
        ({"api_base": "http://x/v1"}, "cannot be combined with judge.api_base"),
        ({"self_judge": {"enabled": True}}, "cannot be combined with judge.self_judge.enabled"),
        ({"rule_judge": {"start": True}}, "cannot be combined with judge.rule_judge.start"),
    ],
)
def test_a_judge_that_is_also_served_elsewhere_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        JudgeConfig.model_validate({"model": MODEL, "local": {"enabled": True}, **keys})


def test_judges_beside_it_are_not_served_here() -> None:
    assert not member_config(config(), OtherJudgeConfig(model="openai/gpt-5.4")).local.enabled


def test_its_gpus_count_before_anything_is_loaded() -> None:
    run = DracoConfig.model_validate(
        {
            "judge": {"model": MODEL, "local": {"enabled": True, "replicas": 2, "gpus_per_replica": 2}},
            "environment": {"slots": 1},
        }
    )
    offered = {"judge": 16, "CPU": 64, "GPU": 6}
    check_resources(run, [offered])
    with pytest.raises(ConfigError, match="1 of 1 engines"):
        check_resources(run, [{**offered, "GPU": 5}])
    with pytest.raises(ConfigError, match="2 of 2 judge servers .2 GPUs and .* do not fit"):
        check_resources(run, [{"GPU": 1, "CPU": 64, "judge": 16}] * 6)
    check_resources(run.updated(algorithm={"reward": "outcome"}), [{**offered, "GPU": 2}])
