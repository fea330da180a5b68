"""The notebook runs from top to bottom on a run directory, and is kept with what it showed of one."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from tests.support.jobs import load_job
from tests.support.small_run import TASKS, small_run

NOTEBOOK = Path(__file__).parents[2] / "docs" / "analysis.ipynb"


def test_every_cell_runs_on_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path / "tiny")
    before = sorted(path for path in run.path.rglob("*"))
    monkeypatch.setenv("DRACO_RUN", str(run.path))
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names = load_job("notebook").run_cells(notebook)
    shown = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert [output["text"] for output in shown if output["output_type"] == "stream"] == [[f"step1/{TASKS[0]}\n"]]
    drawings = [
        "".join(output["data"]["image/svg+xml"]) for output in shown if "image/svg+xml" in output.get("data", {})
    ]
    assert [ElementTree.fromstring(drawing).get("aria-label") for drawing in drawings] == [
        "Pass rate of the applicable verdicts",
        "Pass rate by criterion",
        "Rollouts on which credit is inert",
        "Judge cost by phase, dollars",
        "Task goal completion (TGC)",
        "How rollouts ended",
    ]
    verdicts = names["verdicts"]
    assert isinstance(verdicts, pd.DataFrame)
    assert verdicts.loc["Closes the task"].tolist() == [1, -1]
    assert verdicts.loc["R"].tolist() == [1.0, -1.0]
    assert sorted(path for path in run.path.rglob("*")) == before


def test_it_is_kept_with_outputs_that_name_no_place() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    # Every cell whose last line is a value shows it.
    valued = [cell for cell in cells if isinstance(ast.parse("".join(cell["source"])).body[-1], ast.Expr)]
    assert len(valued) > 13
    assert all(cell["outputs"] for cell in valued)
    assert not re.findall(r"/(?:home|root|tmp|work|Users)/", json.dumps([cell["outputs"] for cell in cells]))
