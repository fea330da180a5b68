"""What `draco judge` says before and while it judges."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from draco_ray.cli import main
from draco_ray.commands.judge import _understood, progress_line
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError
from draco_ray.judging.complete import Request
from draco_ray.judging.pricing import known_price
from draco_ray.records import Message
from draco_ray.traces.estimate import estimate
from draco_ray.traces.library import Meter, judge_sync, plan
from draco_ray.traces.load import load_traces
from tests.unit.test_traces_judging import MODEL, Canned
from tests.unit.test_traces_load import FILES


async def test_the_line_moves_while_nothing_comes_back() -> None:
    meter = Meter(Canned())
    assert progress_line(meter, 10, 1.0, 2) == "0 of about 10 calls for 2 groups in 1s, $0.0000 so far"
    await meter(Request(messages=(Message(role="user", content="x"),)))
    line = progress_line(meter, 10, 20.0, 2)
    assert line == "1 of about 10 calls for 2 groups in 20s, $0.0100 so far, about 3m00s left"

    held = asyncio.Event()

    class Slow(Canned):
        async def __call__(self, request: Request):  # type: ignore[no-untyped-def]
            await held.wait()
            return await super().__call__(request)

    slow = Meter(Slow())
    waiting = asyncio.create_task(slow(Request(messages=(Message(role="user", content="x"),))))
    await asyncio.sleep(0)
    assert ", 1 under way, the oldest for 0s" in progress_line(slow, 10, 7200.0, 2)
    assert "in 2h00m" in progress_line(slow, 10, 7200.0, 2)
    held.set()
    await waiting
    assert slow.under_way == 0
    slow.waits_for = "judge server 0 loads m, for 9 s now (since 9 s)"
    assert progress_line(slow, 10, 7200.0, 2).endswith("; judge server 0 loads m, for 9 s now (since 9 s)")


@pytest.mark.parametrize("group_by", [None, "none"])
def test_as_many_calls_are_announced_as_are_made(group_by: str | None) -> None:
    groups = load_traces([FILES / "openai_chat.jsonl", FILES / "otlp.jsonl"], group_by=group_by)
    settled = plan("openai/gpt-5.4")
    price = known_price(settled.config.judge, "openai/gpt-5.4")
    guessed = estimate(groups, settled.config, settled.prompts, settled.room, price, own=True)
    canned = Canned()
    judge_sync(groups, MODEL, complete=canned)
    made = canned.phases()
    assert {phase: each.calls for phase, each in guessed.items()} == {phase: made.count(phase) for phase in guessed}
    # The guess is for rubrics of ten criteria, and this judge's have two.
    asked = sum(len(each.messages[0].content) for each in canned.asked) / 4
    assert asked < sum(each.input_tokens for each in guessed.values()) < 3 * asked
    assert all((each.dollars or 0) > 0 for each in guessed.values() if each.calls)
    unpriced = estimate(groups, settled.config, settled.prompts, settled.room, None, own=False)
    assert {phase for phase, each in unpriced.items() if each.calls} == {"score", "credit"}
    assert all(each.dollars is None for each in unpriced.values())


def test_a_vllm_judge_without_an_endpoint_is_served_by_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTED_VLLM_API_BASE", raising=False)
    model = "hosted_vllm/Qwen/Qwen3.6-27B"
    config = DracoConfig.model_validate({"judge": {"local": {"replicas": 2, "context_tokens": 32768}}})
    settled = plan(model, config=config, ray=True)
    assert settled.config.judge.local.enabled
    assert (settled.context_tokens, settled.context_known) == (32768, True)
    said = [line for line in _understood(load_traces(FILES / "openai_chat.jsonl"), settled) if "served" in line]
    assert said == [f"  {model} is served on the cluster: 2 to 4 vLLM servers of 1 GPUs (judge.local)"]
    with pytest.raises(ConfigError, match=f"judge {model}: nobody serves it; expected .*--api-base.*--ray"):
        plan(model)
    assert not plan(model, api_base="http://127.0.0.1:8000/v1", ray=True).config.judge.local.enabled
    assert not plan("openai/gpt-5.4", config=config, ray=True).config.judge.local.enabled
    monkeypatch.setenv("HOSTED_VLLM_API_BASE", "http://127.0.0.1:8000/v1")
    assert not plan(model, ray=True).config.judge.local.enabled


def test_the_offline_judge_spends_no_budget_and_is_called_a_stand_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["judge", str(FILES / "openai_chat.jsonl"), "--judge", "rules", "--budget", "0.01", "--out", str(out)]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    said = capsys.readouterr().out
    assert "the offline judge is a stand-in" in said
    results = (out / "judged.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reward"] is None for line in results] == [False] * len(results) != []
