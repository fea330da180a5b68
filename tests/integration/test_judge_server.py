"""The rule judge's server as a process: all phases through the real client, and how it starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.build import build_judge
from draco_ray.judging.example import PROMPT, RUBRIC, example_trajectory
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Credit, Score, Stage1, Stage2, Union
from draco_ray.judging.prompts import render_phase
from draco_ray.records import Judged, Verdict
from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer, serve

pytestmark = pytest.mark.slow

WHERE = CallContext(group="step1/example_1", task_id="example_1")
CLIENT = httpx.Client(timeout=None, trust_env=False)
"""Of all tests: a client of its own for every question costs more than the answer."""


def config(server: JudgeServer, **changes: Any) -> JudgeConfig:
    settings: dict[str, Any] = {
        "model": f"openai/{MODEL_NAME}",
        "api_base": server.base_url,
        "api_key_env": "DRACO_TEST_KEY",
        "max_attempts": 4,
        "max_backoff_seconds": 0.2,
    }
    return JudgeConfig(**(settings | changes))


def stats(server: JudgeServer) -> dict[str, Any]:
    found: dict[str, Any] = CLIENT.get(server.base_url.removesuffix("/v1") + "/stats").json()
    return found


def wait_for_request(server: JudgeServer) -> None:
    while stats(server)["in_flight"] == 0:
        time.sleep(0.01)


def ask(server: JudgeServer, prompt: str = "Reply with the word OK.", **body: Any) -> httpx.Response:
    message = {"role": "user", "content": prompt}
    return CLIENT.post(f"{server.base_url}/chat/completions", json={"model": MODEL_NAME, "messages": [message]} | body)


@pytest.mark.parametrize("prompts", ["prompts/judge", "prompts/judge-cache-friendly"])
async def test_five_phases_through_the_real_client_without_a_second_question(prompts: str) -> None:
    good, poor = example_trajectory(1), example_trajectory(0)
    with JudgeServer() as server:
        judge = build_judge(config(server, prompts=Path(prompts)))
        await judge.check()
        stage1 = await judge.ask(Stage1(PROMPT), WHERE)
        assert stage1.value
        stage2 = [await judge.ask(Stage2(trajectory, stage1.value), WHERE) for trajectory in (poor, good)]
        assert [judged.value for judged in stage2] == [(), ()]
        union = await judge.ask(Union(PROMPT, [*stage1.value, RUBRIC[0]], [poor, good]), WHERE)
        assert union.value is not None
        # One criterion a meaning: the two about pages are one now.
        titles = [criterion.title for criterion in union.value]
        assert titles == ["Reaches the requested result", "Reads every page of the list"]
        scores = [await judge.ask(Score(trajectory, union.value), WHERE) for trajectory in (poor, good)]
        assert scores[0].value is not None
        assert scores[1].value is not None
        assert {score.verdict for score in scores[0].value} == {Verdict.FAIL}
        assert {score.verdict for score in scores[1].value} == {Verdict.PASS}
        credit = await judge.ask(Credit(poor, union.value, scores[0].value), WHERE)
        assert credit.value is not None
        assert {attribution.steps for attribution in credit.value} == {(1,)}
        every: list[Judged[Any]] = [stage1, *stage2, union, *scores, credit]
        assert [(len(judged.calls), judged.notes) for judged in every] == [(1, ())] * len(every)
        counted = stats(server)
    assert counted["phases"] == {"other": 1, "stage1": 1, "stage2": 2, "union": 1, "score": 2, "credit": 1}
    assert counted["outcomes"] == {"good": 8}


async def test_other_peoples_criteria_are_judged_by_their_meaning() -> None:
    with JudgeServer() as server:
        judge = build_judge(config(server))
        scores = await judge.ask(Score(example_trajectory(0), RUBRIC), WHERE)
        assert scores.value is not None
        credit = await judge.ask(Credit(example_trajectory(0), RUBRIC, scores.value), WHERE)
    assert [score.verdict for score in scores.value] == [Verdict.FAIL, Verdict.PASS]
    assert credit.value is not None
    assert [attribution.steps for attribution in credit.value] == [(1,), (2,)]


async def test_a_server_that_replaces_a_killed_one_knows_what_was_answered(tmp_path: Path) -> None:
    with JudgeServer(answered=tmp_path / "answered") as server:
        for _ in range(2):
            judge = build_judge(config(server))
            # Asking whether it is there is no question about a rollout.
            await judge.check()
            await judge.ask(Score(example_trajectory(), RUBRIC), WHERE)
        assert stats(server)["repeated"] == 1
        os.kill(server.pid, signal.SIGKILL)
        # Its port is free once it has ended.
        await asyncio.to_thread(os.waitid, os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        port = int(server.base_url.removesuffix("/v1").rsplit(":", 1)[-1])
        with JudgeServer(answered=tmp_path / "answered", port=port) as replacement:
            assert replacement.base_url == server.base_url
            await judge.ask(Score(example_trajectory(), RUBRIC), WHERE)
            assert stats(replacement)["repeated"] == 2


async def test_a_reply_whose_reader_died_while_the_server_was_held_counts_as_none() -> None:
    # The server has to be held before it replies.
    with JudgeServer(latency=10) as server:
        judge = build_judge(config(server))
        process = psutil.Process(server.pid)
        asking = asyncio.create_task(judge.ask(Score(example_trajectory(), RUBRIC), WHERE))
        await asyncio.to_thread(wait_for_request, server)
        process.suspend()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        # The reply is due when the server runs again.
        await asyncio.sleep(10.1)
        process.resume()
        await judge.ask(Score(example_trajectory(), RUBRIC), WHERE)
        assert stats(server)["repeated"] == 0


async def test_replies_wait_side_by_side() -> None:
    with JudgeServer(latency=0.5) as server:
        judge = build_judge(config(server))
        # Again where the machine sends a request after the first reply.
        while stats(server)["most_in_flight"] < 12:
            judged = await asyncio.gather(*(judge.ask(Stage1(PROMPT), WHERE) for _ in range(12)))
            assert all(one.ok for one in judged)
        assert stats(server)["most_in_flight"] == 12


def test_the_protocol() -> None:
    long = render_phase("stage1", Path("prompts/judge"))
    with JudgeServer() as server:
        first, again = ask(server, long).json(), ask(server, long).json()
        cut = ask(server, long, max_tokens=20).json()
        assert ask(server, model="gpt-5.4").status_code == 404
        assert ask(server, messages=[]).status_code == 400
        assert ask(server, stream=True).status_code == 400
        assert CLIENT.post(f"{server.base_url}/chat/completions", content=b"no JSON").status_code == 400
    usage = first["usage"]
    assert usage["prompt_tokens"] == -(-len(long) // 4)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 <= usage["prompt_tokens"] - again["usage"]["prompt_tokens_details"]["cached_tokens"] <= 128
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 20


def test_the_server_ends_with_the_block_and_with_its_parent_and_not_with_ctrl_c() -> None:
    with JudgeServer() as server:
        pid = server.pid
        assert psutil.pid_exists(pid)
        # Ctrl-C reaches the whole foreground process group; the run still needs its judge while it winds up.
        assert os.getpgid(pid) != os.getpgid(0)
    assert not psutil.pid_exists(pid)
    script = (
        "import time\nfrom draco_ray.sandbox.judge_server import JudgeServer\n"
        "with JudgeServer() as server:\n    print(server.pid, flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    child.wait()


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JudgeUnavailable, match=f"port {port} .* is in use"):
            serve(port=port)
        with pytest.raises(JudgeUnavailable, match=f"port {port} .* is in use"), JudgeServer(port=port):
            pass


def test_ctrl_c_ends_the_command_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "draco_ray.cli", "judge-server", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    base = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert base
    while process.poll() is None:
        with contextlib.suppress(httpx.ConnectError):
            httpx.get(f"{base[0]}/stats", timeout=None)
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate()
    assert process.returncode == 0
    assert complaints == ""


def test_the_server_imports_nothing_heavy_and_nothing_of_the_environment() -> None:
    script = (
        "import sys, draco_ray.sandbox.judge_server\n"
        "heavy = ('torch', 'litellm', 'vllm', 'ray', 'transformers', 'appworld', 'draco_ray.environments')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
