"""The real tau2-bench, where there is one: one task, offline retrieval, a scripted server as agent and as user."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from draco_ray.benchmarks.tau.evaluate import evaluate_tau
from draco_ray.benchmarks.tau.installation import HOME_VARIABLE
from draco_ray.benchmarks.tau.policy import api_policy
from draco_ray.config.schema import DracoConfig
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get(HOME_VARIABLE),
        reason=f"{HOME_VARIABLE} is not set: tau2-bench needs a checkout and an environment of its own",
    ),
]
KEY = "sk-scripted-0123456789"


@pytest.mark.timeout(900)
def test_one_task_of_the_real_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    talk = (Reply("Hello, I have a question."), Reply("How can I help?"), Reply("Nothing, thanks. ###STOP###"))
    with ScriptedJudgeServer(*talk) as server:
        endpoint = {"api_base": server.base, "model": "openai/SCRIPTED"}
        tau = {"retrieval": "bm25", "tasks": ["task_001"], "trials": 1, "concurrency": 1, "restarts": 0}
        roles = dict.fromkeys(("agent", "user", "judge"), endpoint)
        config = DracoConfig.model_validate(
            {"tau_bench": {**tau, **roles, "embeddings_cache": str(tmp_path / "embeddings")}}
        )
        directory = evaluate_tau(config, [api_policy("openai/SCRIPTED")], tmp_path / "out")
    [result] = directory.complete_results()["openai_SCRIPTED"]
    assert result.evaluation.turns == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["measurements"]["openai_SCRIPTED"]
    assert (summary["episodes"], summary["infrastructure_errors"], summary["missing"]) == (1, 0, 0)
    assert summary["costs"]["user"]["input_tokens"] > 0
    assert len(server.requests) == 3
    written = [path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [text for text in written if KEY in text]
