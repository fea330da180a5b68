"""The judge model behind two real `vllm serve` processes that Ray actors keep alive: one is killed, one hangs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.complete import Completion, Request
from draco_ray.judging.limiter import Limiter, WaitingLine
from draco_ray.judging.local.actor import start_judge_servers
from draco_ray.judging.outage import Outage
from draco_ray.records import Message
from tests.support.tiny_model import build_tiny_model

# Two servers load, and each is loaded once more.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCHEMA = {
    "type": "object",
    "properties": {"entries": {"type": "array", "items": {"enum": ["pass", "fail"]}, "minItems": 1, "maxItems": 3}},
    "required": ["entries"],
    "additionalProperties": False,
}
PROMPT = "How many songs are in my library? " * 20


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[JudgeConfig]:
    model = build_tiny_model(tmp_path / "model")
    local = {"enabled": True, "replicas": 2, "calls_per_replica": 4, "stall_seconds": 5, "dtype": "float32"}
    on_cpu = {"gpus_per_replica": 0, "kv_cache_gib": 0.1, "arguments": ["--seed", "1"]}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        yield JudgeConfig.model_validate(
            {"model": f"hosted_vllm/{model}", "max_tokens": 256, "temperature": 0.7, "local": {**local, **on_cpu}}
        )
    finally:
        ray.shutdown()


def serving(judge: JudgeConfig) -> dict[str, psutil.Process]:
    """The servers' processes, by the address each listens on."""
    folder = judge.model.removeprefix("hosted_vllm/")
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if folder in words and "--port" in words:
            found[f"{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"] = process
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other processes do; the test's own time limit ends it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.2)


def request(group: str, number: int, words: int = 60) -> Request:
    """Asks for a reply to a schema, or for one as long as may be."""
    messages = (Message(role="user", content=f"{group}: {PROMPT} {number}"),)
    return Request(messages=messages, group=group, schema=SCHEMA if words < 100 else None)


async def test_calls_of_a_server_that_is_killed_or_hangs_are_answered_by_another(
    judge: JudgeConfig, tmp_path: Path
) -> None:
    started = start_judge_servers(judge, tmp_path, "test")
    assert started is not None
    handle, servers = started
    outage = Outage(max_seconds=600)
    client = LiteLLMClient(judge, leases=WaitingLine(Limiter(judge.limits, outage=outage)), servers=servers)
    # Waits for a server, and is answered by it.
    await client.check()
    await until(lambda: not ray.get(handle.pending.remote()))
    first = serving(judge)
    assert len(first) == 2
    assert {address.partition(":")[0] for address in first} == {ray.util.get_node_ip_address()}

    replies = await asyncio.gather(*(client(request(f"g{n % 2}", n)) for n in range(6)))
    assert [reply.error for reply in replies] == [None] * 6
    assert all(re.fullmatch(r'\{"entries": ?\["(pass|fail)".*\]\}', reply.text) for reply in replies), replies
    # What a group's prompts share was computed once.
    again = await client(request("g0", 7))
    assert again.cached_tokens > 100

    async def ask(numbers: range) -> list[Completion]:
        return list(await asyncio.gather(*(client(request(f"g{n % 2}", n, words=200)) for n in numbers)))

    killed = next(iter(first.values()))
    asking = asyncio.create_task(ask(range(10, 18)))
    await until(lambda: busy(killed))
    os.killpg(killed.pid, signal.SIGKILL)
    replies = await asking
    assert [reply.error for reply in replies] == [None] * 8
    assert any(reply.requests > 1 for reply in replies)

    # Replaced by itself; the other one hangs now.
    await until(lambda: len(serving(judge)) == 2 and not ray.get(handle.pending.remote()))
    hung = next(each for each in serving(judge).values() if each in first.values())
    core = max(hung.children(recursive=True), key=lambda each: each.memory_info().rss)
    core.send_signal(signal.SIGSTOP)
    replies = await ask(range(20, 28))
    assert [reply.error for reply in replies] == [None] * 8
    assert not hung.is_running()

    await handle.stop.remote()
    assert not serving(judge)


def busy(server: psutil.Process) -> bool:
    """Whether somebody is connected to it who waits for a reply."""
    return any(each.status == psutil.CONN_ESTABLISHED for each in server.net_connections("tcp"))
