"""What `draco judge` says before and while it judges."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from draco_ray.cli import main
from draco_ray.commands.judge import _understood, progress_line
from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.errors import ConfigError, JudgeUnavailable
from draco_ray.judging.completion import Request
from draco_ray.judging.endpoint import describe_judge
from draco_ray.judging.pricing import known_price
from draco_ray.records import Message
from draco_ray.traces.estimate import REPLY_TOKENS, estimate_cost
from draco_ray.traces.library import MeteredJudge, judge_sync, plan
from draco_ray.traces.load import load_traces
from tests.unit.test_traces_judging import MODEL, Canned
from tests.unit.test_traces_load import FILES

TRACES = str(FILES / "openai_chat.jsonl")


def run(*words: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(words)


async def test_the_line_moves_while_nothing_comes_back() -> None:
    meter = MeteredJudge(Canned())
    assert progress_line(meter, 10, 1.0, 2) == "0 of about 10 calls for 2 groups in 1 s, $0.0000 so far"
    await meter(Request(messages=(Message(role="user", content="x"),)))
    line = progress_line(meter, 10, 20.0, 2)
    assert line == "1 of about 10 calls for 2 groups in 20 s, $0.0100 so far, about 3 min 0 s left"

    held = asyncio.Event()

    class Slow(Canned):
        async def __call__(self, request: Request):  # type: ignore[no-untyped-def]
            await held.wait()
            return await super().__call__(request)

    slow = MeteredJudge(Slow())
    waiting = asyncio.create_task(slow(Request(messages=(Message(role="user", content="x"),))))
    await asyncio.sleep(0)
    assert ", 1 in progress, the oldest for 0s" in progress_line(slow, 10, 7200.0, 2)
    assert "in 2 h 0 min" in progress_line(slow, 10, 7200.0, 2)
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
    guessed = estimate_cost(groups, settled.config, settled.prompts, settled.room, price, rubric=None)
    canned = Canned()
    judge_sync(groups, MODEL, complete=canned)
    made = canned.phases()
    assert {phase: each.calls for phase, each in guessed.items()} == {phase: made.count(phase) for phase in guessed}
    # The guess is for rubrics of ten criteria, and this judge's have two.
    asked = sum(len(each.messages[0].content) for each in canned.asked) / 4
    assert asked < sum(each.input_tokens for each in guessed.values()) < 3 * asked
    assert all((each.dollars or 0) > 0 for each in guessed.values() if each.calls)
    unpriced = estimate_cost(groups, settled.config, settled.prompts, settled.room, None, rubric=())
    assert {phase for phase, each in unpriced.items() if each.calls} == {"score", "credit"}
    assert all(each.dollars is None for each in unpriced.values())


def test_a_pinned_rubric_costs_what_its_criteria_do() -> None:
    groups, settled = load_traces(FILES / "openai_chat.jsonl"), plan("openai/gpt-5.4", rubric="static")
    known = (groups, settled.config, settled.prompts, settled.room, None)
    assert settled.rubric is not None
    one, all_ = (
        estimate_cost(*known, rubric=each)["score"].output_tokens for each in (settled.rubric[:1], settled.rubric)
    )
    traces, written = 2, REPLY_TOKENS["score"]
    assert all_ - traces * written == len(settled.rubric) * (one - traces * written) > 0


def test_a_vllm_judge_without_an_endpoint_is_served_by_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTED_VLLM_API_BASE", raising=False)
    model = "hosted_vllm/Qwen/Qwen3.6-27B"
    config = DracoConfig.model_validate({"judge": {"local": {"replicas": 2, "context_tokens": 32768}}})
    settled = plan(model, config=config, ray=True)
    assert settled.config.judge.local.enabled
    assert (settled.context_tokens, settled.context_known) == (32768, True)
    said = [line for line in _understood(load_traces(FILES / "openai_chat.jsonl"), settled) if "served" in line]
    assert said == [f"  {model} is served on the cluster: 2 to 4 vLLM servers of 1 GPUs (judge.local)"]
    with pytest.raises(ConfigError, match=f"judge {model}: no endpoint given; .*--api-base.*--ray"):
        plan(model)
    assert not plan(model, api_base="http://127.0.0.1:8000/v1", ray=True).config.judge.local.enabled
    assert not plan("openai/gpt-5.4", config=config, ray=True).config.judge.local.enabled
    monkeypatch.setenv("HOSTED_VLLM_API_BASE", "http://127.0.0.1:8000/v1")
    assert not plan(model, ray=True).config.judge.local.enabled


PRIVATE = {"model": "openai/private", "api_base": "http://127.0.0.1:9/v1", "api_key_env": "ITS_KEY"}


def test_who_is_asked_is_what_the_configuration_says_as_far_as_no_argument_says_otherwise() -> None:
    def asked(model: str | None = None, judge: Mapping[str, Any] = PRIVATE, **told: Any) -> tuple[str | None, ...]:
        found = plan(model, config=DracoConfig.model_validate({"judge": judge}), **told).config.judge
        return found.model, found.api_base, found.key_variable

    base = "http://127.0.0.1:9/v1"
    assert asked() == ("openai/private", base, "ITS_KEY")
    assert asked("anthropic/claude") == ("anthropic/claude", base, "ITS_KEY")
    assert asked("openai/gpt-5.4") == ("openai/gpt-5.4", base, "ITS_KEY")
    assert asked(api_base="http://other/v1", api_key_env="B") == ("openai/private", "http://other/v1", "B")
    assert asked("anthropic/claude", {"model": "openai/m"}) == ("anthropic/claude", None, "ANTHROPIC_API_KEY")
    # What equals a default is as explicit as anything else.
    assert asked(judge={"model": "openai/gpt-5.4", "api_key_env": "OPENAI_API_KEY"})[2] == "OPENAI_API_KEY"
    assert (
        plan("a/b", config=DracoConfig.model_validate({"judge": {"context_tokens": 50_000}})).context_tokens == 50_000
    )
    for judge, said in (
        ({}, "no judge given; expected a model"),
        ({"self_judge": {"enabled": True}}, "self_judge.enabled=true: this judge exists only in training"),
        ({"rule_judge": {"start": True}}, "rule_judge.start=true: this judge exists only in training"),
    ):
        with pytest.raises(ConfigError, match=said):
            asked(judge=judge)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "judge: openai/gpt-5.4 at its provider, key in OPENAI_API_KEY"),
        (
            "--config FILE",
            "judge: openai/private at http://127.0.0.1:9/v1, key in ITS_KEY; jury: gemini/x at its provider",
        ),
        ("--config FILE --judge a/b", "judge: a/b at http://127.0.0.1:9/v1, key in ITS_KEY; jury"),
        ("--set judge.model=a/b --set judge.api_base=http://c/v1", "judge: a/b at http://c/v1, key in A_API_KEY"),
        ("--config sandbox", "judge: the offline judge, in this process"),
        ("--config sandbox --judge a/b", "judge: a/b at its provider, key in A_API_KEY"),
    ],
)
def test_it_says_whom_it_will_ask(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "judge.yaml"
    file.write_text(json.dumps({"judge": {**PRIVATE, "jury": [{"model": "gemini/x"}]}}))
    run("judge", TRACES, "--dry-run", *words.replace("FILE", str(file)).split())
    assert f"\n{said}" in capsys.readouterr().out


def test_an_endpoint_from_the_environment_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://e/v1")
    assert (
        describe_judge(JudgeConfig(model="openai/m"))
        == "openai/m at http://e/v1 (OPENAI_BASE_URL), key in OPENAI_API_KEY"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--set train.steps=3", "--set: train.steps has no effect"),
        ("--set judge.workers=3", "judge.workers has no effect without --ray"),
        ("--set ray.dashboard=false", "ray.dashboard has no effect without --ray"),
        ("--set algorithm.reward=outcome", "algorithm.reward has no effect when judging traces"),
        ("--set algorithm.reliability=0.5", "has no effect without algorithm.rule=draco_calibrated"),
        ("--set algorithm.static_rubric=r.yaml", "has no effect without algorithm.rubric=static"),
        ("--set judge.rule_judge.false_pass=0.5", "judge.rule_judge.false_pass has no effect"),
        ("--set judge.local={replicas: 3}", "judge.local.replicas has no effect unless the cluster serves the judge"),
        ("--batch --set judge.service_tier=flex", "judge.service_tier has no effect with --batch"),
        ("--judge rules --set judge.temperature=0", "judge.temperature has no effect with the offline judge"),
        ("--judge rules --api-base http://x", "--api-base: no effect with --judge rules"),
        ("--judge files:/tmp/d --batch", "--batch: no effect with --judge files:/tmp/d, because no request is sent"),
        ("--judge files:/tmp/d --set judge.temperature=0", "judge.temperature has no effect with judge.model=files:"),
        ("--judge files:", "files:: expected files: and the path of a directory, e.g. files:answers"),
        (f"--judge files:{TRACES}", f"files:{TRACES}: expected files: and the path of a directory"),
        ("--judge rules --batch", "--batch: no effect with --judge rules"),
        ("--judge a/b --set judge.model=c", "--judge and --set judge.model: give only one of them"),
        (
            "--budget 3 --set judge.limits={dollars: 4}",
            "--budget and --set judge.limits.dollars: give only one of them",
        ),
        (
            "--rubric static --set algorithm.rubric=dynamic",
            "--rubric and --set algorithm.rubric: give only one of them",
        ),
        ("--config sandbox --set judge.model=a/b", "judge.model=a/b has no effect with judge.rule_judge.start=true"),
        (
            "--set judge.self_judge.enabled=true",
            "judge.self_judge.enabled=true: this judge exists only in training runs",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = re.findall(r"\S+\{.*?\}|\S+", words)
    with pytest.raises(SystemExit, match="2"):
        main(["judge", TRACES, "--dry-run", *typed])
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent"], "absent: no such file or folder"),
        (["empty.jsonl"], "no trace found in empty.jsonl"),
        ([str(TRACES), "--group-by", "metadata.tsk"], "--group-by metadata.tsk: expected text or a number there"),
    ],
    ids=["path", "empty", "field"],
)
def test_traces_that_cannot_be_read_are_wrong_input(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["judge", *words, "--judge", "rules", "--out", "out"])
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_configured_rule_judge_answers_by_its_own_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text(
        "from tests.support import canned_judge\nanswer = lambda prompt: (None, canned_judge.answer(prompt))\n"
    )
    words = ["--set", "judge.rule_judge.start=true", "--set", f"judge.rule_judge.use={rules}:answer"]
    run("judge", TRACES, *words, "--out", str(tmp_path / "out"))
    judged = [json.loads(line) for line in (tmp_path / "out" / "judged.jsonl").read_text("utf-8").splitlines()]
    assert {verdict["title"] for line in judged for verdict in line["verdicts"]} >= {"Books the cheapest flight"}


def test_without_out_the_judge_is_asked_first_whether_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    quick = DracoConfig.model_validate({"judge": {"max_backoff_seconds": 0.01}})
    with pytest.raises(JudgeUnavailable, match=r"openai/x at http://127.0.0.1:9/v1: not reachable after 3 attempts"):
        judge_sync(load_traces(TRACES), "openai/x", api_base="http://127.0.0.1:9/v1", config=quick)
    for model, base in (("", None), ("openai/x", "")):
        with pytest.raises(ConfigError, match="string should have at least 1 character"):
            judge_sync(load_traces(TRACES), model, api_base=base)
    with pytest.raises(ConfigError, match="batch: cannot be used with complete"):
        judge_sync(load_traces(TRACES), MODEL, complete=Canned(), batch=True)


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


@pytest.mark.parametrize("model", ["opnai/gpt-5.4", "file:box"])
def test_an_unknown_provider_is_named_and_no_answer_is_promised(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["judge", TRACES, "--judge", model, "--out", str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"judge {model}: LiteLLM knows no provider of this model" in line


def test_before_the_first_answer_none_is_said_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main(["judge", TRACES, "--judge", "openai/gpt-5.4", "--out", str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()
    assert "no API key found" in line
    assert "answers so far" not in line


def test_what_the_library_cannot_judge_is_refused_in_one_line() -> None:
    groups = load_traces(TRACES)
    with pytest.raises(ConfigError, match="judge rules: only the command draco judge has this offline judge"):
        judge_sync(groups, "rules")
    for found in (TRACES, groups[0]):
        with pytest.raises(ConfigError, match=r"groups: found \w+; expected a list of groups, as load_traces returns"):
            judge_sync(found, "openai/gpt-5.4")  # type: ignore[arg-type]
