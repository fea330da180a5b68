"""Step credit on other trainers' tokens; what needs none of their packages."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draco_ray.adapters.art import draco_score_group
from draco_ray.adapters.conversations import Judging, judge_conversations
from draco_ray.adapters.credit import conversation_of_tokens
from draco_ray.adapters.inspect_scorer import _judged
from draco_ray.adapters.per_token_advantages import sampled_spans, token_advantages
from draco_ray.adapters.trl import StepCredit
from draco_ray.adapters.verdicts import MissingVerdict
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import BudgetSpent, ConfigError, TraceError
from draco_ray.judging.client import CHECK_ATTEMPTS, PROBE_REQUEST
from draco_ray.judging.completion import Completion, Request
from draco_ray.traces.load import groups_of
from tests.support import canned_judge
from tests.support.adapters import ASK, CannedCompleter, booking_messages
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer

MASK = [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1]
ACTED = (True, True, False)


@pytest.mark.parametrize("advantage", [0.7, -0.7])
@pytest.mark.parametrize("quality", [[1.0, 0.25], [0.0, 1.0], [0.5, 0.5]])
def test_an_advantage_is_spread_over_the_tokens_of_steps_and_its_sum_is_kept(
    advantage: float, quality: list[float]
) -> None:
    spread = token_advantages(advantage, quality, ACTED, MASK)
    assert spread.shape == (13,)
    assert not spread[np.array(MASK) == 0].any()
    assert not spread[11:].any()
    assert spread.sum() == pytest.approx(7 * advantage, rel=1e-6)
    weights = quality if advantage > 0 else [1 - each for each in quality]
    totals = [spread[begin:end].sum() for begin, end in sampled_spans(MASK)[:2]]
    assert np.array(totals) == pytest.approx(7 * advantage * np.array(weights) / sum(weights), rel=1e-6)


@pytest.mark.parametrize(
    ("quality", "acted"),
    [([], ()), ([None, None], ACTED), ([1.0], ACTED), ([1.0, 0.0], (True, True)), ([1.0, 0.0], (*ACTED, True))],
)
def test_without_steps_citations_or_the_same_turns_it_stays_uniform(
    quality: list[float | None], acted: tuple[bool, ...]
) -> None:
    assert token_advantages(0.5, quality, acted, MASK).tolist() == [0.5 * each for each in MASK]


def test_a_turn_that_is_cut_in_reasoning_that_the_template_opened_is_no_step() -> None:
    words = ["Book it.", "<think>", "look</think>search", "found", "<think>", "hm"]
    decode: Any = lambda ids: " ".join(words[each] for each in ids)  # noqa: E731
    counts = [1, 1]
    for prompt, ids in (("Book it. <think>\n", ()), ([{"role": "user", "content": "Book it."}], (0, 1))):
        messages, found = conversation_of_tokens(prompt, range(2, 6), [1, 0, 0, 1], decode, ids)
        assert found == counts
        assert [each["content"] for each in messages[1:]] == ["<think>look</think>search", "found <think>", "<think>hm"]
        (trace,) = groups_of([{"messages": messages}])[0].traces
        assert [turn.is_step for turn in trace.turns] == [True, False, False]


def test_a_reward_function_as_trl_calls_it() -> None:
    credit = StepCredit("canned", complete=CannedCompleter())
    rewards = credit(
        prompts=[ASK, ASK],
        completions=[booking_messages("DL9"), booking_messages("UA1")],
        completion_ids=[[1], [2]],
        step=3,
    )
    assert rewards == [1.0, -1.0]
    spread = credit.advantages([0.7, -0.7], np.array([MASK, MASK]))
    # The message at the end is a step, which nothing cites here: it has its share.
    assert (np.sign(spread[:, 11:]) == [[1.0], [-1.0]]).all()
    assert spread.sum(axis=1).tolist() == pytest.approx([6.3, -6.3], rel=1e-6)
    # The content of other sequences, and another number of them, show that they are not those that were judged.
    with pytest.raises(MissingVerdict, match="no verdict"):
        credit.advantages([0.5, 0.5], [MASK, MASK], [[1], [3]])
    with pytest.raises(MissingVerdict, match="2 sequences judged, 1 trained"):
        credit.advantages([0.5], [MASK])
    assert credit.advantages([0.7, -0.7], [MASK, MASK], [[1], [2]]).tolist() == spread.tolist()
    lenient = StepCredit("canned", complete=CannedCompleter(), missing="uniform")
    assert lenient.advantages([0.5], [MASK]).tolist() == [[0.5 * each for each in MASK]]
    assert lenient.store.counts == {"missing": 1}
    # Plain text is one turn, one step.
    plain = StepCredit("canned", complete=CannedCompleter())
    assert plain(prompts=[ASK, ASK], completions=["It is DL9.", "It is UA1."]) == [1.0, -1.0]
    assert plain.advantages([1.0, -1.0], np.array([MASK, MASK]))[0].tolist() == MASK


def test_a_policy_that_says_nothing_is_judged_and_pushed_away_from() -> None:
    """Without a reward, TRL would give it 0, which is more than a bad answer has."""
    credit = StepCredit("canned", complete=CannedCompleter())
    assert credit(prompts=[ASK] * 3, completions=["It is DL9.", "", "It is UA1."])[:2] == [1.0, -1.0]
    mask = np.array([[1, 1], [1, 0], [1, 1]])
    assert credit.advantages([1.0, -1.0, 0.0], mask)[1].tolist() == [-1.0, 0.0]
    assert credit(prompts=[ASK] * 2, completions=["", ""]) == [-1.0, -1.0]
    # It spoke, but in a way that nobody reads.
    other = [{"role": "assistant", "content": [{"type": "text", "txt": "It is DL9, the cheapest flight to Boston."}]}]
    assert credit(prompts=[ASK] * 2, completions=["It is DL9.", other]) == [1.0, None]


def test_an_assistants_messages_in_the_prompt_are_not_the_policys() -> None:
    prompt = [{"role": "user", "content": "Hello."}, *booking_messages("DL9")[:2], {"role": "user", "content": ASK}]
    for whole in (False, True):
        canned = CannedCompleter()
        credit = StepCredit("canned", complete=canned)
        completions = [booking_messages("DL9"), booking_messages("UA1")]
        messages = [[*prompt, *each] for each in completions] if whole else None
        assert credit([prompt] * 2, completions, messages=messages) == [1.0, -1.0]
        spread = credit.advantages([0.7, -0.7], np.array([MASK, MASK]))
        assert credit.store.counts == {"spread": 2}
        assert len(set(spread[1][np.array(MASK) != 0])) == 3
    rebuilt, _ = conversation_of_tokens(prompt, [1], [1], lambda _: "Done.")
    trace = groups_of([{"messages": rebuilt}])[0].traces[0]
    assert [turn.text for turn in trace.steps] == ["Done."]
    told = [(each.role, each.content) for each in trace.prompt]
    assert ("earlier assistant", 'I search.\nsearch({"to": "SFO"})') in told
    assert told[-1] == ("user", ASK)


async def test_conversations_keep_their_order_whatever_their_groups() -> None:
    records = [
        {"task_id": task, "messages": [{"role": "user", "content": ASK}, *booking_messages(flight)]}
        for task, flight in (("a", "DL9"), ("b", "UA1"), ("a", "UA1"), ("b", "DL9"))
    ]
    records.insert(2, {"task_id": "a", "messages": [{"role": "user", "content": "no agent"}]})
    judged = await judge_conversations(records, "canned", complete=CannedCompleter())
    assert [each and each.trace.reward for each in judged] == [1.0, -1.0, None, -1.0, 1.0]
    assert [each.acted for each in judged if each] == [(True, True, True)] * 4
    with pytest.raises(TraceError, match="no trace: record 1: unknown format"):
        await judge_conversations([{"x": 1}], "canned", complete=CannedCompleter())
    assert draco_score_group.__doc__


def test_a_budget_holds_over_all_generations_of_a_reward_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    config = DracoConfig.model_validate(
        {"judge": {"model": "openai/m", "prices": {"m": {"input": 0.0, "output": 100.0}}, "max_tokens": 1000}}
    )
    with ScriptedJudgeServer(answer=canned_judge.answer) as server:
        # A reply is 10 tokens, a tenth of a cent, and might be 1,000, ten cents.
        credit = StepCredit(config=config, api_base=server.base, budget=0.115)
        prompts, completions = [ASK, ASK], [booking_messages("DL9"), booking_messages("UA1")]
        assert credit(prompts, completions) == [1.0, -1.0]
        # Nine requests, one of them the start-up check, leave 0.106; each generation needs 0.108 at most.
        assert len(server.requests) == 9
        with pytest.raises(BudgetSpent):
            credit(prompts, completions)
        assert len(server.requests) < 20


def test_with_a_cache_of_replies_what_was_spent_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    judge = {"model": "openai/m", "prices": {"m": {"input": 0.0, "output": 100.0}}, "max_tokens": 1000}
    with ScriptedJudgeServer(answer=canned_judge.answer) as server:
        config = {"judge": {**judge, "cache": str(tmp_path)}}
        credit = StepCredit(config=config, api_base=server.base, budget=0.12)
        assert credit([ASK, ASK], [booking_messages("DL9"), booking_messages("UA1")]) == [1.0, -1.0]
        # As above, 0.009 is spent and 0.108 is needed: there is room for it once.
        assert credit([f"{ASK}!"] * 2, [booking_messages("UA1"), booking_messages("DL9")]) == [-1.0, 1.0]


def test_generations_are_kept_and_a_restarted_process_pays_for_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    config = {"judge": {"model": "openai/m", "prices": {"m": {"input": 0.0, "output": 100.0}}, "max_tokens": 1000}}
    prompts, completions = [ASK, ASK], [booking_messages("DL9"), booking_messages("UA1")]
    with ScriptedJudgeServer(answer=canned_judge.answer) as server:
        asked: list[int] = []
        for generation in (1, 2):
            credit = StepCredit(config=config, api_base=server.base, budget=0.115, out=tmp_path)
            assert credit(prompts, completions) == [1.0, -1.0]
            asked.append(len(server.requests))
            assert (tmp_path / f"{generation:05d}" / "judged.jsonl").exists()
        assert asked[1] - asked[0] == asked[0] - 8, "the second process asks for the start-up check alone"
        with pytest.raises(BudgetSpent):
            StepCredit(config=config, api_base=server.base, budget=0.115, out=tmp_path)(
                [ASK + "!"] * 2, [booking_messages("UA1"), booking_messages("DL9")]
            )


@pytest.mark.parametrize("kept", [False, True])
def test_a_judge_is_checked_once_and_waited_for_between_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    away = 0

    def answer(prompt: str) -> str | Reply:
        nonlocal away
        away -= 1
        return Reply(status=503) if away >= 0 else canned_judge.answer(prompt)

    with ScriptedJudgeServer(answer=answer) as server:
        config = {"judge": {"model": "openai/m", "max_backoff_seconds": 0.01}}
        credit = StepCredit(config=config, api_base=server.base, out=tmp_path if kept else None)
        assert credit([ASK, ASK], [booking_messages("DL9"), booking_messages("UA1")]) == [1.0, -1.0]
        away = 2 * CHECK_ATTEMPTS
        assert credit([f"{ASK}!"] * 2, [booking_messages("UA1"), booking_messages("DL9")]) == [-1.0, 1.0]
    checks = [each for each in server.requests if each["messages"][0]["content"] == PROBE_REQUEST.messages[0].content]
    assert len(checks) == 1


def test_a_completer_of_ones_own_is_checked_once(tmp_path: Path) -> None:
    class Checked(CannedCompleter):
        checks = 0

        async def check(self) -> None:
            self.checks += 1

    own = Checked()
    credit = StepCredit("canned", complete=own, out=tmp_path)
    for end in ("", "!"):
        assert credit([f"{ASK}{end}"] * 2, [booking_messages("DL9"), booking_messages("UA1")]) == [1.0, -1.0]
    assert own.checks == 1


async def test_conversations_judged_at_once_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with ScriptedJudgeServer(answer=canned_judge.answer) as server:
        judging = Judging("openai/m", api_base=server.base, out=tmp_path)
        records = [{"task_id": "a", "messages": [{"role": "user", "content": ASK}, *booking_messages("DL9")]}]
        await asyncio.gather(*(judging(records) for _ in range(3)))
    assert sorted(each.parent.name for each in tmp_path.glob("*/judged.jsonl")) == ["00001", "00002", "00003"]


async def test_a_conversation_that_the_budget_refuses_does_not_end_the_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    prices = {"m": {"input": 100.0, "output": 0.0}}
    config = DracoConfig.model_validate({"judge": {"model": "openai/m", "prices": prices}})
    with ScriptedJudgeServer(answer=canned_judge.answer) as server:
        judging = Judging(None, config=config, api_base=server.base, budget=4.0)
        long, short = (
            [{"messages": [{"role": "user", "content": text}, *booking_messages("DL9")]}] for text in (ASK * 2000, ASK)
        )
        with pytest.raises(BudgetSpent):
            await judging(long)
        (judged,) = await judging(short)
    assert judged is not None
    assert judged.trace.reward == 1.0


async def test_a_run_to_which_no_criterion_applies_has_no_score_in_inspect() -> None:
    class Unsure(CannedCompleter):
        async def __call__(self, request: Request) -> Completion:
            found = await super().__call__(request)
            return replace(found, text=re.sub(r'"score": -?1', '"score": 0', found.text))

    message = SimpleNamespace(model_dump=lambda **_: {"role": "user", "content": ASK})
    done = SimpleNamespace(model_dump=lambda **_: {"role": "assistant", "content": "Done."})
    value, explanation, _ = await _judged(Judging("canned", complete=Unsure()), "task", [message, done])
    assert value is None
    assert explanation.startswith("NOT_APPLICABLE: ")


def test_what_a_reward_function_cannot_do_is_said_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="budgett"):
        StepCredit("openai/m", budgett=5.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="the price of openai/m is unknown"):
        StepCredit("openai/m", budget=5.0)
    with pytest.raises(ConfigError, match="no judge given; expected a model"):
        StepCredit()
    calibrated = {"algorithm": {"rule": "draco_calibrated", "reliability": 0.3}}
    with pytest.raises(ConfigError, match="rule=draco_calibrated: adapters spread advantages by the paper's rule"):
        StepCredit("openai/m", config=calibrated)
    for rule in ({"rule": "no_dropout"}, {"rule": "grpo"}, {"rule": "draco_calibrated", "reliability": 0.0}):
        StepCredit("openai/m", config={"algorithm": rule})
