"""The notebook runs from top to bottom on a run directory, and is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.support.small_run import TASKS, small_run

NOTEBOOK = Path(__file__).parents[2] / "docs" / "analysis.ipynb"


def test_every_cell_runs_on_a_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "tiny")
    before = sorted(path for path in run.path.rglob("*"))
    monkeypatch.setenv("DRACO_RUN", str(run.path))
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert capsys.readouterr().out == f"step1/{TASKS[0]}\n"
    verdicts = names["verdicts"]
    assert isinstance(verdicts, pd.DataFrame)
    assert verdicts.loc["Closes the task"].tolist() == [1, -1]
    assert verdicts.loc["R"].tolist() == [1.0, -1.0]
    assert sorted(path for path in run.path.rglob("*")) == before


def test_it_is_kept_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
