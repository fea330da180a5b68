"""docs/method-explained.md: the numbers worked by hand are those of the code."""

from __future__ import annotations

import doctest
import re

import draco_ray as draco
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "method-explained.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_its_code_runs_as_printed() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert (result.failed, result.attempted > 2) == (0, True)


def test_its_tables_are_what_the_rule_gives() -> None:
    winner, loser, _ = draco.step_advantages(
        verdicts=[[1, 1, -1, 1], [-1, -1, 1, 1], [1, -1, 0, 1]],
        citations=[{0: [1, 2], 1: [3], 2: [3, 4]}, {0: [1], 1: [2, 3], 2: [3]}, None],
        tokens=[[10, 20, 10, 20], [10, 10, 20, 20], [15, 15, 15, 15]],
        std_epsilon=0,
    )
    for run, advantages, sign in (("A", winner, 1), ("B", loser, -1)):
        table = TEXT.partition(f"| run {run}, A = ")[2].partition("\n\n")[0]
        rows = re.findall(r"\| step \d \| (\d+) \| \S+ \| .*?\*\*(\S+)\*\* \| (\S+) \|", table)
        assert [float(a) for _, a, _ in rows] == [round(float(each), 2) for each in advantages]
        assert [float(total) for *_, total in rows] == [float(n) * float(a) for n, a, _ in rows]
        assert sum(float(total) for *_, total in rows) == sign * 60
