"""The real tau2-bench, where there is one: one task, offline retrieval, a scripted server as agent and as user."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from draco_ray.benchmarks.tau.evaluate import evaluate_tau
from draco_ray.benchmarks.tau.installation import HOME_VARIABLE, find_tau2
from draco_ray.benchmarks.tau.policy import api_policy
from draco_ray.benchmarks.tau.shell import check_shell
from draco_ray.benchmarks.tau.tau2_runner import SHELL_PROGRAMS
from draco_ray.config.schema import DracoConfig, TauBenchConfig
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
    # What is said of the temperature is what the server received.
    received = {role: [each["temperature"] for each in sent] for role, sent in summary["sent"].items()}
    assert received == {"agent": [0.0], "user": [0.0]}
    assert {request["temperature"] for request in server.requests} == {0.0}
    written = [path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [text for text in written if KEY in text]


def test_the_real_shell_tool_runs_commands_and_reads_no_solution(tmp_path: Path) -> None:
    if absent := [program for program in SHELL_PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"{', '.join(absent)} not on PATH: tau2-bench's shell tool needs them")
    tau2 = find_tau2(TauBenchConfig())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("solutions")
    assert check_shell(TauBenchConfig(), tau2, tmp_path / "out") == shutil.which("srt")
