"""The evaluated policy, and vLLM's OpenAI-compatible server for it: on loopback, behind a random key."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from draco_ray.benchmarks.tau.config import TauBenchConfig, TauServerConfig
from draco_ray.config.schema import DracoConfig
from draco_ray.engine import openai_server
from draco_ray.engine.adapter_files import AdapterFiles
from draco_ray.engine.child import Child, Scrubber
from draco_ray.engine.model_directory import architectures, chat_template_text, check_model_directory, is_local
from draco_ray.engine.vllm_engine import LORA_RANKS
from draco_ray.errors import ConfigError, EngineError, TauBenchError
from draco_ray.judging.endpoint import Server
from draco_ray.lab.evaluation.policies import API_PREFIX, Checkpoint, EvaluatedPolicy, load_adapter, lora_rank
from draco_ray.runs.checkpoints import ADAPTER, ADAPTER_CONFIG, check_adapter, file_digest

BASE_NAME = "base"
"""``--policy`` value for the configured model, and the served name of an adapter's base model."""
SERVED_NAME = "policy"
"""Served name of the policy."""
LITELLM_NAME = f"hosted_vllm/{SERVED_NAME}"
HOST = "127.0.0.1"
POLL_SECONDS = 0.5
PROBE = "The customer asks which of two credit cards has the lower annual fee, and the agent looks both of them up."
PROBE_SECONDS = 300.0
FAMILY_PARSERS = (
    ("qwen3_5", r"qwen3\.[56]", "qwen3_coder", "qwen3"),
    ("qwen3", r"qwen3(?!\.)", "hermes", "qwen3"),
    ("qwen2", r"qwen2", "hermes", None),
)
"""Model families: (prefix of ``model_type``, pattern of hub names, vLLM's tool-call parser, reasoning parser)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TauPolicy:
    """A checked policy, ready to be evaluated."""

    name: str
    """Name of the policy in the results: ``step00100`` for a checkpoint, ``base``, or the model's name."""
    model: str
    """Model directory or hub name to serve, or the LiteLLM name of an API model."""
    api: bool = False
    """Whether it is an API model, called through LiteLLM, instead of being served here."""
    adapter: Path | None = None
    """PEFT adapter on top of ``model``."""
    rank: int = 0
    """LoRA rank of the adapter."""
    digest: str | None = None
    """SHA-256 of the adapter's weights, so that results of two checkpoints cannot mix in one folder."""


def find_policy(named: str, config: DracoConfig) -> TauPolicy:
    """Find and check the policy of ``--policy``.

    Args:
        named: ``base`` (the configured model), ``litellm:MODEL``, or a directory: an adapter, such as
            ``runs/NAME/checkpoints/step00100``, or a model.

    Raises:
        ConfigError: ``named`` is none of these, or the directory is unusable.
    """
    if named.startswith(API_PREFIX):
        return api_policy(named.removeprefix(API_PREFIX))
    if named == BASE_NAME:
        return served_policy(BASE_NAME, config.model.path)
    directory = Path(named).expanduser().resolve()
    if (directory / ADAPTER_CONFIG).is_file():
        return served_policy(directory.name, config.model.path, directory)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"policy {named}: expected a folder with {ADAPTER_CONFIG} (a checkpoint) or config.json (a model), "
            f"'{BASE_NAME}' or {API_PREFIX}<provider>/<model>"
        )
    return served_policy(directory.name, str(directory))


def tau_policies(policy: EvaluatedPolicy, config: DracoConfig) -> list[TauPolicy]:
    """Convert a policy of `draco evaluate`: its checkpoints on the configured base model, or its API model.

    Raises:
        ConfigError: a checkpoint or model is unusable.
    """
    if policy.api_model is not None:
        return [api_policy(policy.api_model)]
    return [served_policy(each.name, config.model.path, each.adapter) for each in policy.checkpoints]


def api_policy(model: str) -> TauPolicy:
    """Make the policy of an API model.

    Raises:
        ConfigError: ``model`` has no provider prefix.
    """
    if "/" not in model:
        raise ConfigError(
            f"policy {model}: no provider given; expected <provider>/<model>, e.g. {API_PREFIX}openai/gpt-5.4"
        )
    return TauPolicy(name=re.sub(r"[^\w.-]+", "_", model), model=model, api=True)


def served_policy(name: str, model: str, adapter: Path | None = None) -> TauPolicy:
    """Check a policy that is served here: ``model``, with ``adapter`` (a PEFT folder) on top.

    Raises:
        ConfigError: the model directory is unusable, or the adapter's rank is not a positive integer.
        DamagedRun: the adapter is damaged.
    """
    try:
        check_model_directory(model)
    except EngineError as error:
        raise ConfigError(f"policy {name}: {error}") from None
    if adapter is None:
        return TauPolicy(name=name, model=model)
    check_adapter(adapter)
    rank = lora_rank(adapter)
    return TauPolicy(name=name, model=model, adapter=adapter, rank=rank, digest=file_digest(adapter / ADAPTER)[0])


def free_port(wanted: int | None) -> int:
    """Find a free port on loopback.

    Raises:
        ConfigError: ``wanted`` is taken.
    """
    try:
        return openai_server.free_port(HOST, wanted)
    except OSError as error:
        raise ConfigError(
            f"port {wanted} on {HOST}: {error.strerror}; expected a free port; set tau_bench.server.port to another "
            "port, or to null for any free port"
        ) from None


def serve_command(config: DracoConfig, policy: TauPolicy, port: int, adapter: Path | None) -> list[str]:
    """Build the command line of vLLM's server; it contains no key.

    Args:
        adapter: folder of the adapter's copy, if the policy has an adapter.

    Raises:
        ConfigError: vLLM's tool parser for this model is neither known nor configured.
    """
    server = TauBenchConfig.of(config).server
    description = _description(policy.model)
    tool_parser, reasoning_parser = _parsers(policy.model, description)
    tool_parser = server.tool_call_parser or tool_parser
    reasoning_parser = server.reasoning_parser or reasoning_parser
    if tool_parser is None:
        raise ConfigError(
            f"policy {policy.name}: the tool-call format of {policy.model} is unknown; set "
            "tau_bench.server.tool_call_parser to vLLM's parser for it"
        )
    words = [*openai_server.SERVER_COMMAND, "--model", policy.model]
    words += ["--host", HOST, "--port", str(port), "--dtype", config.model.dtype, "--seed", str(config.seed)]
    words += ["--served-model-name", SERVED_NAME if adapter is None else BASE_NAME]
    words += ["--max-model-len", str(server.max_model_len), "--language-model-only"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    # Use only the request's sampling parameters: the model's own defaults might add a repetition penalty.
    words += ["--generation-config", "vllm", "--disable-log-stats", "--disable-uvicorn-access-log"]
    if config.model.chat_template is not None:
        words += ["--chat-template", chat_template_text(config.model.chat_template)]
    if reasoning_parser is not None:
        words += ["--default-chat-template-kwargs", json.dumps({"enable_thinking": config.agent.thinking})]
        if config.agent.thinking:
            words += ["--reasoning-parser", reasoning_parser]
    if (overrides := _long_context(server, description)) is not None:
        words += ["--hf-overrides", json.dumps(overrides)]
    if adapter is not None:
        rank = next((rank for rank in LORA_RANKS if rank >= policy.rank), LORA_RANKS[-1])
        words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        words += ["--lora-modules", json.dumps({"name": SERVED_NAME, "path": str(adapter)})]
    return words + openai_server.hardware_arguments(config.engine, server.max_model_len)


@contextmanager
def serve_policy(
    config: DracoConfig, policy: TauPolicy, log: Path, folder: Path, withhold: Sequence[str]
) -> Iterator[Server]:
    """Serve the policy as `SERVED_NAME` while the block runs.

    Args:
        log: file for the server's output.
        folder: private folder for the adapter's copy.
        withhold: environment variables the server must not see.

    Raises:
        ConfigError: the port is taken, or see `serve_command`.
        TauBenchError: the server ended or did not answer in time, or the adapter has no effect.
    """
    settings = TauBenchConfig.of(config).server
    port, key = free_port(settings.port), secrets.token_urlsafe(24)
    adapter: Path | None = None
    trained = False
    with ExitStack() as stack:
        if policy.adapter is not None:
            weights = load_adapter(Checkpoint(name=policy.name, adapter=policy.adapter))
            # In an untrained adapter all lora_B factors are zero, so it has no effect to check.
            trained = any(np.any(values) for name, values in weights.tensors.items() if "lora_B" in name)
            # Serve a copy with vLLM's tensor names, because vLLM silently ignores tensors that have other names.
            files = AdapterFiles(folder)
            stack.callback(files.remove)
            files.open()
            adapter = files.write(weights, architectures(policy.model))
            # Free the memory: the server runs for hours.
            del weights
        command = serve_command(config, policy, port, adapter)
        environment = openai_server.server_env_vars(config.engine, policy.model, key, withhold)
        child = Child(command, environment, log, Scrubber([key]), temporary=openai_server.SOCKETS_VARIABLE)
        stack.callback(child.end)
        base, headers = f"http://{HOST}:{port}", {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=base, headers=headers, timeout=10.0, trust_env=False) as client:
            _wait(child, client, settings.start_timeout_seconds, log)
            if trained:
                check_adapter_is_live(client, policy.name)
        yield Server(f"{base}/v1", key)


def check_adapter_is_live(client: httpx.Client, name: str, *, served_as: str = SERVED_NAME) -> None:
    """Compare log-probs with and without the adapter, because vLLM silently ignores weights it cannot place.

    Args:
        client: sends requests to the server.
        name: name of the policy, for the message.
        served_as: served name of the adapter.

    Raises:
        TauBenchError: the log-probs are equal, or the server does not return them.
    """
    request = {"prompt": PROBE, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    found = []
    for model in (served_as, BASE_NAME):
        try:
            answer = client.post("/v1/completions", json={"model": model, **request}, timeout=PROBE_SECONDS)
            found.append(answer.raise_for_status().json()["choices"][0]["prompt_logprobs"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise TauBenchError(
                f"policy {name}: vLLM's server returned no log-probs, so the adapter cannot be checked: "
                f"{type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}"
            ) from None
    if found[0] == found[1]:
        raise TauBenchError(
            f"policy {name}: its adapter has no effect: log-probs with and without it are equal; check that the "
            "adapter belongs to this model"
        )


def _wait(child: Child, client: httpx.Client, seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while SERVED_NAME not in (openai_server.served_names(client) or ()):
        if (code := child.wait(POLL_SECONDS)) is not None:
            raise TauBenchError(f"vLLM's server ended with exit code {code}; for the reason see the end of {log}")
        if time.monotonic() > deadline:
            raise TauBenchError(
                f"vLLM's server did not answer within {seconds:g} s; see {log}, or raise "
                "tau_bench.server.start_timeout_seconds"
            )


def _description(model: str) -> Mapping[str, Any]:
    """A local model's config.json with its text part merged in; empty for a hub name."""
    if not is_local(model):
        return {}
    content = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    return {**content, **content.get("text_config", {}), "model_type": content.get("model_type", "")}


def _parsers(model: str, description: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """vLLM's tool-call and reasoning parsers for a model; each is None if unknown or not needed."""
    kind, name = description.get("model_type"), model.rsplit("/", 1)[-1]
    for prefix, pattern, tool_calls, reasoning in FAMILY_PARSERS:
        if re.match(pattern, name, re.IGNORECASE) if kind is None else kind.startswith(prefix):
            return tool_calls, reasoning
    return None, None


def _long_context(server: TauServerConfig, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """YaRN parameters if the context is longer than the model's own (appendix "Serving configuration")."""
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
