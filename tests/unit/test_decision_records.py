"""docs/decisions: numbered files, each with a date and a status, all in the table; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
STATUS = r"proposed|accepted|superseded by (\d+)"
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]


def test_records_are_numbered_without_a_gap() -> None:
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))
    assert RECORDS


def test_the_table_says_of_each_what_it_says_of_itself() -> None:
    lines = []
    for path in RECORDS:
        text = path.read_text(encoding="utf-8")
        head = re.match(rf"# (\d+)\. (.+)\n\nDate: (\d{{4}}-\d\d-\d\d)\. Status: ({STATUS})\.\n\n", text)
        assert head is not None, path.name
        assert int(head[1]) == int(path.name[:4])
        assert head[5] is None or 0 < int(head[5]) <= len(RECORDS)
        assert "\n## " not in text, f"{path.name}: one topic a file"
        lines.append(f"| {head[1]} | [{head[2]}]({path.name}) | {head[3]} | {head[4]} |")
    table = (FOLDER / "README.md").read_text(encoding="utf-8").split("|---|---|---|---|\n", 1)[1]
    assert table.splitlines() == lines


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_between_pages_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
