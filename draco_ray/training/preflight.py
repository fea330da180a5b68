"""Checks whether the cluster can carry the run: once, before anything is loaded, with one line where it cannot.

What is checked: GPUs and CPUs of the whole cluster, and ``judge`` slots where a rubric is used, if no autoscaler brings
them; that one node holds a whole engine; object store and disk against an upper estimate of a training step; that every
node which carries engines, slots or learners sees the data and the model under the same path. Nodes that an autoscaler
adds later cannot be checked: they must be made like the others.
"""

from __future__ import annotations

import json
import math
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
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from safetensors import SafetensorError, safe_open

from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.engine.experts import is_frozen
from draco_ray.engine.model_shape import PUBLIC_CONFIGS, check_experts, check_heads, check_split, model_shape
from draco_ray.errors import ClusterError, ConfigError, StoreError
from draco_ray.judging.judge_context import context_problem, context_warning, model_positions
from draco_ray.judging.local.server import served_model
from draco_ray.judging.prompts import KEY_FILE, evidence_key
from draco_ray.judging.reply_cache import FILE, RESTORE, check_own_disk, check_store, create_store
from draco_ray.runs.directory import RunDirectory

ANONYMOUS_TYPE = "node_"
"""Begins the node type that Ray reports for a node which is of no autoscaler's making; its own id follows."""
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


def has_autoscaler() -> bool:
    """Whether something adds nodes to the connected cluster: its nodes, the head first, are then of named types."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    return any(not node.ray_node_type_name.startswith(ANONYMOUS_TYPE) for node in nodes)


def check_resources(
    config: DracoConfig,
    cluster: Mapping[str, float],
    nodes: Sequence[Mapping[str, float]] | None = None,
    *,
    judges: bool = True,
    autoscaled: bool = False,
) -> None:
    """Compare what the actors ask for with what the cluster and its largest node have.

    Args:
        config: the run's.
        cluster: resources of all nodes together.
        nodes: of each.
        judges: whether judge workers are started where the setting uses a rubric.
        autoscaled: whether nodes come as they are asked for; there may then be less of everything than the run needs.

    Raises:
        ConfigError: too few of a resource.
    """
    judge, problems = config.judge.workers + 1, []
    needed = judges and config.algorithm.reward == "rubric" and not autoscaled
    if needed and cluster.get("judge", 0) < judge:
        problems.append(
            f"the Ray cluster offers {cluster.get('judge', 0):g} of the custom resource 'judge' and has no autoscaler; "
            f"judge.workers={config.judge.workers} and the union need {judge}: start a node with "
            """--resources='{"judge": 16}'"""
        )
    engine, learner, local = config.engine, config.learner, config.judge.local
    served = local.replicas if local.enabled and judges and config.algorithm.reward == "rubric" else 0
    gpus = engine.fewest * engine.gpus_per_engine + learner.workers * learner.gpus_per_worker
    # With an autoscaler `draco_ray.training.room` asks for what is missing, and waits for it.
    if not autoscaled and gpus + served * local.gpus_per_replica > cluster.get("GPU", 0):
        who, keys = "engines and learner", "engine.engines, engine.gpus_per_engine or learner.gpus_per_worker"
        if served:
            who, keys = f"engines, learner and {served} judge servers", f"{keys}, judge.local.replicas"
        problems.append(
            f"{who} need {gpus + served * local.gpus_per_replica:g} GPUs, the Ray cluster has "
            f"{cluster.get('GPU', 0):g}: lower {keys} (0 GPUs each run on the CPU)"
        )
    elif not autoscaled:
        problems += [
            problem
            for count, key in (
                (local.gpus_per_replica if served else 0.0, "judge.local.gpus_per_replica"),
                (engine.tensor_parallel, "engine.tensor_parallel")
                if engine.colocate
                else (engine.gpus_per_engine, "engine.gpus_per_engine"),
            )
            if (problem := largest_problem(count, key, nodes)) is not None
        ]
    if not autoscaled and (problem := cpu_problem(config, cluster.get("CPU", 0), served)) is not None:
        problems.append(problem)
    if problems:
        raise ConfigError("; ".join(problems))


def cpu_problem(config: DracoConfig, available: float, served: int) -> str | None:
    """Why ``available`` CPUs are too few beside ``served`` judge servers, and what to set; None where they suffice."""
    engine, learner, environment = config.engine, config.learner, config.environment
    # The evaluation's workers run beside those that train.
    workers = environment.min_workers * (2 if config.train.evaluate_before_after else 1)
    others = (
        engine.fewest * engine.cpus_per_engine
        + learner.workers * learner.cpus_per_worker
        + served * config.judge.local.cpus_per_replica
    )
    cpus = workers * environment.cpus_per_worker + others
    if cpus <= available:
        return None
    left = available - others
    advice = "lower engine.cpus_per_engine or learner.cpus_per_worker, or add a node"
    if left >= 0:
        each = math.floor(100 * min(left, 1.0) / (2 if config.train.evaluate_before_after else 1)) / 100
        one = f"environment.slots_per_worker={environment.slots} and environment.cpus_per_worker={each:g}"
        advice = f"lower environment.slots or environment.cpus_per_worker (here {one} fit), or add a node"
    judging = f", {served} judge servers" if served else ""
    return (
        f"{workers} rollout workers{judging}, {engine.fewest} engines and {learner.workers} learner workers need "
        f"{cpus:g} CPUs, the Ray cluster has {available:g}: {advice}"
    )


def largest_problem(gpus: float, key: str, nodes: Sequence[Mapping[str, float]] | None) -> str | None:
    """Why no node has as many GPUs as one process asks for; None where one has."""
    largest = max((node.get("GPU", 0) for node in nodes or ()), default=gpus)
    if gpus <= largest:
        return None
    return (
        f"{key}={gpus:g}, but no node of the Ray cluster has more than {largest:g} GPUs: lower it and the "
        "tensor_parallel beside it, or add a larger node"
    )


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
