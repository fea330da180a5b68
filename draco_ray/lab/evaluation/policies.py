"""Policies that ``--policy`` and ``--run`` name: weights, adapters, and the source of the configuration."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.config.keys import flat
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError
from draco_ray.records import Adapter
from draco_ray.runs.checkpoints import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, check_adapter
from draco_ray.runs.directory import RunDirectory

STARTER = "starter"
API_PREFIX = "litellm:"
UNTRAINED = "step00000"
"""Name of the model without an adapter, the first point of a training curve."""
_SMALL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One set of weights to measure."""

    name: str
    """Name of the checkpoint (``step00090``), or of the policy if it has no checkpoints."""
    version: int = 0
    """Training step; 0 is the model without an adapter."""
    adapter: Path | None = None
    """PEFT adapter folder; None for the model alone."""


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Connection of an API model; timeouts, retries, prices and limits come from ``judge.*`` in the configuration."""

    api_base: str | None = None
    api_key_env: str | None = None
    """Environment variable with the API key; None: ``<PROVIDER>_API_KEY``."""
    temperature: float | None = None
    """Sampling temperature; None: the provider's default, because some models reject any other value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPolicy:
    """A policy to evaluate."""

    label: str
    """Default name of the row in tables."""
    name: str
    """The name that the user gave."""
    config: str | None = None
    """Default source of its configuration: a preset or a run directory; None for the paper's defaults."""
    model: str | None = None
    """Model directory or hub name; None: as configured."""
    api_model: str | None = None
    """LiteLLM model name; set for an API model, which has no weights."""
    api: ApiOptions = ApiOptions()
    checkpoints: tuple[Checkpoint, ...]


def find_policy(name: str, starter: Path) -> EvaluatedPolicy:
    """Find the policy that ``--policy`` names.

    Args:
        name: ``starter``, ``litellm:<model>``, a model directory, a run directory (its last checkpoint), a
            checkpoint's or an adapter's folder, or a model's hub name.
        starter: folder of the starter policy.

    Raises:
        ConfigError: ``name`` is none of these.
        DamagedRun: the policy's adapter is damaged.
    """

    def single(label: str, checkpoint: str = "base", **fields: Any) -> EvaluatedPolicy:
        return EvaluatedPolicy(label=label, name=name, checkpoints=(Checkpoint(name=checkpoint),), **fields)

    if name.startswith(API_PREFIX):
        model = name.removeprefix(API_PREFIX)
        if not model:
            raise ConfigError(f"--policy {name}: expected a model name after litellm:, e.g. litellm:openai/gpt-5.4")
        return single(model.rsplit("/", 1)[-1], re.sub(r"[^\w.-]+", "_", model), api_model=model)
    if name == STARTER:
        if not starter.is_dir():
            raise ConfigError(f"--policy starter: {starter} does not exist; create it with `draco starter build`")
        return single(STARTER, STARTER, config="sandbox", model=str(starter))
    # Use os.path, which returns False for a name that is too long, where pathlib raises.
    path = Path(name)
    if os.path.isfile(path / ADAPTER_CONFIG):
        return _adapter_policy(path.resolve(), name)
    if os.path.lexists(path / "config.yaml"):
        run = RunDirectory.open(path.resolve())
        found = checkpoints(run)
        if not found:
            raise ConfigError(f"--policy {name}: the run has no checkpoint yet")
        return _run_policy(run, name, (found[-1],))
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"--policy {name}: expected config.json (a model), adapter_config.json (an adapter) or config.yaml (a "
                "run) in it"
            )
        return single(path.resolve().name, model=str(path.resolve()))
    if re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", name) and not os.path.isdir(path.parent):
        return single(name.rsplit("/", 1)[-1], model=name)
    raise ConfigError(
        f"--policy {name[:200]}: no such directory; expected a model, adapter, checkpoint or run directory, starter, "
        "litellm:<model>, or a hub name <owner>/<model>"
    )


def last_epochs(path: Path, epochs: int, steps_per_epoch: int) -> EvaluatedPolicy:
    """The checkpoints that end a run's last ``epochs`` whole epochs.

    Raises:
        ConfigError: the run has fewer epochs, or one of the checkpoints was not kept.
        DamagedRun: one of them is damaged.
    """
    run = RunDirectory.open(path.resolve())
    kept = {checkpoint.version: checkpoint for checkpoint in checkpoints(run)}
    last = max(kept, default=0) // steps_per_epoch
    wanted = [epoch * steps_per_epoch for epoch in range(last - epochs + 1, last + 1)]
    if last < epochs:
        raise ConfigError(
            f"run {path}: only {last} complete epochs of {steps_per_epoch} steps have a checkpoint, but --last-epochs "
            f"is {epochs}; train longer or lower --last-epochs"
        )
    if absent := [step for step in wanted if step not in kept]:
        raise ConfigError(
            f"run {path}: no checkpoint after step {absent[0]}, the end of an epoch; expected train.checkpoint_every "
            f"to divide {steps_per_epoch}"
        )
    return _run_policy(run, str(path), tuple(kept[step] for step in wanted))


def every_checkpoint(path: Path, every: int) -> EvaluatedPolicy:
    """The untrained policy, a run's checkpoints after every ``every``-th training step, and its last checkpoint.

    Raises:
        ConfigError: the run has no checkpoint.
        DamagedRun: one of them is damaged.
    """
    run = RunDirectory.open(path.resolve())
    kept = checkpoints(run)
    if not kept:
        raise ConfigError(f"run {path}: the run has no checkpoint yet")
    chosen = [checkpoint for checkpoint in kept if checkpoint.version % every == 0 or checkpoint is kept[-1]]
    return _run_policy(run, str(path), (Checkpoint(name=UNTRAINED), *chosen))


def checkpoints(run: RunDirectory) -> list[Checkpoint]:
    """A run's checkpoints, ascending by training step."""
    folders = [run.checkpoint(step) for step in run.checkpoint_steps()]
    return [Checkpoint(name=folder.name, version=int(folder.name[4:]), adapter=folder) for folder in folders]


def parse_checkpoint_step(measurement: str) -> int | None:
    """The training step in a checkpoint's name (``step00090``); None for any other name."""
    match = re.fullmatch(r"step(\d+)", measurement)
    return int(match[1]) if match else None


def load_adapter(checkpoint: Checkpoint) -> Adapter:
    """Read a checkpoint's adapter.

    Raises:
        DamagedRun: it is damaged.
    """
    from safetensors.numpy import load_file

    assert checkpoint.adapter is not None
    check_adapter(checkpoint.adapter)
    tensors = load_file(checkpoint.adapter / ADAPTER)
    return Adapter(version=checkpoint.version, config=_adapter_config(checkpoint.adapter), tensors=tensors)


def lora_rank(adapter: Path) -> int:
    """LoRA rank of an adapter. Raises: ConfigError: adapter_config.json has no valid rank."""
    rank = _adapter_config(adapter).get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"adapter {adapter}: adapter_config.json has rank {rank!r}; expected a positive integer")
    return rank


def fingerprint(folder: Path) -> str:
    """Digest of a folder's files: names, sizes, and the content of files up to 16 MiB."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size <= _SMALL_BYTES and file.name != OPTIMIZER:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _adapter_policy(path: Path, name: str) -> EvaluatedPolicy:
    version = parse_checkpoint_step(path.name)
    checkpoint = Checkpoint(name=path.name, version=1 if version is None else version, adapter=path)
    root = path.parent.parent
    if path.parent.name == "checkpoints" and (root / "config.yaml").is_file():
        return _run_policy(RunDirectory.open(root), name, (checkpoint,))
    check_adapter(path)
    base = _adapter_config(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"--policy {name}: the adapter names no base model (base_model_name_or_path); expected a checkpoint of a "
            "run, or an adapter that names it"
        )
    return EvaluatedPolicy(label=path.name, name=name, model=base, checkpoints=(checkpoint,))


def _run_policy(run: RunDirectory, name: str, chosen: tuple[Checkpoint, ...]) -> EvaluatedPolicy:
    for checkpoint in chosen:
        if checkpoint.adapter is not None:
            check_adapter(checkpoint.adapter)
    return EvaluatedPolicy(label=run.setting("setting"), name=name, config=str(run.path), checkpoints=chosen)


def _adapter_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return config


def outcome_settings(config: DracoConfig, policy: EvaluatedPolicy) -> dict[str, Any]:
    """Dotted configuration keys that affect the outcome of rollouts, without keys that only set where they run."""
    limits = {"cell_timeout_seconds", "max_memory_mib", "max_output_bytes", "rollout_retries"}
    deciding: dict[str, Any] = {"seed": True, "agent": True, "environment": limits}
    if policy.api_model is None:
        deciding |= {"engine": {"temperature", "top_p", "top_k"}, "model": True}
    keys = dict(flat(config.model_dump(mode="json", include=deciding)))
    if policy.api_model is None:
        model = Path(config.model.path)
        keys["model fingerprint"] = fingerprint(model) if model.is_dir() else None
        for checkpoint in policy.checkpoints:
            if checkpoint.adapter is not None:
                keys[f"adapter fingerprint of {checkpoint.name}"] = fingerprint(checkpoint.adapter)
    return keys
