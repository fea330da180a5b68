"""`draco judge --ray` asks what `draco judge` asks, by the workers of a cluster that it joins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer
from tests.support.chat_traces import chat_traces
from tests.support.command import draco, draco_here

pytestmark = [pytest.mark.slow, pytest.mark.deployment, pytest.mark.usefixtures("joined_ray")]


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "judged.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_results_are_the_same(tmp_path: Path) -> None:
    traces = chat_traces(tmp_path / "traces.jsonl", 2)
    with JudgeServer() as server:
        command = ["judge", str(traces), "--judge", f"openai/{MODEL_NAME}", "--api-base", server.base_url, "--out"]
        local = draco_here(*command, str(tmp_path / "a"))
        assert local.returncode == 0, local.stderr
        pooled = draco(*command, str(tmp_path / "b"), "--ray", "--set", "judge.workers=1")
        assert pooled.returncode == 0, pooled.stdout + pooled.stderr
    assert [(x["trace_id"], x["reward"], x["steps"]) for x in lines(tmp_path / "a")] == [
        (x["trace_id"], x["reward"], x["steps"]) for x in lines(tmp_path / "b")
    ]
