"""The sandbox's families as scripts: what demonstrations are made of."""

import ast
import doctest
import itertools
import re

import pytest

from draco_ray.sandbox.world import scripts
from draco_ray.sandbox.world.scripts import FATAL, HARMLESS, SPLITS, Family, Fault, families

FAMILIES = list(families().values())
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def fault_sets(family: Family) -> list[frozenset[Fault]]:
    faults = sorted(family.faults)
    return [frozenset(some) for size in range(len(faults) + 1) for some in itertools.combinations(faults, size)]


def test_there_are_enough_families_apps_and_difficulties() -> None:
    seen = [family for family in FAMILIES if "train" in family.splits]
    assert len(FAMILIES) >= 14
    assert len({app for family in FAMILIES for app in family.apps}) >= 6
    assert {family.difficulty for family in seen} == {1, 2, 3}
    assert set(SPLITS) == {split for family in FAMILIES for split in family.splits}


def test_challenge_has_only_compositions_of_apps_that_train_lacks() -> None:
    standard = [family for family in FAMILIES if family.variety == "standard"]
    trained = {family.apps for family in standard if "train" in family.splits}
    challenge = [family for family in standard if "test_challenge" in family.splits]
    assert challenge
    assert all(family.apps not in trained for family in challenge)
    known = {app for apps in trained for app in apps}
    new = [family for family in challenge if not known.issuperset(family.apps)]
    assert {app for family in new for app in family.apps} - known == {"amazon", "file_system", "gmail", "todoist"}
    assert len(new) > len(challenge) / 2
    assert all(set(family.splits).isdisjoint({"train", "dev", "test_normal"}) for family in challenge)


@each_family
def test_every_fault_set_gives_valid_commented_short_cells(family: Family) -> None:
    for faults in fault_sets(family):
        cells = family.script(faults)
        assert len(cells) in (range(8, 17) if family.variety == "hard" and not faults else range(4, 17))
        for cell in cells:
            ast.parse(cell)
            assert re.match(r"# [A-Z].*\.\n", cell)
            assert len(cell) < 360
            assert max(map(len, cell.splitlines())) <= 120


@each_family
def test_every_single_fault_changes_the_script(family: Family) -> None:
    reference = family.script()
    for fault in family.faults:
        assert family.script(frozenset({fault})) != reference
    assert len(family.fatal) >= 3
    assert family.fatal <= FATAL
    assert family.faults == family.fatal | HARMLESS


@each_family
def test_faults_show_in_the_shared_idioms(family: Family) -> None:
    def text(*faults: Fault) -> str:
        return "\n".join(family.script(frozenset(faults)))

    reference = text()
    assert "complete_task(" in reference
    assert "complete_task(" not in text(Fault.NO_COMPLETION)
    assert f'print(passwords["{family.apps[0]}"])' in text(Fault.PRINT_SECRET)
    assert "print(passwords" not in reference
    if Fault.FIRST_PAGE_ONLY in family.faults:
        assert "while True" in reference
        assert "page_index" not in text(Fault.FIRST_PAGE_ONLY)
    repeated = family.script(frozenset({Fault.REPEAT_FAILING_CALL}))
    twice = [cell for cell, after in itertools.pairwise(repeated) if cell == after]
    assert len(twice) == 1
    assert "access_token" not in twice[0]
    after = family.script(frozenset({Fault.CONTINUE_AFTER_COMPLETION}))
    assert after[:-1] == family.script()


@each_family
def test_a_run_without_completion_reports_where_the_reference_completes(family: Family) -> None:
    # `verify` relies on it: it runs the report just before the reference's last cell.
    *work, report = family.script(frozenset({Fault.NO_COMPLETION}))
    assert work == family.script()[:-1]
    assert [line.split("(")[0] for line in report.splitlines()] == ["# Report the result.", "print"]


def test_login_cells_differ_only_in_the_app() -> None:
    def of(app: str) -> str:
        return scripts.login_cell(app).replace(app, "APP")

    assert {of(app) for family in FAMILIES for app in family.apps if app != "phone"} == {of("spotify")}
    assert of("phone").replace("phone_number", "email").replace("APP_number", "email") == of("spotify")


def test_an_unknown_fault_is_refused() -> None:
    family = families()["delete_files"]
    with pytest.raises(ValueError, match="delete_files does not have"):
        family.script(frozenset({Fault.FIRST_PAGE_ONLY}))


@each_family
def test_wordings_are_distinct_and_enough_for_the_splits(family: Family) -> None:
    assert len(set(family.wordings)) == len(family.wordings) == (4 if "train" in family.splits else 2)


def test_the_example_in_the_module_holds() -> None:
    assert doctest.testmod(scripts).failed == 0
