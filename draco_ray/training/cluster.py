"""Finding or starting Ray, and refusing a cluster that cannot run the configuration."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import wraps
from typing import Any

import ray
import ray._private.node
import ray._private.ray_constants
import ray._private.services
import ray._private.utils
import ray._private.worker
import ray._raylet
from rich.console import Console

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.vllm_engine import vllm_environment
from draco_ray.errors import ClusterError, ConfigError
from draco_ray.interruption import handler_kept, held_back
from draco_ray.training.preflight import SUBMITTED, check_resources, has_autoscaler
from draco_ray.training.room import wait_for_room, wait_for_turn
from draco_ray.workers.forked import forked_workers

FORWARDED = ("LITELLM_LOCAL_MODEL_COST_MAP", "RAY_TRAIN_V2_ENABLED", "DRACO_RUN_DIRECTORY")
"""Variables that reach the workers of a cluster that was started elsewhere."""

LOCAL_JUDGE_SLOTS = 64
"""``judge`` resource of a Ray started here, where judge workers share one machine anyway."""
START_ATTEMPTS = 2
START_SECONDS = 180.0
"""For a node to come up, where Ray gives it 30, and its dashboard 60."""
LATE = "timed out during startup"
"""How Ray says that a node did not come up in time."""
DASHBOARD_LOG = re.compile(r"[^\s']+/dashboard\.(?:log|err)")
"""What Ray names, among twenty lines of it, where its dashboard does not come up."""
ERROR_SECONDS = 1.0
"""Between two looks for errors that Ray has for this process, where there is none."""
INSTALL_HANDLERS = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"
"""``ray::RayLog::InstallFailureSignalHandler(char const*, bool)``."""

ACTORS = (
    "draco_ray.engine.actor",
    "draco_ray.rollout.worker",
    "draco_ray.runs.store_actor",
    # Ray's own of every worker, and of those that ask another one.
    "pydantic.v1",
    "ray.dag.compiled_dag_node",
)
"""What every run has, with what it imports; also of evaluations and `draco sft`."""
OF_ENGINES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "draco_ray.engine.vllm_engine",
    "draco_ray.engine.executor",
    "draco_ray.engine.cpu_lora",
)
OF_JUDGES = (
    "litellm",
    "draco_ray.judging.worker",
    "draco_ray.judging.judge",
    "draco_ray.judging.limiter_actor",
    # Else imported with the first question of each worker, which is half of what the question costs.
    "litellm.proxy.openai_files_endpoints.common_utils",
    "openai.resources.beta",
)
OF_LEARNERS = (
    "ray.train.torch",
    "ray.tune",
    "peft",
    "draco_ray.learner.train_loop",
    "draco_ray.training.advantage_computer",
)


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
        with handler_kept(signal.SIGTERM), _signals_left_alone(), _errors_in_turns():
            if address:
                ray.init(address=address, runtime_env=_forwarded(), log_to_driver=False, logging_level=logging.ERROR)
            else:
                # A run has a dozen actors on however few cores; Ray warns of more than four times this number.
                os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "8")
                os.environ.setdefault("RAY_gcs_server_port_wait_time_s", f"{START_SECONDS:.0f}")
                # What the dashboard lists; of 100,000 tasks, which Ray keeps, the head would grow for a thousand steps.
                os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "10000")
                # An actor of Ray Train's that asks whether nodes are being drained; here there is one node.
                os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
                _start(config, judges=judges)
    except ConnectionError as error:
        # To one that wants a token nobody is there: Ray's own words do not say which it was.
        token = "" if "RAY_AUTH_MODE" in os.environ else "; one that wants a token answers with RAY_AUTH_MODE=token"
        raise ConfigError(f"ray.address {address}: no Ray cluster answers there: {_one_line(error)}{token}") from None
    except ValueError:
        raise
    except KeyboardInterrupt:
        ray.shutdown()
        raise
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


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C mean inside the block what they meant before, also while Ray is started or joined.

    Ray has two handlers of SIGTERM. That of its Python, set first, exits without a word of the run. That of its library
    comes as the driver joins, where no Python runs until the node has answered, on a busy machine for a minute: it ends
    the process there with a stack trace. The library installs its own once, so it may as well do so now. And a driver
    that is interrupted there has joined by half, and ends in a fault of its memory: so that waits until it has joined.
    """
    utils, driver = ray._private.utils, ray._private.worker
    set_handler, join = utils.set_sigterm_handler, driver.connect

    @wraps(join)
    def connect(*arguments: Any, **named: Any) -> Any:
        with held_back(signal.SIGTERM, signal.SIGINT):
            return join(*arguments, **named)

    utils.set_sigterm_handler, driver.connect = lambda handler: None, connect
    try:
        # Not there in another Ray than those that are locked.
        install = getattr(ctypes.CDLL(ray._raylet.__file__), INSTALL_HANDLERS, None)
        if install is not None:
            install.argtypes, install.restype = (ctypes.c_char_p, ctypes.c_bool), None
            with handler_kept(signal.SIGTERM):
                install(b"", True)
        yield
    finally:
        utils.set_sigterm_handler, driver.connect = set_handler, join


@contextlib.contextmanager
def _errors_in_turns() -> Iterator[None]:
    """Let the thread that prints Ray's errors wait a moment between two looks.

    To each look the head answers when there is an error. Where it is gone Ray's own thread looks again at once, and
    takes a whole core until this process ends.
    """
    driver = ray._private.worker
    once = driver.listen_error_messages

    @wraps(once)
    def listen(worker: Any, threads_stopped: threading.Event) -> None:
        worker.gcs_error_subscriber = PacedErrors(worker.gcs_error_subscriber, threads_stopped)
        once(worker, threads_stopped)

    driver.listen_error_messages = listen
    try:
        yield
    finally:
        driver.listen_error_messages = once


class PacedErrors:
    """Ray's subscriber to errors, which takes its time where there is none."""

    def __init__(self, subscriber: Any, stopped: threading.Event) -> None:
        """``stopped`` is set when Ray is shut down."""
        self._subscriber, self._stopped = subscriber, stopped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscriber, name)

    def poll(self) -> tuple[Any, Any]:
        """The key and the error, both None where there is none."""
        found: tuple[Any, Any] = self._subscriber.poll()
        if found[1] is None:
            self._stopped.wait(ERROR_SECONDS)
        return found


def _start(config: DracoConfig, *, judges: bool) -> None:
    """A Ray on this machine; where a busy one misses even the longer time, it is asked once more."""
    with _patient_start(), _fewer_daemons(config), _forked(config, judges=judges):
        _try_to_start(config)


def _forked(config: DracoConfig, *, judges: bool) -> contextlib.AbstractContextManager[None]:
    """Let workers be forked where none of them has a GPU, with what the parts of this run import."""
    gpus = config.engine.gpus_per_engine or config.learner.gpus_per_worker
    if gpus or not config.ray.fork_workers or not sys.platform.startswith("linux"):
        return contextlib.nullcontext()
    # An evaluation of an API model has no engines of its own.
    engines = config.engine.cpus_per_engine > 0
    modules = [*ACTORS]
    modules += OF_ENGINES if engines else ()
    modules += OF_JUDGES if judges else ()
    modules += OF_LEARNERS if config.learner.cpus_per_worker else ()
    return forked_workers(modules, vllm_environment(config.engine, config.model) if engines else {})


@contextlib.contextmanager
def _patient_start(seconds: float = START_SECONDS, every: float = 0.5) -> Iterator[None]:
    """Let a node take so long to register, and Ray's dashboard to answer.

    Ray's limit of the first is a number in its code, asked for between two calls of this. That of the second has a
    variable, which is read once, as Ray is imported.
    """
    services, constants = ray._private.services, ray._private.ray_constants
    once, usual = services.get_node, constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S

    def get_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return once(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(every)

    services.get_node, constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = get_node, max(usual, seconds)
    try:
        yield
    finally:
        services.get_node, constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S = once, usual


@contextlib.contextmanager
def _fewer_daemons(config: DracoConfig) -> Iterator[None]:
    """Start no process of Ray's that nobody wants here.

    One sends the workers' logs to drivers; none of them wants them (``log_to_driver``), the dashboard reads the files,
    and it took 4 % of a core. Without a dashboard there would still be its process, which reports usage, and that of
    the autoscaler, whose status the dashboard and `ray status` show and which has no nodes to add.
    """
    node: Any = ray._private.node.Node
    names = ["start_log_monitor", *(() if config.ray.dashboard else ("start_monitor", "start_api_server"))]
    once = {name: getattr(node, name) for name in names}
    for name in names:
        setattr(node, name, _nothing)
    try:
        yield
    finally:
        for name, start in once.items():
            setattr(node, name, start)


def _nothing(node: Any, **named: Any) -> None:
    """In place of a node's start of a process."""


def _try_to_start(config: DracoConfig) -> None:
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                # Without it Ray joins whatever cluster was started last on this machine.
                address="local",
                num_cpus=max(os.cpu_count() or 1, 2),
                resources={"judge": LOCAL_JUDGE_SLOTS},
                object_store_memory=None if config.ray.object_store_mib is None else config.ray.object_store_mib << 20,
                include_dashboard=config.ray.dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
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
