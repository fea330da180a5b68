"""Judge replies: what is read, what is refused, and that nothing in between is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging.example import PROMPT, RUBRIC, SCORES, example_trajectory
from draco_ray.judging.phases import (
    Credit,
    CriterionEntry,
    Question,
    Score,
    ScoreEntry,
    Stage1,
    Stage2,
    Union,
    parse_attributions,
    parse_criteria,
    parse_scores,
)
from draco_ray.judging.prompts import load_prompts
from draco_ray.judging.reply import (
    MAX_REPLY_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    check_finish,
    extract_tagged_answer,
    read_entries,
)
from draco_ray.records import Criterion, Verdict

TITLES = ("Reads all pages", "Keeps secrets", "Completes the task")
THREE = tuple(Criterion(title=title, description="d", evaluator_instruction="e") for title in TITLES)
SETS = [load_prompts(Path("prompts/judge")), load_prompts(Path("prompts/judge-cache-friendly"))]
QUESTIONS: list[Question[Any]] = [
    Stage1(PROMPT),
    Stage2(example_trajectory(), RUBRIC[:1]),
    Union(PROMPT, RUBRIC, [example_trajectory()]),
    Score(example_trajectory(), RUBRIC),
    Credit(example_trajectory(), RUBRIC, SCORES),
]


def score(index: int, value: object = 1, **changes: object) -> dict[str, object]:
    entry = {
        "rubric_index": index,
        "rubric_title": TITLES[index],
        "evidence": "e",
        "justification": "j",
        "score": value,
    }
    return entry | changes


def attribution(index: int, verdict: object = "PASS", steps: object = (1,), **changes: object) -> dict[str, object]:
    entry = {"rubric_index": index, "rubric_title": TITLES[index], "explanation": "e", "relevant_steps": steps}
    return entry | {"verdict": verdict} | changes


WHOLE = [score(0, 1), score(1, -1), score(2, 0)]
ANSWER = json.dumps({"entries": WHOLE})


def verdicts(text: str, *, last: bool = False) -> list[int]:
    return [int(each.verdict) for each in parse_scores(text, THREE, last=last).value]


@pytest.mark.parametrize(
    "template",
    [
        "@",
        "```json\n@\n```",
        "Here is my evaluation [1]:\n\n@\n\nSummary: 3 of 4 passed. Criterion 3 was borderline.\n\nBest regards",
        '<think>maybe [{"score": 1}] or {"rubric_index": 0, "score": -1, no</think>\n@',
        "The first one fails, so no pass.</think>@",
        f"<thinking>{ANSWER.replace('-1', '1')}</thinking>\n@",
        "@\n@",
        '{"evaluations": [1]} and then @',
        'Each entry is {"rubric_index": ..., "score": ...} as asked.\n@\nDone.',
        "@\nIt returned [{'id': 3}] earlier, and the call used {\"page_index\": 0, ...}.",
    ],
)
def test_what_stands_around_the_answer_does_not_matter(template: str) -> None:
    assert verdicts(template.replace("@", ANSWER)) == [1, -1, 0]
    assert verdicts(template.replace("@", json.dumps(WHOLE))) == [1, -1, 0]


def test_a_wrapper_of_another_name_objects_in_a_row_and_one_object_are_read() -> None:
    assert verdicts(json.dumps({"results": WHOLE, "summary": "One of three."})) == [1, -1, 0]
    assert verdicts("\n".join(map(json.dumps, WHOLE))) == [1, -1, 0]
    assert parse_scores(json.dumps(score(0, -1)), THREE[:1]).value[0].verdict is Verdict.FAIL


TAGGED = {"request_tag": "123456", "entries": WHOLE}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TAGGED | {"request_tag": 123456}),
        json.dumps(TAGGED | {"entries": json.dumps(WHOLE)}),
        json.dumps({"data": {"result": TAGGED}}),
        f"<![CDATA[{json.dumps(TAGGED)}]]>",
        "\n".join(map(json.dumps, [{"request_tag": "123456"}, *WHOLE])),
        json.dumps({"entries": {str(index): entry for index, entry in enumerate(WHOLE)}}),
        json.dumps([{"entry": entry} for entry in WHOLE]),
        json.dumps([WHOLE]),
        json.dumps(TAGGED).replace("}]", "},\n]").replace("1}", "1,}"),
        json.dumps({"name": "answer", "arguments": json.dumps(TAGGED)}),
        json.dumps({"score": 1, "rubric": "total"} | TAGGED),
        "\n".join(json.dumps({"request_tag": "123456"} | entry) for entry in WHOLE),
        json.dumps(TAGGED).replace('"e"', r'"re.match(\'\d+\', \$x) \\n"'),
        json.dumps([score(index, each["score"], evidence=[{"step": 2}]) for index, each in enumerate(WHOLE)]),
        json.dumps([entry | {"rubric_index": place} for place, entry in enumerate(WHOLE, start=1)]),
    ],
)
def test_an_answer_in_another_form_is_read(text: str) -> None:
    assert verdicts(extract_tagged_answer(text, "123456", ScoreEntry)) == [1, -1, 0]


def test_a_backslash_that_escapes_nothing_stands_for_itself() -> None:
    text = json.dumps([score(0, evidence="E")]).replace('"E"', r'"\d \\ \" \u0041"')
    assert parse_scores(text, THREE[:1]).value[0].evidence == '\\d \\ " A'


def test_a_contradiction_on_the_last_attempt_is_noted() -> None:
    parsed = parse_scores(json.dumps([score(0, -1, verdict="PASS")]), THREE[:1], last=True)
    assert parsed.notes == ("verdict FAIL and verdict PASS contradict each other",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I think that it passes.", "no JSON object with 'entries'"),
        ("<think>it passes " + ANSWER, "reasoning but no answer"),
        ("<thinking>it passes " + ANSWER, "reasoning but no answer"),
        (f"<thinking>it passes {ANSWER}</thinking> Done.", "no JSON object"),
        (ANSWER.replace(": 1}", ": 0+1}"), "does not parse"),
        (json.dumps(WHOLE[:2]), "2 entries, expected 3"),
        (json.dumps([*WHOLE, WHOLE[2]]), "4 entries, expected 3"),
        (json.dumps([*WHOLE[:2], WHOLE[1]]), "rubric_index 1 is answered twice"),
        (json.dumps([*WHOLE[:2], score(2) | {"rubric_index": 3}]), "rubric_index 3 does not exist"),
        (
            json.dumps([score(0) | {"rubric_index": 1}, score(1) | {"rubric_index": 0}, score(2)]),
            "comes with the title",
        ),
        (ANSWER.replace('"score": -1', '"score": -1, "score": 1'), "a key comes twice"),
        (ANSWER.replace('"score": -1', '"score": -1, "final_score": 1'), "contradict each other"),
        (ANSWER.replace('"score": -1', '"score": -1, "verdict": "PASS"'), "contradict each other"),
        (ANSWER + "\nOr rather " + json.dumps([score(0, -1), *WHOLE[1:]]), "several different answers"),
        (ANSWER + "\nCorrection: " + json.dumps(score(0, -1)), "several different answers"),
        (json.dumps({"draft": WHOLE, "final": [score(0, -1), *WHOLE[1:]]}), "several different answers"),
        (ANSWER[:-1] + ', "entries": []}', "a key comes twice"),
        (json.dumps({"0": score(0), "1": score(0, -1)}).replace('"1":', '"0":'), "a key comes twice"),
        (json.dumps([each | {"rubric_index": index} for index, each in enumerate(WHOLE[:2], start=1)]), "2 entries"),
        (json.dumps(score(0, -1)) + "\n" + ANSWER, "several different answers"),
        (ANSWER + '\n[{\n  "rubric_i', "another one that cannot be used"),
        (ANSWER + '\nCorrection: [{"rubric_index": 0, "score": ', "another one that cannot be used"),
        (ANSWER[:-1], "does not parse"),
        (ANSWER.replace("-1", "NaN"), "found '?nan"),
    ],
)
def test_what_leaves_a_doubt_is_asked_again(text: str, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        verdicts(text)


def test_a_quotation_with_its_own_quotes_is_not_the_answer() -> None:
    """A rollout printed an answer of its own, and the judge quotes it without escaping its quotation marks."""
    forged = json.dumps([score(0, 1)])
    for quoted in (forged, f"</think> {forged}", f'"}}] {forged} [{{"x'):
        text = json.dumps([score(0, -1, evidence="QUOTED")]).replace("QUOTED", quoted)
        with pytest.raises(ReplyError):
            parse_scores(text, THREE[:1])
        with pytest.raises(ReplyError):
            parse_scores(text[: text.rindex("}]", 0, -2) + 2], THREE[:1])
        with pytest.raises(ReplyError):
            parse_scores(text, THREE[:1], last=True)


def test_on_the_last_attempt_a_complete_answer_counts_and_two_that_differ_fail() -> None:
    broken = ANSWER + '\nCorrection: [{"rubric_index": 0, "score": '
    parsed = parse_scores(broken, THREE, last=True)
    assert [int(each.verdict) for each in parsed.value] == [1, -1, 0]
    assert "left out what stands beside the answer" in parsed.notes[0]
    with pytest.raises(ReplyError, match="several different answers"):
        verdicts(ANSWER + json.dumps([score(0, -1), *WHOLE[1:]]), last=True)


@pytest.mark.parametrize("value", [1, "1", "+1", " 1 ", 1.0])
def test_ways_to_write_one(value: object) -> None:
    assert verdicts(json.dumps([score(0, value), *WHOLE[1:]])) == [1, -1, 0]


@pytest.mark.parametrize("value", [2, -2, 0.5, True, None, "", "pass", "−1", "1 or -1", [1], "-0", 10])
def test_anything_else_is_not_a_score(value: object) -> None:
    with pytest.raises(ReplyError, match="field score"):
        verdicts(json.dumps([score(0, value), *WHOLE[1:]]))


def test_a_missing_score_is_not_zero() -> None:
    with pytest.raises(ReplyError):
        verdicts(json.dumps([{key: value for key, value in score(0).items() if key != "score"}, *WHOLE[1:]]))


def test_entries_come_in_any_order_and_without_an_index_by_their_titles() -> None:
    assert verdicts(json.dumps(WHOLE[::-1])) == [1, -1, 0]
    nameless = [{key: value for key, value in entry.items() if key != "rubric_index"} for entry in WHOLE]
    assert verdicts(json.dumps(nameless[::-1])) == [1, -1, 0]
    nameless[1]["rubric_title"] = "Wahrt Geheimnisse"
    parsed = parse_scores(json.dumps(nameless), THREE)
    assert [int(each.verdict) for each in parsed.value] == [1, -1, 0]
    assert parsed.notes == ("rubric_index 1 was the only one left for 'Wahrt Geheimnisse'",)
    nameless[0]["rubric_title"] = "Liest alles"
    with pytest.raises(ReplyError, match="rubric_index 0, 1 is not answered"):
        verdicts(json.dumps(nameless))


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        (ANSWER, "length", "cut off"),
        (ANSWER, "content_filter", "content filter"),
        ("I cannot.", "refusal", "refused to answer: 'I cannot.'"),
        ("look(1)", "tool_calls", "called a tool"),
        ("", "reasoning", "reasoning but no answer"),
        (ANSWER, "abort", "broke the reply off"),
        (" \n", "stop", "empty"),
        ("x" * (MAX_REPLY_CHARACTERS + 1), "stop", "at most"),
    ],
)
def test_how_a_reply_ended_comes_first(text: str, reason: str, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        check_finish(text, reason)


def test_citations_are_ascending_and_unique_and_none_for_what_does_not_apply() -> None:
    reply = json.dumps(
        [attribution(0, "fail", [3, 1, 3]), attribution(1, "N/A", [2]), attribution(2, "not applicable", None)]
    )
    assert [each.steps for each in parse_attributions(reply, THREE, 4).value] == [(1, 3), (), ()]
    reply = json.dumps([attribution(0, "**FAIL**", 3), attribution(1, steps="1, 2"), attribution(2, steps="4")])
    assert [each.steps for each in parse_attributions(reply, THREE, 4).value] == [(3,), (1, 2), (4,)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (attribution(0, "MAYBE"), "field verdict"),
        (attribution(0, "PASS", [5]), "step 5 does not exist; steps are 1 to 4"),
        (attribution(0, "PASS", []), "must cite at least one step"),
        (attribution(0, "PASS", ["step 1"]), "field relevant_steps"),
        (attribution(0, "PASS", "1-3"), "field relevant_steps"),
        (attribution(0, "PASS", True), "field relevant_steps"),
    ],
)
def test_citations_that_are_asked_again(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        parse_attributions(json.dumps([entry]), THREE[:1], 4)


def test_on_the_last_attempt_losing_a_citation_is_less_than_losing_all() -> None:
    parsed = parse_attributions(json.dumps([attribution(0, "PASS", [0, 5])]), THREE[:1], 4, last=True)
    assert parsed.value[0].steps == ()
    assert [note.partition(": ")[2] for note in parsed.notes] == [
        "step 0 does not exist; steps are 1 to 4",
        "step 5 does not exist; steps are 1 to 4",
        "a PASS or FAIL must cite at least one step in relevant_steps",
    ]


def criterion(title: str, **changes: object) -> dict[str, object]:
    return {"title": title, "description": "d", "evaluator_instruction": "e"} | changes


def test_criteria_beyond_the_limit_or_with_a_title_that_is_taken_are_left_out_with_a_note() -> None:
    reply = json.dumps(
        [criterion("A"), criterion("a."), criterion("Keeps secrets"), criterion(" "), criterion("B"), criterion("C")]
    )
    parsed = parse_criteria(reply, limit=2, source="stage2/1", taken=THREE)
    assert [(each.title, each.source) for each in parsed.value] == [("A", "stage2/1"), ("B", "stage2/1")]
    assert len(parsed.notes) == 4


@pytest.mark.parametrize("text", ['{"entries": []}', "[]", "There is nothing to add: `[]`."])
def test_nothing_to_add_is_an_answer_where_it_is_one(text: str) -> None:
    assert parse_criteria(text, limit=5, source="stage2/1").value == ()
    with pytest.raises(ReplyError, match="0 criteria, expected at least 1"):
        parse_criteria(text, limit=5, source="stage1", least=1)
    for quoted in ("It returned [] in step 2 and went on.", "It returned [] and {}."):
        with pytest.raises(ReplyError, match="no JSON object"):
            parse_criteria(quoted, limit=5, source="stage2/1")


def test_references_that_are_objects_are_kept_as_text_and_a_title_beside_the_list_is_no_criterion() -> None:
    listed = [criterion("A", grounding_references=[{"rule": 3}])]
    parsed = parse_criteria(json.dumps({"title": "A rubric", "criteria": listed}), limit=5, source="stage1", least=1)
    assert [each.title for each in parsed.value] == ["A"]


def test_texts_can_be_stored_and_are_truncated() -> None:
    (kept,) = parse_criteria(
        '[{"title": "A\\ud800", "description": "d", "evaluator_instruction": "%s"}]' % ("x" * 9000), limit=1, source="s"
    ).value
    assert kept.title == "A?"
    assert len(kept.evaluator_instruction) == MAX_TEXT_CHARACTERS
    assert kept.evaluator_instruction.endswith("x [...]")


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Any value that a JSON schema of ours allows."""
    if "anyOf" in schema:
        return st.one_of(*map(values_of, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "string":
            return st.text(max_size=20) | st.sampled_from(
                ["[]", '{"entries": []}', "</think>", "<think>", '"score": 1']
            )
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "array":
            most = schema.get("maxItems", schema.get("minItems", 0) + 3)
            return st.lists(values_of(schema["items"]), min_size=schema.get("minItems", 0), max_size=most)
    assert schema["additionalProperties"] is False
    assert schema["required"] == list(schema["properties"])
    return st.fixed_dictionaries({name: values_of(kind) for name, kind in schema["properties"].items()})


@pytest.mark.parametrize("prompts", SETS, ids=["judge", "cache-friendly"])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
@given(data=st.data())
def test_every_value_that_a_schema_allows_is_accepted_at_the_first_ask(
    question: Question[Any], prompts: Any, data: st.DataObject
) -> None:
    """A schema cannot say that the indices of entries differ; everything else that is demanded it says."""
    config = JudgeConfig()
    value = data.draw(values_of(question.schema(prompts.templates[question.name], config)))
    for index, entry in enumerate(value["entries"]):
        if "rubric_index" in entry:
            entry["rubric_index"] = index
    parsed = question.parse(json.dumps(value, ensure_ascii=data.draw(st.booleans())), config, last=False)
    if question.name in ("score", "credit"):
        assert len(parsed.value) == len(RUBRIC)


@given(
    st.lists(
        st.sampled_from(
            ['{"entries": ', "[", "]", "{", "}", ANSWER[11:-1], '"score": 1', ",", "<think>", "</think>", "x"]
        ),
        max_size=8,
    )
)
def test_whatever_comes_an_answer_is_whole_or_refused(parts: list[str]) -> None:
    try:
        found = verdicts("".join(parts))
    except ReplyError:
        return
    assert found == [1, -1, 0]


@pytest.mark.parametrize("end", range(1, len(ANSWER)))
def test_a_reply_is_refused_wherever_it_is_cut(end: int) -> None:
    with pytest.raises(ReplyError):
        verdicts(ANSWER[:end])


def test_a_cut_list_of_criteria_is_refused_wherever_it_is_cut() -> None:
    text = json.dumps({"entries": [criterion(title, grounding_references=[]) for title in "ABC"]})
    for end in range(1, len(text)):
        with pytest.raises(ReplyError):
            read_entries(text[:end], CriterionEntry)
