"""The JSON schemas that replies are held to: strict in OpenAI's sense, and in the order of the prompt's own example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draco_ray.judging.parsing import parse_criteria
from draco_ray.judging.phases import PHASES
from draco_ray.judging.phases.credit import parse_attributions
from draco_ray.judging.phases.score import parse_scores
from draco_ray.judging.prompts import load_prompts
from draco_ray.judging.structured import reply_schema
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
