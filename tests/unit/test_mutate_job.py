"""The check of the tests: its table fits the page and the code, and survivors are told from killed mutants."""

from __future__ import annotations

import ast
import json
import re
import tomllib
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


MUTATED = """
def x_double__mutmut_orig(number):
    return 2 * number

def x_double__mutmut_1(number):
    return 2 / number

def x_double__mutmut_2(number):
    return 3 * number

def x_double__mutmut_3(number):
    return 2 ** number

class Counter:
    def xǁCounterǁadd__mutmut_orig(self):
        self.n += 1
    def xǁCounterǁadd__mutmut_1(self):
        self.n -= 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What mutmut leaves: a mutant each that was killed, ran out of time, survived, and that no test reaches."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "a.py").write_text(MUTATED, encoding="utf-8")
    codes = {
        "pack.a.x_double__mutmut_1": 1,
        "pack.a.x_double__mutmut_2": 0,
        "pack.a.x_double__mutmut_3": 36,
        "pack.a.xǁCounterǁadd__mutmut_1": 33,
    }
    (tmp_path / "pack" / "a.py.meta").write_text(json.dumps({"exit_code_by_key": codes}), encoding="utf-8")
    return tmp_path


def test_survivors_are_shown_and_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "survivors.toml"
    monkeypatch.setattr(JOB, "SURVIVORS", known)

    def reported(text: str) -> tuple[int, str]:
        known.write_text(f"explained = [{text}]", encoding="utf-8")
        return JOB.report(folder), capsys.readouterr().out

    missed, printed = reported("")
    assert missed == 2
    assert "pack/a:double\n- return 2 * number\n+ return 3 * number\n" in printed
    assert "pack/a:Counter.add\nno test reaches it\n" in printed
    assert "| `pack/a` | 4 | 1 | 0 | 1 | 1 | 1 | 0 |" in printed

    missed, printed = reported(
        '{function = "*:double", diff = "3 . number", reason = "r"}, {function = "*", diff = "no test", reason = "r"}'
    )
    assert missed == 0
    assert "| `pack/a` | 4 | 1 | 2 | 0 | 1 | 0 | 0 |" in printed
    missed, printed = reported('{function = "pack/b:*", diff = "number", reason = "r"}')
    assert missed == 2
    assert "explains nothing any more: pack/b:*: number" in printed


def test_every_explanation_has_a_reason_and_a_pattern_that_can_be_searched_for() -> None:
    for each in JOB.explanations(JOB.SURVIVORS):
        assert re.compile(each.diff)
        assert len(each.reason) > 10


def test_the_modules_of_the_method_are_what_is_mutated() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    for path in [*config["pytest_add_cli_args_test_selection"], *config["also_copy"]]:
        assert (ROOT / path).exists(), path
    for pattern in config["only_mutate"]:
        assert list(ROOT.glob(pattern)), pattern
