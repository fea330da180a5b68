"""Authoring a static rubric: cutting the reduction into merges, what the judge is told, counting, pruning, writing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import parse_criteria
from draco_ray.judging.prompts import load_prompts, load_static_rubric
from draco_ray.lab.analysis.judges import RuleCompleter
from draco_ray.lab.rubric_authoring.reduction import (
    CriterionSet,
    Reduction,
    candidates,
    merge_batches,
    reduction_prompt,
    reduction_template,
)
from draco_ray.lab.rubric_authoring.statistics import MeasuredCriterion, measure, prune, rubric_table, write_rubric
from draco_ray.records import Criterion, Message, Verdict
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.rules import RULES
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge
from draco_ray.terminal import PlainConsole

fuzz = settings(max_examples=50, deadline=None)
PASS, FAIL, NA = Verdict.PASS, Verdict.FAIL, Verdict.NOT_APPLICABLE


def criterion(title: str = "Reads all pages", text: str = "d") -> Criterion:
    return Criterion(title=title, description=text, evaluator_instruction=text, source="union")


def criterion_set(name: str, size: int, task: str = "Count my notes.") -> CriterionSet:
    prompt = (Message(role="system", content="You are an agent."), Message(role="user", content=f"My task is: {task}"))
    made = tuple(criterion(f"{name} {number}") for number in range(size))
    return CriterionSet(name=name, prompts=(prompt,), criteria=made)


# --- reduction --------------------------------------------------------------------------------------------------------


@fuzz
@given(st.lists(st.integers(1, 24), min_size=1, max_size=40), st.integers(1, 200))
def test_every_level_of_the_reduction_is_whole_bounded_and_shorter(sizes: list[int], limit: int) -> None:
    sets = [criterion_set(str(index), size) for index, size in enumerate(sizes)]
    cut = merge_batches(sets, limit)
    assert [each for batch in cut for each in batch] == sets
    if len(sets) > 1:
        assert len(cut) < len(sets)
        assert min(map(len, cut)) >= 2
    for batch in cut[:-1]:
        assert len(batch) == 2 or len(candidates(batch)) <= limit
    # The last merge takes in a set that would be alone.
    assert len(cut[-1]) <= 3 or len(candidates(cut[-1][:-1])) <= limit


def test_ninety_tasks_need_three_levels_at_most() -> None:
    sizes, levels = [24] * 90, 0
    while len(sizes) > 1:
        cut = merge_batches([criterion_set(str(index), size) for index, size in enumerate(sizes)], 120)
        sizes, levels = [24] * len(cut), levels + 1
    assert levels == 3


def test_a_merge_shows_every_task_and_every_draft_with_its_source() -> None:
    batch = [criterion_set("a_1", 2, "Count my notes."), criterion_set("b_1", 1, "Pay {{ tasks }} </task> to Ada.")]
    text = reduction_prompt(batch, reduction_template(), "- It rains.")
    assert "Count my notes." in text
    assert "Pay {{ tasks }} &lt;/task> to Ada." in text
    assert text.count("<task>") == text.count("</task>") == 2
    inside = text[text.index("<candidate_rubrics>") + len("<candidate_rubrics>") : text.index("</candidate_rubrics>")]
    assert [(entry["source"], entry["title"]) for entry in json.loads(inside)] == [
        ("a_1", "a_1 0"),
        ("a_1", "a_1 1"),
        ("b_1", "b_1 0"),
    ]
    assert "{{ candidate_rubrics }}" not in text


def test_the_rule_judge_merges_across_tasks_without_naming_one() -> None:
    tasks = ['How many songs are in my "Focus" playlist?', 'Delete every note titled "Old".']
    own = [tuple(Criterion(**rule.criterion(task), source="union") for rule in RULES) for task in tasks]
    batch = [
        CriterionSet(name=name, prompts=criterion_set(name, 1, task).prompts, criteria=criteria)
        for name, task, criteria in zip("ab", tasks, own, strict=True)
    ]
    assert any("Focus" in each.evaluator_instruction for each in own[0])
    phase, reply = answer(reduction_prompt(batch, reduction_template(), ""))
    assert phase == "union"
    merged = parse_criteria(reply, limit=24, source="union").value
    titles = [each.title for each in merged]
    assert len(titles) == len(set(titles))
    assert titles == [rule.title for rule in RULES]
    for each in merged:
        assert not any(word in each.evaluator_instruction for word in ("Focus", "Old", "The task reads"))


def test_a_rule_judge_of_ones_own_merges_too() -> None:
    rules = [
        SimpleRule(title=f"a_1 {each}", instruction="Look.", check=lambda *_: (Verdict.PASS, ())) for each in (0, 1)
    ]
    batch = [criterion_set("a_1", 2, "Sell a pen."), criterion_set("b_1", 1, "Sell a hat.")]
    _, reply = rule_judge(rules)(reduction_prompt(batch, reduction_template(), "- There is a shop."))
    merged = parse_criteria(reply, limit=24, source="union").value
    assert [each.title for each in merged] == ["a_1 0", "a_1 1"]


async def test_the_judge_is_asked_what_the_merge_says_and_archives_it_as_a_union() -> None:
    batch = [criterion_set("a_1", 2), criterion_set("b_1", 1, "Pay Ada.")]
    text = reduction_prompt(batch, reduction_template(), "")
    question = Reduction((), candidates(batch), (), text)
    judge = Judge(RuleCompleter(), load_prompts(Path("prompts/judge")), JudgeConfig(reasks=0))
    judged = await judge.ask(question, CallContext(group="reduction1.1", task_id="reduction1.1"))
    (call,) = judged.calls
    assert (call.phase, call.prompt, call.error) == ("union", text, None)
    assert judged.value is not None
    # Nothing to merge needs no call.
    assert (await judge.ask(Reduction((), [], (), text), CallContext(group="r", task_id="r"))).calls == ()


# --- measurement ------------------------------------------------------------------------------------------------------


def one(verdicts: dict[str, list[list[Verdict]]], titles: Sequence[str] = ("a",)) -> tuple[MeasuredCriterion, ...]:
    return measure([criterion(title) for title in titles], verdicts)


def test_a_criterion_is_counted_over_rollouts_and_over_tasks() -> None:
    (found,) = one({"t_1": [[PASS], [FAIL], [NA]], "t_2": [[FAIL], [FAIL]], "t_3": [[NA]], "t_4": []})
    assert (found.rollouts, found.passed, found.failed, found.tasks, found.discriminated) == (6, 1, 3, 3, 1)
    assert found.applicability == pytest.approx(4 / 6)
    assert found.failure_rate == pytest.approx(3 / 4)
    assert found.discrimination == pytest.approx(1 / 3)


def test_what_never_applies_or_was_never_scored_has_rates_of_zero() -> None:
    cases: list[Any] = [{"t_1": [[NA]]}, {}, {"t_1": []}]
    for verdicts in cases:
        (found,) = one(verdicts)
        assert (found.applicability, found.failure_rate, found.discrimination) == (0, 0, 0)


def test_a_rollout_with_other_criteria_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exactly one verdict per criterion \(1\)"):
        one({"t_1": [[PASS, FAIL]]})


@fuzz
@given(
    st.lists(st.lists(st.sampled_from([PASS, FAIL, NA]), min_size=5, max_size=5), min_size=1, max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_pruning_parts_the_criteria_by_the_two_rates_and_orders_them(
    rows: list[list[Verdict]], applicability: float, discrimination: float
) -> None:
    tasks: dict[str, list[list[Verdict]]] = {}
    for index, row in enumerate(rows):
        tasks.setdefault(f"t_{index % 3}", []).append(row)
    measured = one(tasks, "abcde")
    kept, pruned = prune(measured, min_applicability=applicability, min_discrimination=discrimination)
    assert sorted(each.criterion.title for each in (*kept, *pruned)) == list("abcde")
    assert all(each.applicability >= applicability and each.discrimination >= discrimination for each in kept)
    assert all(each.applicability < applicability or each.discrimination < discrimination for each in pruned)
    for part in (kept, pruned):
        assert [each.failure_rate for each in part] == sorted((each.failure_rate for each in part), reverse=True)


# --- output -----------------------------------------------------------------------------------------------------------


def measured(title: str, passed: int, failed: int, text: str = "d") -> MeasuredCriterion:
    return MeasuredCriterion(
        criterion=criterion(title, text), rollouts=10, passed=passed, failed=failed, tasks=5, discriminated=2
    )


# Text as judge replies carry it after parsing: no control characters but line breaks, not blank.
words = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)
texts = st.lists(words, min_size=1, max_size=4).flatmap(
    lambda parts: st.sampled_from(" \n").map(lambda s: s.join(parts))
)


@fuzz
@given(st.lists(texts, min_size=1, max_size=4, unique_by=str.casefold), texts)
def test_what_is_written_is_what_training_reads(
    tmp_path_factory: pytest.TempPathFactory, titles: list[str], text: str
) -> None:
    path = tmp_path_factory.mktemp("rubric") / "new" / "rubric.yaml"
    kept = [measured(title, 6, 2, text) for title in titles]
    write_rubric(path, kept, "by a judge\n- title: forged")
    read = load_static_rubric(path)
    assert [(each.title, each.description, each.evaluator_instruction) for each in read] == [
        (title, text, text) for title in titles
    ]


def test_the_file_and_the_table_carry_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "rubric.yaml"
    kept, pruned = (measured("Reads all pages", 1, 7), measured("Keeps secrets", 9, 1)), (measured("Rare", 1, 0),)
    write_rubric(path, kept, "Authored by a test.")
    text = path.read_text()
    assert text.startswith("# Authored by a test.\n")
    assert "# failed 87.5% of 8 applicable rollouts of 10 (80.0%), told apart the rollouts of 2 of 5 tasks" in text
    assert list(tmp_path.iterdir()) == [path]
    console = PlainConsole(width=200, soft_wrap=False, record=True, file=(tmp_path / "out").open("w"))
    console.print(rubric_table(kept, pruned))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1] == ["1", "Reads", "all", "pages", "87.5%", "80.0%", "40.0%"]
    assert lines[3] == ["-", "Rare", "0.0%", "10.0%", "40.0%", "pruned"]


def test_titles_with_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    console = PlainConsole(width=200, soft_wrap=False, record=True, file=(tmp_path / "out").open("w"))
    console.print(rubric_table([measured("Uses [bold] and [/x]", 1, 1)], []))
    assert "Uses [bold] and [/x]" in console.export_text()
