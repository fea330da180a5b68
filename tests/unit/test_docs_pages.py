"""Markdown of the repository: links resolve, configuration keys exist, and its words stay below a limit.

The Makefile's and jobs' example commands name existing keys, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draco_ray.config.keys import dotted_keys
from draco_ray.config.schema import DracoConfig
from tests.conftest import REPOSITORY

PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("dev/**/*.md")]
WITH_COMMANDS = [REPOSITORY / "Makefile", *REPOSITORY.glob("jobs/*.py")]
MOST_WORDS = 35_000


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_between_pages_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("file", [*PAGES, *WITH_COMMANDS], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_configuration_keys_exist(file: Path) -> None:
    known = set(dotted_keys())
    known |= {key.rpartition(".")[0] for key in known}
    key = rf"(?<![\w./])((?:{'|'.join(DracoConfig.model_fields)})(?:\.[a-z_0-9]+)+)"
    text = file.read_text(encoding="utf-8")
    prose = re.sub(r"^```\w+\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) if file in PAGES else ""
    named = re.findall(rf"{key}\b(?![/.(])", prose) + re.findall(rf"{key}=", text)
    open_ended = ("environment.options.", "learner.options.", "engine.vllm.")
    # Files look alike.
    files = (".py", ".md", ".yaml", ".yml", ".json", ".jsonl", ".parquet", ".html", ".toml")
    unknown = [each for each in named if each not in known and not each.startswith(open_ended)]
    assert [each for each in unknown if not each.endswith(files)] == []


def test_every_design_note_is_in_the_list() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")


def test_prose_stays_short() -> None:
    cells = json.loads((REPOSITORY / "docs" / "analysis.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    texts += [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS
