"""The program under tau2's Python, in this one: what it hides from the agent's shell, and what it saw on the wire."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from draco_ray.benchmarks.tau.episodes import read_requests
from draco_ray.benchmarks.tau.report import sent_notes
from draco_ray.benchmarks.tau.tau2_runner import ROLES, record_requests, surroundings
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.tau2_installation import STAND_IN


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """tau2's stand-in, and the client whose requests are recorded, put back afterwards."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(httpx.Client, "send", httpx.Client.send)
    found: dict[str, Any] = {name: importlib.import_module(name) for name in ROLES}
    for module in found.values():
        monkeypatch.setattr(module, "generate", module.generate)
    return {"httpx": httpx, **found}


def test_what_lies_beside_what_is_needed_is_hidden(tmp_path: Path) -> None:
    for name in ("work/kept/inside", "work/base/tau2", "work/other", "home/user/tau", "tools/bin", "tools/data"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "work" / "results.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    (tmp_path / "work" / "to_kept").symlink_to(tmp_path / "work" / "kept")
    os.mkfifo(tmp_path / "pipe")
    found = surroundings([tmp_path / "work" / "kept", tmp_path / "tools" / "bin"])
    mine = [path.removeprefix(f"{tmp_path}/") for path in found if path.startswith(f"{tmp_path}/")]
    assert mine == ["home", "tools/data", "work/base", "work/other", "work/results.json"]
    # Nothing that is needed, and nothing of the system, is below anything that is hidden.
    needed = [tmp_path / "work" / "kept" / "inside", tmp_path / "tools" / "bin", Path("/usr/bin"), Path("/etc/ssl")]
    assert not [path for path in found for each in needed if each.is_relative_to(path)]
    # An evaluation that another process begins now is hidden from the next command.
    (tmp_path / "work" / "new").mkdir()
    assert str(tmp_path / "work" / "new") in surroundings([tmp_path / "work" / "kept"])


def test_the_parameters_of_requests_are_recorded_as_they_were_sent(modules: dict[str, Any], tmp_path: Path) -> None:
    """A temperature of 0 is asked for in each role; LiteLLM drops it for a model that takes none."""
    record_requests(modules, tmp_path / "requests.jsonl")
    agent, user = modules["tau2.agent.llm_agent"], modules["tau2.user.user_simulator"]
    with ScriptedJudgeServer(*[Reply("Hello.")] * 4) as server:
        told = {"api_base": server.base, "api_key": "sk-0123456789", "temperature": 0.0}
        question = [{"role": "user", "content": "a secret question"}]
        for _ in range(2):
            agent.generate("openai/policy", question, **told)
        user.generate("openai/gpt-5", question, **told)
        httpx.Client().post(f"{server.base}/embeddings", json={"model": "embedder", "input": ["a secret question"]})
        bodies = list(server.requests)
    sent = read_requests(tmp_path)
    assert sent["agent"] == [{"model": "policy", "temperature": 0.0}]
    assert [each["model"] for each in sent["user"]] == ["gpt-5"]
    assert "temperature" not in sent["user"][0]
    assert sent["embedder"] == [{"model": "embedder"}]
    # The same as the server received.
    assert [body.get("temperature") for body in bodies[:3]] == [0.0, 0.0, None]
    text = (tmp_path / "requests.jsonl").read_text()
    assert text.count("\n") == 3
    assert "secret" not in text
    assert "sk-0123456789" not in text


def test_a_table_says_the_temperature_that_was_sent_and_no_other() -> None:
    sent = {"agent": [{"temperature": 0.0}], "user": [{"model": "gpt-5.4"}], "judge": [{}, {"temperature": 0.0}]}
    assert sent_notes({"GPT": [{"sent": sent}]}) == [
        "Temperature as sent: agent 0.0, user none, judge 0.0 or none; none: the model's own."
    ]
    notes = sent_notes({"GPT": [{"sent": sent}], "old": [{}], "older": [{"sent": {}}]})
    assert notes[1] == (
        "Temperature as sent (old, older): agent not recorded, user not recorded, judge not recorded; "
        "none: the model's own."
    )


def test_nothing_is_made_of_requests_that_were_not_recorded(tmp_path: Path) -> None:
    assert read_requests(tmp_path) == {}
    line = json.dumps({"role": "agent", "path": "/v1", "parameters": {"temperature": 1.0}})
    # A killed process had begun another line.
    (tmp_path / "requests.jsonl").write_text(f'{line}\n{line}\n{{"role": "us')
    assert read_requests(tmp_path) == {"agent": [{"temperature": 1.0}]}
