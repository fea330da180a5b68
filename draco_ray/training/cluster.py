"""Finding or starting Ray, and refusing a cluster that cannot run the configuration."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from typing import Any

import ray
from rich.console import Console

from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ClusterError, ConfigError
from draco_ray.interruption import handler_kept
from draco_ray.training.preflight import SUBMITTED, check_resources, has_autoscaler
from draco_ray.training.room import wait_for_room, wait_for_turn

FORWARDED = ("LITELLM_LOCAL_MODEL_COST_MAP", "RAY_TRAIN_V2_ENABLED", "DRACO_RUN_DIRECTORY")
"""Variables that reach the workers of a cluster that was started elsewhere."""

LOCAL_JUDGE_SLOTS = 64
"""``judge`` resource of a Ray started here, where judge workers share one machine anyway."""
START_ATTEMPTS = 3
"""Ray gives a node 30 s to start, which a busy machine may exceed."""
GCS_SECONDS = "180"
"""For Ray's head service to listen, where Ray's default is 30."""
LATE = "timed out during startup"
"""What Ray's error says of a node that did not start in time."""
DASHBOARD_LOG = re.compile(r"[^\s']+/dashboard\.(?:log|err)")
"""Path of the log that Ray's error quotes when its dashboard does not start."""


def address_of(config: DracoConfig) -> str | None:
    """Return that of the cluster which is joined; None where this process starts Ray itself."""
    return config.ray.address or os.environ.get("RAY_ADDRESS") or None


def connect(config: DracoConfig, *, judges: bool = True, console: Console | None = None) -> dict[str, Any]:
    """Join the cluster of ``ray.address`` or RAY_ADDRESS, or start Ray on this machine.

    Args:
        config: what is going to run.
        judges: whether judge workers are part of it.
        console: is told what is waited for where others use the cluster, or nodes have yet to come.

    On a cluster no other run begins until `draco_ray.training.room.begun`, or this process leaves it.

    Returns: the cluster's resources.
    Raises:
        ConfigError: if the cluster lacks ``judge`` slots and cannot get them, or GPUs that the configuration asks for.
        ClusterError: if Ray does not start on this machine, or the cluster has no room in ``watch.start_seconds``.
    """
    # Read by the processes Ray starts as well: no price map is fetched, no model hub is asked.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    # Ray would end this process a minute after its head is gone, whatever it still has to write.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    address = address_of(config)
    try:
        with handler_kept(signal.SIGTERM):
            if address:
                ray.init(address=address, runtime_env=_forwarded(), log_to_driver=False, logging_level=logging.ERROR)
            else:
                # A run has a dozen actors on however few cores; Ray warns of more than four times this number.
                os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "8")
                # What the dashboard lists; of 100,000 tasks, which Ray keeps, the head would grow for a thousand steps.
                os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "10000")
                # An actor of Ray Train's that asks whether nodes are being drained; here there is one node.
                os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
                store = config.ray.object_store_mib
                start_ray(
                    num_cpus=max(os.cpu_count() or 1, 2),
                    resources={"judge": LOCAL_JUDGE_SLOTS},
                    object_store_memory=None if store is None else store << 20,
                    include_dashboard=config.ray.dashboard,
                )
    except ConnectionError as error:
        # To one that wants a token nobody is there: Ray's own words do not say which it was.
        token = "" if "RAY_AUTH_MODE" in os.environ else "; one that wants a token answers with RAY_AUTH_MODE=token"
        raise ConfigError(f"ray.address {address}: no Ray cluster answers there: {_one_line(error)}{token}") from None
    except ValueError:
        raise
    except (KeyboardInterrupt, SystemExit):
        # While it starts Ray answers SIGTERM itself, with SystemExit.
        ray.shutdown()
        raise KeyboardInterrupt from None
    except Exception as error:
        # Ray raises bare Exception where a node does not come up in time.
        ray.shutdown()
        where = f"joining ray.address {address}" if address else "Ray does not start on this machine"
        raise ClusterError(
            f"{where}: {_one_line(error)}; wait until the machine has CPU and memory to spare and try again"
        ) from None
    resources: dict[str, Any] = ray.cluster_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    autoscaled = has_autoscaler()
    check_resources(config, resources, nodes, judges=judges, autoscaled=autoscaled)
    if address:
        wait_for_turn(config, console)
        wait_for_room(config, console, judges=judges, autoscaled=autoscaled)
        resources = ray.cluster_resources()
    return resources


def start_ray(**options: Any) -> None:
    """Start Ray on this machine with ``options`` of `ray.init`; retry where a busy machine misses Ray's time limit."""
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", GCS_SECONDS)
    for attempt in range(START_ATTEMPTS):
        try:
            # "local", since otherwise Ray joins the cluster that was started last on this machine.
            ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as error:
            # Ray raises bare Exception where a node does not come up in time.
            if LATE not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            ray.shutdown()


def _one_line(error: BaseException) -> str:
    log = DASHBOARD_LOG.search(str(error))
    if log:
        return f"its dashboard did not come up, see {log[0]}; ray.dashboard=false does without"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _forwarded() -> dict[str, Any]:
    """Variables of this process for a cluster's workers; those that the submitted job sets itself reach them anyway.

    Ray refuses a variable that both name.
    """
    submitted = json.loads(os.environ.get(SUBMITTED, "{}")).get("runtime_env") or {}
    already = submitted.get("env_vars") or {}
    return {"env_vars": {name: os.environ[name] for name in FORWARDED if name in os.environ and name not in already}}
