"""docs/sample/report.html: a page from our own example that names no machine."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from draco_ray.errors import ConfigError
from draco_ray.lab.report.groups import pack, unpack
from draco_ray.runs.directory import RunDirectory
from tests.conftest import REPOSITORY
from tests.support.jobs import load_job
from tests.support.small_run import small_run

PAGE = REPOSITORY / "docs" / "sample" / "report.html"
JOB = load_job("sample_page")


def packed(page: str) -> dict[str, object]:
    found = re.findall(r'<script type="text/plain" id="(\w+)">([\w+/=]*)</script>', page)
    return {name: unpack(text) for name, text in found}


def test_the_sample_is_small_and_names_no_place_of_a_machine() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert PAGE.stat().st_size < 2**20
    assert list(JOB.places(page)) == []
    index = packed(page)["index"]
    assert isinstance(index, dict)
    assert {group["split"] for group in index["groups"] if "split" in group} == {"dev"}
    assert {group["step"] for group in index["groups"] if "split" not in group} == {1, 2, 3, 4}
    # Its tools are the library's, not AppWorld's apps.
    assert "apis." not in str(packed(page))


def test_its_policy_allows_its_script() -> None:
    page = PAGE.read_text(encoding="utf-8")
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


def test_the_readme_leads_to_it_on_its_first_screen() -> None:
    first = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert "](docs/sample/report.html)" in first
    assert (REPOSITORY / "docs" / "images" / "rollout.png").stat().st_size < 300_000


def test_places_are_found_wherever_they_stand_and_taken_out_of_a_configuration(tmp_path: Path) -> None:
    hidden = f'<script type="text/plain" id="g0">{pack({"lines": ["see /home/somebody/x.py"]})}</script>'
    assert list(JOB.places(hidden)) == ["/home/somebody/x.py"]
    assert list(JOB.places("<p>/tmp/draco/a</p></div>")) == ["/tmp/draco/a"]
    config = "root: /home/me/draco/examples/shop\nmodel: /mnt/x/.cache/shop/policy\nother: /tmp/secret/name\nn: a/b"
    assert JOB.without_places(config) == "root: examples/shop\nmodel: .cache/shop/policy\nother: name\nn: a/b"


def test_a_run_of_appworlds_world_is_no_sample(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a run of examples/library"):
        JOB.write_sample(RunDirectory.open(small_run(tmp_path / "run").path), tmp_path / "page.html")
