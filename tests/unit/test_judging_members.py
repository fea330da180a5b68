"""A union that the judge refuses for some of its rollouts: asked without them, in a bounded number of calls."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.load import load_config
from draco_ray.errors import BudgetSpent
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.example import PROMPT, RUBRIC, example_trajectory
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Stage2, Union
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Judged, Trajectory
from tests.unit.test_judging_judge import Script, completion, criteria, judge

WHERE = CallContext(group="g", task_id="t_1")
FLAGGED = completion("", finish_reason="error", error="the prompt was flagged")


class Filter:
    """A judge behind a filter that refuses whatever shows one of ``bad``."""

    def __init__(self, bad: Collection[int], refusal: Completion = FLAGGED) -> None:
        self.bad, self.refusal = bad, refusal
        self.shown: list[list[int]] = []
        self.prompts: list[str] = []

    async def __call__(self, request: Request) -> Completion:
        prompt = request.messages[0].content
        self.prompts.append(prompt)
        self.shown.append([int(each) for each in re.findall(r'<rollout index="(\d+)"', prompt)])
        return self.refusal if {*self.shown[-1]} & {*self.bad} else completion(criteria("A"))

    async def forget(self, request: Request) -> None: ...

    async def check(self) -> None: ...


def rollouts(count: int) -> list[Trajectory]:
    return [example_trajectory(rollout) for rollout in range(count)]


def union(count: int, doubtful: Sequence[int] = ()) -> Union:
    proposals = [replace(RUBRIC[0], title=f"Of {each}", source=f"stage2/{each}") for each in range(count)]
    return Union(PROMPT, [*RUBRIC, *proposals], rollouts(count), doubtful=doubtful)


async def asked(complete: Any, question: Union, **settings: object) -> Judged[Any]:
    return await judge(complete, reasks=0, **settings).ask(question, WHERE)


async def test_a_rollout_whose_own_call_was_refused_is_left_out_first() -> None:
    complete = Filter({5})
    judged = await asked(complete, union(8, doubtful=[5]))
    assert judged.ok
    assert complete.shown == [[*range(8)], [0, 1, 2, 3, 4, 6, 7]]
    assert '"Of 5"' not in complete.prompts[1]
    assert '"Of 6"' in complete.prompts[1]
    assert f'"{RUBRIC[0].title}"' in complete.prompts[1]
    assert len(judged.calls) == 2
    assert judged.notes == (
        "union was asked without rollout 5, which the judge refused to read: union of t_1 failed after 1 calls: the "
        "prompt was flagged",
    )


@pytest.mark.parametrize("bad", [*itertools.combinations(range(8), 1), *itertools.combinations(range(8), 2)])
async def test_one_or_two_of_eight_are_found_and_all_others_stay(bad: tuple[int, ...]) -> None:
    complete = Filter(bad)
    judged = await asked(complete, union(8))
    assert judged.ok
    # The answer that counts is the last accepted one.
    accepted = [shown for shown in complete.shown if not set(shown) & set(bad)]
    assert sorted(accepted[-1]) == [each for each in range(8) if each not in bad]
    assert len(judged.calls) == len(complete.shown) <= 1 + 8
    assert len({tuple(each) for each in complete.shown}) == len(complete.shown)


async def test_one_that_stage2_did_not_betray_is_found_among_the_others() -> None:
    """Rollout 2 is refused and its stage2 call was not; that of rollout 5 was lost for another reason."""
    complete = Filter({2})
    judged = await asked(complete, union(8, doubtful=[5]))
    assert judged.ok
    assert max(complete.shown[1:], key=lambda each: (2 not in each, len(each))) == [0, 1, 3, 4, 6, 7]


async def test_where_every_stage2_call_failed_none_is_doubtful() -> None:
    complete = Filter({1})
    assert (await asked(complete, union(4, doubtful=[0, 1, 2, 3]))).ok
    assert complete.shown[1:] == [[0], [0, 1], [0, 2], [0, 2, 3]]


@pytest.mark.parametrize("count", [2, 3, 5, 16])
async def test_a_judge_that_refuses_everything_is_asked_a_bounded_number_of_times(count: int) -> None:
    complete = Filter(range(count))
    judged = await asked(complete, union(count))
    assert judged.error == "union of t_1 failed after 1 calls: the prompt was flagged"
    assert len(judged.calls) == len(complete.shown) <= 1 + count


async def test_all_refused_ones_are_left_out_however_many_they_are() -> None:
    complete = Filter(range(1, 16, 2))
    judged = await asked(complete, union(16))
    assert judged.ok
    assert len(complete.shown) == 1 + 16
    assert judged.notes[0].startswith("union was asked without rollout 1, 3, 5, 7, 9, 11, 13, 15, which")


@pytest.mark.parametrize(
    "refusal",
    [
        completion("", finish_reason="content_filter"),
        completion("I cannot help with that.", finish_reason="refusal"),
        completion("", finish_reason="error", error="litellm.BadRequestError: content management policy"),
    ],
)
async def test_a_refusal_may_also_be_a_reply(refusal: Completion) -> None:
    assert (await asked(Filter({3}, refusal), union(4, doubtful=[3]))).ok


@pytest.mark.parametrize(
    "failure",
    [
        completion("", finish_reason="unavailable", error="no answer within 600 s"),
        completion("half", finish_reason="error"),
    ],
)
async def test_an_outage_starts_no_search(failure: Completion) -> None:
    complete = Filter({3}, failure)
    assert not (await asked(complete, union(4, doubtful=[3]))).ok
    assert len(complete.shown) == 1


@pytest.mark.parametrize(
    "failure",
    [
        completion("I'm sorry, I can't help with that."),
        completion(""),
        completion("[", finish_reason="length"),
        completion("look()", finish_reason="tool_calls"),
        completion('{"request_tag": "000000", "entries": []}'),
    ],
)
async def test_an_unusable_reply_is_retried_once_without_doubtful_rollouts(failure: Completion) -> None:
    complete = Filter({3}, failure)
    assert (await asked(complete, union(4, doubtful=[3]))).ok
    assert complete.shown == [[0, 1, 2, 3], [0, 1, 2]]
    for doubtful in ([], [2], [0, 1, 2, 3]):
        complete = Filter({3}, failure)
        assert not (await asked(complete, union(4, doubtful=doubtful))).ok
        assert len(complete.shown) == 1 + (doubtful == [2])


async def test_a_spent_budget_ends_the_search() -> None:
    class Poor(Filter):
        async def __call__(self, request: Request) -> Completion:
            if len(self.shown) == 3:
                raise BudgetSpent("no more")
            return await super().__call__(request)

    complete = Poor({5})
    with pytest.raises(BudgetSpent):
        await asked(complete, union(8))
    assert len(complete.shown) == 3


async def test_a_refused_question_about_one_rollout_is_asked_once() -> None:
    script = Script(FLAGGED)
    judged = await judge(script).ask(Stage2(example_trajectory(), RUBRIC), WHERE)
    assert judged.error == "stage2 of t_1 failed after 1 calls: the prompt was flagged"


async def test_a_rollout_that_is_too_long_whatever_is_cut_is_left_out_without_a_call() -> None:
    huge = example_trajectory(2)
    huge = replace(huge, turns=huge.turns * 4_000)
    question = replace(union(4), trajectories=[*rollouts(2), huge, example_trajectory(3)])
    complete = Filter({})
    judged = await asked(complete, question, context_tokens=60_000, model="openai/no-such")
    assert judged.ok
    assert complete.shown[-1] == [0, 1, 3]
    assert all(2 not in each for each in complete.shown)
    assert "too long even with every text cut" in judged.notes[0]


async def test_the_pipeline_says_whose_stage2_call_failed() -> None:
    given: list[dict[str, Any]] = []

    async def ask(phase: Any, context: CallContext, **named: Any) -> Any:
        given.append(named)
        error = "refused" if phase is Union else None
        return SimpleNamespace(
            judged=None, archived=None, ok=error is None, summary=SimpleNamespace(phase="", error=error)
        )

    judges: Any = SimpleNamespace(ask=ask)
    keep = SimpleNamespace(
        judged=SimpleNamespace(remote=lambda *_: None), group=SimpleNamespace(remote=lambda *_: None)
    )
    algorithm = load_config("sandbox", []).algorithm
    pipeline = Pipeline(algorithm, None, judges, None, keep)  # type: ignore[arg-type]
    members: Any = [SimpleNamespace(rollout=each, trajectory=each) for each in (0, 1, 3)]
    proposals: Any = [SimpleNamespace(ok=each != 1, judged=each) for each in range(3)]
    stage1: Any = asyncio.get_running_loop().create_future()
    stage1.set_result(SimpleNamespace(ok=True, judged=None))
    group = Group(step=1, index=0, task_id="t_1", prompt=())
    assert await pipeline._rubric_reward(group, members, proposals, stage1) is None
    (asked_of,) = given
    assert asked_of["doubtful"] == [1]
    assert group.reason == "no rubric: refused"
