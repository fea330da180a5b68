"""Public docstrings open with a verb or the thing, not in the middle of a sentence that only its author has begun."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import draco_ray

PACKAGE = Path(draco_ray.__file__).parent
MIDDLES = ("Of", "With", "As a", "It", "Its", "All of", "None", "They", "Those", "Them", "Inside,", "Raises", "Also")


@pytest.mark.parametrize("folder", [".", *sorted(path.name for path in PACKAGE.iterdir() if path.is_dir())])
def test_they_do_not_open_in_the_middle(folder: str) -> None:
    files = (PACKAGE / folder).rglob("*.py") if folder != "." else PACKAGE.glob("*.py")
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                own = getattr(node, "name", "").startswith("_") and not getattr(node, "name", "").endswith("__")
                text = "" if own else ast.get_docstring(node) or ""
                if any(text.startswith((f"{middle} ", f"{middle}:", f"{middle}.")) for middle in MIDDLES):
                    found.append(
                        f"{file.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]}"
                    )
    assert found == []
