"""The second look: a sample of justifications is read again without their scores, and only counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.example import RUBRIC, example_trajectory
from draco_ray.judging.judge import SECOND_LOOK, CallContext, Judge, in_sample
from draco_ray.judging.panel import Panel
from draco_ray.judging.phases import Score
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import Judged
from draco_ray.traces.library import judge_sync
from draco_ray.traces.load import load_traces
from tests.support import canned_judge

WHERE = CallContext(group="step1/t_1", task_id="t_1", rollout=0)
PROMPTS = load_prompts(Path("prompts/judge"))


class Answers:
    """Scores 1 everywhere with notes that speak of a failure, and says so when the notes alone are read."""

    def __init__(self, look: str | None = None) -> None:
        self.looked = ["FAIL", "UNCLEAR"]
        self.look = look
        self.asked: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked.append(request)
        entries: list[dict[str, object]] = [
            {"rubric_index": index, "rubric_title": criterion.title} for index, criterion in enumerate(RUBRIC)
        ]
        for entry, verdict in zip(entries, self.looked, strict=True):
            if request.phase == SECOND_LOOK:
                entry["verdict"] = verdict
            else:
                entry |= {"evidence": "step 1", "justification": "It never read page 2.", "score": 1}
        text = json.dumps({"entries": entries}) if request.phase != SECOND_LOOK or self.look is None else self.look
        return Completion(
            text=text, finish_reason="stop", model="m", input_tokens=9, cached_tokens=0, output_tokens=9, dollars=0.25,
            started_at=0.0, seconds=0.0, requests=1,
        )  # fmt: skip

    async def forget(self, request: Request) -> None:
        """Nothing is kept."""

    async def check(self) -> None:
        """It answers."""


async def judged(answers: Answers, share: float) -> Judged[Any]:
    judge = Judge(answers, PROMPTS, JudgeConfig(second_look=share))
    found: Judged[Any] = await judge.ask(Score(example_trajectory(), RUBRIC), WHERE)
    return found


async def test_a_contradiction_is_counted_and_changes_no_verdict() -> None:
    answers = Answers()
    found = await judged(answers, 1.0)
    assert (found.looked_at, found.contradicted) == (2, 1)
    assert [int(each.verdict) for each in found.value or ()] == [1, 1]
    assert [(call.phase, call.dollars) for call in found.calls] == [("score", 0.25), (SECOND_LOOK, 0.25)]
    score, look = answers.asked
    assert "It never read page 2." in look.messages[0].content
    assert '"score"' not in look.messages[0].content
    assert look.schema != score.schema


async def test_off_by_default_and_a_failed_look_counts_nothing() -> None:
    answers = Answers()
    assert (await judged(answers, 0.0)).looked_at == 0
    assert len(answers.asked) == 1
    found = await judged(Answers("I cannot tell."), 1.0)
    assert (found.ok, found.looked_at, found.contradicted) == (True, 0, 0)
    assert found.calls[-1].error is not None


async def test_a_panel_counts_what_its_members_found() -> None:
    config = JudgeConfig(second_look=1.0)
    panel = Panel(Answers(), PROMPTS, config, None, [Judge(Answers(), PROMPTS, config)], None)
    found = await panel.ask(Score(example_trajectory(), RUBRIC), WHERE)
    assert (found.looked_at, found.contradicted) == (4, 2)


def test_the_sample_is_a_share_of_rollouts_and_the_same_again() -> None:
    drawn = [in_sample(0.1, f"step{step}/t", rollout) for step in range(500) for rollout in range(4)]
    assert 140 < sum(drawn) < 260
    assert drawn == [in_sample(0.1, f"step{step}/t", rollout) for step in range(500) for rollout in range(4)]
    assert not in_sample(0.0, "g", 0)
    assert in_sample(1.0, "g", 0)


def test_judged_traces_say_how_many_were_looked_at() -> None:
    class Canned(Answers):
        async def __call__(self, request: Request) -> Completion:
            answer = await super().__call__(request)
            if request.phase == SECOND_LOOK:
                return answer
            text = canned_judge.answer(request.messages[0].content)
            return Completion(**{**{name: getattr(answer, name) for name in answer.__slots__}, "text": text})

    from draco_ray.config.schema import DracoConfig

    config = DracoConfig.model_validate({"judge": {"model": "openai/m", "second_look": 1.0}})
    groups = load_traces(Path("tests/support/traces/openai_chat.jsonl"))
    (group,) = judge_sync(groups, config=config, complete=Canned("no"))
    assert (group.looked_at, group.contradicted) == (0, 0)
    assert group.dollars > 0
