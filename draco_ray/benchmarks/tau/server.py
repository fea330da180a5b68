"""The policy behind vLLM's OpenAI-compatible server: a process of this environment, on loopback, with its own key."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draco_ray.benchmarks.tau.policy import TauPolicy, changes_model, write_served_adapter
from draco_ray.config.schema import DracoConfig
from draco_ray.engine import openai_server
from draco_ray.engine.child import Child, Scrubber
from draco_ray.engine.model_directory import is_local
from draco_ray.engine.tokenizer import chat_template_text
from draco_ray.engine.vllm_engine import LORA_RANKS
from draco_ray.errors import ConfigError, TauBenchError

HOST = "127.0.0.1"
SERVED = "policy"
"""Name under which the policy answers."""
BASE_SERVED = "base"
"""Name of the model below an adapter; nobody asks for it."""
POLL_SECONDS = 0.5
PROBE = "The customer asks which of two credit cards has the lower annual fee, and the agent looks both of them up."
PROBE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """How a family of models writes its tool calls and its thinking, in vLLM's names."""

    tool_calls: str
    thinking: str | None


# By `model_type`, and for hub names by how the name goes on.
FORMATS: tuple[tuple[str, str, ModelFormat], ...] = (
    ("qwen3_5", r"qwen3\.[56]", ModelFormat("qwen3_coder", "qwen3")),
    ("qwen3", r"qwen3(?!\.)", ModelFormat("hermes", "qwen3")),
    ("qwen2", r"qwen2", ModelFormat("hermes", None)),
)


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """Where a served policy answers."""

    model: str
    """LiteLLM name."""
    api_base: str
    key: str


def free_port(wanted: int | None) -> int:
    """A port of loopback that nobody listens on.

    Raises:
        ConfigError: ``wanted`` is taken.
    """
    try:
        return openai_server.free_port(HOST, wanted)
    except OSError as error:
        raise ConfigError(
            f"port {wanted} on {HOST}: {error.strerror}; expected a free port; set "
            "tau_bench.server.port to another one, or to null for any"
        ) from None


def serve_command(config: DracoConfig, policy: TauPolicy, port: int, adapter: Path | None) -> list[str]:
    """The command line of vLLM's server; it holds no key.

    Args:
        adapter: the folder `write_served_adapter` made, if the policy has one.

    Raises:
        ConfigError: vLLM's tool parser for this model is not known and not configured.
    """
    engine, server = config.engine, config.tau_bench.server
    description = _description(policy.model)
    family = _family(policy.model, description)
    tool_parser = server.tool_call_parser or (family.tool_calls if family else None)
    if tool_parser is None:
        raise ConfigError(
            f"policy {policy.name}: no tool-call format is known for {policy.model}; "
            "set tau_bench.server.tool_call_parser to vLLM's name of it"
        )
    thinks = server.reasoning_parser or (family.thinking if family else None)
    words = [*openai_server.PROGRAM, "--model", policy.model]
    words += ["--host", HOST, "--port", str(port), "--dtype", config.model.dtype, "--seed", str(config.seed)]
    words += ["--served-model-name", SERVED if adapter is None else BASE_SERVED]
    words += ["--max-model-len", str(server.max_model_len), "--language-model-only"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    # Sampling is what the request says; the model's own defaults would add a repetition penalty, say.
    words += ["--generation-config", "vllm", "--disable-log-stats", "--disable-uvicorn-access-log"]
    if config.model.chat_template is not None:
        words += ["--chat-template", chat_template_text(config.model.chat_template)]
    if thinks is not None:
        words += ["--default-chat-template-kwargs", json.dumps({"enable_thinking": config.agent.thinking})]
        if config.agent.thinking:
            words += ["--reasoning-parser", thinks]
    if (overrides := _long_context(config, description)) is not None:
        words += ["--hf-overrides", json.dumps(overrides)]
    if adapter is not None:
        rank = next((rank for rank in LORA_RANKS if rank >= policy.rank), LORA_RANKS[-1])
        words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        words += ["--lora-modules", json.dumps({"name": SERVED, "path": str(adapter)})]
    return words + openai_server.hardware_words(engine, server.max_model_len)


def serve_environment(config: DracoConfig, policy: TauPolicy, key: str, withhold: Sequence[str]) -> dict[str, str]:
    """See `openai_server.server_environment`."""
    return openai_server.server_environment(config.engine, policy.model, key, withhold)


@contextmanager
def served(
    config: DracoConfig, policy: TauPolicy, log: Path, folder: Path, withhold: Sequence[str]
) -> Iterator[ServedPolicy]:
    """Serve the policy while the block runs.

    Args:
        log: file for what the server prints.
        folder: private folder for the adapter's copy.
        withhold: environment variables the server must not see.

    Raises:
        ConfigError: the port is taken, or see `serve_command`.
        TauBenchError: the server ended or did not answer in time, or the adapter is not live.
    """
    port = free_port(config.tau_bench.server.port)
    adapter = write_served_adapter(policy, folder / "adapter") if policy.adapter is not None else None
    command = serve_command(config, policy, port, adapter)
    key = secrets.token_urlsafe(24)
    environment = serve_environment(config, policy, key, withhold)
    child = Child(command, environment, log, Scrubber([key]), temporary=openai_server.SOCKETS)
    try:
        base = f"http://{HOST}:{port}"
        _wait(child, base, key, config.tau_bench.server.start_timeout_seconds, log)
        if adapter is not None and changes_model(adapter):
            check_adapter_is_live(base, key, policy.name)
        yield ServedPolicy(f"hosted_vllm/{SERVED}", f"{base}/v1", key)
    finally:
        child.end()


def check_adapter_is_live(
    base_url: str, key: str, name: str, *, served_as: str = SERVED, model: str = BASE_SERVED
) -> None:
    """Compare log-probs with and without the adapter: vLLM passes over weights it finds no place for without a word.

    Args:
        base_url: of the server, without ``/v1``.
        key: of the server.
        name: of the policy, for the message.
        served_as: the adapter's name there.
        model: the name of the model below it.

    Raises:
        TauBenchError: they are the same, or the server does not give them.
    """
    request = {"prompt": PROBE, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    found = []
    for asked in (served_as, model):
        try:
            answer = httpx.post(
                f"{base_url}/v1/completions",
                json={"model": asked, **request},
                headers={"Authorization": f"Bearer {key}"},
                timeout=PROBE_SECONDS,
                trust_env=False,
            )
            found.append(answer.raise_for_status().json()["choices"][0]["prompt_logprobs"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise TauBenchError(
                f"policy {name}: vLLM's server gives no log-probs to check its adapter with: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}"
            ) from None
    if found[0] == found[1]:
        raise TauBenchError(
            f"policy {name}: its adapter is not live: log-probs with and without it are the same; is it an adapter of "
            "this model?"
        )


def _wait(child: Child, base: str, key: str, seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    with httpx.Client(
        base_url=base, headers={"Authorization": f"Bearer {key}"}, timeout=10.0, trust_env=False
    ) as client:
        while True:
            if child.returncode is not None:
                raise TauBenchError(
                    f"vLLM's server ended with exit code {child.returncode}; its last words are in {log}"
                )
            if (names := openai_server.served_names(client)) is not None:
                if SERVED not in names:
                    raise TauBenchError(f"vLLM's server answers for {sorted(names)}, not {SERVED!r}; see {log}")
                return
            if time.monotonic() > deadline:
                raise TauBenchError(
                    f"vLLM's server did not answer within {seconds:g} s; see {log}, or raise "
                    "tau_bench.server.start_timeout_seconds"
                )
            time.sleep(POLL_SECONDS)


def _description(model: str) -> Mapping[str, Any]:
    """A local model's config.json, its text part where it has several; empty for a hub name."""
    if not is_local(model):
        return {}
    content = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    return {**content, **content.get("text_config", {}), "model_type": content.get("model_type", "")}


def _family(model: str, description: Mapping[str, Any]) -> ModelFormat | None:
    if description:
        kind = str(description["model_type"])
        return next((found for prefix, _, found in FORMATS if kind.startswith(prefix)), None)
    name = model.rsplit("/", 1)[-1]
    return next((found for _, pattern, found in FORMATS if re.match(pattern, name, re.IGNORECASE)), None)


def _long_context(config: DracoConfig, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """YaRN, where the context is longer than the model was trained for (appendix "Serving configuration")."""
    server = config.tau_bench.server
    native = server.native_context or description.get("max_position_embeddings")
    if native is None or native >= server.max_model_len:
        return None
    known = description.get("rope_parameters") or {}
    theta = known.get("rope_theta", description.get("rope_theta", 1_000_000.0))
    return {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": server.max_model_len / native,
            "original_max_position_embeddings": native,
        }
    }
