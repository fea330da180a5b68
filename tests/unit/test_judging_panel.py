"""Several judges: who decides, who is asked, and who stands in for whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from draco_ray.config.load import load_config
from draco_ray.config.schema import JudgeConfig, JudgeLimits, OtherJudgeConfig
from draco_ray.errors import BudgetSpent, ConfigError, JudgeUnavailable
from draco_ray.judging.complete import Complete, Completion, Request
from draco_ray.judging.example import PROMPT, RUBRIC, example_trajectory
from draco_ray.judging.judge import CallContext
from draco_ray.judging.panel import AWAY_SECONDS, Fallbacks, majority, other, panel_judge, with_fallbacks
from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import ScoredCriterion, Verdict

CONTEXT = CallContext(group="step1/t", task_id="t", rollout=0)
PROMPTS = load_prompts(Path("prompts/judge"), b"key")


class Scores:
    """A judge of one mind: the verdicts it gives on the criteria it is asked about, by title."""

    def __init__(self, model: str, *verdicts: int, error: Exception | str | None = None) -> None:
        self.model, self.verdicts, self.error = model, verdicts, error
        self.asked: list[list[str]] = []
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
        pass

    async def check(self) -> None:
        self.checked += 1
        if isinstance(self.error, Exception):
            raise self.error


def panel(main: Scores, jury: Sequence[Scores], strong: Scores | None = None) -> tuple[JudgeConfig, Complete]:
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
    assert any(note.startswith("no vote: score of t rollout 0 failed") for note in judged.notes)
    assert [call.model for call in judged.calls] == ["a", "b"]
    _, all_fail = panel(Scores("a", error="cut"), [Scores("b", error="cut")])
    nobody = await all_fail.ask(Score(example_trajectory(), RUBRIC), CONTEXT)  # type: ignore[attr-defined]
    assert nobody.value is None
    assert "cut" in (nobody.error or "")
    assert config.jury


async def test_other_phases_are_the_judges_alone() -> None:
    a, b = Scores("a", 1), Scores("b", 1)
    _, judge = panel(a, [b])
    judged = await judge.ask(Stage1(PROMPT), CONTEXT)  # type: ignore[attr-defined]
    assert judged.value is not None
    assert judged.value[0].evaluator_instruction == "a"
    assert not b.asked
    await judge.check()
    assert (a.checked, b.checked) == (1, 1)


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


def test_a_budget_wants_a_price_of_every_judge() -> None:
    config = JudgeConfig(limits=JudgeLimits(dollars=1.0), fallbacks=(OtherJudgeConfig(model="openai/own"),))
    with pytest.raises(ConfigError, match="no price of openai/own is known"):
        with_fallbacks(config, lambda each: Scores(each.model))
    priced = replace_jury(config)
    assert with_fallbacks(priced, lambda each: Scores(each.model)) is not None


def replace_jury(config: JudgeConfig) -> JudgeConfig:
    """The same with a judge whose price is known."""
    return config.model_copy(update={"fallbacks": (OtherJudgeConfig(model="anthropic/claude-sonnet-4-5"),)})


def test_another_judge_has_its_own_endpoint_and_key() -> None:
    config = JudgeConfig(api_base="http://a/v1", api_key_env="A", extra_body={"x": 1})
    made = other(config, OtherJudgeConfig(model="anthropic/claude-sonnet-4-5"))
    assert (made.api_base, made.api_key_env, made.extra_body) == (None, "ANTHROPIC_API_KEY", {})
    assert made.max_tokens == config.max_tokens
    assert other(config, OtherJudgeConfig(model="m", api_key_env="B")).api_key_env == "B"
    loaded = load_config(
        "sandbox", ["judge.jury=[{model: openai/gpt-5.4-mini}]", "judge.strong={model: openai/gpt-5.4}"]
    )
    assert loaded.judge.jury[0].model == "openai/gpt-5.4-mini"
