"""`draco eval-set`: what a file and arguments ask for, and what is refused before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draco_ray.commands.eval_set import evaluate_set, parse_set, planned_evaluations, read_set
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.rendering import ShownUncertainty, TableFormat

FILE = """
runs: 2
max_lost_share: 0.1
splits: [dev, tau-banking]
settings:
  Base: starter
  DRACO: {run: [./runs/one, runs/two], last_epochs: 1, overrides: agent.max_turns=3}
overrides: [data.eval_tasks=4]
"""


def test_a_file_is_a_set_that_arguments_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sub" / "nightly.yaml"
    file.parent.mkdir()
    file.write_text(FILE, encoding="utf-8")
    wanted, out = read_set(file, ["data.eval_tasks=1"]), tmp_path / "evaluations" / "nightly"
    assert (wanted.runs, wanted.splits, wanted.max_lost_share) == (2, ("dev", "tau-banking"), 0.1)
    assert wanted.overrides == ("data.eval_tasks=4", "data.eval_tasks=1")
    assert wanted.settings["Base"].policy == "starter"
    draco = wanted.settings["DRACO"]
    # ./ is the file's own folder, anything else the working directory, as in a configuration.
    assert draco.run == (tmp_path / "sub" / "runs" / "one", Path("runs/two"))
    assert (draco.last_epochs, draco.overrides) == (1, ("agent.max_turns=3",))
    planned = planned_evaluations(read_set(file, []), out)
    assert [str(each.out.relative_to(out)) for each in planned] == [
        *("Base/dev", "DRACO/dev/one", "DRACO/dev/two"),
        *("Base/tau-banking", "DRACO/tau-banking/one", "DRACO/tau-banking/two"),
    ]
    assert planned[1].title == "DRACO on dev (one)"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "set: settings: is missing; splits: is missing"),
        (
            {"settings": {}, "splits": []},
            "settings: dictionary should have at least 1 item after validation, not 0, found {}",
        ),
        ({"settings": {"a": "m"}, "splits": ["dev", "dev"]}, "splits: 'dev' is given twice"),
        ({"settings": {"a/b": "m"}, "splits": ["dev"]}, "expected a plain name"),
        ({"settings": {"a=b": "m"}, "splits": ["dev"]}, "expected a name without ="),
        ({"settings": {"a": {"policy": "m", "run": "r"}}, "splits": "dev"}, "a: expected one of policy and run"),
        ({"settings": {"a": {"run": []}}, "splits": "dev"}, "settings.a.run: "),
        ({"settings": {"a": "m"}, "splits": ["../up"]}, "splits.0: expected a plain name"),
        ({"settings": {"a": "m"}, "splits": ["dev"], "run": 3}, "set: run: extra inputs are not permitted, found 3"),
        ({"settings": {"a": "m"}, "splits": ["dev"], "runs": 0}, "runs: input should be greater than 0, found 0"),
        ({"settings": {"a": "m"}, "splits": ["dev"], "max_lost_share": 5}, "max_lost_share: input should be less"),
    ],
)
def test_a_set_that_cannot_be_used_is_one_line(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_set(tree, "set")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_and_an_unknown_baseline_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "set.yaml"
    file.write_text("settings: {a: starter}\nsplits: dev\n", encoding="utf-8")
    options: dict[str, Any] = {
        "form": TableFormat.TEXT,
        "show": ShownUncertainty.INTERVAL,
        "retry_errors": False,
        "trust": False,
    }
    for asked, against, said in (
        (tmp_path / "none.yaml", None, "none.yaml: cannot be read: [Errno 2] No such file"),
        (file, "b", "--against 'b': expected one of a"),
    ):
        with pytest.raises(ConfigError) as caught:
            evaluate_set(asked, [], out=tmp_path / "out", against=against, starter=tmp_path / "starter", **options)
        assert said in str(caught.value)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    runs = [str(tmp_path / side / "draco") for side in "ab"]
    wanted = parse_set({"settings": {"D": {"run": runs}}, "splits": "dev"}, "set")
    with pytest.raises(ConfigError, match="D and D on dev would both be stored in"):
        planned_evaluations(wanted, tmp_path)
    labels = parse_set({"settings": {"Base": "m", "base": "n"}, "splits": "dev"}, "set")
    with pytest.raises(ConfigError, match="Base and base on dev would both be stored in"):
        planned_evaluations(labels, tmp_path)
