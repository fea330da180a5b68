"""A Ray cluster of three hosts, as docs/cluster.md describes one: head and driver, engines and slots, judges."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.hosts import OUTSIDE, Host, Network, network

HEAD, NODE, JUDGE = "head", "node", "judge"
RESOURCES = {HEAD: ("--num-cpus=0",), NODE: ("--num-cpus=4",), JUDGE: ("--num-cpus=0", '--resources={"judge": 8}')}
GCS_PORT = 6379
BUCKET = "bucket"
MAKE_BUCKET = """\
import sys
from pyarrow import fs
fs.S3FileSystem(endpoint_override=sys.argv[1], region="us-east-1", allow_bucket_creation=True).create_dir(sys.argv[2])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsCluster:
    """The cluster, as a test uses it."""

    network: Network
    token: str
    judge: str
    """Base URL of the judge's API, outside."""
    store: str
    """Address of the S3 server, outside."""
    logs: Path
    """Folder of Ray's logs, one per host."""

    def environment(self, host: Host) -> dict[str, str]:
        """Environment variables of every process of the cluster."""
        return host.environment(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=self.token,
            NO_KEY_IS_ASKED_FOR="none",
            AWS_ACCESS_KEY_ID="tests",
            AWS_SECRET_ACCESS_KEY="tests",
            AWS_EC2_METADATA_DISABLED="true",
            RAY_worker_maximum_startup_concurrency="8",
        )

    def join(self, name: str, mounts: Mapping[Path, Path], resources: Sequence[str]) -> None:
        """Add a host that runs Ray and restarts it whenever it ends; returns once Ray has started."""
        host = self.network.add(name, mounts)
        where = [f"--address={self.network[HEAD].address}:{GCS_PORT}"]
        if name == HEAD:
            where = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false", "--no-monitor"]
        ray = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *("--disable-usage-stats", "--include-log-monitor=false", *where, *resources),
            *(f"--node-ip-address={host.address}", "--object-store-memory", str(200 << 20)),
        ]
        log = self.logs / f"{name}.log"
        with log.open("w") as file:
            # The process belongs to the host and ends with it.
            process = subprocess.Popen(
                host.command("sh", "-c", 'while :; do "$@"; sleep 1; done', "sh", *ray),
                env=self.environment(host),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.network.stack.callback(process.wait)
        self.network.stack.callback(process.kill)
        while "--block" not in log.read_text(encoding="utf-8"):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.2)

    def start(self, *words: str, name: str = HEAD) -> subprocess.Popen[str]:
        """Start a program on a host."""
        host = self.network[name]
        return subprocess.Popen(
            host.command(*words),
            env=self.environment(host),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def do(self, *words: str, name: str = HEAD, timeout: float = 1500) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end."""
        process = self.start(*words, name=name)
        stdout, stderr = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    @property
    def bucket(self) -> str:
        """URL of runs in the store, without options."""
        return f"s3://{BUCKET}/runs"

    @property
    def options(self) -> str:
        """Options to append to a URL in the store."""
        return f"?endpoint_override={self.store}&scheme=http&region=us-east-1"


@contextlib.contextmanager
def cluster_of_hosts(folders: Mapping[str, Mapping[Path, Path]], logs: Path) -> Iterator[HostsCluster]:
    """Three hosts with Ray, and what is outside.

    Args:
        folders: host -> its ``mounts`` for `tests.support.hosts.Network.add`.
        logs: folder for the output of `ray start`.
    """
    with network() as net, contextlib.ExitStack() as stack:
        outside = stack.enter_context(
            subprocess.Popen(
                net.outside(sys.executable, "-m", "tests.support.outside_servers", OUTSIDE),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(outside.kill)
        assert outside.stdout is not None
        judge, store = json.loads(outside.stdout.readline())
        cluster = HostsCluster(
            network=net,
            token=secrets.token_hex(32),
            judge=f"http://{OUTSIDE}:{judge}/v1",
            store=f"{OUTSIDE}:{store}",
            logs=logs,
        )
        for name in (HEAD, NODE, JUDGE):
            cluster.join(name, folders[name], RESOURCES[name])
        made = cluster.do(sys.executable, "-c", MAKE_BUCKET, f"http://{cluster.store}", BUCKET)
        assert made.returncode == 0, made.stderr
        yield cluster
