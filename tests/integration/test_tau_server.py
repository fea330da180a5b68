"""The policy behind a real `vllm serve` process: a tiny model with an adapter, on CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import psutil
import pytest

from draco_ray.benchmarks.tau import server
from draco_ray.benchmarks.tau.server import TauPolicy, serve_policy, served_policy
from draco_ray.config.schema import DracoConfig, LearnerConfig, ModelConfig
from draco_ray.engine import openai_server
from draco_ray.errors import TauBenchError
from draco_ray.learner.lora_learner import LoraLearner
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.slow

TOOL = {
    "type": "function",
    "function": {"name": "get_user", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}},
}


def configure(model: Path) -> DracoConfig:
    return DracoConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "agent": {"thinking": False},
            "engine": {"gpus_per_engine": 0, "cpus_per_engine": 1, "kv_cache_gib": 0.1, "max_num_seqs": 4},
            "tau_bench": {"server": {"max_model_len": 1024}},
        }
    )


def client(url: str | None, key: str | None) -> httpx.Client:
    assert url is not None
    return httpx.Client(base_url=url.partition("/v1")[0], headers={"Authorization": f"Bearer {key}"}, timeout=None)


def processes_serving(folder: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or ())]


def test_a_checkpoint_answers_with_tools_under_its_own_key(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    learner = LoraLearner(
        ModelConfig(path=str(model), dtype="float32"),
        LearnerConfig(gpus_per_worker=0, lora_rank=8, lora_alpha=16, gradient_checkpointing=False),
        seed=0,
    )
    for name, parameter in learner.policy.peft.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.02
    learner.save(tmp_path / "step00001")
    policy = served_policy("step00001", str(model), tmp_path / "step00001")
    log = tmp_path / "server.log"
    with serve_policy(configure(model), policy, log, tmp_path, ["OPENAI_API_KEY"]) as endpoint:
        with client(endpoint.api_base, endpoint.key) as asking:
            names = asking.get("/v1/models")
        assert {each["id"]: each["parent"] for each in names.json()["data"]} == {"base": None, "policy": "base"}
        request = {
            "model": "policy",
            "messages": [{"role": "user", "content": "Who am I?"}],
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 0.0,
            "max_tokens": 8,
        }
        url = f"{endpoint.api_base}/chat/completions"
        assert httpx.post(url, json=request, timeout=None).status_code == 401
        answer = httpx.post(url, json=request, headers={"Authorization": f"Bearer {endpoint.key}"}, timeout=None)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        # The policy was found live before it was served; the model is no adapter of itself.
        with pytest.raises(TauBenchError, match="step00001: its adapter has no effect") as refusal:
            server.check_adapter_is_live(client(url, endpoint.key), "step00001", served_as="base")
        assert "\n" not in str(refusal.value)
        with pytest.raises(TauBenchError, match="returned no log-probs.*401"):
            server.check_adapter_is_live(client(url, "another-key"), "step00001")
        running = processes_serving(model)
        assert running
        assert not [each for each in running if endpoint.key in " ".join(each.cmdline())]
    assert processes_serving(model) == []
    assert endpoint.key not in log.read_text()


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "SERVER_COMMAND", [sys.executable, "-m", "no_such_module"])
    model = build_tiny_model(tmp_path / "model")
    policy = TauPolicy(name="base", model=str(model))
    config = configure(model)
    with (
        pytest.raises(TauBenchError, match="vLLM's server ended with exit code 1; .*server.log") as refusal,
        serve_policy(config, policy, tmp_path / "server.log", tmp_path, []),
    ):
        pass
    assert "\n" not in str(refusal.value)
    assert "no_such_module" in (tmp_path / "server.log").read_text()
