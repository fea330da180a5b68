"""Several hosts on this machine: namespaces with their own network, host name, processes, /tmp, /dev/shm and folders.

Each is a tree of processes whose first one waits for the end of its standard input, and the kernel ends all others with
it: whatever becomes of a test, nothing of a host is left. They share the machine's system files, Python and this
repository, as hosts of one image do, and a bridge in a namespace of its own, where the outside world is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OUTSIDE = "10.77.0.254"
"""Address of services outside the hosts: the judge's provider, an object store."""
FOLDER = Path("/srv")
"""Where a host has its own folders."""
HOME = FOLDER / "home"
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
SLOW = ("rate", "4mbit", "burst", "16kb", "limit", "24kb")
"""Options of a token-bucket filter with a short queue: packets beyond its rate are lost."""

BOOT = """\
set -e
name=$1 address=$2 stage=$3
shift 3
mount -t tmpfs host "$stage"
mount -t tmpfs host /srv
mkdir /srv/home
while [ "$1" != -- ]; do
    case $1 in /tmp/*) mkdir -p "$stage/${1#/tmp/}"; mount --bind "$1" "$stage/${1#/tmp/}" ;; esac
    shift
done
shift
while [ $# -gt 0 ]; do mkdir -p "$2"; mount --bind "$1" "$2"; shift 2; done
mount --move "$stage" /tmp
chmod 1777 /tmp
mount -t tmpfs host /dev/shm
echo "$name" > /proc/sys/kernel/hostname
printf '127.0.0.1 localhost\\n%s %s\\n' "$address" "$name" > /srv/hosts
mount --bind /srv/hosts /etc/hosts
trap '' CHLD
echo ready
exec cat
"""


@dataclass(frozen=True, slots=True)
class Host:
    """One host."""

    name: str
    address: str
    holder: subprocess.Popen[str]
    """The process outside the namespaces that started the host's first process."""
    pid: int
    """Id of the host's first process, as seen from outside."""

    def command(self, *words: str) -> list[str]:
        """A command line that runs ``words`` on the host, in its home."""
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES]
        return [*enter, "sh", "-c", 'cd "$HOME" && exec "$@"', "sh", *words]

    def path(self, path: Path) -> Path:
        """The path at which this process sees a path of the host."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of a process on the host: this process's, without variables of this user, host or Ray."""
        mine = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("XDG_", "RAY_ADDRESS", "RAY_TMPDIR")) and not name.lower().endswith("_proxy")
        }
        return {**mine, "HOME": str(HOME), "PYTHONPATH": str(REPOSITORY), **more}

    def end(self) -> None:
        """End the host at once, like a power failure."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        self.holder.kill()
        self.holder.wait()


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts and the bridge between them."""

    switch: subprocess.Popen[str]
    stack: contextlib.ExitStack
    kept: Sequence[Path]
    hosts: dict[str, Host] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def add(self, name: str, mounts: Mapping[Path, Path]) -> Host:
        """A further host.

        Args:
            name: of the host.
            mounts: path below `FOLDER` on the host -> folder of this machine. Hosts with the same folder share it.
        """
        address = f"10.77.0.{len(self.hosts) + 1}"
        stage = self.stack.enter_context(tempfile.TemporaryDirectory())
        pairs = [str(path) for target, source in mounts.items() for path in (source, target)]
        holder = _held(
            self.stack,
            [
                *("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", BOOT, "sh", name, address, stage, *map(str, self.kept), "--", *pairs),
            ],
        )
        (pid,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text(encoding="ascii").split()
        self.hosts[name] = Host(name, address, holder, int(pid))
        link, inside = f"to-{name}", ("nsenter", f"--target={pid}", "--net", "ip")
        _do(self.outside("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid))
        _do(self.outside("ip", "link", "set", link, "master", "bridge", "up"))
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", OUTSIDE),
        ):
            _do([*inside, *words])
        return self.hosts[name]

    def outside(self, *words: str) -> list[str]:
        """A command line that runs ``words`` on this machine, in the outside network."""
        return ["nsenter", f"--target={self.switch.pid}", "--net", *words]

    def unplug(self, name: str) -> None:
        """Disconnect a host from the network."""
        _do(self.outside("ip", "link", "set", f"to-{name}", "down"))

    def plug(self, name: str) -> None:
        """Undo `unplug`."""
        _do(self.outside("ip", "link", "set", f"to-{name}", "up"))

    def slow(self, name: str) -> None:
        """Slow down packets to a host, and lose those beyond the rate."""
        _do(self.outside("tc", "qdisc", "replace", "dev", f"to-{name}", "root", "tbf", *SLOW))

    def lost(self, name: str) -> int:
        """Number of packets lost by `slow`."""
        said = _do(self.outside("tc", "-s", "qdisc", "show", "dev", f"to-{name}"))
        return int(said.split("(dropped ")[1].split(",")[0])

    def fast(self, name: str) -> None:
        """Undo `slow`."""
        _do(self.outside("tc", "qdisc", "del", "dev", f"to-{name}", "root"))


@contextlib.contextmanager
def network(kept: Sequence[Path] = ()) -> Iterator[Network]:
    """A network without hosts, for as long as the block lasts; they end with it.

    Args:
        kept: further paths that hosts see, besides the repository and Python.
    """
    with contextlib.ExitStack() as stack:
        switch = _held(stack, ["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
        made = Network(switch, stack, [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *kept])
        for words in (
            ("link", "set", "lo", "up"),
            ("link", "add", "bridge", "type", "bridge"),
            ("addr", "add", f"{OUTSIDE}/24", "dev", "bridge"),
            ("link", "set", "bridge", "up"),
        ):
            _do(made.outside("ip", *words))
        yield made


@cache
def why_unavailable() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    for command in ("ip", "tc", "unshare", "nsenter", "mount"):
        if shutil.which(command) is None:
            return f"no hosts can be made here: the command {command} is missing (iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "sh", "-c", "mount -t tmpfs host /srv && ip link add bridge type bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no hosts can be made here: {' '.join(tried.stderr.split())[:200]}"


def _held(stack: contextlib.ExitStack, words: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that ends with its standard input, and wait until it prints ``ready``."""
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    stack.callback(_ended, process)
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"no host: {process.stderr.read()}")
    return process


def _ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _do(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
