"""Links between hosts of namespaces that are unplugged or slow, under the parts of a run that have to bear it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import hosts
from tests.support.hosts import OUTSIDE, Host, Network, network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deployment,
    pytest.mark.skipif(hosts.why_unavailable() is not None, reason=str(hosts.why_unavailable())),
]

PORT = 6379
AWAY = "; trying again, the run continues in its local folder"
HEAD = f"""\
import socket
server = socket.create_server(("", {PORT}))
print("up", flush=True)
while True:
    server.accept()[0].close()
    print("asked", flush=True)
"""
DRIVER = f"""\
import asyncio, sys
from draco_ray.training.cluster import wait_for_head_failure
asyncio.run(wait_for_head_failure(f"{{sys.argv[1]}}:{PORT}", look=0.5, gone=5.0))
"""
WRITER = """\
import sys
from pathlib import Path
import pyarrow.fs
from draco_ray.runs.remote import location
from draco_ray.runs.remote.location import RunLocation, fetch_run_for_reading, open_working_folder
from tests.support.small_run import TASKS
from tests.unit.test_remote_runs import SmallRun, consistent
location.INTERVAL_SECONDS = 0.1
server, region = f"http://{sys.argv[1]}", "us-east-1"
pyarrow.fs.S3FileSystem(endpoint_override=server, region=region, allow_bucket_creation=True).create_dir("bucket")
url = f"s3://bucket/run?endpoint_override={sys.argv[1]}&scheme=http&region={region}"
where = RunLocation(Path("run").resolve(), url)
with open_working_folder(where, lambda line: print(line, flush=True), new=True) as path:
    run = SmallRun(path)
    for step in (1, 2):
        for task in TASKS:
            run.piece(step, task)
        run.finish(step)
        print("step", flush=True)
        sys.stdin.readline()
assert consistent(fetch_run_for_reading(url, checkpoints=True)) == consistent(path)
print("the same", flush=True)
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network() as made:
        yield made


def start(host: Host, program: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python program on a host."""
    environment = host.environment(
        AWS_ACCESS_KEY_ID="tests", AWS_SECRET_ACCESS_KEY="tests", AWS_EC2_METADATA_DISABLED="true"
    )
    return subprocess.Popen(
        host.command(sys.executable, "-u", "-c", program, *arguments),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """Its lines up to the wanted one."""
    assert process.stdout is not None
    lines = []
    while wanted not in (line := process.stdout.readline()):
        assert line, process.communicate()[1]
        lines.append(line)
    return lines


def test_a_driver_whose_link_to_the_head_is_slow_goes_on_and_one_whose_link_is_cut_ends(net: Network) -> None:
    head, driver = net.add("head", {}), net.add("driver", {})
    with start(head, HEAD) as listening:
        read(listening, "up")
        net.slow("driver")
        with start(driver, DRIVER, head.address) as watching:
            # More looks than it would miss before it ends.
            for _ in range(15):
                read(listening, "asked")
            assert watching.poll() is None
            net.unplug("driver")
            errors = watching.communicate()[1]
        listening.kill()
    assert f"the Ray cluster's head at {head.address}:{PORT} has not answered for 5 s" in errors


def test_a_run_goes_on_while_its_store_cannot_be_reached_and_copies_all_of_it_afterwards(net: Network) -> None:
    writer = net.add("writer", {})
    with subprocess.Popen(
        net.outside(sys.executable, "-m", "tests.support.outside_servers", OUTSIDE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as outside:
        assert outside.stdout is not None
        port = json.loads(outside.stdout.readline())[1]
        with start(writer, WRITER, f"{OUTSIDE}:{port}") as run:
            assert run.stdin is not None
            read(run, "step")
            net.unplug("writer")
            run.stdin.write("\n")
            run.stdin.flush()
            # The second step is done although nothing can be copied, which is said before the step's end or after it.
            before = read(run, "step")
            if not any(AWAY in line for line in before):
                read(run, AWAY)
            net.plug("writer")
            stdout, stderr = run.communicate("\n")
        outside.kill()
    assert run.returncode == 0, stdout + stderr
    assert ": the store answers again\n" in stdout
    assert stdout.endswith("the same\n")
