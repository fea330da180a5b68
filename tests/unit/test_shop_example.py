"""examples/shop: its tasks are those its script makes, and its rules say of demonstrations what its evaluator says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draco_ray.config.load import load_config
from draco_ray.environments.tools.rows import read_rows
from draco_ray.records import Verdict
from draco_ray.registry import find_component
from draco_ray.sandbox.rule_judge.reading import Step
from tests.conftest import REPOSITORY

SHOP = REPOSITORY / "examples" / "shop"
RULES = ("looks_first", "decides_all", "follows_policy", "no_refused_call")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example's script writes."""
    folder = tmp_path_factory.mktemp("shop")
    subprocess.run([sys.executable, SHOP / "demonstrations.py", folder], check=True)
    return folder


def test_the_tasks_are_the_scripts_and_no_split_shares_any(made: Path) -> None:
    assert (made / "tasks.jsonl").read_text() == (SHOP / "tasks.jsonl").read_text()
    config = load_config(str(SHOP / "environment.yaml"))
    rows = read_rows(config.environment.options["tasks"])
    by_split = {split: [row for row in rows.values() if row.split == split] for split in ("train", "dev", "shown")}
    assert {split: len(found) for split, found in by_split.items()} == {"train": 64, "dev": 40, "shown": 160}
    told = {
        split: {json.dumps([row.row["orders"], row.row["asked"]]) for row in found} for split, found in by_split.items()
    }
    assert len(told["dev"] - told["train"] - told["shown"]) >= 38


def test_rules_without_ground_truth_agree_with_the_evaluator(made: Path) -> None:
    rows = read_rows(str(made / "tasks.jsonl"))
    tools: ModuleType = sys.modules[find_component("test", f"{SHOP}/tools.py:reset", {}).__module__]
    agreed: list[tuple[bool, bool]] = []
    for line in (made / "demonstrations.jsonl").read_text().splitlines():
        shown = json.loads(line)
        row = rows[shown["id"]]
        tools.reset(row.told(ground_truth=False))
        steps = _played(tools, shown["messages"])
        success = all(tools.evaluate(row.told(ground_truth=True), tools.end_state()).values())
        verdicts = [_verdict(rule, row.row["instruction"], steps) for rule in RULES] if steps else [Verdict.FAIL]
        agreed.append((success, Verdict.FAIL not in verdicts))
    assert {success for success, _ in agreed} == {True, False}
    # A refund by chance, without a look, is a failure to both; nothing else tells them apart.
    assert all(success == passed for success, passed in agreed)


def _verdict(rule: str, task: str, steps: list[Step]) -> Verdict:
    verdict: Verdict = find_component("test", f"{SHOP}/judge.py:{rule}", {})(task, steps)[0]
    return verdict


def _played(tools: ModuleType, messages: list[dict[str, Any]]) -> list[Step]:
    """The demonstration's steps, whose results the tools must give again."""
    steps: list[Step] = []
    results = iter([message["content"] for message in messages if message["role"] == "tool"])
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", [])]
        if not calls:
            continue
        told = []
        for call in calls:
            try:
                told.append(getattr(tools, call["name"])(**call["arguments"]))
            except (ValueError, LookupError) as error:
                told.append(f"error: {call['name']}: {type(error).__name__}: {error}")
            assert told[-1] == next(results)
        code = "\n".join(json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in calls)
        steps.append(Step(number=len(steps) + 1, code=code, output="\n".join(told)))
    return steps
