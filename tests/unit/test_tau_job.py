"""The job and environment of tau2's process, and the command of the policy's server: flags, keys and errors."""

from __future__ import annotations

import gc
import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draco_ray.benchmarks.tau import server
from draco_ray.benchmarks.tau.config import TauBenchConfig
from draco_ray.benchmarks.tau.evaluate import (
    EMBEDDER_KEY,
    key_variables,
    sent_temperatures,
    task_ids,
    tau2_env_vars,
    tau2_job,
)
from draco_ray.benchmarks.tau.server import TauPolicy, find_policy, free_port, serve_command
from draco_ray.benchmarks.tau.tau2_process import JUDGE_KEY, Tau2, sampling_arguments
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.engine import openai_server
from draco_ray.engine.child import Scrubber
from draco_ray.errors import ConfigError, DracoError
from draco_ray.judging.endpoint import Server
from draco_ray.lab.evaluation.policies import load_adapter

KEYS = {"user simulator": "sk-user-0123456789", "judge": "sk-judge-0123456789", "embedder": "sk-embed-0123456789"}
API_BASE = "http://127.0.0.1:8123/v1"
SERVED = Server(API_BASE, "server-key-0123456789")
POLICY = TauPolicy(name="step00100", model="Qwen/Qwen3.6-27B", adapter=Path("adapter"), rank=16)


def config(**tau: Any) -> TauBenchConfig:
    return TauBenchConfig.model_validate(tau)


@pytest.fixture
def tau2(tmp_path: Path) -> Tau2:
    (tmp_path / "home" / "data").mkdir(parents=True)
    return Tau2(
        python="python", home=tmp_path / "home", version="1.0.1", commit="a2c0247", tasks=("task_001", "task_002")
    )


def value_after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def model_directory(folder: Path, architecture: str = "Qwen2ForCausalLM", **description: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **description}))
    save_file({"weight": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def adapter_directory(folder: Path, rank: Any = 16) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    tensors = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.ones((2, 2), dtype=np.float32)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_the_job_holds_the_papers_numbers_and_no_key(tau2: Tau2, tmp_path: Path) -> None:
    job = tau2_job(config(), POLICY, SERVED, tmp_path, tasks=tau2.tasks, unreadable=["secret"])
    assert (job["trials"], job["max_steps"], job["seed"]) == (3, 200, 300)
    assert job["retrieval"] == "alltools-qwen"
    assert job["agent"] == {"model": "hosted_vllm/policy", "args": {"temperature": 0.0}}
    assert job["user"]["model"] == job["judge"]["model"] == "openai/gpt-5.4"
    text = json.dumps(job)
    assert not [key for key in (*KEYS.values(), SERVED.key) if key in text]


@pytest.mark.parametrize(
    ("model", "temperature", "told"),
    [
        ("openai/gpt-4o", 0.0, {"temperature": 0.0}),
        ("hosted_vllm/policy", 0.0, {"temperature": 0.0}),
        ("nobody/knows", 0.0, {"temperature": 0.0}),
        ("openai/gpt-4o", None, {}),
        ("openai/gpt-5", 0.0, {}),
        ("openai/gpt-5", 1.0, {"temperature": 1.0}),
    ],
)
def test_a_temperature_the_model_refuses_is_not_recorded(
    model: str, temperature: float | None, told: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    tau_bench = config()
    asked = tau_bench.user.model_copy(update={"model": model, "temperature": temperature})
    assert sampling_arguments(asked) == sampling_arguments(
        tau_bench.user.model_copy(update={"temperature": temperature}), model
    )
    assert sampling_arguments(asked) == told
    carried = sent_temperatures(tau_bench.model_copy(update={"user": asked}), [POLICY])
    assert carried == {"agent": 0.0, "user": told.get("temperature"), "judge": 0.0}
    left_out = temperature is not None and not told
    assert (
        caplog.messages
        == ["tau_bench.user.temperature=0 is not sent; null is recorded: openai/gpt-5 does not accept a temperature"]
        * left_out
    )


def test_keys_and_endpoints_are_in_the_environment(tau2: Tau2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not for tau2")
    tau = config(user={"api_base": "http://user/v1"})
    environment = tau2_env_vars(tau, tau2.home, POLICY, SERVED, KEYS, tmp_path)
    assert environment["OPENAI_API_KEY"] == KEYS["user simulator"]
    assert environment["OPENAI_API_BASE"] == "http://user/v1"
    assert environment["HOSTED_VLLM_API_BASE"] == API_BASE
    assert environment["HOSTED_VLLM_API_KEY"] == SERVED.key
    assert environment[JUDGE_KEY] == KEYS["judge"]
    assert environment[EMBEDDER_KEY] == KEYS["embedder"]
    assert environment["TAU2_DATA_DIR"] == str(tau2.home / "data")
    assert environment["TMPDIR"] == str(tmp_path)
    assert "127.0.0.1" in environment["NO_PROXY"].split(",")
    assert not environment.keys() & {"OPENAI_BASE_URL", "AWS_SECRET_ACCESS_KEY"}


def test_an_api_policy_brings_its_own_key(tau2: Tau2, tmp_path: Path) -> None:
    policy = find_policy("litellm:anthropic/claude", DracoConfig())
    tau = config(agent={"api_key_env": "ANTHROPIC_API_KEY"})
    environment = tau2_env_vars(tau, tau2.home, policy, None, {**KEYS, "agent": "sk-agent-0"}, tmp_path)
    assert environment["ANTHROPIC_API_KEY"] == "sk-agent-0"
    assert "HOSTED_VLLM_API_KEY" not in environment
    assert tau2_job(tau, policy, None, tmp_path, tasks=[], unreadable=[])["agent"]["model"] == "anthropic/claude"


def test_one_variable_cannot_serve_two_roles(tau2: Tau2, tmp_path: Path) -> None:
    policy = find_policy("litellm:openai/gpt", DracoConfig())
    with pytest.raises(ConfigError, match="agent and user simulator need different OPENAI_API_KEY"):
        tau2_env_vars(config(), tau2.home, policy, None, {**KEYS, "agent": "another"}, tmp_path)


def test_an_endpoint_that_cannot_be_set_is_refused(tau2: Tau2, tmp_path: Path) -> None:
    tau = config(user={"model": "anthropic/claude", "api_base": "http://here"})
    with pytest.raises(ConfigError, match="tau_bench.user.api_base: cannot be set for provider 'anthropic'"):
        tau2_env_vars(tau, tau2.home, POLICY, SERVED, KEYS, tmp_path)


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "x")
    monkeypatch.setenv("EMPTY_KEY", "")
    tau = config(user={"api_key_env": "USER_KEY"}, judge={"api_key_env": "EMPTY_KEY"})
    with pytest.raises(ConfigError, match="judge: no API key found; set environment variable EMPTY_KEY"):
        key_variables(tau, POLICY)


def test_only_dense_retrieval_needs_the_embedders_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    assert key_variables(config(retrieval="bm25"), POLICY).keys() == {"user simulator", "judge"}
    with pytest.raises(ConfigError, match="embedder: no API key found; .* OPENROUTER_API_KEY"):
        key_variables(config(), POLICY)


def test_a_task_that_does_not_exist_is_refused(tau2: Tau2) -> None:
    assert task_ids(config(tasks=["task_002"]), tau2) == ("task_002",)
    with pytest.raises(ConfigError, match="'task_999' is not a task"):
        task_ids(config(tasks=["task_999"]), tau2)


def test_embeddings_of_another_model_are_kept_apart(tmp_path: Path) -> None:
    folders = {
        tau2_job(config(embedder=each), POLICY, SERVED, tmp_path, tasks=[], unreadable=[])["embeddings_cache"]
        for each in ({}, {"model": "other"}, {"api_base": "http://other/v1"})
    }
    assert len(folders) == 3


def test_qwen36_is_served_with_its_own_formats() -> None:
    words = serve_command(DracoConfig(), POLICY, 8123, Path("folder/adapter"))
    assert words[:4] == [*openai_server.SERVER_COMMAND, "--model"]
    assert value_after(words, "--model") == "Qwen/Qwen3.6-27B"
    assert value_after(words, "--host") == "127.0.0.1"
    assert "--enable-auto-tool-choice" in words
    assert value_after(words, "--tool-call-parser") == "qwen3_coder"
    assert value_after(words, "--reasoning-parser") == "qwen3"
    assert json.loads(value_after(words, "--default-chat-template-kwargs")) == {"enable_thinking": True}
    assert value_after(words, "--max-model-len") == "131072"
    assert "--hf-overrides" not in words
    assert json.loads(value_after(words, "--lora-modules")) == {"name": "policy", "path": "folder/adapter"}
    assert value_after(words, "--max-lora-rank") == "16"
    assert value_after(words, "--served-model-name") == "base"


def test_qwen25_is_served_with_yarn_and_without_thinking() -> None:
    settings = load_config("qwen2.5-32b")
    policy = find_policy("base", settings)
    words = serve_command(settings, policy, 8123, None)
    assert value_after(words, "--tool-call-parser") == "hermes"
    assert not {"--reasoning-parser", "--default-chat-template-kwargs", "--enable-lora"} & set(words)
    assert json.loads(value_after(words, "--hf-overrides"))["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    assert value_after(words, "--served-model-name") == "policy"


def test_the_context_of_a_local_model_is_read_from_its_config(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "m", model_type="qwen2", max_position_embeddings=65536, rope_theta=5e6)
    words = serve_command(DracoConfig(), find_policy(str(model), DracoConfig()), 8123, None)
    rope = json.loads(value_after(words, "--hf-overrides"))["rope_parameters"]
    assert (rope["factor"], rope["rope_theta"], rope["original_max_position_embeddings"]) == (2.0, 5e6, 65536)


def test_an_unknown_tool_format_is_refused_unless_it_is_named() -> None:
    policy = TauPolicy(name="base", model="some/Model-7B")
    with pytest.raises(ConfigError, match="the tool-call format of some/Model-7B is unknown"):
        serve_command(DracoConfig(), policy, 8123, None)
    words = serve_command(load_config(None, ["tau_bench.server.tool_call_parser=llama3_json"]), policy, 8123, None)
    assert value_after(words, "--tool-call-parser") == "llama3_json"


def test_the_server_gets_its_own_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-user")
    monkeypatch.setenv("HF_HOME", "models")
    withhold = ["OPENAI_API_KEY", "OPENROUTER_API_KEY"]
    environment = openai_server.server_env_vars(DracoConfig().engine, POLICY.model, "own-key", withhold)
    assert environment["VLLM_API_KEY"] == "own-key"
    assert environment["HF_HOME"] == "models"
    assert "OPENAI_API_KEY" not in environment
    assert "own-key" not in " ".join(serve_command(DracoConfig(), POLICY, 8123, None))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1: .*in use.*tau_bench.server.port"):
            free_port(port)
    assert free_port(port) == port


def test_policies(tmp_path: Path) -> None:
    base = model_directory(tmp_path / "base")
    settings = DracoConfig.model_validate({"model": {"path": str(base)}})
    checkpoint = adapter_directory(tmp_path / "checkpoints" / "step00100", rank=8)
    found = find_policy(str(checkpoint), settings)
    assert (found.name, found.model, found.adapter, found.rank) == ("step00100", str(base), checkpoint, 8)
    assert found.digest == find_policy(str(checkpoint), settings).digest
    assert find_policy("base", settings).model == str(base)
    assert find_policy(str(base), DracoConfig()).adapter is None
    assert find_policy("litellm:openai/gpt-5.4", settings).api


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder: None, "expected a folder with adapter_config.json"),
        (lambda folder: adapter_directory(folder, rank="many"), "has rank 'many'"),
        (
            lambda folder: (adapter_directory(folder) / "adapter_model.safetensors").unlink(),
            "safetensors: it is missing",
        ),
        (lambda folder: (model_directory(folder) / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_an_unusable_policy_directory_is_one_line(tmp_path: Path, prepare: Any, reason: str) -> None:
    settings = DracoConfig.model_validate({"model": {"path": str(model_directory(tmp_path / "base"))}})
    prepare(tmp_path / "policy")
    with pytest.raises(DracoError, match=reason) as refusal:
        find_policy(str(tmp_path / "policy"), settings)
    assert "\n" not in str(refusal.value)


def test_an_adapter_is_served_from_a_copy_under_vllms_names_and_not_held_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM silently ignores the learner's tensor names if the text model is inside a wrapper."""
    base = model_directory(tmp_path / "base", architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5")
    settings = DracoConfig.model_validate({"model": {"path": str(base)}})
    policy = find_policy(str(adapter_directory(tmp_path / "step00001")), settings)
    held: list[weakref.ref[Any]] = []
    ended: list[bool] = []

    class Child:
        def __init__(self, *given: Any, **more: Any) -> None:
            (self.copy,) = tmp_path.glob("private/*/*/*/")

        def end(self) -> None:
            ended.append(self.copy.exists())

    def loaded(checkpoint: Any) -> Any:
        found = load_adapter(checkpoint)
        held.extend(map(weakref.ref, found.tensors.values()))
        return found

    monkeypatch.setattr(server, "Child", Child)
    monkeypatch.setattr(server, "load_adapter", loaded)
    monkeypatch.setattr(server, "_wait", lambda *given: None)
    with server.serve_policy(settings, policy, tmp_path / "log", tmp_path / "private", []):
        (copy,) = tmp_path.glob("private/*/*/*/")
        assert list(load_file(copy / "adapter_model.safetensors")) == [
            "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
        ]
        assert json.loads((copy / "adapter_config.json").read_text()) == {"r": 16}
        gc.collect()
        assert [each() is None for each in held] == [True]
    # The server ends before its files are removed.
    assert (ended, copy.exists()) == ([True], False)


def test_keys_are_masked_wherever_they_are_quoted(tmp_path: Path) -> None:
    scrubber = Scrubber(["sk-0123456789", "sk-0123456789-longer", "", "x"])
    assert scrubber.text("no sk-0123456789-longer, no sk-0123456789, x") == "no ***, no ***, x"
    file = tmp_path / "results.json"
    file.write_text('{"error": "incorrect key sk-0123456789"}')
    scrubber.file(file)
    assert json.loads(file.read_text()) == {"error": "incorrect key ***"}
    before = os.stat(file).st_mtime_ns
    scrubber.file(file)
    assert os.stat(file).st_mtime_ns == before
