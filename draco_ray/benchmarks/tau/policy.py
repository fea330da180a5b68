"""What is evaluated: an adapter on the configured base model, the base model, another model directory, an API model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.adapter_files import engine_tensor_name
from draco_ray.engine.model_directory import architectures, check_model_directory
from draco_ray.errors import ConfigError, EngineError
from draco_ray.lab.evaluation.policies import EvaluatedPolicy
from draco_ray.runs.checkpoints import ADAPTER, ADAPTER_CONFIG, check_adapter, file_digest

API = "litellm:"
BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class TauPolicy:
    """A policy that was looked at and can be used."""

    name: str
    """Of its measurement: ``step00100``, ``base``, the model's name."""
    model: str
    """Model directory or hub name to serve, or an API model's LiteLLM name."""
    api: bool = False
    """Reached through LiteLLM, not served here."""
    adapter: Path | None = None
    """PEFT adapter on top of ``model``."""
    rank: int = 0
    """Of the adapter."""
    digest: str | None = None
    """SHA-256 of the adapter's weights: a result folder never mixes two checkpoints."""


def find_policy(named: str, config: DracoConfig) -> TauPolicy:
    """Look at what the user named.

    Args:
        named: ``base`` (the configured model), ``litellm:MODEL``, or a directory: an adapter as checkpoints hold it
            (``runs/NAME/checkpoints/step00100``) or a model.

    Raises:
        ConfigError: it is none of these, or the directory is unusable.
    """
    if named.startswith(API):
        return api_policy(named.removeprefix(API))
    if named == BASE:
        return served_policy(BASE, config.model.path)
    directory = Path(named).expanduser().resolve()
    if (directory / ADAPTER_CONFIG).is_file():
        return served_policy(directory.name, config.model.path, directory)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"policy {named}: expected a folder with {ADAPTER_CONFIG} (a checkpoint) or config.json (a model), "
            f"'{BASE}' or {API}<provider>/<model>"
        )
    return served_policy(directory.name, str(directory))


def tau_policies(policy: EvaluatedPolicy, config: DracoConfig) -> list[TauPolicy]:
    """What `draco evaluate` found, checkpoint by checkpoint, on the configured base model.

    Raises:
        ConfigError: one is unusable.
    """
    if policy.api_model is not None:
        return [api_policy(policy.api_model)]
    return [served_policy(each.name, config.model.path, each.adapter) for each in policy.checkpoints]


def api_policy(model: str) -> TauPolicy:
    """A policy behind an API.

    Raises:
        ConfigError: ``model`` has no provider prefix.
    """
    if "/" not in model:
        raise ConfigError(f"policy {model}: no provider; expected <provider>/<model>, e.g. {API}openai/gpt-5.4")
    return TauPolicy(name=re.sub(r"[^\w.-]+", "_", model), model=model, api=True)


def served_policy(name: str, model: str, adapter: Path | None = None) -> TauPolicy:
    """A policy to serve here: ``model``, with ``adapter`` (a PEFT folder) on top.

    Raises:
        ConfigError: the model directory is unusable, or the adapter names no rank.
        DamagedRun: the adapter is not sound.
    """
    try:
        check_model_directory(model)
    except EngineError as error:
        raise ConfigError(f"policy {name}: {error}") from None
    rank, digest = (0, None) if adapter is None else _read_adapter(adapter)
    return TauPolicy(name=name, model=model, adapter=adapter, rank=rank, digest=digest)


def write_served_adapter(policy: TauPolicy, folder: Path) -> Path:
    """Copy the adapter under the names vLLM looks for; it passes over others without a word. Returns ``folder``."""
    assert policy.adapter is not None
    named = architectures(policy.model)
    folder.mkdir(parents=True)
    tensors = load_file(policy.adapter / ADAPTER)
    save_file(
        {engine_tensor_name(name, named): np.ascontiguousarray(values) for name, values in tensors.items()},
        folder / ADAPTER,
    )
    text = (policy.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return folder


def changes_model(adapter: Path) -> bool:
    """Whether the adapter does anything: an untrained one's second factors are all zero."""
    return any(np.any(values) for name, values in load_file(adapter / ADAPTER).items() if "lora_B" in name)


def _read_adapter(directory: Path) -> tuple[int, str]:
    """Rank and digest."""
    check_adapter(directory)
    rank = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"policy {directory}: {ADAPTER_CONFIG} has rank {rank!r}; expected a positive integer")
    return rank, file_digest(directory / ADAPTER)[0]
