"""Checks whether model, disk, object store and nodes suffice for a run, before anything is loaded.

Object store and disk are compared with an upper estimate of a training step. Every node with CPUs or GPUs must see data
and model under the same path; nodes that an autoscaler adds later cannot be checked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors import SafetensorError, safe_open

from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.engine.model_config import SHAPES, check_experts, check_heads, check_tensor_parallel, is_router_or_expert
from draco_ray.errors import ClusterError, ConfigError, StoreError
from draco_ray.judging.judge_context import context_problem, model_positions
from draco_ray.judging.local.server import served_model
from draco_ray.judging.prompts import KEY_FILE, evidence_key
from draco_ray.judging.reply_cache import REPLIES_FILE, RESTORE, check_local_disk, check_store, create_store
from draco_ray.runs.directory import RunDirectory

SUBMITTED_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for a submitted job."""
PROBE_SECONDS = 120.0
"""Timeout for a node to start a process and look for data and model."""

TRAJECTORY_BYTES = 21
"""Bytes per token of a trajectory: 4 each for the token id, its log-prob and its step number, 1 for the mask, and 8 for
the text, because code is stored twice."""
SAMPLE_BYTES = 13
"""Bytes per token of a training sample: id, log-prob and advantage 4 each, the mask 1."""
PROMPT_BYTES = 4
"""Bytes per trajectory token in a judge prompt, which is archived with the reply."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Upper estimate of the data of one training step, in bytes, with rollouts of maximum length."""

    rollouts: int
    trajectories: int
    samples: int
    judge_calls: int
    adapter: int
    """Size of the LoRA adapter; 0 if the model's checkpoint is not on this machine."""

    @property
    def object_store(self) -> int:
        """Bytes in memory, including one copy of the adapter for the learner and one for the engines."""
        return self.trajectories + self.samples + self.judge_calls + 2 * self.adapter

    @property
    def disk(self) -> int:
        """Bytes on disk: tables before compression, and a checkpoint.

        A checkpoint holds the adapter (twice for wrapped models) and the optimizer's two moments.
        """
        return self.trajectories + self.judge_calls + 4 * self.adapter


def step_size(config: DracoConfig) -> StepSize:
    """Estimate a training step of this configuration."""
    agent, algorithm = config.agent, config.algorithm
    rollouts = config.train.prompts_per_step * algorithm.group_size
    tokens = rollouts * (agent.max_prompt_length + agent.max_response_length)
    # Judge calls whose prompts contain a given trajectory: stage2, union, credit, and each scoring vote.
    shown = 3 + config.judge.score_votes if algorithm.reward == "rubric" else 0
    return StepSize(
        rollouts=rollouts,
        trajectories=tokens * TRAJECTORY_BYTES,
        samples=tokens * SAMPLE_BYTES,
        judge_calls=tokens * shown * PROMPT_BYTES,
        adapter=adapter_bytes(config.model.path, config.learner),
    )


def adapter_bytes(model_path: str, learner: LearnerConfig) -> int:
    """Size of the float32 LoRA adapter, from the checkpoint's matrices; 0 if the checkpoint is not on this machine."""
    if model_path in SHAPES:
        shape = SHAPES[model_path]["shape"]
        layers = (shape["distinct"][index]["linears"] for index in shape["order"])
        sides = sum(linear["inputs"] + linear["outputs"] for linears in layers for linear in linears)
        return learner.lora_rank * sides * FLOAT32_BYTES
    config, sides = cached_config(model_path), 0
    wanted = r".*\.\d+\..*" if learner.lora_target == "all-linear" else learner.lora_target
    for file in (Path(model_path).expanduser() if config is None else config.parent).glob("*.safetensors"):
        with suppress(SafetensorError), safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no mapping)
                shape_of, module = tensors.get_slice(name).get_shape(), name.removesuffix(".weight")
                if len(shape_of) == 2 and re.fullmatch(wanted, module) and not is_router_or_expert(module):
                    sides += sum(shape_of)
    return learner.lora_rank * sides * FLOAT32_BYTES


def check_trainable(model_path: str, learner: LearnerConfig, tensor_parallel: int = 1) -> None:
    """Check that a model can be adapted and divided as configured, if its ``config.json`` is on this machine.

    Args:
        model_path: `model.path`.
        learner: its LoRA target, precision and context parallelism.
        tensor_parallel: number of GPUs of an engine.

    Raises:
        ConfigError: its mixture of experts is not supported, or its heads or sizes cannot be divided evenly.
    """
    file = Path(model_path).expanduser() / "config.json" if Path(model_path).is_dir() else cached_config(model_path)
    if file is not None:
        config = json.loads(file.read_text(encoding="utf-8"))
        check_experts(config, learner, model_path)
        check_heads(config, learner.context_parallel, model_path)
        check_tensor_parallel(config, tensor_parallel, model_path)


def cached_config(model_path: str) -> Path | None:
    """The ``config.json`` of a hub model in the local cache; None if there is none or ``model_path`` is a directory."""
    if Path(model_path).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model_path, "config.json")
    except HFValidationError:
        # The path is a missing folder, which `check_model_directory` reports.
        return None
    return Path(cached) if isinstance(cached, str) else None


def check_judge_context(config: DracoConfig) -> None:
    """Check that the policy's context is long enough for its prompts as a judge.

    Raises:
        ConfigError: it is too short.
    """
    problem = context_problem(config, model_positions(config.model.path, cached_config(config.model.path)))
    if problem is not None:
        raise ConfigError(problem)


def check_session(config: DracoConfig, run: Path) -> None:
    """Check object stores, disk, and whether the nodes see data and model; `check_resources` checks CPUs and GPUs.

    Raises:
        ClusterError: the object stores are too small, or a node does not see the data or the model.
        StoreError: the disk of the run directory is full.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_object_store(config, sum(node["Resources"].get("object_store_memory", 0) for node in nodes))
    check_disk(config, run)
    if len(nodes) > 1:
        check_nodes(config, nodes)


def check_object_store(config: DracoConfig, available: float) -> None:
    """Compare the total size of the cluster's object stores, ``available`` bytes, with the estimate for a step.

    Raises:
        ClusterError: they are too small; Ray would spill to disk, which slows the step down.
    """
    size = step_size(config)
    # With staleness, rollouts of later steps exist while the learner trains on this step.
    steps = 1 + config.train.staleness
    needed = steps * size.object_store - (steps - 1) * 2 * size.adapter
    if needed > available:
        both = f"; for {steps} concurrent steps" if steps > 1 else ""
        raise ClusterError(
            f"the object stores of the Ray cluster have {_gib(available)}, but a step of {size.rollouts} rollouts may "
            f"need {_gib(needed)} (trajectories {_gib(size.trajectories)}, samples {_gib(size.samples)}, judge "
            f"calls {_gib(size.judge_calls)}, adapter twice {_gib(2 * size.adapter)}{both}): start Ray with a larger "
            "--object-store-memory (ray.object_store_mib if draco starts Ray), or lower train.prompts_per_step"
        )


def check_outlives_job(root: Path | str) -> None:
    """Check that run directories outlive the job that makes them.

    Raises:
        ConfigError: they would be in the folder where Ray unpacks the job's files and which it later deletes, or in
            the cluster's working directory, which may be inside a container.
    """
    if isinstance(root, str):
        return  # A `str` is the URL of an object store, which outlives the job.
    folder = root.resolve()
    if {"runtime_resources", "working_dir_files"} <= set(folder.parts):
        raise ConfigError(
            f"run.root={root} is inside the files submitted with this job ({folder}), which Ray deletes; set run.root "
            "to a folder that outlives the job"
        )
    if SUBMITTED_JOB_VARIABLE in os.environ and not root.is_absolute():
        raise ConfigError(
            f"run.root={root} is a relative path in the cluster's working directory ({folder}), which may be deleted "
            "with its container; set run.root to an absolute path that outlives the job"
        )


def check_replies(config: DracoConfig, run: Path) -> None:
    """Check that the judge's replies are stored on a local disk.

    Args:
        config: the run's.
        run: its directory.

    Raises:
        ConfigError: they would be on a network file system; the message says what to change.
        StoreError: existing replies are damaged.
    """
    if not keeps_replies(config):
        return
    folder = config.judge.cache or RunDirectory(run).judge_cache
    try:
        check_local_disk(folder)
    except StoreError as error:
        also = ""
        if config.judge.cache is None and isinstance(config.run.root, str):
            also = ", or set run.local"
        elif config.judge.cache is None:
            also = (
                f"; or start a new run with run.root=file://{run.resolve().parent}, which works on a local disk and is "
                "copied there"
            )
        raise ConfigError(f"{error}{also}") from None
    check_store(folder)


def keeps_replies(config: DracoConfig) -> bool:
    """Whether the judge's replies are stored; they are, unless the policy is its own judge."""
    return config.algorithm.reward == "rubric" and not config.judge.self_judge.enabled


def check_paid_replies(run: RunDirectory, before: DracoConfig, config: DracoConfig) -> None:
    """Check that the paid replies of a run exist, unless the user has set another folder for them.

    Args:
        run: the run to resume.
        before: its previous configuration.
        config: its new configuration.

    Raises:
        StoreError: they are missing or damaged.
    """
    if not keeps_replies(before) or not keeps_replies(config) or not any(run.tables.glob("judge_calls/step*")):
        return
    folder = config.judge.cache or run.judge_cache
    missing = None if check_store(folder) else REPLIES_FILE
    # Every prompt contains a code derived from this key, so with another key no stored reply would match.
    missing = missing or (None if (folder / KEY_FILE).exists() else KEY_FILE)
    if missing is not None and config.judge.cache == before.judge.cache:
        raise StoreError(
            f"judge replies: {folder / missing} is missing, although this run has paid for replies; {RESTORE}"
        )
    evidence_key(folder)
    create_store(folder)


FILES_PER_ROLLOUT = 16
"""Estimated table files per rollout of a step: 8 for the rollout itself, the rest for groups and evaluations."""


def check_disk(config: DracoConfig, run: Path) -> None:
    """Check that there is disk space for another training step. Called before each one.

    Raises:
        StoreError: there is too little.
    """
    needed, free = step_size(config).disk, shutil.disk_usage(run).free
    if free < needed:
        raise StoreError(
            f"run directory {run}: its disk has {_gib(free)} free, but a training step may write {_gib(needed)}; free "
            "disk space, or set run.root"
        )
    files, status = FILES_PER_ROLLOUT * config.train.prompts_per_step * config.algorithm.group_size, os.statvfs(run)
    # File systems without a limit on the number of files report 0 of 0.
    if status.f_files and status.f_favail < files:
        raise StoreError(
            f"run directory {run}: its file system allows {status.f_favail} more files, but a training step may write "
            f"{files}; remove files there, or set run.root"
        )


def check_nodes(config: DracoConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Check on every node that may run engines, rollout workers or learners that data and model exist.

    Nodes without CPUs and GPUs run judge workers or the driver, which need neither. Only the driver's node needs the
    run directory.

    Raises:
        ClusterError: names the first node that does not see them under the same path, or does not answer.
    """
    data, judge = [config.data.root.resolve()], config.judge
    models = [Path(config.model.path), *([Path(served_model(judge.model))] if judge.local.enabled else [])]
    paths = [str(path) for path in [*data, *models] if path.is_absolute() and path.is_dir()]
    probe = ray.remote(probe_node)
    answers = {
        probe.options(
            name=f"probe {node['NodeManagerAddress']}",
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(paths): node
        for node in nodes
        if node["Resources"].get("CPU") or node["Resources"].get("GPU")
    }
    done, late = ray.wait(list(answers), num_returns=len(answers), timeout=PROBE_SECONDS) if answers else ([], [])
    for answer in [*done, *late]:
        node = f"node {answers[answer]['NodeManagerAddress']}"
        if answer in late:
            raise ClusterError(
                f"{node} started no process within {PROBE_SECONDS:.0f} s; check the node with `ray status`"
            )
        if (missing := ray.get(answer)) is not None:
            raise ClusterError(
                f"{node}: {missing} does not exist; every node with CPUs or GPUs needs it at this path. Copy it "
                "there, or use a shared folder"
            )


def probe_node(paths: Sequence[str]) -> str | None:
    """The first of these paths that does not exist on this node."""
    return next((path for path in paths if not os.path.exists(path)), None)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
