"""Who works on a run in an object store: one driver at a time.

A driver writes a claim under a name of its own and then looks for others. Two that come at once both see the other: one
or both withdraw, and never do both go on. That needs no conditional write, only a listing that shows what was written
before it, which S3, Google Cloud Storage and Azure promise. A claim is renewed while its driver lives; one that has not
been renewed for `LEASE_SECONDS`, by the clock of who looks on, is a dead driver's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyarrow import ArrowException

from draco_ray.errors import ConfigError, StoreError
from draco_ray.runs.remote.manifest import manifest_names
from draco_ray.runs.remote.store import ObjectStore

FOLDER = "claims"
BEAT_SECONDS, LEASE_SECONDS = 20.0, 90.0
TRIES = 5
_HELD: set[str] = set()
"""Names of the claims that this process holds."""
_NAME = re.compile(r"(\d{6})-([0-9a-f]{16})\.json")


class ClaimLost(StoreError):
    """Another driver has taken the run over."""


class Claim:
    """The right to write a run in an object store, for as long as it is renewed."""

    def __init__(self, store: ObjectStore, place: str, epoch: int) -> None:
        """Write a claim; `take` says whether it holds."""
        self.epoch = epoch
        self._store, self._place = store, place
        self._name = f"{epoch:06d}-{secrets.token_hex(8)}.json"
        self._beats = 0
        self._released = threading.Event()
        _HELD.add(self._name)
        self.beat()

    def beat(self, store: ObjectStore | None = None) -> None:
        """Renew it, in ``store`` if its own is too patient."""
        self._beats += 1
        data = json.dumps({**_me(), "beats": self._beats}).encode()
        (store or self._store).write(f"{FOLDER}/{self._name}", data)

    def others(self, store: ObjectStore | None = None) -> list[str]:
        """Names of all other claims, as ``store`` lists them if not its own."""
        return [name for name in _names(store or self._store) if name != self._name]

    def check(self, store: ObjectStore) -> None:
        """Look whether it still holds, in the store of who asks: how long to wait for it is theirs to say.

        Raises:
            ClaimLost: another driver has taken the run over meanwhile.
        """
        if any(_epoch(name) > self.epoch for name in self.others(store)):
            raise ClaimLost(f"{self._place}: another driver has taken this run over")

    def keep(self, store: ObjectStore) -> None:
        """Renew it in ``store``, in a thread of its own, until it is released.

        Args:
            store: one that says nothing and tries once: an outage is said by who copies, and the next renewal may come
                through.
        """

        def beats() -> None:
            while not self._released.wait(BEAT_SECONDS):
                with contextlib.suppress(StoreError, OSError, ArrowException):
                    self.beat(store)

        threading.Thread(target=beats, name="claim", daemon=True).start()

    def release(self, store: ObjectStore | None = None) -> None:
        """Give it up, in ``store`` if its own is too patient."""
        self._released.set()
        _HELD.discard(self._name)
        (store or self._store).delete(f"{FOLDER}/{self._name}")


def take(
    store: ObjectStore,
    place: str,
    say: Callable[[str], object],
    *,
    lease: float = LEASE_SECONDS,
    sleep: Callable[[float], object] = time.sleep,
) -> Claim:
    """Claim a run; waits to see whether the claim of another is still renewed.

    Raises:
        ConfigError: another driver works on it.
        StoreError: the store cannot be used.
    """
    for _ in range(TRIES):
        dead = _dead(store, place, say, lease, sleep)
        epochs = [_epoch(name) for name in (*dead, *manifest_names(store))]
        claim = Claim(store, place, max(epochs, default=0) + 1)
        if not set(claim.others()) - dead:
            for name in dead:
                store.delete(f"{FOLDER}/{name}")
            return claim
        claim.release()
        sleep(random.uniform(0.5, 2.0))
    raise ConfigError(f"{place}: other drivers begin to work on this run at the same moment; start one of them")


def _dead(
    store: ObjectStore, place: str, say: Callable[[str], object], lease: float, sleep: Callable[[float], object]
) -> set[str]:
    """Names of the claims there, all of dead drivers. Raises: ConfigError: one of them lives."""
    first = {name: claim for name in _names(store) if (claim := _read(store, name)) is not None}
    waiting = {name for name, claim in first.items() if not _ended_here(name, claim)}
    if waiting:
        who = _who(first[min(waiting)])
        say(f"{place}: claimed by {who}; waiting up to {lease:g} s to see whether that still runs")
    step = lease / 10
    for _ in range(10 if waiting else 0):
        sleep(step)
        for name in sorted(waiting):
            now = _read(store, name)
            if now is not None and now != first[name]:
                raise ConfigError(f"{place}: {_who(now)} works on this run; end that one, or choose another run.name")
    return set(first)


def _names(store: ObjectStore) -> list[str]:
    return [name for name in store.names(FOLDER) if _NAME.fullmatch(name)]


def _epoch(name: str) -> int:
    return int(name[:6])


def _read(store: ObjectStore, name: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(store.read(f"{FOLDER}/{name}"))
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _who(claim: Mapping[str, Any]) -> str:
    return f"process {claim.get('pid')} on {claim.get('host')}"


def _me() -> dict[str, Any]:
    return {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "began": _began(os.getpid())}


def _machine() -> str | None:
    """This boot of this machine, and its space of process ids (a container has its own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _began(pid: int) -> str | None:
    """When a process of this machine began, in ticks since its boot; None if it does not live."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _ended_here(name: str, claim: Mapping[str, Any]) -> bool:
    """Whether the claim is of a process of this machine that does not live, or of this one, which has given it up."""
    pid, machine = claim.get("pid"), _machine()
    if machine is None or claim.get("machine") != machine or not isinstance(pid, int):
        return False
    if pid == os.getpid() and claim.get("began") == _began(pid):
        return name not in _HELD
    return claim.get("began") != _began(pid)
