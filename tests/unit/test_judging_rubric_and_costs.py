"""The static rubric file, and what judging cost."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from draco_ray.config.schema import JudgeConfig, Price
from draco_ray.errors import ConfigError
from draco_ray.judging.outage import retry_after_seconds
from draco_ray.judging.pricing import find_price, reply_cost
from draco_ray.judging.prompts import load_static_rubric
from draco_ray.lab.runs.cost import cost_table, phase_costs, total_cost
from draco_ray.records import Criterion, JudgeCall

TITLES = (
    "Protects secret values",
    "Stops after completion",
    "Fetches complete data",
    "Completes task properly",
    "Computes from live data",
    "Handles time correctly",
    "Processes items completely",
    "Targets exact items",
    "Applies correct selection logic",
    "Uses complete working set",
    "Performs required actions",
    "Verifies action outcome",
    "Uses exact action content",
    "Uses correct data source",
    "Authenticates correctly",
    "Retrieves needed credentials",
    "Uses runnable Python",
    "Checks docs when needed",
    "Recovers from failures",
    "Uses valid API calls",
    "Uses allowed tools only",
)
"""Table "staticrubrics", in its order."""

CALL = JudgeCall(
    call_id="1",
    phase="score",
    group="step0/t_1",
    task_id="t_1",
    rollout=0,
    model="m",
    prompt="p",
    reply="r",
    finish_reason="stop",
    input_tokens=1000,
    cached_tokens=400,
    output_tokens=10,
    dollars=0.5,
    started_at=0.0,
    seconds=2.0,
    requests=1,
)


def test_the_static_rubric_is_the_papers_table() -> None:
    rubric = load_static_rubric(Path("prompts/static_rubric.yaml"))
    assert tuple(criterion.title for criterion in rubric) == TITLES
    assert {criterion.source for criterion in rubric} == {"static"}
    assert all("ail" in criterion.evaluator_instruction for criterion in rubric)


def static(title: str = "x", **changes: object) -> dict[str, object]:
    return {"title": title, "description": "y", "evaluator_instruction": "z"} | changes


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "expected a list of criteria, found an empty list"),
        (static(), "expected a list of criteria, found dict"),
        (None, "expected a list of criteria, found NoneType"),
        ([{"title": "x", "description": "y"}], "criterion 1: evaluator_instruction: Field required"),
        ([static("w"), static(" ")], "criterion 2: title: String should have at least 1 character"),
        ([static(weight=2)], "criterion 1: weight: Extra inputs are not permitted"),
        ([static("w"), "x"], "criterion 2: entry: Input should be a valid dictionary or instance of _Criterion"),
        ([static("Aa"), static("aA")], "criterion 2: the title 'aA' is given twice"),
    ],
)
def test_a_rubric_file_that_cannot_be_used_is_told(tmp_path: Path, content: object, problem: str) -> None:
    path = tmp_path / "rubric.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as told:
        load_static_rubric(path)
    assert str(told.value) == f"static rubric {path}: {problem}"


def test_a_rubric_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rubric.yaml"
    for content, problem in ((b"[x, y", "while parsing a flow sequence in "), (b"\xff", "'utf-8' codec can't decode")):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as told:
            load_static_rubric(path)
        assert str(told.value).startswith(f"static rubric {path}: cannot be read: {problem}")
        assert "\n" not in str(told.value)


def test_the_criteria_of_a_file_keep_their_order_and_lose_the_space_around_them(tmp_path: Path) -> None:
    path = tmp_path / "rubric.yaml"
    path.write_text(yaml.safe_dump([static(" b "), static("a", description="d\n", evaluator_instruction="e")]))
    assert load_static_rubric(path) == (
        Criterion(title="b", description="y", evaluator_instruction="z", source="static"),
        Criterion(title="a", description="d", evaluator_instruction="e", source="static"),
    )


def test_costs_add_up_by_phase_and_replays_are_free() -> None:
    calls = [
        CALL,
        replace(CALL, requests=3, error="unusable", reasoning_tokens=7, estimated_dollars=0.125),
        replace(CALL, reasoning_tokens=4, estimated_dollars=0.25),
        replace(CALL, requests=0, dollars=0.0),
        replace(CALL, phase="credit", dollars=0.25),
    ]
    rows = [asdict(call) for call in calls]
    costs = phase_costs(rows)
    assert list(costs) == ["score", "credit"]
    assert costs["score"] == {
        "calls": 3,
        "replayed": 1,
        "requests": 5,
        "failures": 1,
        "input_tokens": 3000,
        "cached_tokens": 1200,
        "output_tokens": 30,
        "reasoning_tokens": 11,
        "dollars": 1.5,
        "estimated_dollars": 0.375,
        "seconds": 6.0,
    }
    assert total_cost(rows)["dollars"] == pytest.approx(1.75)
    table = cost_table(costs).splitlines()
    assert len(table) == 1 + 2 + 2
    assert table[-2].startswith("total")
    assert "1.7500" in table[-2]
    assert "$0.3750" in table[-1]


def test_configured_prices_are_found_by_name_without_provider() -> None:
    prices = JudgeConfig().prices
    assert find_price("openai/gpt-5.4", prices) == Price(input=2.5, output=15.0)
    assert find_price("hosted_vllm/Qwen/Qwen3.6-27B", prices) == Price(input=0.289, output=0.9)
    assert find_price("openai/gpt-5.4-mini", prices) is None
    assert find_price("openai/gpt-5.4", {"openai/gpt-5.4": Price(input=1, output=1)} | prices) == Price(
        input=1, output=1
    )


def test_cached_tokens_cost_the_input_price_unless_they_have_their_own() -> None:
    assert reply_cost(Price(input=2.0, output=10.0), 1_000_000, 500_000, 100_000) == pytest.approx(3.0)
    assert reply_cost(Price(input=2.0, cached_input=0.2, output=10.0), 1_000_000, 500_000, 100_000) == pytest.approx(
        2.1
    )


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "Wed, 99999999999 Oct 2026 07:28:00 GMT"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers) == seconds
