"""Recipes of coding agents: how they are read and filled, and what is wrong with one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draco_ray.config.schema import AgentConfig
from draco_ray.errors import ConfigError
from draco_ray.rollout.program_agent import HARNESSES_FOLDER, ProgramAgent, program_files, read_harness
from draco_ray.rollout.tokens import EnginePolicies

VARIABLES = {"DRACO_MODEL": "policy", "OPENAI_BASE_URL": "http://127.0.0.1:9/x/v1", "OPENAI_API_KEY": "k"}


@pytest.mark.parametrize("name", [path.stem for path in HARNESSES_FOLDER.glob("*.yaml")])
def test_recipes_that_ship_are_filled_whole(name: str) -> None:
    harness = read_harness(name)
    words, variables = harness.fill([*harness.command], VARIABLES, "Fix {model}.")
    text = " ".join([*words, *variables.values()]).replace("Fix {model}.", "")
    assert not any(f"{{{field}}}" in text for field in ("prompt", "model", *VARIABLES))


def test_a_recipe_of_ones_own_may_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown; expected claude-code, codex, mini-swe-agent, opencode, or a YAML"):
        read_harness("aider")
    mine = tmp_path / "mine.yaml"
    mine.write_text("command: [a]\ndialect: grpc\nversions: ['1', '2']\n")
    with pytest.raises(ConfigError, match="dialect"):
        read_harness(str(mine))


def program(folder: Path, source: str) -> Path:
    path = folder / "agent"
    path.write_text(f"#!/bin/sh\n{source}\n")
    path.chmod(0o755)
    return path


def test_the_version_of_the_program_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "mine.yaml").write_text("command: [agent]\ndialect: responses\nversions: ['2.9', '3']\n")
    config = AgentConfig(use="command", harness=str(tmp_path / "mine.yaml"))
    policies = EnginePolicies.__new__(EnginePolicies)
    with pytest.raises(ConfigError, match="'agent' is not an executable program"):
        ProgramAgent.check(config, policies)
    program(tmp_path, "echo agent 2.10.1")
    ProgramAgent.check(config, policies)
    program(tmp_path, "echo agent 3.0")
    with pytest.raises(ConfigError, match="has version 3.0; expected at least 2.9 and below 3"):
        ProgramAgent.check(config, policies)
    with pytest.raises(ConfigError, match="expected agent.command="):
        ProgramAgent.check(config.model_copy(update={"command": "a"}), policies)


def test_what_a_program_reads(tmp_path: Path) -> None:
    modules = tmp_path / "node_modules"
    (modules / ".bin").mkdir(parents=True)
    (modules / "a").mkdir()
    script = program(modules / "a", "true")
    (modules / ".bin" / "a").symlink_to(script)
    assert program_files(str(modules / ".bin" / "a"))[0] == modules
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "venv" / "bin" / "python").symlink_to("/usr/bin/env")
    assert program_files(str(program(tmp_path / "venv" / "bin", "true"))) == [tmp_path / "venv", Path("/usr")]
    assert program_files(str(script.rename(tmp_path / "alone"))) == [tmp_path / "alone"]
