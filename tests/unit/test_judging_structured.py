"""The JSON schemas that replies are held to: strict in OpenAI's sense, and in the order of the prompt's own example."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig, LocalJudgeConfig
from draco_ray.judging.parsing import parse_criteria
from draco_ray.judging.phases import PHASES
from draco_ray.judging.phases.credit import parse_attributions
from draco_ray.judging.phases.score import parse_scores
from draco_ray.judging.prompts import load_prompts
from draco_ray.judging.structured import StructuredOutput, reply_schema
from draco_ray.records import Criterion

SETS = [load_prompts(Path("prompts/judge")), load_prompts(Path("prompts/judge-cache-friendly"))]


def entry_of(prompts: Any, phase: str) -> dict[str, Any]:
    schema: Any = reply_schema(PHASES[phase], prompts.templates[phase])
    assert schema["required"] == ["entries"]
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    assert schema["properties"]["entries"]["type"] == "array"
    entry: dict[str, Any] = schema["properties"]["entries"]["items"]
    return entry


@pytest.mark.parametrize("prompts", SETS, ids=["judge", "cache-friendly"])
@pytest.mark.parametrize("phase", list(PHASES))
def test_every_field_is_required_and_stands_where_the_prompts_example_has_it(prompts: Any, phase: str) -> None:
    entry = entry_of(prompts, phase)
    assert (entry["type"], entry["additionalProperties"]) == ("object", False)
    assert entry["required"] == list(entry["properties"])
    template = prompts.templates[phase]
    example = json.loads(template[template.rindex("```json") + 7 : template.rindex("```")])
    assert entry["required"] == list(example[0])


def test_a_reply_of_the_schemas_form_is_read() -> None:
    rubric = (Criterion(title="A", description="d", evaluator_instruction="e"),)

    def value(kind: dict[str, Any]) -> Any:
        if "enum" in kind:
            return kind["enum"][-1]
        return {"string": "A", "integer": 0, "array": []}[kind["type"]]

    for phase in PHASES:
        entry = {name: value(kind) for name, kind in entry_of(SETS[0], phase)["properties"].items()}
        text = json.dumps({"entries": [entry]})
        if phase == "score":
            assert parse_scores(text, rubric).value[0].verdict == 1
        elif phase == "credit":
            assert parse_attributions(text, rubric, 1).value[0].steps == ()
        else:
            assert parse_criteria(text, limit=1, source="s").value[0].title == "A"


def test_a_field_that_the_prompt_does_not_show_comes_last_and_one_that_is_optional_not_at_all() -> None:
    schema: Any = reply_schema(PHASES["credit"], '"verdict": "PASS", "explanation" : "e"')
    entry = schema["properties"]["entries"]["items"]
    assert entry["required"] == ["verdict", "explanation", "rubric_index", "rubric_title", "relevant_steps"]
    schema = reply_schema(PHASES["stage1"], "")
    assert set(schema["properties"]["entries"]["items"]["required"]) == set(PHASES["stage1"].reply_fields)


class Refused(Exception):
    def __init__(self, status: int, text: str = "no\n such  parameter") -> None:
        super().__init__(text)
        self.status_code = status


class Table:
    """LiteLLM's table and its requests; those with a schema fail with ``error``, all of them with ``always``."""

    def __init__(self, *known: str, error: Exception | None = None, always: bool = False) -> None:
        self.known, self.error, self.always = known, error, always
        self.sent: list[dict[str, Any]] = []

    def supports_response_schema(self, model: str) -> bool:
        return model in self.known

    async def acompletion(self, **arguments: Any) -> str:
        self.sent.append(arguments)
        if self.error is not None and (self.always or "response_format" in arguments):
            raise self.error
        return "reply"


SCHEMA = {"type": "object"}
FORM = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (JudgeConfig(model="openai/known"), True),
        (JudgeConfig(model="openai/unknown"), False),
        (JudgeConfig(model="openai/unknown", api_base="http://own/v1"), True),
        (JudgeConfig(model="hosted_vllm/own", local=LocalJudgeConfig(enabled=True)), True),
        (JudgeConfig(model="openai/known", structured_output=False), False),
    ],
)
async def test_a_schema_is_sent_where_it_is_known_or_may_be(config: JudgeConfig, wanted: bool) -> None:
    table, structured = Table("openai/known"), StructuredOutput(config)
    for schema in (SCHEMA, None, SCHEMA):
        assert await structured.complete(table, schema, temperature=0.5) == "reply"
    with_one = {"temperature": 0.5, "response_format": FORM} if wanted else {"temperature": 0.5}
    assert table.sent == [with_one, {"temperature": 0.5}, with_one]


@pytest.mark.parametrize("status", [400, 422, 501])
async def test_an_endpoint_that_refuses_it_and_answers_without_is_not_asked_for_it_again(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table = Table("m", error=Refused(status))
    structured = StructuredOutput(JudgeConfig(model="m"))
    for _ in range(2):
        assert await structured.complete(table, SCHEMA, temperature=0.5) == "reply"
    assert table.sent == [{"temperature": 0.5, "response_format": FORM}, *[{"temperature": 0.5}] * 2]
    assert [record.getMessage() for record in caplog.records] == [
        "m takes no JSON schema, replies are asked for without: no such parameter"
    ]


async def test_of_a_long_refusal_the_beginning_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    table = Table("m", error=Refused(400, "x" * 201))
    await StructuredOutput(JudgeConfig(model="m")).complete(table, SCHEMA)
    (record,) = caplog.records
    assert record.getMessage().endswith(f" without: {'x' * 200}")


async def test_what_is_refused_either_way_or_for_another_reason_does_not_speak_against_schemas() -> None:
    structured = StructuredOutput(JudgeConfig(model="m"))

    class ContextWindowExceededError(Refused):
        pass

    for table in (
        Table("m", error=Refused(500)),
        Table("m", error=ContextWindowExceededError(400)),
        Table("m", error=ValueError("no status")),
        Table("m", error=Refused(400), always=True),
    ):
        with pytest.raises((Refused, ValueError)):
            await structured.complete(table, SCHEMA)
        assert len(table.sent) == (2 if table.always else 1)
    table = Table("m")
    await structured.complete(table, SCHEMA)
    assert table.sent == [{"response_format": FORM}]
