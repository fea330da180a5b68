"""Join or start Ray, check whether the cluster has room for a run, and wait for that room."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError
from rich.console import Console

from draco_ray.config.machine import thread_env_vars
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ClusterError, ConfigError, one_line
from draco_ray.interruption import handler_kept
from draco_ray.judging.outage import format_duration
from draco_ray.placement import driver_node_affinity
from draco_ray.training.preflight import SUBMITTED_JOB_VARIABLE
from draco_ray.training.progress import shown
from draco_ray.training.sizes import ray_address

log = logging.getLogger(__name__)

Bundle = tuple[float, float]
"""GPUs and CPUs that one process needs on one node."""
Resources = Mapping[str, float]
CHECK_SECONDS = 5.0
"""Interval between two checks of the free resources."""
LOG_SECONDS = 60.0
"""Interval between two lines on what the run waits for."""
ROUNDING = 1e-6
"""Tolerance of comparisons: Ray counts resources in ten-thousandths, and sums of floats are off by less than this."""
STATUS_TIMEOUT_SECONDS = 5
ANONYMOUS_TYPE = "node_"
"""Prefix of the node type that Ray reports for a node that no autoscaler started; the node's id follows."""
START_LOCK, NAMESPACE = "starting", "draco-ray"
"""Name of the lock actor that a starting run holds, and the namespace in which all runs of a cluster look it up."""
_start_locks: list[Any] = []
"""The lock that this process holds, if any."""


class StartLock:
    """An actor whose name is the lock: it is taken while a run starts and freed when the run's driver dies."""


def has_autoscaler() -> bool:
    """Whether an autoscaler adds nodes to the connected cluster; if so, its nodes have named types."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    return any(not node.ray_node_type_name.startswith(ANONYMOUS_TYPE) for node in nodes)


def bundles(config: DracoConfig) -> dict[str, list[Bundle]]:
    """Resources that the processes of a starting run need, by kind; kinds that need nothing are left out."""
    engine, learner, environment, local = config.engine, config.learner, config.environment, config.judge.local
    # Evaluation has rollout workers of its own, in addition to those for training.
    rollouts = (2 if config.train.evaluate_before_after else 1) * environment.min_workers
    served = local.replicas if local.enabled and config.algorithm.reward == "rubric" else 0
    needed: dict[str, list[Bundle]] = {
        "engines": [(engine.gpus_per_engine, engine.cpus_per_engine)] * engine.fewest,
        "learner workers": [(learner.gpus_per_worker, learner.cpus_per_worker)] * learner.workers,
        "judge servers": [(local.gpus_per_replica, local.cpus_per_replica)] * served,
        "rollout workers": [(0.0, environment.cpus_per_worker)] * rollouts,
    }
    return {name: each for name, each in needed.items() if each and any(each[0])}


def unplaced(needed: Mapping[str, Sequence[Bundle]], nodes: Sequence[Resources]) -> dict[str, int]:
    """Number of processes of each kind that fit on no node.

    The largest are placed first, on the node with the fewest free GPUs.

    A process needs all its resources on one node: an engine of two GPUs does not fit if each node has one free GPU.
    """
    left = [[node.get("GPU", 0.0), node.get("CPU", 0.0)] for node in nodes]
    missing: Counter[str] = Counter()
    for (gpus, cpus), name in sorted(((bundle, name) for name, of in needed.items() for bundle in of), reverse=True):
        fits = [node for node in left if node[0] + ROUNDING >= gpus and node[1] + ROUNDING >= cpus]
        if not fits:
            missing[name] += 1
            continue
        node = min(fits, key=lambda each: each[0])
        node[0], node[1] = node[0] - gpus, node[1] - cpus
    return dict(missing)


def _describe(needed: Mapping[str, Sequence[Bundle]], missing: Mapping[str, int], nodes: Sequence[Resources]) -> str:
    parts = []
    for name, number in missing.items():
        gpus, cpus = needed[name][0]
        parts.append(f"{number} of {len(needed[name])} {name} ({gpus:g} GPUs and {cpus:g} CPUs each, on one node)")
    gpus_free, cpus_free = (sum(node.get(kind, 0) for node in nodes) for kind in ("GPU", "CPU"))
    return f"{', '.join(parts)} do not fit into {gpus_free:g} GPUs and {cpus_free:g} CPUs on {len(nodes)} nodes"


def check_resources(config: DracoConfig, nodes: Sequence[Resources]) -> None:
    """Check that the nodes of a cluster without an autoscaler would have room for a run if they were idle.

    Args:
        config: of the run.
        nodes: all resources of each node.

    Raises:
        ConfigError: the cluster is too small.
    """
    offered, workers = sum(node.get("judge", 0) for node in nodes), config.judge.workers
    if config.algorithm.reward == "rubric" and offered < workers + 1:
        raise ConfigError(
            f"the Ray cluster has {offered:g} units of the custom resource 'judge' and no autoscaler, but "
            f"judge.workers={workers} and the union phase's worker need {workers + 1}; start a node with "
            """--resources='{"judge": 16}'"""
        )
    engine, largest = config.engine, max(node.get("GPU", 0) for node in nodes)
    if engine.colocate and engine.tensor_parallel > largest:
        raise ConfigError(
            f"engine.tensor_parallel={engine.tensor_parallel}, but no node of the Ray cluster has more than "
            f"{largest:g} GPUs: lower it, or add a larger node"
        )
    needed = bundles(config)
    if missing := unplaced(needed, nodes):
        on_cpus = not config.engine.gpus_per_engine and not config.learner.gpus_per_worker
        if on_cpus and (problem := cpu_problem(config, needed, sum(node.get("CPU", 0) for node in nodes))):
            raise ConfigError(problem)
        raise ConfigError(
            f"the Ray cluster is too small: {_describe(needed, missing, nodes)}; add nodes, start fewer of these "
            "processes, or reserve less for each (engine.*, learner.*, judge.local.*, environment.slots, "
            "environment.cpus_per_worker; a process with 0 GPUs runs on the CPU)"
        )


def cpu_problem(config: DracoConfig, needed: Mapping[str, Sequence[Bundle]], available: float) -> str | None:
    """Why ``available`` CPUs are too few for these processes, and what to set; None if they suffice."""
    cpus = {name: sum(each for _, each in of) for name, of in needed.items()}
    total = sum(cpus.values())
    if total <= available:
        return None
    left = available - (total - cpus.get("rollout workers", 0))
    advice = "lower engine.cpus_per_engine or learner.cpus_per_worker, or add a node"
    if left >= 0:
        # Evaluation has rollout workers of its own, in addition to those for training.
        each = math.floor(100 * min(left, 1.0) / (2 if config.train.evaluate_before_after else 1)) / 100
        one = f"environment.slots_per_worker={config.environment.slots} and environment.cpus_per_worker={each:g}"
        advice = f"lower environment.slots or environment.cpus_per_worker (e.g. {one}), or add a node"
    processes = ", ".join(f"{len(of)} {name}" for name, of in needed.items())
    return f"{processes} need {total:g} CPUs, but the Ray cluster has {available:g}: {advice}"


def wait_for_start_lock(config: DracoConfig, console: Console | None) -> None:
    """Wait until no other run of the cluster is starting, and block other starts until `release_start_lock`.

    Two runs that count free resources at the same moment would both find room, and each might get half of what it
    needs.

    Raises:
        ClusterError: another run is still starting after ``watch.start_seconds``.
    """
    lock = ray.remote(StartLock).options(
        name=START_LOCK, namespace=NAMESPACE, num_cpus=0, scheduling_strategy=driver_node_affinity()
    )

    def problem() -> str:
        try:
            _start_locks[:] = [lock.remote()]
        except ValueError:  # Another run holds the lock: the actor's name is taken.
            return "its processes have not all started yet"
        return ""

    _wait(config, console, "another run is starting on the Ray cluster", problem)


def release_start_lock() -> None:
    """Let the next run start: all processes of this run have their resources."""
    while _start_locks:
        # The lock may belong to a Ray session that has ended.
        with contextlib.suppress(RayError):
            ray.kill(_start_locks.pop())


def wait_for_room(config: DracoConfig, console: Console | None, *, autoscaled: bool = False) -> None:
    """Return once every process of a run fits on some node; request the nodes from the autoscaler if there is one.

    Only free resources count: otherwise two runs could each hold half of what they need, and neither would ever start.

    Args:
        config: of the run.
        console: shows what the run waits for; None: nothing is shown.
        autoscaled: whether the cluster has an autoscaler.

    Raises:
        ClusterError: there is no room after ``watch.start_seconds``.
    """
    needed, requested = bundles(config), False

    def problem() -> str:
        nonlocal requested
        nodes = _free()
        missing = unplaced(needed, nodes)
        if missing and autoscaled and not requested:
            requested = True
            request_resources(bundles=[{"GPU": gpus, "CPU": cpus} for of in needed.values() for gpus, cpus in of])
        why = "nodes were requested" if autoscaled else "another run may use the rest (see `ray status`)"
        return f"{_describe(needed, missing, nodes)}; {why}" if missing else ""

    try:
        _wait(config, console, "not enough free resources on the Ray cluster", problem)
    finally:
        if requested:
            # Cancel this request: from now on the run's own processes request what they need.
            request_resources(bundles=[])


def _wait(config: DracoConfig, console: Console | None, what: str, problem: Callable[[], str]) -> None:
    """Wait until ``problem`` returns an empty text. Raises: ClusterError: after ``watch.start_seconds``."""
    started, logged, limit = time.monotonic(), -float("inf"), config.watch.start_seconds
    while reason := problem():
        now = time.monotonic()
        if limit is not None and now - started >= limit:
            raise ClusterError(f"{what} after watch.start_seconds={limit:g}: {reason}")
        if console is not None and now - logged >= LOG_SECONDS:
            logged = now
            console.print(f"{what}, waiting for {format_duration(now - started)}: {reason}")
        time.sleep(CHECK_SECONDS)


def pending_demand() -> str:
    """Pending resource requests of all runs on the cluster, e.g. ``no node has free resources for 2 x 1 CPU``.

    Returns: an empty string if no request is known to be pending, or if Ray's head does not answer.
    """
    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=STATUS_TIMEOUT_SECONDS)
    except Exception as error:  # `wait_for_head_failure` reports a lost head.
        log.debug("Ray's head node does not report pending resource requests: %s", error)
        return ""
    demands = [*status.resource_demands.placement_group_demand, *status.resource_demands.ray_task_actor_demand]
    counts: Counter[str] = Counter()
    for demand in demands:
        for each in demand.bundles_by_count:
            named = [f"{each.bundle[kind]:g} {kind}" for kind in ("GPU", "CPU") if each.bundle.get(kind)]
            counts[" and ".join(named)] += each.count
    del counts[""]
    return (
        f"no node has free resources for {', '.join(f'{count} x {what}' for what, count in counts.items())}"
        if counts
        else ""
    )


def _free() -> list[Resources]:
    """For each live node of the Ray cluster, the resources that are not in use."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=STATUS_TIMEOUT_SECONDS)
    return [node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)]


HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A client's HTTP/2 connection preface, followed by an empty SETTINGS frame."""
LOOK_SECONDS = 5.0
GONE_SECONDS = 30.0
"""Seconds without an answer before the head counts as lost; Ray's own processes exit after twice as long."""
LEAVE_SECONDS = 20.0
"""Time limit for leaving a cluster whose head does not answer."""


async def wait_for_head_failure(
    address: str | None = None, *, look: float = LOOK_SECONDS, gone: float = GONE_SECONDS
) -> None:
    """Wait until the head of the cluster has not answered for ``gone`` seconds.

    It counts failed checks instead of measuring time, because time also passes while this process is suspended.

    Args:
        address: HOST:PORT of the head; None: the head of the cluster that was joined.
        look: interval between two checks and timeout of one, in seconds.
        gone: seconds without an answer.

    Raises:
        ClusterError: the head does not answer.
    """
    address = address or head_address()
    missed = 0
    while missed * look < gone:
        await asyncio.sleep(look)
        missed = 0 if await head_answers(address, look) else missed + 1
    raise ClusterError(
        f"the Ray cluster's head at {address} has not answered for {gone:g} s; restart the cluster or use another "
        "one, then continue with draco train --resume"
    )


async def stop_unless_head_lost(stop: Callable[[], Awaitable[object]], look: float = LOOK_SECONDS) -> None:
    """Call ``stop``, which waits for answers from actors of this run, unless Ray's head is lost.

    Without the head, the actors might never answer. ``look``: time limit for the head's answer, in seconds.
    """
    if await head_answers(head_address(), look):
        await stop()


def leave_ray(within: float = LEAVE_SECONDS) -> None:
    """Leave the cluster, or end the Ray of this process.

    Ray waits forever for a head that hangs. After ``within`` seconds this process exits without waiting for it.
    """
    if not ray.is_initialized() or _head_answers():
        ray.shutdown()
        return
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(within)
    if leaving.is_alive():
        # Otherwise Ray would call shutdown again when the interpreter exits.
        atexit.unregister(ray.shutdown)
        atexit.register(_end_at_once)


def _head_answers() -> bool:
    """`head_answers` for callers inside and outside an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(head_answers(head_address()))).result()


def _end_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def head_address() -> str:
    """HOST:PORT of the head of the cluster that was joined."""
    return str(ray.get_runtime_context().gcs_address)


async def head_answers(address: str, within: float = LOOK_SECONDS) -> bool:
    """Whether the head answers within so many seconds. Ray's own calls would wait for it without a limit.

    The kernel accepts connections even for a process that hangs. So this sends a gRPC greeting: a live head replies
    or closes the connection.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(HTTP2_GREETING)
            with contextlib.suppress(ConnectionError):
                await reader.read(1)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


FORWARDED = ("LITELLM_LOCAL_MODEL_COST_MAP", "RAY_TRAIN_V2_ENABLED", "DRACO_RUN_DIRECTORY", "OMP_WAIT_POLICY")
"""Environment variables that are passed on to the workers of a cluster that was started elsewhere."""

LOCAL_JUDGE_SLOTS = 64
"""``judge`` resource of a Ray started here, where all judge workers share one machine."""
START_ATTEMPTS = 3
"""Attempts to start Ray: it gives a node 30 s to start, which a busy machine may exceed."""
GCS_SECONDS = "180"
"""Ray's limit for the start of its head service, in seconds, instead of 30."""
START_TIMEOUT_MESSAGE = "timed out during startup"
"""Part of Ray's error message for a node that did not start in time."""
DASHBOARD_LOG = re.compile(r"[^\s']+/dashboard\.(?:log|err)")
"""Path of the log that Ray's error quotes when its dashboard does not start."""


def connect_ray(config: DracoConfig, *, console: Console | None = None) -> dict[str, Any]:
    """Join the cluster of ``ray.address`` or RAY_ADDRESS, or start Ray on this machine.

    Args:
        config: of the run.
        console: shows what the run waits for: Ray's start, other runs that use the cluster, nodes that are being added.

    On a shared cluster no other run starts until `draco_ray.training.cluster.release_start_lock` is called or this
    process ends.

    Returns: the cluster's resources.
    Raises:
        ConfigError: the cluster lacks ``judge`` slots or GPUs that the configuration needs, and cannot get them.
        ClusterError: Ray does not start on this machine, or the cluster has no room within ``watch.start_seconds``.
    """
    # Keeps LiteLLM from fetching its price map; Ray's processes inherit this.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    # PyTorch reads this variable on import, before a worker calls `set_threads`.
    os.environ.setdefault("OMP_WAIT_POLICY", thread_env_vars(1)["OMP_WAIT_POLICY"])
    # Ray ends a driver 60 s after it has lost the head, even if it still has to write something.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    address = ray_address(config)
    try:
        doing = f"joining the Ray cluster at {address}" if address else "starting Ray"
        progress = contextlib.nullcontext() if console is None else shown(console, doing)
        with handler_kept(signal.SIGTERM), progress:
            if address:
                ray.init(address=address, runtime_env=_forwarded(), log_to_driver=False, logging_level=logging.ERROR)
            else:
                # Ray warns if more than four times this many workers exist. A run has a dozen, on any number of cores.
                os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "8")
                # Limit the tasks that the dashboard lists. With Ray's default of 100,000 the head's memory grows for a
                # thousand steps.
                os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "10000")
                # Ray Train's preemption watcher looks for nodes that are being drained: not needed on one node.
                os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
                # By default Ray's workers have niceness 15: other work on the machine would take their CPU time.
                os.environ.setdefault("RAY_worker_niceness", "0")
                store = config.ray.object_store_mib
                start_ray(
                    console,
                    num_cpus=max(os.cpu_count() or 1, 2),
                    resources={"judge": LOCAL_JUDGE_SLOTS},
                    object_store_memory=None if store is None else store << 20,
                    include_dashboard=config.ray.dashboard,
                )
    except ConnectionError as error:
        # A cluster that requires a token does not answer without one; Ray's message does not mention the token.
        token = "" if "RAY_AUTH_MODE" in os.environ else "; if the cluster requires a token, set RAY_AUTH_MODE=token"
        raise ConfigError(f"ray.address {address}: no Ray cluster answers there: {_one_line(error)}{token}") from None
    except ValueError:
        raise
    except (KeyboardInterrupt, SystemExit):
        # While Ray starts, it handles SIGTERM itself and raises SystemExit.
        ray.shutdown()
        raise KeyboardInterrupt from None
    except Exception as error:
        # Ray raises a bare Exception when a node does not start in time.
        ray.shutdown()
        where = f"joining ray.address {address}" if address else "Ray does not start on this machine"
        raise ClusterError(
            f"{where}: {_one_line(error)}; try again when the machine has free CPUs and memory"
        ) from None
    autoscaled = has_autoscaler()
    if not autoscaled:
        check_resources(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    if address:
        wait_for_start_lock(config, console)
        wait_for_room(config, console, autoscaled=autoscaled)
    return dict(ray.cluster_resources())


def start_ray(console: Console | None = None, **options: Any) -> None:
    """Start Ray on this machine with ``options`` of `ray.init`; retry if a busy machine misses Ray's time limit.

    ``console`` gets a line for each further attempt.
    """
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", GCS_SECONDS)
    for attempt in range(START_ATTEMPTS):
        try:
            # "local", since otherwise Ray joins the cluster that was started last on this machine.
            ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as error:
            # Ray raises a bare Exception when a node does not start in time.
            if START_TIMEOUT_MESSAGE not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            ray.shutdown()
            if console is not None:
                console.print(f"Ray {START_TIMEOUT_MESSAGE}; attempt {attempt + 2} of {START_ATTEMPTS}")


def _one_line(error: BaseException) -> str:
    log = DASHBOARD_LOG.search(str(error))
    if log:
        return f"Ray's dashboard did not start; see {log[0]}, or set ray.dashboard=false"
    return one_line(error)


def _forwarded() -> dict[str, Any]:
    """Runtime environment for a cluster's workers, without the variables that the submitted job already sets.

    Ray refuses a variable that is set in both places.
    """
    submitted = json.loads(os.environ.get(SUBMITTED_JOB_VARIABLE, "{}")).get("runtime_env") or {}
    already = submitted.get("env_vars") or {}
    return {"env_vars": {name: os.environ[name] for name in FORWARDED if name in os.environ and name not in already}}
