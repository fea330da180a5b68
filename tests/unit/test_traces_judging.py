"""Groups of traces through the judge's phases: rewards, verdicts, step advantages, and the run directory they leave."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.commands.report import write_reports as write_report
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import BudgetSpent, ConfigError, JudgeUnavailable
from draco_ray.judging.completion import Completion, Request
from draco_ray.lab.analysis.judged_groups import recorded_groups
from draco_ray.lab.analysis.rules import replay_rules
from draco_ray.records import EpisodeEnd, Message, Turn
from draco_ray.runs.directory import RunDirectory, lock_run
from draco_ray.runs.rows import step_trajectories
from draco_ray.traces.judging import as_trajectory, environment_facts
from draco_ray.traces.library import judge, judge_sync, plan
from draco_ray.traces.load import groups_of, load_traces
from draco_ray.traces.model import Trace
from tests.support import canned_judge
from tests.unit.test_traces_load import FILES, written

MODEL = "openai/a-judge"


class Canned:
    """A `Completer` that answers with `canned_judge`, and by phase with something else."""

    def __init__(self, **instead: Callable[[str], str | Exception]) -> None:
        self.instead = instead
        self.asked: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked.append(request)
        prompt = request.messages[0].content
        text = self.instead.get(str(request.phase), canned_judge.answer)(prompt)
        if isinstance(text, Exception):
            raise text
        return Completion(
            text=text,
            finish_reason="stop",
            model=MODEL,
            input_tokens=100,
            cached_tokens=40,
            output_tokens=10,
            dollars=0.01,
            started_at=1.0,
            seconds=0.1,
            requests=1,
            call_id=str(len(self.asked)),
        )

    async def forget(self, request: Request) -> None:
        pass

    async def check(self) -> None:
        pass

    def phases(self) -> list[str]:
        return [str(request.phase) for request in self.asked]


def test_a_group_is_judged_as_the_method_says() -> None:
    canned = Canned()
    (group,) = judge_sync(load_traces(FILES / "openai_chat.jsonl"), MODEL, complete=canned)
    assert [criterion.title for criterion in group.rubric] == [
        "Books the cheapest flight",
        "Searches before it answers",
    ]
    # Nobody fails the second: it drops out. So R is +1 and -1, A is 1/sqrt(2) and its opposite.
    assert group.survived == (True, False)
    assert [trace.reward for trace in group.rollouts] == [1.0, -1.0]
    assert [trace.advantage for trace in group.rollouts] == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-5)
    for trace in group.rollouts:
        # A search, a message to the user, the booking, a message at the end.
        assert [step.cited for step in trace.steps] == [False, False, True, False]
        assert not trace.steps[1].action.startswith("search_flights(")
        # The whole advantage, N A, on all steps (property P1).
        tokens = np.array([step.tokens for step in trace.steps])
        assert trace.advantage is not None
        pushed = sum(step.tokens * (step.advantage or 0.0) for step in trace.steps)
        assert pushed == pytest.approx(trace.advantage * tokens.sum())
        assert trace.verdicts[0].steps == (3,)
        assert trace.verdicts[0].evidence == "as it says"
    assert canned.phases() == ["stage1", *["stage2"] * 2, "union", *["score"] * 2, *["credit"] * 2]
    assert group.dollars == pytest.approx(0.08)


def test_a_plain_function_can_answer_instead_of_the_model(tmp_path: Path) -> None:
    canned = Canned(credit=lambda prompt: "no")

    async def answers(request: Request) -> Completion:
        return await canned(request)

    groups = load_traces(FILES / "openai_chat.jsonl")
    (kept,) = judge_sync(groups, MODEL, complete=answers, out=tmp_path / "out")
    (found,) = judge_sync(groups, MODEL, complete=answers)
    for group in (kept, found):
        assert [trace.reward for trace in group.rollouts] == [1.0, -1.0]
        # After an unusable reply, too.
        assert [trace.fallback for trace in group.rollouts] == ["credit_call_failed"] * 2


def test_every_prompt_tells_of_the_world_of_these_traces_and_of_no_other() -> None:
    canned = Canned()
    judge_sync(load_traces(FILES / "openai_chat.jsonl"), MODEL, complete=canned)
    for request in canned.asked:
        prompt = request.messages[0].content
        assert "Tools that it has: book, search_flights." in prompt
        assert "complete_task" not in prompt
        assert "<code>" not in prompt


def test_a_single_trace_has_a_rubric_verdicts_and_citations_but_no_advantage() -> None:
    canned = Canned()
    (group, _) = judge_sync(load_traces(FILES / "openai_chat.jsonl", group_by="none"), MODEL, complete=canned)
    (trace,) = group.rollouts
    assert group.notes == ("a single trace: no dropout, no advantage",)
    assert group.survived == (True, True)
    assert (trace.reward, trace.advantage) == (1.0, None)
    assert [step.advantage for step in trace.steps] == [None] * 4
    assert [step.quality for step in trace.steps] == [1.0] * 4
    assert [each.verdict for each in trace.verdicts] == ["PASS", "PASS"]
    assert trace.verdicts[0].steps == (3,)
    # Nothing to merge: the union, which keeps what some run fails, is not asked.
    assert canned.phases().count("union") == 0
    assert [each.title for each in group.rubric] == ["Books the cheapest flight", "Searches before it answers"]


def test_a_rubric_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"- {json.dumps(canned_judge.CHEAPEST)}", encoding="utf-8")
    canned = Canned()
    groups = load_traces(FILES / "openai_chat.jsonl")
    (group,) = judge_sync(groups, MODEL, rubric=tmp_path / "mine.yaml", complete=canned)
    assert [criterion.source for criterion in group.rubric] == ["static"]
    assert set(canned.phases()) == {"score", "credit"}
    (static,) = judge_sync(groups, MODEL, rubric="static", complete=Canned(score=lambda p: "no"))
    assert len(static.rubric) > 5
    assert static.error == "0 of 2 traces could be scored"


def test_which_credit_calls_are_made_is_what_the_settings_say(tmp_path: Path) -> None:
    """The criterion that all pass is dropped: by default it needs no credit call."""
    (tmp_path / "passed.yaml").write_text(f"- {json.dumps(canned_judge.SEARCHES)}", encoding="utf-8")
    groups = load_traces(FILES / "openai_chat.jsonl")
    every = {"algorithm": {"skip_useless_credit_calls": False, "credit_surviving_only": False}}
    for config, calls in ((None, 0), (every, 2)):
        canned = Canned()
        judge_sync(groups, MODEL, rubric=tmp_path / "passed.yaml", config=config, complete=canned)
        assert canned.phases().count("credit") == calls
    for config, cited in ((None, False), (every, True)):
        (group,) = judge_sync(groups, MODEL, config=config, complete=Canned())
        assert [bool(trace.verdicts[1].steps) for trace in group.rollouts] == [cited] * 2


def test_a_pinned_rubric_blames_steps_where_all_fail_alike_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "failed.yaml").write_text(f"- {json.dumps(canned_judge.CHEAPEST)}", encoding="utf-8")
    record = json.loads((FILES / "openai_chat.jsonl").read_text(encoding="utf-8").splitlines()[1])
    groups = groups_of([record, {**record, "id": "again"}])
    for config, blamed in ((None, True), ({"algorithm": {"skip_useless_credit_calls": True}}, False)):
        (group,) = judge_sync(groups, MODEL, rubric=tmp_path / "failed.yaml", config=config, complete=Canned())
        verdicts = [verdict for trace in group.rollouts for verdict in trace.verdicts]
        assert [(verdict.verdict, bool(verdict.steps)) for verdict in verdicts] == [("FAIL", blamed)] * 2


def test_traces_judged_alone_are_replayed_as_they_were_judged(tmp_path: Path) -> None:
    """Their rubrics have a criterion that the trace passes, which dropout would drop."""
    groups = load_traces(FILES / "openai_chat.jsonl", group_by="none")
    for name, rubric in (("own", None), ("pinned", "static")):
        judge_sync(groups, MODEL, rubric=rubric, out=tmp_path / name, complete=Canned())
        for row in replay_rules(RunDirectory.open(tmp_path / name)).to_pylist():
            assert (row["rule"], row["reward_shift"], row["advantage_shift"]) == (row["rule"], 0.0, 0.0)
            assert row["surviving"] == row["criteria"]


def test_without_a_criterion_there_is_no_reward(tmp_path: Path) -> None:
    none = json.dumps({"entries": []})
    (group,) = judge_sync(
        load_traces(FILES / "openai_chat.jsonl"), MODEL, out=tmp_path / "out", complete=Canned(union=lambda _: none)
    )
    assert group.error == "no rubric: no criterion distinguishes the traces of the group"
    assert [(trace.reward, trace.error) for trace in group.rollouts] == [(None, None)] * 2
    (row,) = RunDirectory.open(tmp_path / "out").table("groups").to_pylist()
    assert (row["state"], row["rollouts"], row["lost"]) == ("failed", 2, 0)


async def test_the_rubric_of_a_large_group_is_merged_from_its_first_traces() -> None:
    groups = load_traces(FILES / "openai_chat.jsonl")
    many = replace(groups[0], read=lambda: [*groups[0].traces * 9])
    canned = Canned()
    (found,) = await judge([many], MODEL, complete=canned)
    (union,) = (each.messages[0].content for each in canned.asked if each.phase == "union")
    assert union.count("<rollout index=") == 16
    assert found.notes == ("the rubric was merged from the first 16 of 18 traces",)
    assert [canned.phases().count(phase) for phase in ("stage2", "score", "credit")] == [18] * 3


def test_what_fails_is_said_and_is_no_verdict() -> None:
    broken = Canned(score=lambda prompt: "no" if "booked UA1" in prompt else canned_judge.answer(prompt))
    (group,) = judge_sync(load_traces(FILES / "openai_chat.jsonl"), MODEL, complete=broken)
    assert group.error == "1 of 2 traces could be scored"
    assert [trace.reward for trace in group.rollouts] == [None, None]
    assert "no JSON object" in (group.rollouts[1].error or "")
    assert group.rollouts[0].verdicts
    (uncredited,) = judge_sync(
        load_traces(FILES / "openai_chat.jsonl"), MODEL, complete=Canned(credit=lambda prompt: "no")
    )
    assert [trace.fallback for trace in uncredited.rollouts] == ["credit_call_failed"] * 2
    assert uncredited.rollouts[0].notes[0].startswith("no step credit: credit of jfk-sfo")
    assert [step.advantage for step in uncredited.rollouts[0].steps] == [uncredited.rollouts[0].advantage] * 4
    (unwritten,) = judge_sync(
        load_traces(FILES / "openai_chat.jsonl"),
        MODEL,
        complete=Canned(stage1=lambda prompt: "no", stage2=lambda prompt: "no"),
    )
    assert (unwritten.error or "").startswith("no rubric: stage1 of jfk-sfo failed")


def test_notes_about_a_score_and_about_credit_are_kept() -> None:
    def beyond(prompt: str) -> str:
        return re.sub(r'"relevant_steps": \[\d+\]', '"relevant_steps": [1, 99]', canned_judge.answer(prompt))

    def twice(prompt: str) -> str:
        return canned_judge.answer(prompt).replace('"score": 1', '"score": 1, "final_score": -1')

    (group,) = judge_sync(load_traces(FILES / "openai_chat.jsonl"), MODEL, complete=Canned(score=twice, credit=beyond))
    notes = "\n".join(group.rollouts[0].notes)
    assert "score: verdict PASS and final_score -1 contradict each other" in notes
    assert "credit: rubric_index 0: step 99 does not exist" in notes


def test_traces_that_say_little_are_judged(tmp_path: Path) -> None:
    """One turn, no tool, no task: its message is what a verdict cites."""
    file = written(tmp_path / "a.jsonl", {"messages": [{"role": "assistant", "content": "The answer is DL9."}]})
    canned = Canned()
    (group,) = judge_sync(load_traces(file), MODEL, complete=canned)
    assert group.rollouts[0].reward == 1.0
    assert [(step.action, step.cited) for step in group.rollouts[0].steps] == [("The answer is DL9.", True)]
    assert group.rollouts[0].notes == ("the trace does not contain the agent's task",)
    # A trace that only reasons has no step: there is nothing to ask.
    silent = written(tmp_path / "b.jsonl", {"messages": [{"role": "assistant", "content": "<think>DL9?</think>"}]})
    canned = Canned()
    (group,) = judge_sync(load_traces(silent), MODEL, complete=canned)
    assert group.rollouts[0].steps == ()
    assert "credit" not in canned.phases()


def test_the_run_directory_is_one_like_any_other(tmp_path: Path) -> None:
    out = tmp_path / "judged"
    groups = load_traces([FILES / "openai_chat.jsonl", FILES / "tau2.json"])
    found = judge_sync(groups, MODEL, out=out, complete=Canned())
    run = RunDirectory.open(out)
    assert run.path.stat().st_mode & 0o077 == 0
    assert [group.name for group in recorded_groups(run)] == ["step1/flights/task_001", "step1/jfk-sfo"]
    recorded = {group.task_id: group for group in recorded_groups(run)}
    for group in found:
        assert recorded[group.task_id].reward_G.tolist() == [trace.reward for trace in group.rollouts]
        for trace, steps in zip(group.rollouts, recorded[group.task_id].step_advantage_GM, strict=True):
            assert steps.tolist() == pytest.approx([step.advantage for step in trace.steps])
    roles = [turn.role for turn in step_trajectories(run, 1)["jfk-sfo"][0].turns]
    assert roles == ["assistant", "assistant", "user", "assistant", "assistant"]
    assert {row["rule"]: row["advantage_shift"] for row in replay_rules(run).to_pylist()}["draco"] == 0.0
    write_report([out], figures=False, tables=False, out=None)
    assert (out / "report.html").stat().st_size > 10_000
    (line,) = run.metrics()
    assert (line["groups"], line["rollouts"], line["judge_dollars"]) == (2, 4, pytest.approx(0.16))
    lines = [json.loads(text) for text in (out / "judged.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(each["task_id"], each["trace_id"], each["reward"]) for each in lines][:2] == [
        ("jfk-sfo", "run-1", 1.0),
        ("jfk-sfo", "run-2", -1.0),
    ]
    assert lines[0]["steps"][1]["advantage"] == found[0].rollouts[0].steps[1].advantage
    # What a trace was scored with elsewhere stands beside the reward, and no judge has seen it.
    assert [each["outcome"] for each in lines][2:] == [1.0, 0.0]


def test_a_judge_that_fails_in_the_middle_is_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "judged"
    groups = load_traces([FILES / "openai_chat.jsonl", FILES / "anthropic.jsonl"], group_by="id")
    unavailable = Canned(credit=lambda prompt: JudgeUnavailable("gone"))
    unavailable.instead["credit"] = lambda p: canned_judge.answer(p) if "booked DL9" in p else JudgeUnavailable("gone")
    with pytest.raises(JudgeUnavailable):
        judge_sync(groups, MODEL, out=out, complete=unavailable)
    done = [json.loads(text) for text in (out / "judged.jsonl").read_text(encoding="utf-8").splitlines()]
    assert 0 < len(done) + 1 <= 4
    again = Canned()
    found = judge_sync(groups, MODEL, out=out, complete=again)
    assert [group.error for group in found] == [None] * 4
    assert len(again.asked) == 4 * (4 - len(done))
    third = Canned()
    assert judge_sync(groups, MODEL, out=out, complete=third) == found
    assert not third.asked


def test_ids_that_are_no_names_of_files_are_kept_as_they_are(tmp_path: Path) -> None:
    ids = ["../../etc/passwd", "a/b", "x" * 400, "猫\u202e", "line\nbreak", ".", "{{ task }}"]
    records = [
        {"task_id": each, "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "is DL9"}]}
        for each in ids
    ]
    found = judge_sync(
        load_traces(written(tmp_path / "a.jsonl", *records)), MODEL, out=tmp_path / "o", complete=Canned()
    )
    assert len(found) == len(ids)
    run = RunDirectory.open(tmp_path / "o")
    recorded = set(run.table("groups", columns=["task_id"]).column("task_id").to_pylist())
    assert recorded == {group.task_id for group in found}
    assert {"../../etc/passwd", "a/b"} <= recorded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "o"]
    write_report([tmp_path / "o"], figures=False, tables=False, out=None)


def test_another_judging_is_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "judged"
    groups = load_traces(FILES / "openai_chat.jsonl")
    judge_sync(groups, MODEL, out=out, complete=Canned())
    with pytest.raises(ConfigError, match="contains judgements of other traces"):
        judge_sync(load_traces(FILES / "tau2.json"), MODEL, out=out, complete=Canned())
    with pytest.raises(ConfigError, match=r"judge\.model differs from the earlier judgement"):
        judge_sync(groups, "openai/other", out=out, complete=Canned())
    with pytest.raises(ConfigError, match=r"algorithm\.rubric differs from the earlier judgement"):
        judge_sync(groups, MODEL, rubric="static", out=out, complete=Canned())
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a run directory"):
        judge_sync(groups, MODEL, out=tmp_path / "file", complete=Canned())
    # A larger budget goes on.
    config = DracoConfig().judge.model_copy(update={"prices": {"a-judge": DracoConfig().judge.prices["gpt-5.4"]}})
    assert judge_sync(
        groups, MODEL, out=tmp_path / "two", complete=Canned(), config=DracoConfig(judge=config), budget=1
    )
    assert judge_sync(
        groups, MODEL, out=tmp_path / "two", complete=Canned(), config=DracoConfig(judge=config), budget=2
    )


def test_a_pinned_rubric_that_was_edited_is_another_one(tmp_path: Path) -> None:
    """One with the same path: the finished groups would keep the verdicts on its old criteria."""
    mine, out, groups = tmp_path / "mine.yaml", tmp_path / "judged", load_traces(FILES / "openai_chat.jsonl")
    mine.write_text(f"- {json.dumps(canned_judge.CHEAPEST)}", encoding="utf-8")
    first = judge_sync(groups, MODEL, rubric=mine, out=out, complete=Canned())
    # Not one that was moved and written in another way.
    mine = mine.rename(tmp_path / "moved.yaml")
    mine.write_text(json.dumps([canned_judge.CHEAPEST], indent=4), encoding="utf-8")
    assert judge_sync(groups, MODEL, rubric=mine, out=out, complete=Canned()) == first
    edited = {**canned_judge.CHEAPEST, "evaluator_instruction": "Pass if it is UA1."}
    mine.write_text(f"- {json.dumps(edited)}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"used other contents of .*moved\.yaml; choose a new folder"):
        judge_sync(groups, MODEL, rubric=mine, out=out, complete=Canned())


def test_prompts_that_were_edited_are_other_ones(tmp_path: Path) -> None:
    mine, out, groups = tmp_path / "prompts", tmp_path / "judged", load_traces(FILES / "openai_chat.jsonl")
    shutil.copytree("prompts/judge", mine)
    config = {"judge": {"prompts": str(mine)}}
    first = judge_sync(groups, MODEL, out=out, complete=Canned(), config=config)
    assert judge_sync(groups, MODEL, out=out, complete=Canned(), config=config) == first
    template = mine / "score_rubrics.txt"
    template.write_text(template.read_text(encoding="utf-8") + "Be strict.\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"used other contents of .*prompts; choose a new folder, or restore the file"
    ):
        judge_sync(groups, MODEL, out=out, complete=Canned(), config=config)


def test_a_folder_that_was_moved_is_gone_on_with(tmp_path: Path) -> None:
    groups = load_traces(FILES / "openai_chat.jsonl")
    first = judge_sync(groups, MODEL, out=tmp_path / "judged", complete=Canned())
    (tmp_path / "judged").rename(tmp_path / "moved")
    assert judge_sync(groups, MODEL, out=tmp_path / "moved", complete=Canned()) == first


def test_where_nothing_was_judged_yet_another_judge_and_other_traces_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    out, groups = tmp_path / "judged", load_traces(FILES / "openai_chat.jsonl")
    with pytest.raises(JudgeUnavailable, match="no API key found; set environment variable OPENAI_API_KEY"):
        judge_sync(load_traces(FILES / "tau2.json"), "openai/gpt-5.4", out=out)
    (judged,) = judge_sync(groups, MODEL, out=out, complete=Canned())
    assert [trace.reward for trace in judged.rollouts] == [1.0, -1.0]
    assert load_config(str(out)).judge.model == MODEL
    recorded = [json.loads(line)["trace_id"] for line in (out / "traces.jsonl").read_text("utf-8").splitlines()]
    assert recorded == [trace.trace_id for trace in judged.rollouts]


def test_two_at_a_time_are_refused_and_another_way_to_the_same_judge_is_not(tmp_path: Path) -> None:
    out, groups = tmp_path / "judged", load_traces(FILES / "openai_chat.jsonl")
    judge_sync(groups, MODEL, out=out, complete=Canned())
    with (
        lock_run(RunDirectory.open(out)),
        pytest.raises(ConfigError, match="another process is using it; end that process"),
    ):
        judge_sync(groups, MODEL, out=out, complete=Canned())
    moved = "http://10.0.0.7/v1"
    assert judge_sync(groups, MODEL, out=out, complete=Canned(), api_base=moved, api_key_env="OTHER_KEY")
    with pytest.raises(ConfigError, match=r"below cannot be created, because a file has this name|cannot be created"):
        judge_sync(groups, MODEL, out=out / "judged.jsonl" / "below", complete=Canned())


def test_a_budget_needs_a_price_and_is_dollars() -> None:
    with pytest.raises(ConfigError, match=r"the price of openai/a-judge is unknown"):
        plan(MODEL, budget=1.0)
    with pytest.raises(ConfigError, match=r"budget -1: expected 0 dollars or more"):
        plan("openai/gpt-5.4", budget=-1.0)
    with pytest.raises(ConfigError, match="a reply alone may have"):
        plan("openai/gpt-5.4", context=2000)
    assert issubclass(BudgetSpent, JudgeUnavailable)


def long_trace(**lengths: int) -> Trace:
    """Ten steps, with an observation, something said and a prompt of these lengths."""
    said = "s" * lengths.get("said", 10)
    action = "run({})"
    return Trace(
        trace_id="long",
        task_id="t",
        prompt=(Message(role="user", content="p" * lengths.get("prompt", 10)),),
        turns=tuple(
            Turn(
                role="assistant",
                text=f"{said}\n\n{action}",
                action=action,
                observation="o" * lengths.get("observation", 10),
            )
            for _ in range(10)
        ),
        format="openai-chat",
        source="x",
        ended=EpisodeEnd.FINISHED,
    )


@pytest.mark.parametrize(
    ("lengths", "cut_parts"),
    [
        ({"observation": 9000}, {"o"}),
        ({"observation": 9000, "said": 9000}, {"o", "s"}),
        ({"prompt": 90_000}, {"o", "s", "p"}),
    ],
)
async def test_what_is_too_long_is_cut_by_the_rule_and_said(lengths: dict[str, int], cut_parts: set[str]) -> None:
    trace, canned = long_trace(**lengths), Canned()
    group = replace(load_traces(FILES / "openai_chat.jsonl")[0], read=lambda: [trace])
    (found,) = await judge([group], MODEL, complete=canned, context=35_000)
    (result,) = found.rollouts
    assert result.reward is not None
    assert any(note.startswith(f"score: {result.left_out:,} of ") for note in result.notes)
    (prompt,) = (each.messages[0].content for each in canned.asked if each.phase == "score")
    assert prompt.count("run({})") == 10
    for letter in "osp":
        left_out = sum(lengths.values()) > 0 and letter * 500 not in prompt
        whole = letter * (max(lengths.values()) - 1) in prompt
        assert not (letter not in cut_parts and left_out and lengths.get(letter)), letter
        assert not (letter in cut_parts and whole), letter


async def test_no_step_is_left_out_and_what_cannot_fit_is_said() -> None:
    """It alone is lost: the others are judged on a rubric that was written without it."""
    groups = load_traces(FILES / "openai_chat.jsonl")
    huge = replace(long_trace(), turns=long_trace().turns * 300)
    group = replace(groups[0], read=lambda: [*groups[0].traces, huge])
    canned = Canned()
    (found,) = await judge([group], MODEL, complete=canned, context=35_000)
    *others, lost = found.rollouts
    assert all(each.reward is not None for each in others)
    assert lost.reward is None
    assert lost.error is not None
    assert "too long even with every text cut to 100 characters" in lost.error
    assert any(note.startswith(f"union: union was asked without rollout {len(others)},") for note in found.notes)
    assert [each.phase for each in canned.asked].count("union") == 1


async def test_the_judge_sees_less_of_each_where_it_sees_them_together() -> None:
    canned = Canned()
    groups = load_traces(FILES / "openai_chat.jsonl")
    long = [replace(each, turns=(*each.turns, *long_trace(observation=30_000).turns)) for each in groups[0].traces]
    group = replace(groups[0], read=lambda: long)
    (found,) = await judge([group], MODEL, complete=canned, context=100_000)
    assert any("characters were left out of the prompt" in note for note in found.notes)
    union = next(each.messages[0].content for each in canned.asked if each.phase == "union")
    score = next(each.messages[0].content for each in canned.asked if each.phase == "score")
    assert "characters left out ...]" in union
    assert len(union) < 3 * 100_000
    assert len(score) < 3 * 100_000


def test_the_facts_are_of_what_is_seen() -> None:
    facts = environment_facts(load_traces(FILES / "openai_chat.jsonl")[0].traces)
    assert "Tools that it has: book, search_flights." in facts
    assert "It talks with a user" in facts
    assert "complete_task" not in facts
    assert "An action of the agent is carried out" in environment_facts(
        load_traces(FILES / "own_format.jsonl", mapping=FILES / "own_format.yaml")[0].traces
    )
    assert "sub-agent checker" in environment_facts(load_traces(FILES / "otlp.jsonl")[0].traces)


def test_the_facts_name_tools_that_nobody_called() -> None:
    def tool(name: str) -> dict[str, object]:
        return {"type": "function", "function": {"name": name, "description": "Do.\nArgs: none.", "parameters": {}}}

    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Refund it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "shipped"},
    ]
    record = {"task_id": "a", "tools": [tool("look"), tool("decline")], "messages": messages}
    (group,) = groups_of([record])
    assert "Tools that it has: decline, look." in environment_facts(group.traces)
    in_run = Message(role="tools", content=json.dumps([tool("decline")]))
    assert "Tools that it has: decline, look." in environment_facts([replace(group.traces[0], prompt=(in_run,))])


def test_tokens_are_the_traces_own_where_it_counts_them() -> None:
    trace = load_traces(FILES / "openai_chat.jsonl")[0].traces[0]
    trajectory = as_trajectory(trace, "g", 0)
    assert trajectory.tokens_M.tolist() == [-(-len(turn.text) // 4) for turn in trace.steps]
    assert (trajectory.token_ids_T == -1).all()
    counted = replace(trace, turns=tuple(replace(t, last_token=7 if t.role == "assistant" else 0) for t in trace.turns))
    assert as_trajectory(counted, "g", 0).tokens_M.tolist() == [7, 7, 7, 7]
    assert len(as_trajectory(counted, "g", 0).token_ids_T) == 28


async def test_many_groups_are_not_all_in_memory_at_once(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {
            "id": str(n),
            "messages": [{"role": "user", "content": f"task {n}"}, {"role": "assistant", "content": "is DL9"}],
        }
        for n in range(40)
    ]
    groups = load_traces(written(tmp_path / "many.jsonl", *records))
    alive = most = 0

    class Counted(Canned):
        async def __call__(self, request: Request) -> Completion:
            nonlocal alive, most
            alive += request.phase == "stage1"
            most = max(most, alive)
            await asyncio.sleep(0)
            alive -= request.phase == "score"
            return await super().__call__(request)

    config = DracoConfig.model_validate({"judge": {"concurrency_per_worker": 4, "workers": 1, "max_workers": 2}})
    found = await judge(groups, MODEL, out=tmp_path / "out", complete=Counted(), config=config)
    assert len(found) == 40
    # As many as requests may be in flight.
    assert 4 < most <= 8
    # Two batches stand where training steps stand.
    assert [line["step"] for line in RunDirectory.open(tmp_path / "out").metrics()] == [1, 2]
