"""The judge model behind real `vllm serve` processes that Ray actors keep alive: they come, are killed, and hang."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.limiter import Limiter, LimiterQueue
from draco_ray.judging.local.actor import start_judge_servers
from draco_ray.judging.outage import JudgeHealth
from draco_ray.records import Message
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.cluster import start_ray
from tests.support.chat_traces import chat_traces
from tests.support.command import draco
from tests.support.scripted_policy import build_scripted_policy
from tests.support.tiny_model import build_tiny_model

# Two servers load, and each is loaded once more.
pytestmark = [pytest.mark.slow, pytest.mark.deployment]

SCHEMA = {
    "type": "object",
    "properties": {"entries": {"type": "array", "items": {"enum": ["pass", "fail"]}, "minItems": 1, "maxItems": 3}},
    "required": ["entries"],
    "additionalProperties": False,
}
PROMPT = "How many songs are in my library? " * 20


SERVED = (
    "judge.structured_output=false",
    "judge.local.gpus_per_replica=0",
    "judge.local.cpus_per_replica=0.1",
    "judge.local.kv_cache_gib=0.2",
    "judge.local.dtype=float32",
    "judge.local.calls_per_replica=2",
    "judge.local.max_replicas=2",
)
"""Keys of a judge that `vllm serve` runs on CPUs."""


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[JudgeConfig]:
    model = build_tiny_model(tmp_path / "model")
    local = {"enabled": True, "max_replicas": 2, "calls_per_replica": 4, "stall_seconds": 5, "dtype": "float32"}
    on_cpu = {"gpus_per_replica": 0, "kv_cache_gib": 0.1, "arguments": ["--seed", "1"]}
    start_ray(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
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
    outage = JudgeHealth(max_seconds=600)
    client = LiteLLMClient(judge, leases=LimiterQueue(Limiter(judge.limits, outage=outage)), servers=servers)
    # Waits for a server, and is answered by it.
    await client.check()
    assert len(serving(judge)) == 1
    # More calls than it has room for bring another one, which stays for a while.
    while len(serving(judge)) < 2:
        await asyncio.gather(*(client(request("g", n, words=200)) for n in range(12)))
    await until(lambda: not ray.get(handle.pending.remote()))
    first = serving(judge)
    assert len(first) == len([*(tmp_path / "logs").glob("judge-server-*.log")]) == 2
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
    sockets = Path(killed.environ()["VLLM_RPC_BASE_PATH"])
    assert any(path.is_socket() for path in sockets.iterdir())
    asking = asyncio.create_task(ask(range(10, 18)))
    await until(lambda: busy(killed))
    below = killed.children(recursive=True)
    assert below
    # The server alone: what it started must not outlive it.
    killed.kill()
    replies = await asking
    assert [reply.error for reply in replies] == [None] * 8
    assert any(reply.requests > 1 for reply in replies)
    await until(lambda: all(map(ended, below)))
    await until(lambda: not sockets.exists())

    # Replaced by itself; the other one hangs now.
    await until(lambda: not ray.get(handle.pending.remote()) and len(serving(judge)) == 2)
    hung = next(each for each in serving(judge).values() if each in first.values())
    core = max(hung.children(recursive=True), key=lambda each: each.memory_info().rss)
    core.send_signal(signal.SIGSTOP)
    replies = await ask(range(20, 28))
    assert [reply.error for reply in replies] == [None] * 8
    # Told to end, it drops its calls before it is gone.
    await until(lambda: not hung.is_running())

    await handle.stop.remote()
    assert not serving(judge)


def test_traces_are_judged_by_servers_that_are_there_for_as_long_as_that_takes(tmp_path: Path) -> None:
    model = build_scripted_policy(tmp_path / "model")
    traces, out = chat_traces(tmp_path / "traces.jsonl", 2), tmp_path / "out"
    keys = ["ray.dashboard=false", "ray.object_store_mib=100", "judge.workers=1", *SERVED, "judge.max_tokens=256"]
    # Room for all of them at the first server: that others come with the calls is seen above.
    keys.append("judge.local.calls_per_replica=16")
    command = ["judge", str(traces), "--judge", f"hosted_vllm/{model}", "--ray", "--out", str(out)]
    done = draco(*command, *(word for key in keys for word in ("--set", key)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is served on the cluster: 1 to 2 vLLM servers on CPUs" in done.stdout
    assert "__ray_terminate__" not in done.stdout + done.stderr
    lines = [json.loads(line) for line in (out / "judged.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["reward"] in (-1.0, 0.0, 1.0) for line in lines] == [True] * 4
    calls = RunDirectory.open(out).table("judge_calls").to_pylist()
    assert {call["model"] for call in calls} == {f"hosted_vllm/{model}"}
    assert sum(call["cached_tokens"] for call in calls) > 0
    assert len([*(out / "logs").glob("judge-server-*.log")]) == 1
    assert not any(str(model) in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))


def ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only waits to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def busy(server: psutil.Process) -> bool:
    """Whether somebody is connected to it who waits for a reply."""
    return any(each.status == psutil.CONN_ESTABLISHED for each in server.net_connections("tcp"))
