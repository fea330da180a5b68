"""Join or start Ray, and refuse a cluster that cannot run the configuration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from rich.console import Console

from draco_ray.config.machine import thread_environment
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ClusterError, ConfigError
from draco_ray.interruption import handler_kept
from draco_ray.training.capacity import check_resources, has_autoscaler, wait_for_room, wait_for_start_lock
from draco_ray.training.preflight import SUBMITTED

LOOK_SECONDS = 5.0
GONE_SECONDS = 30.0
"""Half of the minute after which Ray's own processes end, where the head does not come back."""


async def head_failure(address: str | None = None, *, look: float = LOOK_SECONDS, gone: float = GONE_SECONDS) -> None:
    """Wait until the head of the cluster has not answered for long.

    Looks are counted and not the time between them, which also passes while this process is stopped.

    Args:
        address: HOST:PORT of the head; None is that of the cluster that was joined.
        look: seconds between two looks, and for an answer.
        gone: seconds.

    Raises:
        ClusterError: then.
    """
    address = address or head_address()
    missed = 0
    while missed * look < gone:
        await asyncio.sleep(look)
        missed = 0 if await head_answers(address, look) else missed + 1
    raise ClusterError(
        f"the Ray cluster's head at {address} has not answered for {gone:g} s; start a cluster again, or run where one "
        "is, and continue with draco train --resume"
    )


async def unless_gone(stop: Callable[[], Awaitable[object]], look: float = LOOK_SECONDS) -> None:
    """Do ``stop``, which waits for actors of this run; where the head is gone they may never answer."""
    if await head_answers(head_address(), look):
        await stop()


def head_address() -> str:
    """HOST:PORT of the head of the cluster that was joined."""
    return str(ray.get_runtime_context().gcs_address)


async def head_answers(address: str, within: float = LOOK_SECONDS) -> bool:
    """Whether the head takes a connection within so many seconds; what asks it through Ray waits for it instead."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(within):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
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
"""Ray gives a node 30 s to start, which a busy machine may exceed."""
GCS_SECONDS = "180"
"""Ray's limit for the start of its head service, in seconds, instead of 30."""
LATE = "timed out during startup"
"""What Ray's error says of a node that did not start in time."""
DASHBOARD_LOG = re.compile(r"[^\s']+/dashboard\.(?:log|err)")
"""Path of the log that Ray's error quotes when its dashboard does not start."""


def address_of(config: DracoConfig) -> str | None:
    """Return the address of the cluster to join; None: this process starts Ray itself."""
    return config.ray.address or os.environ.get("RAY_ADDRESS") or None


def connect(config: DracoConfig, *, judges: bool = True, console: Console | None = None) -> dict[str, Any]:
    """Join the cluster of ``ray.address`` or RAY_ADDRESS, or start Ray on this machine.

    Args:
        config: of the run.
        judges: whether the run has judge workers.
        console: shows what is waited for while other runs hold the cluster or nodes have yet to come.

    On a shared cluster no other run starts until `draco_ray.training.capacity.release_start_lock` or the end of this
    process.

    Returns: the cluster's resources.
    Raises:
        ConfigError: the cluster lacks ``judge`` slots or GPUs that the configuration needs, and cannot get them.
        ClusterError: Ray does not start on this machine, or the cluster has no room within ``watch.start_seconds``.
    """
    # Inherited by Ray's processes: LiteLLM is not to fetch its price map.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    # PyTorch reads it when a worker imports it, before `set_threads` is called there.
    os.environ.setdefault("OMP_WAIT_POLICY", thread_environment(1)["OMP_WAIT_POLICY"])
    # Ray ends a driver 60 s after it has lost the head, even if it still has to write something.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    address = address_of(config)
    try:
        with handler_kept(signal.SIGTERM):
            if address:
                ray.init(address=address, runtime_env=_forwarded(), log_to_driver=False, logging_level=logging.ERROR)
            else:
                # A run has a dozen actors on any number of cores; Ray warns above four times this number.
                os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "8")
                # Tasks that the dashboard lists. With Ray's default of 100,000 the head grows for a thousand steps.
                os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "10000")
                # Ray Train's watcher of draining nodes is not needed on one node.
                os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
                store = config.ray.object_store_mib
                start_ray(
                    num_cpus=max(os.cpu_count() or 1, 2),
                    resources={"judge": LOCAL_JUDGE_SLOTS},
                    object_store_memory=None if store is None else store << 20,
                    include_dashboard=config.ray.dashboard,
                )
    except ConnectionError as error:
        # A cluster that wants a token does not answer without one; Ray's message does not say so.
        token = "" if "RAY_AUTH_MODE" in os.environ else "; one that wants a token answers with RAY_AUTH_MODE=token"
        raise ConfigError(f"ray.address {address}: no Ray cluster answers there: {_one_line(error)}{token}") from None
    except ValueError:
        raise
    except (KeyboardInterrupt, SystemExit):
        # While it starts Ray answers SIGTERM itself, with SystemExit.
        ray.shutdown()
        raise KeyboardInterrupt from None
    except Exception as error:
        # Ray raises a bare Exception when a node does not start in time.
        ray.shutdown()
        where = f"joining ray.address {address}" if address else "Ray does not start on this machine"
        raise ClusterError(
            f"{where}: {_one_line(error)}; wait until the machine has CPU and memory to spare and try again"
        ) from None
    autoscaled = has_autoscaler()
    if not autoscaled:
        check_resources(config, [node["Resources"] for node in ray.nodes() if node["Alive"]], judges=judges)
    if address:
        wait_for_start_lock(config, console)
        wait_for_room(config, console, judges=judges, autoscaled=autoscaled)
    return dict(ray.cluster_resources())


def start_ray(**options: Any) -> None:
    """Start Ray on this machine with ``options`` of `ray.init`; retry where a busy machine misses Ray's time limit."""
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", GCS_SECONDS)
    for attempt in range(START_ATTEMPTS):
        try:
            # "local", since otherwise Ray joins the cluster that was started last on this machine.
            ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as error:
            # Ray raises a bare Exception when a node does not start in time.
            if LATE not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            ray.shutdown()


def _one_line(error: BaseException) -> str:
    log = DASHBOARD_LOG.search(str(error))
    if log:
        return f"its dashboard did not start, see {log[0]}, or set ray.dashboard=false"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _forwarded() -> dict[str, Any]:
    """Runtime environment for a cluster's workers, without the variables that the submitted job already sets.

    Ray refuses a variable that both set.
    """
    submitted = json.loads(os.environ.get(SUBMITTED, "{}")).get("runtime_env") or {}
    already = submitted.get("env_vars") or {}
    return {"env_vars": {name: os.environ[name] for name in FORWARDED if name in os.environ and name not in already}}
