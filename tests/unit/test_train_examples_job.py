"""The table of `make examples`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from train_examples import cells, main, table

from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.evaluations import a_result

TASKS = [f"{scenario}_{number}" for scenario in "abcdef" for number in (1, 2)]


def evaluated(folder: Path, measured: dict[int, Sequence[bool]]) -> Path:
    """A run with two rollouts of each task at some steps: the outcome of a task's scenario, twice."""
    run = RunDirectory.create(folder / "run", dump_config(DracoConfig()))
    (folder / "seconds.json").write_text("90.0")
    for step, outcomes in measured.items():
        found = [
            a_result(task, again, outcomes["abcdef".index(task[0])]).evaluation for task in TASKS for again in (0, 1)
        ]
        RunStore(run).write("evaluations", step, "dev", rows.evaluation_rows(step, "dev", found))
    return folder


def test_a_row_has_rates_their_difference_and_how_many_were_played(tmp_path: Path) -> None:
    row = cells(evaluated(tmp_path, {0: [False] * 5 + [True], 7: [True] * 4 + [False, True]}))
    assert row[0] == "12 x 2"
    before, after, gain = (float(cell.split(" ")[0]) for cell in row[1:4])
    assert (before, after, gain) == (16.7, 83.3, 66.7)
    low, high = (float(bound) for bound in row[3].split("[")[1].rstrip("]").split(", "))
    assert low < 66.7 < high <= 100
    assert row[4:] == ["7", "1.5"]
    assert table({"shop": row}).splitlines()[2] == f"| shop | {' | '.join(row)} |"


def test_a_lost_rollout_has_not_reached_its_goal(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    run = RunDirectory.create(folder / "run", dump_config(DracoConfig()))
    (folder / "seconds.json").write_text("60")
    for step in (0, 1):
        found = [a_result(task, 0, True).evaluation for task in TASKS[:4]]
        found[0] = replace(found[0], success=False)
        RunStore(run).write("evaluations", step, "dev", rows.evaluation_rows(step, "dev", found))
    assert cells(folder)[2].startswith("75.0 [")


@pytest.mark.parametrize("measured", [{}, {0: [True] * 6}, {3: [True] * 6}])
def test_a_run_that_was_not_measured_twice_has_no_gain(tmp_path: Path, measured: dict[int, Sequence[bool]]) -> None:
    with pytest.raises(ConfigError, match="not evaluated before and after"):
        cells(evaluated(tmp_path, measured))


def test_an_example_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_examples", "--only", "shop,shops"])
    with pytest.raises(SystemExit):
        main()
    monkeypatch.setattr("sys.argv", ["train_examples", "--table"])
    with pytest.raises(SystemExit, match="not trained yet: desk, hangman, parcels, shop"):
        main()
