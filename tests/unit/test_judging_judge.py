"""The five phases with a scripted judge: what is asked, what comes back, what happens when it goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.complete import Completion, Request
from draco_ray.judging.example import PROMPT, RUBRIC, SCORES, example_trajectory
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases.credit import Credit
from draco_ray.judging.phases.score import Score, combine_votes
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.phases.union import Union
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import EpisodeEnd, ScoredCriterion, Verdict

WHERE = CallContext(group="step3/example_1", task_id="example_1", rollout=2)


def completion(text: str, **changes: Any) -> Completion:
    answer = Completion(
        text=text,
        finish_reason="stop",
        model="scripted",
        input_tokens=100,
        cached_tokens=40,
        output_tokens=10,
        dollars=0.5,
        started_at=1.0,
        seconds=2.0,
        requests=1,
    )
    return replace(answer, **changes)


class Script:
    """Completes requests from a list, and remembers what it was asked and told to forget."""

    def __init__(self, *answers: str | Completion | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[Request] = []
        self.forgotten: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return completion(answer) if isinstance(answer, str) else answer

    async def forget(self, request: Request) -> None:
        self.forgotten.append(request)

    async def check(self) -> None:
        raise JudgeUnavailable("nobody there")


def judge(script: Script, **changes: object) -> Judge:
    config = JudgeConfig.model_validate({"prompts": "prompts/judge"} | changes)
    return Judge(script, load_prompts(Path(config.prompts)), config)


def criteria(*titles: str) -> str:
    return json.dumps([{"title": title, "description": "d", "evaluator_instruction": "e"} for title in titles])


def scores(*values: int) -> str:
    return json.dumps(
        [
            {"rubric_index": index, "rubric_title": RUBRIC[index].title, "score": value, "evidence": f"{value} seen"}
            for index, value in enumerate(values)
        ]
    )


def attributions(rubric_indices: Sequence[int], *steps: list[int]) -> str:
    return json.dumps(
        [
            {
                "rubric_index": position,
                "rubric_title": RUBRIC[index].title,
                "verdict": "PASS",
                "relevant_steps": cited,
            }
            for position, (index, cited) in enumerate(zip(rubric_indices, steps, strict=True))
        ]
    )


async def test_stage1_sees_the_agents_prompt_and_archives_its_call() -> None:
    script = Script(criteria("A", "B"))
    judged = await judge(script).ask(Stage1(PROMPT), CallContext(group="g", task_id="t_1"))
    assert judged.ok
    assert [(criterion.title, criterion.source) for criterion in judged.value or ()] == [
        ("A", "stage1"),
        ("B", "stage1"),
    ]
    (message,) = script.asked[0].messages
    assert message.role == "user"
    assert f"]\n{PROMPT[0].content}\n\n[USER " in message.content
    (call,) = judged.calls
    assert (call.phase, call.group, call.task_id, call.rollout) == ("stage1", "g", "t_1", None)
    assert (call.prompt, call.reply, call.error) == (message.content, criteria("A", "B"), None)
    assert (call.input_tokens, call.cached_tokens, call.output_tokens, call.dollars) == (100, 40, 10, 0.5)
    assert (call.started_at, call.seconds, call.requests, call.model) == (1.0, 2.0, 1, "scripted")
    assert script.forgotten == []


async def test_stage2_adds_to_what_exists() -> None:
    script = Script(criteria("New", RUBRIC[0].title))
    judged = await judge(script).ask(Stage2(example_trajectory(5), RUBRIC), WHERE)
    assert [(criterion.title, criterion.source) for criterion in judged.value or ()] == [("New", "stage2/5")]
    assert len(judged.notes) == 1
    prompt = script.asked[0].messages[0].content
    assert re.search(r"\[ENVIRONMENT \w{8}\] \(output of step 2\)", prompt)
    assert RUBRIC[1].evaluator_instruction in prompt


async def test_stage2_and_union_may_find_nothing_but_stage1_may_not() -> None:
    assert (await judge(Script("[]")).ask(Stage2(example_trajectory(), RUBRIC), WHERE)).value == ()
    assert (await judge(Script("[]")).ask(Union(PROMPT, RUBRIC, [example_trajectory()]), WHERE)).value == ()
    assert (await judge(Script("[]", "[]")).ask(Stage1(PROMPT), WHERE)).value is None


@pytest.mark.parametrize(("phase", "limit"), [("stage1", 15), ("stage2", 10), ("union", 24)])
async def test_the_papers_limits_hold_whatever_the_judge_writes(phase: str, limit: int) -> None:
    referee = judge(Script(criteria(*(f"criterion {number}" for number in range(30)))))
    if phase == "stage1":
        judged = await referee.ask(Stage1(PROMPT), WHERE)
    elif phase == "stage2":
        judged = await referee.ask(Stage2(example_trajectory(), ()), WHERE)
    else:
        judged = await referee.ask(Union(PROMPT, RUBRIC, [example_trajectory()]), WHERE)
    assert len(judged.value or ()) == limit
    assert judged.notes == (f"cut {30 - limit} of 30 criteria: the limit is {limit}",)


async def test_union_shows_every_candidate_and_every_rollout() -> None:
    script = Script(criteria("Merged"))
    judged = await judge(script).ask(Union(PROMPT, RUBRIC, [example_trajectory(0), example_trajectory(1)]), WHERE)
    assert [(criterion.title, criterion.source) for criterion in judged.value or ()] == [("Merged", "union")]
    prompt = script.asked[0].messages[0].content
    assert '"candidate_index": 1' in prompt
    assert '<rollout index="1" code=' in prompt


async def test_score_returns_verdicts_in_the_rubrics_order() -> None:
    judged = await judge(Script(scores(-1, 0))).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert [score.verdict for score in judged.value or ()] == [Verdict.FAIL, Verdict.NOT_APPLICABLE]
    assert judged.calls[0].rollout == 2


async def test_credit_returns_steps() -> None:
    script = Script(attributions((0, 1), [1], [2, 1]))
    judged = await judge(script).ask(Credit(example_trajectory(), RUBRIC, SCORES), WHERE)
    assert [(item.criterion, item.steps) for item in judged.value or ()] == [(0, (1,)), (1, (1, 2))]
    prompt = script.asked[0].messages[0].content
    assert "### Step 2" in prompt
    assert '"verdict": "FAIL"' in prompt
    assert "verdicts on 2 criteria" in prompt


async def test_credit_can_be_asked_about_some_criteria_and_answers_in_the_groups_indices() -> None:
    script = Script(attributions((1,), [2]))
    judged = await judge(script).ask(Credit(example_trajectory(), RUBRIC, SCORES, criteria=[1]), WHERE)
    assert [(item.criterion, item.steps) for item in judged.value or ()] == [(1, (2,))]
    prompt = script.asked[0].messages[0].content
    assert RUBRIC[1].title in prompt
    assert RUBRIC[0].title not in prompt


async def test_what_needs_no_call_makes_none() -> None:
    referee = judge(Script())
    closing_only = replace(example_trajectory(), turns=example_trajectory().turns[2:], ended=EpisodeEnd.FINISHED)
    assert (await referee.ask(Union(PROMPT, (), [example_trajectory()]), WHERE)).value == ()
    assert (await referee.ask(Score(example_trajectory(), ()), WHERE)).value == ()
    assert (await referee.ask(Credit(example_trajectory(), (), ()), WHERE)).value == ()
    assert (await referee.ask(Credit(example_trajectory(), RUBRIC, SCORES, criteria=[]), WHERE)).value == ()
    assert (await referee.ask(Credit(closing_only, RUBRIC, SCORES), WHERE)).value == ()


async def test_an_unusable_reply_is_quoted_back_once_with_its_error() -> None:
    script = Script(scores(1, 3), scores(1, -1))
    judged = await judge(script).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert judged.ok
    question, answer, again = script.asked[1].messages
    assert question == script.asked[0].messages[0]
    assert (answer.role, answer.content) == ("assistant", scores(1, 3))
    assert again.role == "user"
    assert "entry 1, field score" in again.content
    first, second = judged.calls
    assert first.error is not None
    assert "entry 1, field score" in first.error
    assert second.error is None
    assert scores(1, 3) in second.prompt
    assert script.forgotten == []


async def test_a_second_unusable_reply_fails_the_phase_and_forgets_both() -> None:
    script = Script("no", "still no")
    judged = await judge(script).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert judged.value is None
    assert judged.error is not None
    assert judged.error.startswith("score of example_1 rollout 2 failed after 2 calls: no complete JSON array")
    assert all(call.error for call in judged.calls)
    assert script.forgotten == script.asked


async def test_a_reply_cut_at_the_token_limit_is_unusable_even_if_it_parses() -> None:
    cut = completion(scores(1, 1), finish_reason="length")
    judged = await judge(Script(cut, cut)).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert judged.value is None
    assert judged.error is not None
    assert "cut off at the token limit" in judged.error
    assert judged.calls[0].finish_reason == "length"


async def test_a_long_unusable_reply_is_not_sent_back_whole() -> None:
    script = Script("word " * 100_000, criteria("A"))
    judged = await judge(script).ask(Stage1(PROMPT), WHERE)
    assert judged.ok
    assert len(script.asked[1].messages[1].content) < 21_000
    assert judged.calls[0].reply == "word " * 100_000


async def test_an_empty_reply_is_asked_again() -> None:
    script = Script("", criteria("A"))
    assert (await judge(script).ask(Stage1(PROMPT), WHERE)).ok
    assert script.asked[1].messages[1].content == "(empty)"


async def test_a_call_the_judge_cannot_take_fails_at_once() -> None:
    script = Script(completion("", finish_reason="error", error="prompt too long"))
    judged = await judge(script).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert judged.value is None
    assert judged.error == "score of example_1 rollout 2 failed after 1 calls: prompt too long"
    assert judged.calls[0].error == "prompt too long"


async def test_asking_again_can_be_turned_off_or_up() -> None:
    assert len((await judge(Script("no"), reasks=0).ask(Stage1(PROMPT), WHERE)).calls) == 1
    assert len((await judge(Script("no", "no", "no"), reasks=2).ask(Stage1(PROMPT), WHERE)).calls) == 3


async def test_a_judge_that_is_gone_climbs() -> None:
    with pytest.raises(JudgeUnavailable):
        await judge(Script(JudgeUnavailable("gone"))).ask(Stage1(PROMPT), WHERE)
    with pytest.raises(JudgeUnavailable):
        await judge(Script()).check()


async def test_a_verdict_without_a_step_is_asked_about_once_and_then_moves_no_credit() -> None:
    uncited = attributions((0, 1), [1], [])
    judged = await judge(Script(uncited, uncited)).ask(Credit(example_trajectory(), RUBRIC, SCORES), WHERE)
    assert [item.steps for item in judged.value or ()] == [(1,), ()]
    assert judged.calls[0].error is not None
    assert judged.calls[1].error is None
    assert judged.notes == ("no step cited for rubric_index 1: no credit moves for it",)


async def test_a_step_beyond_the_trajectory_is_asked_about_once_and_then_left_out() -> None:
    beyond = attributions((0, 1), [1], [2, 3])
    judged = await judge(Script(beyond, beyond)).ask(Credit(example_trajectory(), RUBRIC, SCORES), WHERE)
    assert [item.steps for item in judged.value or ()] == [(1,), (2,)]
    assert judged.calls[0].error is not None
    assert judged.calls[1].error is None
    assert judged.notes == ("rubric_index 1: step 3 does not exist; steps are 1 to 2",)


async def test_every_vote_is_a_request_of_its_own() -> None:
    script = Script(scores(1, 1), scores(1, -1), scores(1, 0))
    judged = await judge(script, score_votes=3).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert [score.verdict for score in judged.value or ()] == [Verdict.PASS, Verdict.FAIL]
    assert [request.vote for request in script.asked] == [0, 1, 2]
    assert len({request.messages for request in script.asked}) == 1
    assert len(judged.calls) == 3


async def test_a_lost_vote_fails_the_score() -> None:
    script = Script(scores(1, 1), completion("", error="gone"), scores(1, 1))
    judged = await judge(script, score_votes=3).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert judged.value is None
    assert judged.error is not None
    assert len(judged.calls) == 3


@pytest.mark.parametrize(
    ("ballots", "joint"),
    [
        ((1, 1, 1), Verdict.PASS),
        ((1, 1, -1), Verdict.FAIL),
        ((-1, 0, 0), Verdict.FAIL),
        ((-1, -1, -1), Verdict.FAIL),
        ((1, 1, 0), Verdict.NOT_APPLICABLE),
        ((1, 0, 0), Verdict.NOT_APPLICABLE),
        ((0, 0, 0), Verdict.NOT_APPLICABLE),
    ],
)
def test_a_criterion_passes_only_if_all_calls_pass_it(ballots: tuple[int, ...], joint: Verdict) -> None:
    votes = [(ScoredCriterion(verdict=Verdict(value), evidence=str(value)),) for value in ballots]
    (combined,) = combine_votes(votes)
    assert combined.verdict is joint
    assert combined.evidence == str(int(joint))


async def test_the_cache_friendly_set_works_with_the_same_judge() -> None:
    referee = judge(Script(attributions((0, 1), [1], [2])), prompts="prompts/judge-cache-friendly")
    assert (await referee.ask(Credit(example_trajectory(), RUBRIC, SCORES), WHERE)).ok
