"""The real judge pool on Ray's real autoscaler: nodes come with the calls that wait, and go when nothing waits.

The autoscaler is the one that `ray up` and KubeRay start; only its provider is a stand-in, whose nodes are further
raylets on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)

from tests.support import judge_autoscaling

# Longer than all that is waited for below on a machine that does other things: a test that hangs has a limit still.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
OBJECT_STORE = 80 << 20
START_ATTEMPTS = 3
"""Ray gives a head 30 s to start, which a busy machine may miss."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cluster_file(gcs: str) -> str:
    """A head with one judge slot, and up to two nodes with two slots each."""
    types = {
        FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 2, "judge": 1}, "node_config": {}, "max_workers": 0},
        "judge": {
            "resources": {"CPU": 0, "judge": 2, "object_store_memory": OBJECT_STORE},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    }
    provider = {
        # By its module, because Ray's wheel lacks the defaults of the name "fake_multinode".
        "type": "external",
        "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
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
            "cluster_name": "judges",
            "max_workers": 2,
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


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a driver needs to join an autoscaling cluster."""
    # Ray's sockets lie in its folder, and the path of a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    (tmp_path / "token").write_text(secrets.token_hex(32))
    port = free_port()
    (folder / "cluster.yaml").write_text(cluster_file(f"127.0.0.1:{port}"), encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"),
        # Not the default ones, which the Ray of another test may hold.
        *(f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"),
        *("--num-cpus=2", "--resources", '{"judge": 1}', f"--object-store-memory={OBJECT_STORE}"),
        f"--autoscaling-config={folder / 'cluster.yaml'}",
    ]
    ours = {
        **environment,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        # Ray's workers yield to everything else by default: beside another test each would import LiteLLM for minutes.
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
            head = subprocess.Popen(command, env=ours, stdout=log.open("w"), stderr=subprocess.STDOUT)
            stack.callback(kill_tree, head)
            while "--block" not in log.read_text(encoding="utf-8") and head.poll() is None:
                time.sleep(0.2)
            if head.poll() is None:
                break
        assert head.poll() is None, log.read_text(encoding="utf-8")
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    shutil.rmtree(folder, ignore_errors=True)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End it and all below it: the nodes that were added are children of the autoscaler and would outlive it."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


def test_judge_nodes_come_with_the_calls_and_go(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.judge_autoscaling", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    # The head's only slot is the worker's; the union's waits for a node and holds nobody up.
    assert (seen["judge_slots_at_first"], seen["up_at_first"]) == (1, 1)
    assert seen["merged"] == "union"
    assert (seen["calls_beside_a_value"], seen["calls_archived"], seen["same_value"]) == (0, 1, True)
    assert (seen["most_up"], seen["nodes_added"]) == (judge_autoscaling.MOST, 2)
    assert seen["nodes_that_judged"] == 3
    assert seen["errors"] == []
    # Moving calls to the workers that came asked nothing twice.
    assert seen["requests"] == seen["calls"] >= judge_autoscaling.ASKERS
    # A worker that neither answers nor dies: the two calls it held were answered by others.
    assert (seen["held_by_the_silent"], seen["answered_elsewhere"]) == (2, 2 * judge_autoscaling.MOST)
    # It was ended and started anew: it might have held what the others wait for.
    assert (seen["in_a_new_process"], seen["up_again"]) == (True, judge_autoscaling.MOST)
    # One node stays for the union.
    assert (seen["up_at_last"], seen["nodes_at_last"]) == (1, 1)
