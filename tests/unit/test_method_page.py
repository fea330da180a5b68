"""docs/method.md names only what exists, and names everything it should."""

from __future__ import annotations

import re
from pathlib import Path

from draco_ray.configuration import setting_names
from draco_ray.judging.prompts import FILES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")


def test_every_place_it_names_exists() -> None:
    places = re.findall(r"`([\w./-]+\.(?:py|txt|yaml))(?:::(\w+))?`", PAGE)
    assert len(places) > 60
    for path, name in places:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(?:async )?(?:def|class) {name}\b", text, re.MULTILINE), f"{path}::{name}"


def test_every_setting_and_prompt_is_on_it() -> None:
    assert all(f"`{name}`" in PAGE for name in setting_names())
    assert all(f"`prompts/judge/{name}`" in PAGE for name in FILES.values())
