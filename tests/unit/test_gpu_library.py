"""The library's desk as TRL's environment: the example's own tools, reset and evaluation."""

from __future__ import annotations

import inspect
import json
from types import ModuleType
from typing import Any

import pytest

from tests.support.jobs import JOBS, load_job


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(JOBS))
    return load_job("gpu_library")


def refused(row: dict[str, Any]) -> bool:
    """Nothing may be done, but the member must be told."""
    task = json.loads(row["task"])
    expected: dict[str, Any] = task["expected"]
    return expected == {"renew": [], "waive": False, "refuse": True}


def test_desks_are_apart_and_rewarded_by_the_examples_own_evaluation(job: ModuleType) -> None:
    row = next(row for row in job.tasks() if refused(row))
    task = json.loads(row["task"])
    one, other = job.desk()(), job.desk()()
    for each in (one, other):
        assert each.reset(**row) is None
    assert task["name"] in row["prompt"][1]["content"]
    assert task["name"] in one.show_member(card=task["card"])
    assert one.get_reward() == 0.0
    one.refuse(reason="it is against the rules")
    assert (one.get_reward(), other.get_reward()) == (1.0, 0.0)
    one.reset(**row)
    assert one.get_reward() == 0.0


def test_tools_keep_their_names_parameters_and_words(job: ModuleType) -> None:
    desk = job.desk()()
    tools = [name for name in dir(desk) if not name.startswith("_") and name not in ("reset", "get_reward")]
    assert tools == ["list_loans", "refuse", "renew", "show_member", "waive_fine"]
    assert list(inspect.signature(desk.renew).parameters) == ["book"]
    assert (inspect.getdoc(desk.renew) or "").startswith("Renew a loan for two weeks.")
