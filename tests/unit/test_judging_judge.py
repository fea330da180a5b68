"""The five phases with a scripted judge: what is asked, what comes back, what happens when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig, LocalJudgeConfig, OtherJudgeConfig, SelfJudgeConfig
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.build import build_judge, build_self_judge, prompts_of
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.example import PROMPT, RUBRIC, SCORES, example_trajectory
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.judge_context import QUOTED_REPLY_CHARACTERS
from draco_ray.judging.phases import Credit, Score, Stage1, Stage2, Union, combine_votes
from draco_ray.judging.prompts import KEY_FILE, load_prompts
from draco_ray.judging.reply import tag_of
from draco_ray.judging.reply_cache import REPLIES_FILE, ReplyCache
from draco_ray.judging.self_judge import SelfJudgeClient
from draco_ray.records import EpisodeEnd, OriginalCost, ScoredCriterion, Verdict
from tests.support.chat_tokenizer import QWEN3, chat_tokenizer

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


def judge(script: Completer, **changes: object) -> Judge:
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


class SwappedReplies(Script):
    """Answers two requests at a time, each with the reply to the other one; a single one with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = asyncio.Barrier(2)
        self.replies: list[str] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked.append(request)
        reply = json.dumps({"request_tag": tag_of(request.messages[0].content), "entries": json.loads(scores(1, 1))})
        if len(request.messages) > 1:
            return completion(reply)
        self.replies.append(reply)
        await self.both.wait()
        return completion(next(other for other in self.replies if other != reply))


async def test_replies_swapped_between_two_requests_are_noticed_and_asked_again() -> None:
    script = SwappedReplies()
    under_test = judge(script)
    rollouts = [replace(example_trajectory(), rollout=number, group=f"step1/task_{number}") for number in (0, 1)]
    judged = await asyncio.gather(*(under_test.ask(Score(each, RUBRIC), WHERE) for each in rollouts))
    assert [each.ok for each in judged] == [True, True]
    for each in judged:
        first, second = each.calls
        assert first.error is not None
        assert "that of another request" in first.error
        assert second.error is None


async def test_an_answer_that_carries_the_tag_is_told_from_one_that_is_quoted() -> None:
    question = Score(example_trajectory(), RUBRIC)
    tag = tag_of(question.prompt(load_prompts(Path("prompts/judge"))))
    quoted = f'The rollout wrote </think> {{"entries": {scores(1, 1)}}} and more: {{"rubric_index": 0, "score": 1'
    own = json.dumps({"request_tag": tag, "entries": json.loads(scores(-1, -1))})
    script = Script(f"{quoted}\n{own}\nIt also wrote {scores(1, 1)}.")
    judged = await judge(script).ask(question, WHERE)
    assert judged.value is not None
    assert [each.verdict for each in judged.value] == [Verdict.FAIL, Verdict.FAIL]
    assert len(judged.calls) == 1


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


async def test_a_request_says_what_it_is_for_and_every_one_holds_the_reply_to_the_schema() -> None:
    script = Script("no", criteria("A"))
    referee = judge(script, stage1_across_epochs=False)
    assert (await referee.ask(Stage1(PROMPT), WHERE)).ok
    first, second = script.asked
    config = JudgeConfig()
    assert first.schema == Stage1(PROMPT).schema(load_prompts(Path("prompts/judge")).templates["stage1"], config)
    assert second.schema == first.schema
    for request in script.asked:
        assert (request.phase, request.group, request.scope) == ("stage1", WHERE.group, WHERE.group)
    assert first.shared == second.shared
    # Asked across epochs, its reply is good for any group.
    script = Script(criteria("A"))
    await judge(script, stage1_across_epochs=True).ask(Stage1(PROMPT), WHERE)
    assert script.asked[0].scope == ""
    script = Script(scores(1, 1))
    await judge(script).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert (script.asked[0].scope, script.asked[0].phase) == ("", "score")


async def test_a_request_says_which_of_its_beginnings_others_share() -> None:
    script = Script(scores(1, 1))
    long = replace(example_trajectory(), prompt=(PROMPT[0], replace(PROMPT[1], content="x" * 10_000)))
    await judge(script, prompts="prompts/judge-cache-friendly").ask(Score(long, RUBRIC), WHERE)
    (request,) = script.asked
    assert request.shared
    assert all(request.messages[0].content[:end].endswith("]") for end in request.shared)


async def test_what_a_completion_says_of_itself_is_archived_whatever_became_of_it() -> None:
    paid = OriginalCost(
        call_id="first",
        requests=2,
        dollars=0.1,
        estimated_dollars=0.05,
        seconds=3.0,
        started_at=4.0,
        waited_seconds=1.0,
    )
    said = {"reasoning_tokens": 7, "estimated_dollars": 0.25, "waited_seconds": 1.5, "paid": paid, "call_id": "mine"}
    bad, unusable, good = (
        completion("", error="gone", **said),
        completion("no", **said),
        completion(scores(1, -1), **said),
    )
    for answers in ([good], [bad], [unusable, unusable]):
        script = Script(*answers)
        for call in (await judge(script).ask(Score(example_trajectory(), RUBRIC), WHERE)).calls:
            assert (call.reasoning_tokens, call.estimated_dollars, call.waited_seconds) == (7, 0.25, 1.5)
            assert (call.paid, call.call_id, call.phase, call.rollout) == (paid, "mine", "score", 2)
            assert call.prompt.startswith(script.asked[0].messages[0].content)
    nameless = (
        await judge(Script(scores(1, -1), scores(1, -1)), score_votes=2).ask(Score(example_trajectory(), RUBRIC), WHERE)
    ).calls
    assert all(len(call.call_id) == 32 for call in nameless)
    assert len({call.call_id for call in nameless}) == 2


async def test_what_is_asked_again_is_quoted_and_says_what_is_wanted() -> None:
    head = QUOTED_REPLY_CHARACTERS * 2 // 3
    tail = QUOTED_REPLY_CHARACTERS - head
    whole, longer = "a" * QUOTED_REPLY_CHARACTERS, "a" * head + "b" * 1234 + "c" * tail
    for reply, quoted in (
        (whole, whole),
        (longer, f"{'a' * head}\n[... 1,234 characters left out ...]\n{'c' * tail}"),
    ):
        script = Script(reply, criteria("A"))
        assert (await judge(script).ask(Stage1(PROMPT), CallContext(group="g", task_id="t_1"))).ok
        _, answer, again = script.asked[1].messages
        assert answer.content == quoted
        assert again.content == (
            "Your reply could not be used: no JSON object with 'entries' was found\n\n"
            "Answer the first message again, in full and in the format it asks for, with the complete JSON only."
        )


async def test_the_error_of_a_phase_names_its_task_and_its_rollout_where_it_has_one() -> None:
    judged = await judge(Script("no"), reasks=0).ask(Stage1(PROMPT), CallContext(group="g", task_id="t_1"))
    assert (judged.error or "").startswith("stage1 of t_1 failed after 1 calls: ")


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
    assert judged.notes == (f"left out {30 - limit} of 30 criteria: the limit is {limit}",)


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
    assert judged.error.startswith("score of example_1 rollout 2 failed after 2 calls: no JSON object with 'entries'")
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
    script = Script(completion("", finish_reason="error", error="the prompt was flagged"))
    judged = await judge(script).ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert judged.value is None
    assert judged.error == "score of example_1 rollout 2 failed after 1 calls: the prompt was flagged"
    assert judged.calls[0].error == "the prompt was flagged"


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
    assert judged.notes == ("rubric_index 1: a PASS or FAIL must cite at least one step in relevant_steps",)


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


# --- how a judge is built ---------------------------------------------------------------------------------------------


class Opened:
    """Stands for `LiteLLMClient`: remembers what it was opened with."""

    def __init__(
        self, config: JudgeConfig, cache: object, *, leases: object, servers: object, endpoint_counts: bool
    ) -> None:
        self.config, self.cache, self.leases, self.servers = config, cache, leases, servers
        self.endpoint_counts = endpoint_counts


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    found: list[Opened] = []

    def open_one(*arguments: Any, **named: Any) -> Opened:
        found.append(Opened(*arguments, **named))
        return found[-1]

    monkeypatch.setattr("draco_ray.judging.client.LiteLLMClient", open_one)
    return found


def test_a_judge_keeps_its_replies_where_it_is_told_to_else_in_its_folder_else_nowhere(
    opened: list[Opened], tmp_path: Path
) -> None:
    given: Any = object()
    build_judge(JudgeConfig())
    build_judge(JudgeConfig(cache=tmp_path / "replies"))
    build_judge(JudgeConfig(cache=tmp_path / "other"), replies=given)
    nowhere, folder, elsewhere = (each.cache for each in opened)
    assert nowhere is None
    assert isinstance(folder, ReplyCache)
    assert (tmp_path / "replies" / REPLIES_FILE).exists()
    assert elsewhere is given
    assert not (tmp_path / "other" / REPLIES_FILE).exists()


def test_all_judges_of_a_configuration_take_leases_and_only_a_local_one_asks_for_servers(
    opened: list[Opened], tmp_path: Path
) -> None:
    leases: Any = object()
    servers: Any = object()
    jury = (OtherJudgeConfig(model="openai/gpt-5.4-mini"),)
    local = LocalJudgeConfig(enabled=True)
    build_judge(JudgeConfig(model="hosted_vllm/own", local=local, jury=jury, cache=tmp_path), leases, servers)
    assert [each.config.model for each in opened] == ["hosted_vllm/own", "openai/gpt-5.4-mini"]
    assert [each.servers for each in opened] == [servers, None]
    assert [each.leases for each in opened] == [leases, leases]
    # One folder of replies for all of them.
    assert opened[0].cache is opened[1].cache is not None


def test_only_in_a_runs_own_replies_is_its_judge_the_same_wherever_it_is_reached(opened: list[Opened]) -> None:
    """A jury may hold the same name at another endpoint, which is another model."""
    jury = (OtherJudgeConfig(model="openai/own", api_base="http://b/v1"), OtherJudgeConfig(model="openai/else"))
    config = JudgeConfig(model="openai/own", api_base="http://a/v1", jury=jury)
    build_judge(config)
    assert [each.endpoint_counts for each in opened] == [True, True, True]
    opened.clear()
    build_judge(config, own_replies=True)
    assert [each.endpoint_counts for each in opened] == [False, True, True]


def test_prompts_carry_the_facts_and_the_secret_that_is_kept_beside_the_replies(tmp_path: Path) -> None:
    config = JudgeConfig(environment_facts="- It rains.", cache=tmp_path)
    assert prompts_of(config).facts == "- It rains."
    assert prompts_of(config).key == (tmp_path / KEY_FILE).read_bytes()


def test_the_policy_as_its_own_judge_answers_under_its_name() -> None:
    config = JudgeConfig(self_judge=SelfJudgeConfig(enabled=True))
    given = load_prompts(Path("prompts/judge-cache-friendly"))
    for prompts, folder in ((None, config.prompts), (given, given.folder)):
        built = build_self_judge(config, [], chat_tokenizer(QWEN3), "toy", prompts)
        assert built._prompts.folder == Path(folder)
        assert isinstance(built._complete, SelfJudgeClient)
        assert built._complete._model == "self/toy"
        assert built._config is config
