"""The table of broken rules fits docs/method.md and the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.jobs import load_job

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
JOB = load_job("mutate")


@pytest.mark.parametrize("mutation", JOB.mutations(), ids=lambda each: f"{each.row}: {each.breaks}")
def test_a_mutation_can_be_applied(mutation: object) -> None:
    text = JOB.broken((ROOT / mutation.file).read_text(encoding="utf-8"), mutation)  # type: ignore[attr-defined]
    if mutation.file.endswith(".py"):  # type: ignore[attr-defined]
        ast.parse(text)


def test_every_test_that_the_method_page_names_is_tried_and_no_other() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE))
    assert len(named) > 40
    tried = {test for mutation in JOB.mutations() for test in mutation.tests}
    assert sorted(named - tried) == [], "write a broken rule into tests/mutation/method.toml that each of these notices"
    assert sorted(tried - named) == [], "not named in docs/method.md any more"


def test_a_rule_that_is_not_there_any_more_is_said() -> None:
    mutation = JOB.Mutation(row="r", breaks="b", file="f.py", old="x = 1", new="x = 2", tests=[])
    assert JOB.broken("x = 1\n", mutation) == "x = 2\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match="f.py: 'x = 1' occurs . times, expected once"):
            JOB.broken(text, mutation)
