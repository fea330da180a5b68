"""Checks whether the cluster can carry the run: once, before anything is loaded, with one line where it cannot.

What is checked: GPUs and CPUs of the whole cluster, and ``judge`` slots where a rubric is used, if no autoscaler brings
them; that one node holds a whole engine; object store and disk against an upper estimate of a training step; that every
node which carries engines, slots or learners sees the data and the model under the same path. Nodes that an autoscaler
adds later cannot be checked: they must be made like the others.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from safetensors import SafetensorError, safe_open

from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.engine.model_shape import PUBLIC_CONFIGS, check_experts, check_heads, check_split, is_frozen, model_shape
from draco_ray.errors import ClusterError, ConfigError, StoreError
from draco_ray.judging.judge_context import context_problem, context_warning, model_positions
from draco_ray.judging.local.server import served_model
from draco_ray.judging.prompts import KEY_FILE, evidence_key
from draco_ray.judging.reply_cache import FILE, RESTORE, check_own_disk, check_store, create_store
from draco_ray.runs.directory import RunDirectory

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for a submitted job."""
PROBE_SECONDS = 120.0
"""Time a node has to start a process and look at the run directory."""

TRAJECTORY_BYTES = 21
"""Of one token of a trajectory: id, log-prob and step at 4 bytes, the mask at 1, its text (the code twice) at 8."""
SAMPLE_BYTES = 13
"""Of one token of a training sample: id, log-prob and advantage at 4 bytes, the mask at 1."""
PROMPT_BYTES = 4
"""Of one trajectory token in a judge prompt, which is archived with the reply."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Upper estimate of what one training step makes, every rollout at its full length; bytes."""

    rollouts: int
    trajectories: int
    samples: int
    judge_calls: int
    adapter: int
    """0 where the model's checkpoint is not here."""

    @property
    def object_store(self) -> int:
        """Bytes in memory: all of it, and the adapter twice: the learner's and the engines' copy."""
        return self.trajectories + self.samples + self.judge_calls + 2 * self.adapter

    @property
    def disk(self) -> int:
        """Bytes on disk: tables before compression, and a checkpoint.

        That is the adapter, under two sets of names where the model is wrapped, and two moments of the optimizer.
        """
        return self.trajectories + self.judge_calls + 4 * self.adapter


def step_size(config: DracoConfig) -> StepSize:
    """Estimate a training step of this configuration."""
    agent, algorithm = config.agent, config.algorithm
    rollouts = config.train.prompts_per_step * algorithm.group_size
    tokens = rollouts * (agent.max_prompt_length + agent.max_response_length)
    # Each trajectory is shown to stage2, union, the scoring votes and credit.
    shown = 3 + config.judge.score_votes if algorithm.reward == "rubric" else 0
    return StepSize(
        rollouts=rollouts,
        trajectories=tokens * TRAJECTORY_BYTES,
        samples=tokens * SAMPLE_BYTES,
        judge_calls=tokens * shown * PROMPT_BYTES,
        adapter=adapter_bytes(config.model.path, config.learner),
    )


def adapter_bytes(model_path: str, learner: LearnerConfig) -> int:
    """Size of the float32 LoRA adapter, by the shapes of the checkpoint's matrices; 0 where there is none here."""
    if model_path in PUBLIC_CONFIGS:
        with suppress(ConfigError):  # the learner refuses a target that matches nothing
            shape = model_shape(model_path)
            return shape.adapter_parameters(learner.lora_target, learner.lora_rank) * FLOAT32_BYTES
        return 0
    config, sides = cached_config(model_path), 0
    wanted = r".*\.\d+\..*" if learner.lora_target == "all-linear" else learner.lora_target
    for file in (Path(model_path).expanduser() if config is None else config.parent).glob("*.safetensors"):
        with suppress(SafetensorError), safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no mapping)
                shape_of, module = tensors.get_slice(name).get_shape(), name.removesuffix(".weight")
                if len(shape_of) == 2 and re.fullmatch(wanted, module) and not is_frozen(module):
                    sides += sum(shape_of)
    return learner.lora_rank * sides * FLOAT32_BYTES


def check_trainable(model_path: str, learner: LearnerConfig, tensor_parallel: int = 1) -> None:
    """Check that a model can be adapted and divided as it is to be, where its ``config.json`` is on this machine.

    Args:
        model_path: `model.path`.
        learner: what adapts it, with workers that may divide its heads among them.
        tensor_parallel: GPUs that an engine divides it among.

    Raises:
        ConfigError: it is a mixture of experts that is not trained here, or not so, or does not divide.
    """
    file = Path(model_path).expanduser() / "config.json" if Path(model_path).is_dir() else cached_config(model_path)
    if file is not None:
        config = json.loads(file.read_text(encoding="utf-8"))
        check_experts(config, learner, model_path)
        check_heads(config, learner.context_parallel, model_path)
        check_split(config, tensor_parallel, model_path)


def cached_config(model_path: str) -> Path | None:
    """The ``config.json`` that the hub's cache holds of a model which is no directory here; None where it has none."""
    if Path(model_path).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model_path, "config.json")
    except HFValidationError:
        # The engine refuses a folder that is missing.
        return None
    return Path(cached) if isinstance(cached, str) else None


def check_judge_context(config: DracoConfig, console: Console) -> None:
    """Check that the policy's context is long enough for its prompts as a judge; say where it is set to be shorter.

    Raises:
        ConfigError: it is not; the numbers, and what to change.
    """
    problem = context_problem(config, model_positions(config.model.path, cached_config(config.model.path)))
    if problem is not None:
        raise ConfigError(problem)
    if (warning := context_warning(config)) is not None:
        console.print(warning)


def check_session(config: DracoConfig, run: Path) -> None:
    """Check what a run needs beyond the resources that `check_resources` compares: room, the data and the model.

    Raises:
        ClusterError: the object stores are too small, or a node does not see the data or the model.
        StoreError: the run directory cannot be written, or its disk is full.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_object_store(config, sum(node["Resources"].get("object_store_memory", 0) for node in nodes))
    check_writable(run)
    check_disk(config, run)
    if len(nodes) > 1:
        check_nodes(config, nodes)


def check_object_store(config: DracoConfig, available: float) -> None:
    """Compare the cluster's object stores, ``available`` bytes together, with a step's estimate.

    Raises:
        ClusterError: too small; Ray would spill to disk and slow the step down.
    """
    size = step_size(config)
    # With staleness later steps' rollouts are there while this one's are learned.
    steps = 1 + config.train.staleness
    needed = steps * size.object_store - (steps - 1) * 2 * size.adapter
    if needed > available:
        both = f"; {steps} steps at a time" if steps > 1 else ""
        raise ClusterError(
            f"the object stores of the Ray cluster hold {_gib(available)}, a step of {size.rollouts} rollouts may need "
            f"{_gib(needed)} (trajectories {_gib(size.trajectories)}, samples {_gib(size.samples)}, judge "
            f"calls {_gib(size.judge_calls)}, adapter twice {_gib(2 * size.adapter)}{both}): start Ray with a larger "
            "--object-store-memory (ray.object_store_mib where it starts here) or lower train.prompts_per_step"
        )


def check_writable(run: Path) -> None:
    """Write and read back a file of the run directory.

    Raises:
        StoreError: it cannot be written.
    """
    probe = run / f".probe-{secrets.token_hex(4)}"
    try:
        probe.write_text("probe", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"run directory {run} cannot be written: {error.strerror}; set run.root to a folder this user owns"
        ) from None


def check_outlives_job(root: Path | str) -> None:
    """Check that run directories outlive the job that makes them.

    Raises:
        ConfigError: they would lie where Ray unpacks a submitted job's files, which it deletes, or wherever the cluster
            was started, in a container's own file system say.
    """
    if isinstance(root, str):
        return  # An object store.
    folder = root.resolve()
    if {"runtime_resources", "working_dir_files"} <= set(folder.parts):
        raise ConfigError(
            f"run.root={root} lies among the files that were submitted with this job ({folder}), which Ray deletes: "
            "set run.root to a folder that outlives the job"
        )
    if SUBMITTED in os.environ and not root.is_absolute():
        raise ConfigError(
            f"run.root={root} is no absolute path, and a submitted job runs wherever its cluster was started ({folder} "
            "here, which may go with a container): set run.root to a folder that outlives the job"
        )


def check_replies(config: DracoConfig, run: Path, mounts: str | None = None) -> None:
    """Check that the judge's replies are kept on a disk of this machine, and say what else a run could do.

    Args:
        config: the run's.
        run: its directory.
        mounts: what /proc/mounts says; None: of this machine.

    Raises:
        ConfigError: they would lie on a file system that machines share.
        StoreError: those that are there are damaged.
    """
    if not keeps_replies(config):
        return
    folder = config.judge.cache or RunDirectory(run).judge_cache
    try:
        check_own_disk(folder, mounts)
    except StoreError as error:
        also = ""
        if config.judge.cache is None and isinstance(config.run.root, str):
            also = "; here also run.local"
        elif config.judge.cache is None:
            also = f"; a new run with run.root=file://{run.resolve().parent} works on such a disk and is copied there"
        raise ConfigError(f"{error}{also}") from None
    check_store(folder)


def keeps_replies(config: DracoConfig) -> bool:
    """Whether the judge's replies are kept: those of a judge that is paid."""
    return config.algorithm.reward == "rubric" and not config.judge.self_judge.enabled


def check_paid_replies(run: RunDirectory, before: DracoConfig, config: DracoConfig) -> None:
    """Check that the replies a run has paid for are there, unless the user has named another folder for them.

    Args:
        run: to be continued.
        before: its configuration until now.
        config: its configuration from now on.

    Raises:
        StoreError: they are missing or damaged.
    """
    if not keeps_replies(before) or not keeps_replies(config) or not any(run.tables.glob("judge_calls/step*")):
        return
    folder = config.judge.cache or run.judge_cache
    missing = None if check_store(folder) else FILE
    # Every question holds a code that is made with it: with another one no reply would be found.
    missing = missing or (None if (folder / KEY_FILE).exists() else KEY_FILE)
    if missing is not None and config.judge.cache == before.judge.cache:
        raise StoreError(f"judge replies: {folder / missing} is missing, this run has paid for some: {RESTORE}")
    evidence_key(folder)
    create_store(folder)


FILES_PER_ROLLOUT = 16
"""Parts of tables that a step writes for one of its rollouts: 8, with room for those of groups and for evaluations."""


def check_disk(config: DracoConfig, run: Path) -> None:
    """Check that there is room for one more training step; before each, so that a full disk stops the run between two.

    Raises:
        StoreError: less is free than a step may write.
    """
    needed, free = step_size(config).disk, shutil.disk_usage(run).free
    if free < needed:
        raise StoreError(
            f"run directory {run}: {_gib(free)} free on its disk, a training step may write {_gib(needed)}: free "
            "space there, or set run.root"
        )
    files, status = FILES_PER_ROLLOUT * config.train.prompts_per_step * config.algorithm.group_size, os.statvfs(run)
    # Some file systems have no limit, and say 0 of 0.
    if status.f_files and status.f_favail < files:
        raise StoreError(
            f"run directory {run}: its disk has room for {status.f_favail} files, a training step may write {files}: "
            "remove files there, or set run.root"
        )


def check_nodes(config: DracoConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Let a task look for the data and the model on every node that may hold engines, rollout slots or learners.

    Nodes without CPUs and GPUs hold judge workers or the driver: those need neither. The run directory is the driver's
    alone; what other nodes have to say to it goes through Ray.

    Raises:
        ClusterError: the first node that does not see them under the same path, or does not answer.
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
            raise ClusterError(f"{node} started no process within {PROBE_SECONDS:.0f}s: look at it in `ray status`")
        if (missing := ray.get(answer)) is not None:
            raise ClusterError(
                f"{node}: no {missing}; every node with CPUs or GPUs must see it under this path: copy it there, or "
                "use a shared folder"
            )


def probe_node(paths: Sequence[str]) -> str | None:
    """The first of these paths that is missing on the node it runs on."""
    return next((path for path in paths if not os.path.exists(path)), None)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
