"""A cluster on this machine with Ray's real autoscaler, for drivers that run in processes of their own.

The autoscaler is the one that `ray up` and KubeRay start; only its provider is a stand-in, whose nodes are further
raylets on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
)
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # Not in its stubs.

REPOSITORY = Path(__file__).resolve().parents[2]
OBJECT_STORE = 80 << 20
START_ATTEMPTS = 3
"""Ray gives a head 30 s to start, which a busy machine may miss."""


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cluster_file(gcs: str, head: Mapping[str, float], node: Mapping[str, float], most: int) -> str:
    types = {
        FAKE_HEAD_NODE_TYPE: {"resources": dict(head), "node_config": {}, "max_workers": 0},
        "added": {
            "resources": {**node, "object_store_memory": OBJECT_STORE},
            "node_config": {},
            "min_workers": 0,
            "max_workers": most,
        },
    }
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "gcs_address": gcs,
        "launch_multiple": True,
    }
    lists = [
        *("cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands"),
        *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
    ]
    return json.dumps(
        {
            "cluster_name": "tests",
            "max_workers": most,
            "upscaling_speed": 10,
            "idle_timeout_minutes": 0.03,
            "provider": provider,
            "auth": {},
            "available_node_types": types,
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            "file_mounts": {},
            **{name: [] for name in lists},
        }
    )


@contextlib.contextmanager
def autoscaling_cluster(
    tmp_path: Path, *, head: Mapping[str, float], node: Mapping[str, float], most: int
) -> Iterator[dict[str, str]]:
    """A head with the resources ``head``, and up to ``most`` nodes with ``node``; yields a driver's environment."""
    # Ray's sockets lie in its folder, and the path of a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    (tmp_path / "token").write_text(secrets.token_hex(32))
    port = free_port()
    (folder / "cluster.yaml").write_text(_cluster_file(f"127.0.0.1:{port}", head, node, most), encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "PYTHONPATH": str(REPOSITORY),
    }
    others = {name: amount for name, amount in head.items() if name != "CPU"}
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts"),
        *("start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"),
        # Not the default ports, which the Ray of another test may use.
        *(f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"),
        *(f"--num-cpus={head['CPU']:g}", "--resources", json.dumps(others), f"--object-store-memory={OBJECT_STORE}"),
        f"--autoscaling-config={folder / 'cluster.yaml'}",
    ]
    ours = {
        **environment,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        # By default Ray's workers have low priority: beside another test, importing LiteLLM would take minutes in each.
        "RAY_worker_niceness": "0",
        # As `ray up` and KubeRay start a head.
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE,
    }
    log = tmp_path / "head.log"
    with contextlib.ExitStack() as stack:
        for _ in range(START_ATTEMPTS):
            started = subprocess.Popen(command, env=ours, stdout=log.open("w"), stderr=subprocess.STDOUT)
            stack.callback(kill_tree, started)
            while "--block" not in log.read_text(encoding="utf-8") and started.poll() is None:
                time.sleep(0.2)
            if started.poll() is None:
                break
        assert started.poll() is None, log.read_text(encoding="utf-8")
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    shutil.rmtree(folder, ignore_errors=True)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants: added nodes are children of the autoscaler and would outlive it."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


def run_driver(module: str, environment: Mapping[str, str], *words: str) -> dict[str, Any]:
    """Run a driver in a process of its own, because Ray reads its authentication token once a process.

    Returns: the JSON object in its last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


PATIENCE_SECONDS = 600.0
"""Time limit, in seconds, for everything that a driver waits for on a busy machine."""


async def poll_until(true: Callable[[], bool]) -> None:
    """Poll until the condition holds or the time limit passes; the test then reports what is wrong."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def added_nodes() -> set[str]:
    """Ids of the running nodes without the head."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {FAKE_HEAD_NODE_ID}


def preempt_node(node: str) -> None:
    """Tell Ray that a node will be preempted, as providers of spot nodes do."""
    gcs = ray._raylet.GcsClient(address=os.environ["RAY_ADDRESS"])  # type: ignore[attr-defined]  # Not in its stubs.
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why_not = gcs.drain_node(node, reason, "as spot nodes are", 0)
    assert accepted, why_not


def lose_node(process: int) -> None:
    """Kill the raylet above a worker's process, and with it every process of its node."""
    (raylet,) = (each for each in psutil.Process(process).parents() if each.name() == "raylet")
    below = raylet.children(recursive=True)
    for each in (raylet, *below):
        with contextlib.suppress(psutil.Error):
            each.send_signal(signal.SIGKILL)
