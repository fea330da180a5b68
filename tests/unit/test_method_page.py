"""docs/method.md names only what exists, and names everything it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from draco_ray.config.load import load_config, setting_names
from draco_ray.judging.phases import PHASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


def test_every_place_it_names_exists() -> None:
    places = re.findall(r"`([\w./-]+\.(?:py|txt|yaml))(?:::(\w+))?`", PAGE)
    assert len(places) > 60
    for path, name in places:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(?:async )?(?:def|class) {name}\b", text, re.MULTILINE), f"{path}::{name}"


def deviations() -> list[list[str]]:
    """Rows of the table of deviations: what, here, the paper, why, the paper's way."""
    section = PAGE.partition("## Where this is not the paper's method")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_deviations_name_the_defaults_as_they_are() -> None:
    rows = deviations()
    assert len(rows) > 20
    assert all(len(row) == 5 and all(row[:4]) for row in rows)
    named = [pair for row in rows for pair in re.findall(r"`([a-z_]+\.[a-z_0-9.]+): ([^`]+)`", row[1])]
    assert len(named) > 10
    for key, shown in named:
        value: object = load_config()
        for part in key.split("."):
            value = getattr(value, part)
        assert value == yaml.safe_load(shown) or str(value) == shown, key


@pytest.mark.parametrize(
    "key",
    [
        "judge.stage1_across_epochs",
        "algorithm.credit_surviving_only",
        "algorithm.skip_useless_credit_calls",
        "algorithm.skip_inert_credit_calls",
        "agent.max_turn_tokens",
        "environment.cell_timeout_seconds",
    ],
)
def test_what_changes_the_papers_method_is_among_the_deviations(key: str) -> None:
    assert any(f"`{key}: " in row[1] for row in deviations())


def test_every_setting_and_prompt_is_on_it() -> None:
    assert all(f"`{name}`" in PAGE for name in setting_names())
    assert all(f"`prompts/judge/{name}`" in PAGE for name in (phase.template for phase in PHASES.values()))
