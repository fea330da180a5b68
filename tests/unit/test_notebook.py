"""examples/notebooks/judge_traces.ipynb runs from top to bottom, on the recorded judge."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def test_it_judges_the_example_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = REPOSITORY / "examples" / "notebooks" / "judge_traces.ipynb"
    monkeypatch.chdir(notebook.parent)
    names: dict[str, object] = {}
    printed: list[str] = []
    for number, cell in enumerate(json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            printed.append(out.getvalue())
    assert "does not look: 2 steps" in printed[0]
    assert "Hides no missed condition" in printed[1]
    assert "step 2: Hides no missed condition" in printed[2]
    assert len(printed[3].splitlines()) == 4
