"""Several judges: who decides, who is asked, and who stands in for whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from draco_ray.config.load import load_config
from draco_ray.config.schema import JudgeConfig, JudgeLimits, LocalJudgeConfig, OtherJudgeConfig, RuleJudgeConfig
from draco_ray.errors import BudgetSpent, ConfigError, JudgeUnavailable
from draco_ray.judging.client import LiteLLMClient
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.example import PROMPT, RUBRIC, example_trajectory
from draco_ray.judging.judge import CallContext
from draco_ray.judging.panel import AWAY_SECONDS, Fallbacks, Panel, majority, member_config, panel_judge, with_fallbacks
from draco_ray.judging.phases import Score, Stage1
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import Message, ScoredCriterion, Verdict

CONTEXT = CallContext(group="step1/t", task_id="t", rollout=0)
PROMPTS = load_prompts(Path("prompts/judge"), b"key")


class Scores:
    """A judge of one mind: the verdicts it gives on the criteria it is asked about, by title."""

    def __init__(self, model: str, *verdicts: int, error: Exception | str | None = None) -> None:
        self.model, self.verdicts, self.error = model, verdicts, error
        self.asked: list[list[str]] = []
        self.forgotten: list[Request] = []
        self.checked = 0

    async def __call__(self, request: Request) -> Completion:
        if isinstance(self.error, Exception):
            raise self.error
        prompt = request.messages[0].content
        listed = json.loads(prompt.partition("<rubrics>")[2].partition("</rubrics>")[0] or "[]")
        self.asked.append([each["title"] for each in listed])
        titles = [criterion.title for criterion in RUBRIC]
        entries = [
            {
                "rubric_index": each["rubric_index"],
                "rubric_title": each["title"],
                "evidence": self.model,
                "justification": "",
                "score": (self.verdicts or [1] * len(RUBRIC))[titles.index(each["title"])],
            }
            for each in listed
        ] or [{"title": "t", "description": "d", "evaluator_instruction": self.model}]
        return Completion(
            text=json.dumps(entries),
            finish_reason="stop",
            model=self.model,
            input_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            dollars=0.5,
            started_at=0.0,
            seconds=0.0,
            requests=1,
            error=self.error,
        )

    async def forget(self, request: Request) -> None:
        self.forgotten.append(request)

    async def check(self) -> None:
        self.checked += 1
        if isinstance(self.error, Exception):
            raise self.error


def panel(main: Scores, jury: Sequence[Scores], strong: Scores | None = None) -> tuple[JudgeConfig, Completer]:
    judges = {each.model: each for each in (main, *jury, *([strong] if strong else []))}
    config = JudgeConfig(
        model=main.model,
        reasks=0,
        jury=tuple(OtherJudgeConfig(model=each.model) for each in jury),
        strong=None if strong is None else OtherJudgeConfig(model=strong.model),
    )
    return config, panel_judge(config, PROMPTS, main, lambda each: judges[each.model])  # type: ignore[return-value]


async def scored(main: Scores, jury: Sequence[Scores], strong: Scores | None = None) -> list[tuple[int, str]]:
    _, judge = panel(main, jury, strong)
    judged = await judge.ask(Score(example_trajectory(), RUBRIC), CONTEXT)  # type: ignore[attr-defined]
    assert judged.value is not None, judged.error
    return [(int(each.verdict), each.evidence) for each in judged.value]


async def test_the_verdict_of_most_counts_and_the_judges_own_where_none_has_most() -> None:
    count = len(RUBRIC)
    a, b, c = (Scores(name, *([verdict] * count)) for name, verdict in (("a", 1), ("b", -1), ("c", -1)))
    assert await scored(a, [b, c]) == [(-1, "b")] * count
    assert await scored(a, [b]) == [(1, "a")] * count
    zero = Scores("d", *([0] * count))
    assert await scored(a, [b, zero]) == [(1, "a")] * count
    assert majority([ScoredCriterion(verdict=Verdict.FAIL)]).verdict is Verdict.FAIL
    # Two others have as many votes as each other, and more than the judge's own.
    split = [Verdict.PASS, Verdict.FAIL, Verdict.FAIL, Verdict.NOT_APPLICABLE, Verdict.NOT_APPLICABLE]
    assert majority([ScoredCriterion(verdict=each) for each in split]).verdict is Verdict.PASS


async def test_the_strong_judge_is_asked_where_the_others_differ_and_nowhere_else() -> None:
    count = len(RUBRIC)
    assert count >= 2
    cheap = Scores("cheap", *([1] * count))
    second = Scores("second", -1, *([1] * (count - 1)))
    strong = Scores("strong", *([-1] * count))
    found = await scored(cheap, [second], strong)
    assert found == [(-1, "strong"), *[(1, "cheap")] * (count - 1)]
    assert strong.asked == [[RUBRIC[0].title]]
    agreeing = Scores("strong", *([-1] * count))
    assert await scored(cheap, [Scores("second", *([1] * count))], agreeing) == [(1, "cheap")] * count
    assert not agreeing.asked


async def test_who_fails_has_no_vote_and_is_said_to_have_none() -> None:
    count = len(RUBRIC)
    config, judge = panel(
        Scores("a", *([1] * count), error="cut"), [Scores("b", *([-1] * count))], Scores("s", error="cut")
    )
    judged = await judge.ask(Score(example_trajectory(), RUBRIC), CONTEXT)  # type: ignore[attr-defined]
    assert [int(each.verdict) for each in judged.value or ()] == [-1] * count
    assert any(note.startswith("one judge gave no verdicts: score of t rollout 0 failed") for note in judged.notes)
    assert [call.model for call in judged.calls] == ["a", "b"]
    _, all_fail = panel(Scores("a", error="cut"), [Scores("b", error="gone")])
    nobody = await all_fail.ask(Score(example_trajectory(), RUBRIC), CONTEXT)  # type: ignore[attr-defined]
    assert nobody.value is None
    assert nobody.error == "score of t rollout 0 failed after 1 calls: cut"
    # What the failed calls have cost is in the archive as well, and nothing was left out.
    assert [call.model for call in nobody.calls] == ["a", "b"]
    assert nobody.notes == tuple(
        f"one judge gave no verdicts: score of t rollout 0 failed after 1 calls: {why}" for why in ("cut", "gone")
    )
    assert nobody.left_out == 0
    assert config.jury


async def test_every_call_of_a_panel_is_archived_and_a_strong_judge_that_fails_leaves_the_vote() -> None:
    count = len(RUBRIC)
    a, b = Scores("a", *([1] * count)), Scores("b", *([-1] * count))
    _, judge = panel(a, [b], Scores("s", *([0] * count)))
    judged = await judge.ask(Score(example_trajectory(), RUBRIC), CONTEXT)  # type: ignore[attr-defined]
    assert [call.model for call in judged.calls] == ["a", "b", "s"]
    assert (judged.notes, judged.left_out) == ((), 0)
    _, judge = panel(a, [b], Scores("s", error="cut"))
    judged = await judge.ask(Score(example_trajectory(), RUBRIC), CONTEXT)  # type: ignore[attr-defined]
    assert [int(each.verdict) for each in judged.value or ()] == [1] * count
    assert [call.model for call in judged.calls] == ["a", "b", "s"]
    assert judged.notes == (
        "the strong judge did not answer, so the majority's verdicts count: score of t rollout 0 failed after 1 "
        "calls: cut",
    )
    assert judged.left_out == 0


async def test_other_phases_are_the_judges_alone() -> None:
    a, b = Scores("a", 1), Scores("b", 1)
    _, judge = panel(a, [b])
    judged = await judge.ask(Stage1(PROMPT), CONTEXT)  # type: ignore[attr-defined]
    assert judged.value is not None
    assert judged.value[0].evaluator_instruction == "a"
    assert not b.asked


@pytest.mark.parametrize("gone", [None, 0, 1, 2])
async def test_all_of_a_panel_have_to_answer(gone: int | None) -> None:
    judges = [Scores(name, error=JudgeUnavailable(name) if gone == n else None) for n, name in enumerate("abc")]
    _, judge = panel(judges[0], [judges[1]], judges[2])
    if gone is None:
        await judge.check()
        assert [each.checked for each in judges] == [1, 1, 1]
    else:
        with pytest.raises(JudgeUnavailable, match=judges[gone].model):
            await judge.check()
    _, undecided = panel(Scores("a"), [Scores("b")])
    await undecided.check()


@pytest.mark.parametrize("strong", [None, "agrees", "decides", "fails", "has nothing to decide"])
async def test_a_panels_verdict_says_what_was_left_out_of_the_judges_prompt(strong: str | None) -> None:
    long = replace(example_trajectory(), turns=(replace(example_trajectory().turns[0], observation="o" * 60_000),))
    nobody = "cut" if strong == "has nothing to decide" else None
    judges = {
        "a": Scores("a", 1, 1, error=nobody),
        "b": Scores("b", *((1, 1) if strong == "agrees" else (-1, -1)), error=nobody),
        "s": Scores("s", 1, 1, error="cut" if strong == "fails" else None),
    }
    # Only the first one's context is known, and only its prompt is cut.
    config = JudgeConfig(
        model="a",
        context_tokens=21_000,
        max_tokens=1000,
        reasks=0,
        jury=(OtherJudgeConfig(model="b"),),
        strong=None if strong is None else OtherJudgeConfig(model="s"),
    )
    judged = await panel_judge(config, PROMPTS, judges["a"], lambda each: judges[each.model]).ask(
        Score(long, RUBRIC), CONTEXT
    )
    assert judged.ok is (nobody is None)
    assert judged.left_out > 0
    assert f"{judged.left_out:,} of" in judged.notes[0]


async def test_another_judge_answers_what_the_first_cannot() -> None:
    request = Request(messages=(PROMPT[0],))
    now = 0.0
    away = Scores("away", 1, error=JudgeUnavailable("gone"))
    broken, well = Scores("broken", 1, error="moderated"), Scores("well", 1)
    fallbacks = Fallbacks([away, broken, well], clock=lambda: now)
    completion = await fallbacks(request)
    # What the one in between may have cost is not lost.
    assert (completion.model, completion.dollars, completion.estimated_dollars) == ("well", 1.0, 0.5)
    away.error = None
    assert (await fallbacks(request)).model == "well"
    now = AWAY_SECONDS + 1
    assert (await fallbacks(request)).model == "away"
    await fallbacks.check()
    nobody = Fallbacks([Scores("a", error=JudgeUnavailable("a")), Scores("b", error=JudgeUnavailable("b"))])
    with pytest.raises(JudgeUnavailable, match="b"):
        await nobody(request)
    with pytest.raises(JudgeUnavailable, match="b"):
        await nobody.check()
    with pytest.raises(BudgetSpent):
        await Fallbacks([Scores("a", error=BudgetSpent("spent")), well])(request)


async def test_what_every_judge_before_the_last_may_have_cost_is_added_up() -> None:
    first, second, last = Scores("a", error="cut"), Scores("b", error="cut"), Scores("c")
    completion = await Fallbacks([first, second, last])(Request(messages=(PROMPT[0],)))
    assert (completion.model, completion.dollars, completion.estimated_dollars) == ("c", 1.5, 1.0)
    alone = await Fallbacks([last])(Request(messages=(PROMPT[0],)))
    assert (alone.dollars, alone.estimated_dollars) == (0.5, 0.0)


async def test_an_answer_is_forgotten_wherever_it_may_be_kept() -> None:
    judges = [Scores("a"), Scores("b")]
    request = Request(messages=(PROMPT[0],))
    await Fallbacks(judges).forget(request)
    assert [each.forgotten for each in judges] == [[request], [request]]


async def test_a_judge_that_a_check_finds_away_is_not_asked_for_a_while() -> None:
    now = 5.0
    away, well = Scores("away", error=JudgeUnavailable("gone")), Scores("well")
    fallbacks = Fallbacks([away, well], clock=lambda: now)
    await fallbacks.check()
    away.error = None
    request = Request(messages=(PROMPT[0],))
    now += AWAY_SECONDS - 1
    assert (await fallbacks(request)).model == "well"
    now += 1
    assert (await fallbacks(request)).model == "away"


def test_a_budget_wants_a_price_of_every_judge() -> None:
    config = JudgeConfig(limits=JudgeLimits(dollars=1.0), fallbacks=(OtherJudgeConfig(model="openai/own"),))
    with pytest.raises(ConfigError, match="the price of openai/own is unknown"):
        with_fallbacks(config, lambda each: Scores(each.model))
    priced = replace_jury(config)
    assert with_fallbacks(priced, lambda each: Scores(each.model)) is not None


def replace_jury(config: JudgeConfig) -> JudgeConfig:
    """The same with a judge whose price is known."""
    return config.model_copy(update={"fallbacks": (OtherJudgeConfig(model="anthropic/claude-sonnet-4-5"),)})


def test_another_judge_has_its_own_endpoint_and_key() -> None:
    config = JudgeConfig(api_base="http://a/v1", api_key_env="A", extra_body={"x": 1})
    made = member_config(config, OtherJudgeConfig(model="anthropic/claude-sonnet-4-5"))
    assert (made.api_base, made.key_variable, made.extra_body) == (None, "ANTHROPIC_API_KEY", {})
    assert made.max_tokens == config.max_tokens
    assert member_config(config, OtherJudgeConfig(model="m", api_key_env="B")).key_variable == "B"
    loaded = load_config(
        "sandbox", ["judge.jury=[{model: openai/gpt-5.4-mini}]", "judge.strong={model: openai/gpt-5.4}"]
    )
    assert loaded.judge.jury[0].model == "openai/gpt-5.4-mini"


def test_the_replies_of_another_judge_are_not_those_of_the_rule_judge_that_the_run_started() -> None:
    """They have the name of one model; endpoint, or rules, tell them apart."""
    config = JudgeConfig.model_validate({"model": "openai/rule-judge", "rule_judge": {"start": True}})
    same = [
        member_config(config, OtherJudgeConfig(model=config.model, api_base=base))
        for base in ("http://a/v1", "http://b/v1")
    ]
    rules = config.model_copy(update={"rule_judge": RuleJudgeConfig(start=True, use="mine.py:answer")})
    request = Request(messages=(Message(role="user", content="?"),))
    keys = {LiteLLMClient(each)._key(request) for each in (config, rules, *same)}
    assert len(keys) == 4
    restarted = config.model_copy(update={"api_base": "http://c/v1"})
    assert LiteLLMClient(restarted)._key(request) == LiteLLMClient(config)._key(request)


def with_others(**changes: object) -> JudgeConfig:
    """A configuration with other judges, every one at an endpoint of its own."""
    others = {
        "jury": (OtherJudgeConfig(model="j"),),
        "strong": OtherJudgeConfig(model="s"),
        "fallbacks": (OtherJudgeConfig(model="f", api_base="http://f/v1"), OtherJudgeConfig(model="g")),
    }
    return JudgeConfig.model_validate({"model": "m", "max_outage_seconds": 60.0, "max_tokens": 999} | others | changes)


def test_another_judge_has_no_panel_of_its_own_and_everything_else_of_the_first() -> None:
    config = with_others(context_tokens=50_000, api_base="http://m/v1", extra_body={"x": 1}, api_key_env="M")
    made = member_config(config, OtherJudgeConfig(model="org/name/x", api_base="http://x/v1"))
    assert made == JudgeConfig(model="org/name/x", api_base="http://x/v1", max_outage_seconds=60.0, max_tokens=999)
    assert member_config(config, OtherJudgeConfig(model="bare")).key_variable == "OPENAI_API_KEY"
    served = JudgeConfig(model="hosted_vllm/own", local=LocalJudgeConfig(enabled=True))
    assert member_config(served, OtherJudgeConfig(model="org/x")).local == LocalJudgeConfig()


def test_only_the_last_judge_that_stands_in_is_waited_for() -> None:
    opened: list[JudgeConfig] = []

    def open_one(config: JudgeConfig) -> Scores:
        opened.append(config)
        return Scores(config.model)

    config = with_others()
    assert isinstance(with_fallbacks(config, open_one), Fallbacks)
    impatient = {"max_outage_seconds": 0.0}
    first, second = (member_config(config, each) for each in config.fallbacks)
    assert opened == [config.model_copy(update=impatient), first.model_copy(update=impatient), second]
    opened.clear()
    alone = config.model_copy(update={"strong": None, "fallbacks": ()})
    assert isinstance(with_fallbacks(alone, open_one), Scores)
    assert opened == [alone]


@pytest.mark.parametrize("unpriced", ["j", "s", "f", "g"])
def test_a_budget_wants_a_price_of_whoever_may_be_asked(unpriced: str) -> None:
    prices = {model: {"input": 1.0, "output": 1.0} for model in "mjsfg"}
    config = with_others(limits={"dollars": 1.0}, prices=prices)
    assert with_fallbacks(config, lambda each: Scores(each.model)) is not None
    del prices[unpriced]
    with pytest.raises(ConfigError, match=f"the price of {unpriced} is unknown"):
        with_fallbacks(with_others(limits={"dollars": 1.0}, prices=prices), lambda each: Scores(each.model))


@pytest.mark.parametrize(("jury", "strong", "panel_of"), [((), None, False), (("j",), None, True), ((), "s", True)])
async def test_a_judge_alone_is_no_panel(jury: tuple[str, ...], strong: str | None, panel_of: bool) -> None:
    others = {"jury": [{"model": each} for each in jury], "strong": None if strong is None else {"model": strong}}
    config = with_others(**others)
    first = Scores("m")
    made = panel_judge(config, PROMPTS, first, lambda each: Scores(each.model))
    assert isinstance(made, Panel) is panel_of
    await made.check()
    assert first.checked == 1
