"""Markdown of the repository: links resolve, configuration keys exist, and there is not too much of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draco_ray.config.keys import dotted_keys
from draco_ray.config.schema import DracoConfig
from tests.conftest import REPOSITORY

PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("dev/**/*.md")]
MOST_WORDS = 35_000


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_between_pages_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_configuration_keys_exist(page: Path) -> None:
    known = set(dotted_keys())
    known |= {key.rpartition(".")[0] for key in known}
    sections = "|".join(DracoConfig.model_fields)
    text = re.sub(r"^```\w+\n.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(rf"(?<![\w./])((?:{sections})(?:\.[a-z_0-9]+)+)\b(?![/.(])", text)
    open_ended = ("environment.options.", "learner.options.", "engine.vllm.")
    # Files look alike.
    files = (".py", ".md", ".yaml", ".yml", ".json", ".jsonl", ".parquet", ".html", ".toml")
    unknown = [key for key in named if key not in known and not key.startswith(open_ended) and not key.endswith(files)]
    assert unknown == []


def test_every_design_note_is_in_the_list() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")


def test_prose_stays_short() -> None:
    cells = json.loads((REPOSITORY / "docs" / "analysis.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    texts += [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS
