"""Prompts that a judge could not read whole: cut by the stated rule, marked, counted, and never a step lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.example import PROMPT, RUBRIC, SCORES, example_trajectory
from draco_ray.judging.judge import CallContext, Judge, phase_summary
from draco_ray.judging.judge_context import judge_context_length, max_judge_prompt_tokens
from draco_ray.judging.phases import Credit, Question, Score, Stage1, Stage2, Union
from draco_ray.judging.prompt_fitter import PromptFitter
from draco_ray.judging.prompts import load_prompts
from draco_ray.judging.shortening import LENGTHS, MAX_LEVEL, cut, shortened, shortened_prompt
from draco_ray.records import Message, Trajectory
from tests.unit.test_judging_judge import Script

PROMPTS = load_prompts(Path("prompts/judge"))
WHERE = CallContext(group="step3/example_1", task_id="example_1", rollout=2)
LONG = 60_000


def long_rollout(*, steps: int = 4, output: int = LONG, said: int = 100, told: int = 100) -> Trajectory:
    example = example_trajectory()
    first = example.turns[0]
    turn = replace(
        first,
        text="t" * said + f"<code>\nprint({'c' * said})\n</code>",
        action=f"print({'c' * said})",
        observation="o" * output,
    )
    own = example.prompt[-1]
    prompt = (*example.prompt[:-1], Message(role=own.role, content=own.content + "p" * told))
    empty: dict[str, Any] = {
        name: np.zeros(0, dtype=getattr(example, name).dtype)
        for name in ("token_ids_T", "sampled_T", "logprob_T", "step_T")
    }
    return replace(example, turns=(turn,) * steps, prompt=prompt, **empty)


def judge(script: Script, **settings: Any) -> Judge:
    config = JudgeConfig(reasks=0, max_tokens=1000, **{"model": "openai/no-such", **settings})
    return Judge(script, PROMPTS, config)


async def asked(question: Question[Any], tokens: int) -> tuple[str, Any]:
    script = Script("[]")
    judged = await judge(script, context_tokens=tokens).ask(question, WHERE)
    return (script.asked[0].messages[0].content if script.asked else ""), judged


QUESTIONS: dict[str, Any] = {
    "stage2": lambda rollout: Stage2(rollout, RUBRIC[:1]),
    "union": lambda rollout: Union(PROMPT, RUBRIC, [rollout, replace(rollout, rollout=1)]),
    "score": lambda rollout: Score(rollout, RUBRIC),
    "credit": lambda rollout: Credit(rollout, RUBRIC, SCORES),
}


@pytest.mark.parametrize("phase", QUESTIONS)
async def test_outputs_are_cut_first_to_the_longest_length_with_which_the_prompt_fits(phase: str) -> None:
    prompt, judged = await asked(QUESTIONS[phase](long_rollout()), 41_000)
    room = 3 * 40_000
    assert 0.95 * room < len(prompt) <= room
    assert judged.left_out > LONG
    assert judged.notes[0].startswith(f"{judged.left_out:,} of {judged.left_out + len(prompt):,} characters")
    # The cut is marked, every step is there, and what was said is whole.
    assert "characters left out ...]" in prompt
    assert prompt.count("t" * 100) == prompt.count("[... ")
    assert "c" * 100 in prompt
    assert phase_summary(phase, WHERE, judged, 0.0).prompt_cut


@pytest.mark.parametrize("phase", QUESTIONS)
async def test_what_fits_is_shown_as_it_is(phase: str) -> None:
    question = QUESTIONS[phase](long_rollout(output=50))
    prompt, judged = await asked(question, 1_000_000)
    assert prompt == question.prompt(judge(Script())._prompts)
    assert (judged.left_out, phase_summary(phase, WHERE, judged, 0.0).prompt_cut) == (0, False)


async def test_then_turns_are_cut_and_then_the_agents_prompt() -> None:
    prompt, _ = await asked(Score(long_rollout(said=20_000), RUBRIC), 21_000)
    assert prompt.count("[... ") > 4
    assert "p" * 100 in prompt
    prompt, _ = await asked(Stage1(long_rollout(told=200_000).prompt), 21_000)
    assert "characters left out ...]\n" in prompt
    assert len(prompt) <= 60_000


async def test_what_does_not_fit_even_so_is_not_asked_and_says_why() -> None:
    question = Score(long_rollout(steps=400, output=500), RUBRIC)
    prompt, judged = await asked(question, 21_000)
    assert (prompt, judged.value, judged.calls) == ("", None, ())
    whole = len(question.prompt(load_prompts(Path("prompts/judge"))))
    assert judged.error == (
        f"score of example_1 rollout 2 failed: the prompt has about {whole / 3:,.0f} tokens, but the judge accepts "
        "about 20,000; it is too long even with every text cut to 100 characters. Use a judge with a longer context "
        "(judge.context_tokens)"
    )


@pytest.mark.parametrize("tokens", [2_300, 3_000, 5_000, 7_500])
async def test_about_the_least_cut_is_taken_with_which_the_prompt_fits(tokens: int) -> None:
    question = Score(long_rollout(output=2_500, said=1_200, told=300), RUBRIC)
    fitting = PromptFitter(JudgeConfig(reasks=0, max_tokens=1000, model="openai/no-such"), PROMPTS)
    fitting.room = tokens
    fitted = await fitting.fit(question)
    less = question.shortened(fitted.level - 3).prompt(PROMPTS)
    assert len(less) > 3 * tokens >= len(fitted.prompt)
    assert fitted.shown == question.shortened(fitted.level)
    assert fitted.left_out == len(question.prompt(PROMPTS)) - len(fitted.prompt)


def test_a_cut_rollout_has_the_steps_it_had() -> None:
    rollout = long_rollout(said=5_000)
    for level in range(0, MAX_LEVEL + 1, 11):
        found = shortened(rollout, level)
        assert len(found.steps) == len(rollout.steps)
        assert all(step.action in step.text for step in found.steps if step.action)


def test_how_much_a_judge_reads() -> None:
    known = JudgeConfig(model="openai/gpt-4o")
    assert judge_context_length(known) == 128_000
    assert judge_context_length(JudgeConfig(model="openai/gpt-4o", context_tokens=5000)) == 5000
    # An endpoint of one's own may serve anything under that name.
    assert judge_context_length(JudgeConfig(model="openai/gpt-4o", api_base="http://127.0.0.1:1/v1")) is None
    assert max_judge_prompt_tokens(JudgeConfig(model="openai/no-such")) is None
    with_fallback = JudgeConfig.model_validate({"model": "openai/gpt-5.4", "fallbacks": [{"model": "openai/gpt-4o"}]})
    assert max_judge_prompt_tokens(with_fallback) == max_judge_prompt_tokens(known)


def test_a_cut_keeps_two_thirds_of_the_length_from_the_beginning_and_says_what_is_left_out() -> None:
    text = "".join(chr(0x4E00 + number) for number in range(2_000))
    assert cut(text, 300) == f"{text[:200]}\n[... 1,700 characters left out ...]\n{text[-100:]}"
    # What the mark itself takes is not cut for it.
    assert cut(text[:360], 300) == text[:360]
    assert len(cut(text[:361], 300)) < 361


@pytest.mark.parametrize("stage", range(3))
def test_every_stage_begins_where_the_one_before_has_ended_and_takes_every_length(stage: int) -> None:
    """First outputs, then what was said, then what the agent was told."""
    rollout = long_rollout(output=LONG, said=LONG, told=LONG)

    def lengths(level: int) -> tuple[int, int, int]:
        less = shortened(rollout, level)
        turn = less.turns[-1]
        assert turn.action is not None
        assert turn.text.count(turn.action) == 1
        assert shortened_prompt(rollout.prompt, level) == less.prompt
        return (turn.observation or "").count("o"), turn.action.count("c"), less.prompt[-1].content.count("p")

    whole = lengths(0)
    for step, length in enumerate(LENGTHS, start=1):
        if length > LONG or step % 7:
            continue
        now = lengths(stage * len(LENGTHS) + step)
        shortest = lengths(stage * len(LENGTHS))
        assert now[stage] - length in range(-100, 10)
        assert now[:stage] == shortest[:stage]
        assert now[stage + 1 :] == whole[stage + 1 :]


def test_a_turn_is_cut_around_its_action() -> None:
    turn = replace(example_trajectory().turns[0], text="a" * 900 + "ACT" + "b" * 900, action="ACT", observation=None)
    gap = replace(turn, text="g" * 900, action=None)
    rollout = replace(long_rollout(), turns=(turn, gap))
    shown, closing = shortened(rollout, 2 * len(LENGTHS)).turns
    kept = LENGTHS[-1]
    assert shown.text == cut("a" * 900, kept) + "ACT" + cut("b" * 900, kept)
    assert (shown.action, shown.observation) == ("ACT", None)
    assert closing.text == cut("g" * 900, kept)

    def text(whole: str, action: str = "ACT") -> str:
        played = replace(rollout, turns=(replace(turn, text=whole, action=action),))
        (found,) = shortened(played, 2 * len(LENGTHS)).turns
        assert found.action == action
        return found.text

    # Of a trace the action stands at the end as well as in the text.
    assert text("ACT, then ACT") == "ACT, then ACT"
    # Where it was named before, the place where it was executed stays.
    assert text("ACT? " + "a" * 900 + "ACT.") == cut("ACT? " + "a" * 900, kept) + "ACT."
    assert text("n" * 900) == cut("n" * 900, kept) + "ACT"
    assert text("e" * 900 + "<code></code>", action="") == cut("e" * 900 + "<code></code>", kept)


def test_a_shorter_union_is_told_less_of_everything_and_merges_the_same_candidates() -> None:
    long = (Message(role="user", content="p" * LONG),)
    union = Union(long, RUBRIC, [long_rollout(), replace(long_rollout(), rollout=1)])
    shorter = union.shortened(MAX_LEVEL)
    assert shorter.messages == shortened_prompt(long, MAX_LEVEL) != long
    assert shorter.candidates == RUBRIC
    assert [each.rollout for each in shorter.trajectories] == [0, 1]
    assert {each.turns for each in shorter.trajectories} == {shortened(long_rollout(), MAX_LEVEL).turns}


async def test_a_union_of_more_candidates_than_fit_merges_the_first_of_them() -> None:
    """The proposals of a hundred rollouts, a thousand criteria, are longer than the prompt may be."""
    proposed = [replace(RUBRIC[0], title=f"Of {n}", description="d" * 1000) for n in range(1000)]
    prompt, judged = await asked(Union(PROMPT, proposed, [example_trajectory()]), 101_000)
    assert judged.ok
    kept = [each for each in proposed if f'"title": "{each.title}"' in prompt]
    assert kept == proposed[: len(kept)]
    assert 100 <= len(kept) < 300
    assert len(prompt) <= 3 * 100_000
