"""docs/judge-traces.md: its commands and examples run as they stand, against a real server with a canned judge."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from draco_ray.cli import app
from draco_ray.config.schema import JudgeConfig
from draco_ray.traces.mapping import FieldMapping
from draco_ray.traces.readers import FORMATS
from tests.conftest import REPOSITORY
from tests.support.canned_judge import answer
from tests.support.scripted_judge_server import ScriptedJudgeServer
from tests.unit.test_traces_load import FILES

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs/judge-traces.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_its_commands_and_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").mkdir()
    shutil.copy(FILES / "openai_chat.jsonl", tmp_path / "traces")
    shutil.copy(REPOSITORY / "prompts/static_rubric.yaml", tmp_path / "rubric.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-the-test")
    commands = [line.removeprefix("$ draco ") for block in blocks("console") for line in block.splitlines()]
    assert len(commands) >= 3
    with ScriptedJudgeServer(answer=answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base)
        monkeypatch.setenv("OPENAI_API_BASE", server.base)
        for command in commands:
            app(shlex.split(command), standalone_mode=False)
        for example in blocks("python"):
            names: dict[str, object] = {}
            exec(compile(example, "judge-traces.md", "exec"), names)
            assert "judged" in names or "good" in names
    assert server.requests
    for folder in ("judged", "graded"):
        assert (tmp_path / folder / "report.html").is_file()


def test_it_names_every_format_and_key() -> None:
    table = PAGE.partition("## Formats")[2].partition("## ")[0]
    assert {*FORMATS, "run"} == set(re.findall(r"^\| `([a-z][a-z0-9-]*)` \|", table, re.MULTILINE))
    mapping, judges = map(yaml.safe_load, blocks("yaml"))
    assert set(mapping) <= set(FieldMapping.model_fields)
    assert JudgeConfig.model_validate(judges["judge"]).strong is not None
