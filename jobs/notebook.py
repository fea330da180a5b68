"""Run docs/analysis.ipynb on a run directory and keep what its cells show, for a reader who runs nothing.

    python jobs/notebook.py RUN

Cells run in this process, one after another; no Jupyter is needed. What is kept of a cell: what it prints, and its last
value as text, as a table or as a drawing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "analysis.ipynb"


def main() -> None:
    """Read the command line and write the notebook."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    os.environ["DRACO_RUN"] = str(parser.parse_args().run)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    run_cells(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in order, put into each what it shows, and return the names they leave."""
    names: dict[str, Any] = {}
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for number, cell in enumerate(code, 1):
        cell["execution_count"] = number
        cell["outputs"] = _outputs("".join(cell["source"]), number, names)
    return names


def _outputs(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = ast.Expression(end.value) if tree.body and isinstance(end := tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        before = ast.Module(tree.body if last is None else tree.body[:-1], type_ignores=[])
        exec(compile(before, f"cell {number}", "exec"), names)
        value = None if last is None else eval(compile(last, f"cell {number}", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        shown = {"text/plain": _lines(repr(value))}
        for kind, method in (("text/html", "_repr_html_"), ("image/svg+xml", "_repr_svg_")):
            if hasattr(value, method):
                shown[kind] = _lines(getattr(value, method)())
        about = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        found.append({**about, "data": shown})
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    main()
