"""`draco judge` against the rule judge's HTTP server: budget, kill, the same again, and every way it can be refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import draco_ray
from draco_ray.judging.reply_cache import read_cost_ledger
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer
from tests.support.canned_judge import answer
from tests.support.chat_traces import chat_traces
from tests.support.command import draco_here
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.unit.test_traces_load import FILES

pytestmark = pytest.mark.slow

MODEL = f"openai/{MODEL_NAME}"


def command(traces: Path, out: Path, base: str, *more: str) -> list[str]:
    return ["judge", str(traces), "--judge", MODEL, "--out", str(out), "--api-base", base, *more]


def stats(server: JudgeServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(server.base_url.removesuffix("/v1") + "/stats", timeout=None).json()
    return found


def wait_for_requests(server: JudgeServer, count: int, process: subprocess.Popen[Any]) -> None:
    """Until the server was asked so often, or the process is not there any more to ask it."""
    # By one connection: a client of its own for every look takes a core.
    with httpx.Client(base_url=server.base_url.removesuffix("/v1"), timeout=None) as client:
        while client.get("/stats").json()["requests"] < count and process.poll() is None:
            time.sleep(0.02)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "judged.jsonl").read_text(encoding="utf-8").splitlines()]


def test_killed_and_gone_on_with_it_asks_nothing_twice(tmp_path: Path) -> None:
    traces, out = chat_traces(tmp_path / "traces.jsonl", 4), tmp_path / "out"
    with JudgeServer(latency=0.3) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "draco_ray.cli", *command(traces, out, server.base_url)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_requests(server, 20, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # Requests whose reply, if one was on its way, nobody was there to take.
        lost = len(read_cost_ledger(out / "judge_cache").under_way)
        done = draco_here(*command(traces, out, server.base_url))
        assert done.returncode == 0, done.stderr
        counted = stats(server)
        again = draco_here(*command(traces, out, server.base_url))
        assert again.returncode == 0, again.stderr
        assert stats(server)["requests"] == counted["requests"]
        (out / "judge_cache" / "replies.sqlite").unlink()
        without_replies = draco_here(*command(traces, out, server.base_url))
        assert without_replies.returncode == 0, without_replies.stderr
        assert "replies.sqlite is missing: judged groups are kept" in " ".join(without_replies.stdout.split())
        assert stats(server)["requests"] == counted["requests"]
    assert counted["repeated"] <= lost < 20
    found = lines(out)
    assert [line["trace_id"] for line in found] == [f"{n}/{r}" for n in range(4) for r in (0, 1)]
    assert all(good["reward"] > bad["reward"] for good, bad in zip(found[::2], found[1::2], strict=True))
    # Every call is in the archive, and what it cost is booked once.
    calls = RunDirectory.open(out).table("judge_calls", columns=["call_id", "requests"]).to_pylist()
    assert len({call["call_id"] for call in calls}) == len(calls)
    assert "4 groups already judged, 0 left" in again.stdout


def test_stopped_by_hand_it_says_how_to_go_on(tmp_path: Path) -> None:
    traces, out = chat_traces(tmp_path / "traces.jsonl", 2), tmp_path / "out"
    with JudgeServer(latency=3.0) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "draco_ray.cli", *command(traces, out, server.base_url)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_requests(server, 3, process)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate()
    assert process.returncode == 130, errors
    assert f"stopped; results so far are in {out}; run the same command again to continue" in said
    assert "Traceback" not in errors


def test_the_budget_holds_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    traces, out = chat_traces(tmp_path / "traces.jsonl", 4), tmp_path / "out"
    price = ("--set", f"judge.prices={{{MODEL_NAME}: {{input: 100.0, output: 100.0}}}}")
    with JudgeServer() as server:
        short = draco_here(*command(traces, out, server.base_url, "--budget", "5", *price))
        assert short.returncode == 1, short.stdout + short.stderr
        assert "budget: $" in short.stderr
        assert f"answers so far are kept in {out}; run the command with a larger --budget to continue" in short.stderr
        assert len(short.stderr.strip().splitlines()) == 1
        assert 0 < read_cost_ledger(out / "judge_cache").dollars <= 5
        whole = draco_here(*command(traces, out, server.base_url, "--budget", "900", *price))
        assert whole.returncode == 0, whole.stderr
        assert stats(server)["repeated"] == 0
    assert len(lines(out)) == 8


def test_exit_codes_for_the_ci_of_an_agent(tmp_path: Path) -> None:
    traces = chat_traces(tmp_path / "traces.jsonl", 1)
    pinned = ("--rubric", "static")
    with JudgeServer() as server:
        graded = draco_here(*command(traces, tmp_path / "a", server.base_url, *pinned, "--fail-under", "0"))
        assert (graded.returncode, "pass share" in graded.stdout) == (0, True), graded.stdout + graded.stderr
        low = draco_here(*command(traces, tmp_path / "a", server.base_url, *pinned, "--fail-under", "1"))
        assert (low.returncode, "is below --fail-under 1" in low.stdout) == (3, True), low.stdout
        same = draco_here(*command(traces, tmp_path / "a", server.base_url, *pinned, "--baseline", str(tmp_path / "a")))
        assert (same.returncode, "change from the baseline: +0.0" in same.stdout) == (0, True), same.stdout
        relative = draco_here(*command(traces, tmp_path / "c", server.base_url, "--fail-under", "0.5"))
        assert "--fail-under: needs a fixed rubric" in relative.stderr
        with traces.open("a", encoding="utf-8") as file:
            file.write("{broken\n")
        partial = draco_here(*command(traces, tmp_path / "b", server.base_url))
        assert partial.returncode == 4
        assert f"{traces}:3: expected a JSON object" in partial.stdout + partial.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--group-by", "nowhere"), "--group-by nowhere: expected text or a number there"),
        (("--format", "otel"), "expected OTLP JSON"),
        (("--budget", "1"), "the price of openai/rule-judge is unknown"),
        (("--rubric", "absent.yaml"), "absent.yaml: no such file"),
        (("--mapping", "absent.yaml"), "mapping absent.yaml: cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line(
    more: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    traces = chat_traces(tmp_path / "traces.jsonl", 1)
    refused = draco_here(*command(traces, tmp_path / "out", "http://127.0.0.1:9/v1", *more))
    assert refused.returncode in (1, 2)
    assert message in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_judge_that_is_not_there_is_known_at_once(tmp_path: Path) -> None:
    traces = chat_traces(tmp_path / "traces.jsonl", 1)
    refused = draco_here(
        *command(traces, tmp_path / "out", "http://127.0.0.1:9/v1", "--set", "judge.max_backoff_seconds=0.1")
    )
    assert refused.returncode == 1
    assert "not reachable after" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_dry_run_asks_nothing_and_writes_nothing(tmp_path: Path) -> None:
    shown = draco_here("judge", str(FILES / "openai_chat.jsonl"), "--dry-run", "--out", str(tmp_path / "out"))
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "out").exists()
    assert "2 traces (openai-chat 2), 8 steps, in 1 group\n" in shown.stdout
    assert "about 8 calls (stage1 1, stage2 2, union 1, score 2, credit 2)" in shown.stdout
    assert "about $0." in shown.stdout
    assert "(step 3)\nbook(" in shown.stdout


async def test_the_library_over_http_with_traces_of_another_world(tmp_path: Path) -> None:
    """A stand-in for a judge of flights behind a real server."""
    with ScriptedJudgeServer(answer=answer) as server:
        groups = draco_ray.load_traces(FILES / "anthropic.jsonl")
        judged = await draco_ray.judge(groups, model=MODEL, api_base=server.base, out=tmp_path / "out")
    assert [trace.reward for trace in judged[0].rollouts] == [1.0, -1.0]
    assert judged[0].rollouts[1].steps[1].advantage is not None
    assert judged[0].rollouts[1].steps[1].advantage < 0
    prompts = [body["messages"][0]["content"] for body in server.requests]
    assert not any("apis." in prompt for prompt in prompts)


@pytest.mark.parametrize(
    "raw",
    [
        "<html>Please log in</html>",
        '{"type": "message", "role": "assistant", "content": [{"type": "text", "text": "OK"}]}',
        '{"object": "text_completion", "choices": [{"text": "OK", "finish_reason": "stop"}]}',
    ],
    ids=["a page", "Anthropic's", "an old one"],
)
def test_a_judge_of_another_format_is_one_line(raw: str, tmp_path: Path) -> None:
    with ScriptedJudgeServer(Reply(raw=raw)) as server:
        more = ("--set", "judge.max_backoff_seconds=0.01")
        done = draco_here(*command(chat_traces(tmp_path / "t.jsonl", 1), tmp_path / "out", server.base, *more))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the reply has another format than the provider in judge.model uses" in line
    assert "Traceback" not in line
