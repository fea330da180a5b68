"""Claims: one driver at a time works on a run in an object store.

A driver writes a claim with a unique name, then lists the claims. If two drivers start at once, at least one sees the
other's claim and withdraws, so they never both continue. This needs no conditional write, only listings that show
earlier writes, which S3, Google Cloud Storage and Azure guarantee. A driver renews its claim while it lives. If a claim
was not renewed for `LEASE_SECONDS`, by the clock of the waiting driver, its driver counts as dead.
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

from draco_ray.errors import ConfigError, StoreError
from draco_ray.runs.remote.manifest import manifest_names
from draco_ray.runs.remote.store import ObjectStore

CLAIMS_FOLDER = "claims"
RENEW_SECONDS, LEASE_SECONDS = 20.0, 90.0
MAX_TRIES = 5
_NAME = re.compile(r"(\d{6})-([0-9a-f]{16})\.json")


class ClaimLost(StoreError):
    """Another driver has taken over the run."""


class Claim:
    """The right to write a run in an object store, for as long as it is renewed."""

    def __init__(self, store: ObjectStore, epoch: int) -> None:
        """Write a claim; `claim_run` decides whether it is granted."""
        self.epoch, self.url = epoch, store.url
        self._name = f"{epoch:06d}-{secrets.token_hex(8)}.json"
        self._renewals = 0
        self._released = threading.Event()
        self.renew(store)

    def renew(self, store: ObjectStore) -> None:
        """Renew the claim once."""
        self._renewals += 1
        owner = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "beats": self._renewals}
        store.write(f"{CLAIMS_FOLDER}/{self._name}", json.dumps(owner).encode())

    def others(self, store: ObjectStore) -> list[str]:
        """Names of all other claims."""
        return [name for name in _names(store) if name != self._name]

    def check(self, store: ObjectStore) -> None:
        """Check that the claim is still valid.

        Raises:
            ClaimLost: another driver has taken over the run meanwhile.
        """
        if any(_epoch(name) > self.epoch for name in self.others(store)):
            raise ClaimLost(f"{store.url}: another driver has taken over this run")

    def keep(self, store: ObjectStore) -> None:
        """Renew the claim in a thread until it is released.

        ``store`` should not retry: if a renewal fails, the next one may succeed.
        """

        def renew() -> None:
            while not self._released.wait(RENEW_SECONDS):
                with contextlib.suppress(StoreError):
                    self.renew(store)

        threading.Thread(target=renew, name="claim", daemon=True).start()

    def release(self, store: ObjectStore) -> None:
        """Release the claim."""
        self._released.set()
        store.delete(f"{CLAIMS_FOLDER}/{self._name}")


def claim_run(
    store: ObjectStore, *, lease: float = LEASE_SECONDS, sleep: Callable[[float], object] = time.sleep
) -> Claim:
    """Claim a run; waits to see whether another driver still renews its claim.

    Raises:
        ConfigError: another driver works on it.
        StoreError: the store cannot be used.
    """
    for _ in range(MAX_TRIES):
        dead = _dead_claims(store, lease, sleep)
        epochs = [_epoch(name) for name in (*dead, *manifest_names(store))]
        claim = Claim(store, max(epochs, default=0) + 1)
        if not set(claim.others(store)) - dead:
            for name in dead:
                store.delete(f"{CLAIMS_FOLDER}/{name}")
            return claim
        claim.release(store)
        sleep(random.uniform(0.5, 2.0))
    raise ConfigError(f"{store.url}: several drivers are starting this run at the same time; start only one")


def _dead_claims(store: ObjectStore, lease: float, sleep: Callable[[float], object]) -> set[str]:
    """Names of the existing claims if all their drivers are dead. Raises: ConfigError: one of the drivers is alive."""
    first = {name: claim for name in _names(store) if (claim := _read(store, name)) is not None}
    waiting = {name for name, claim in first.items() if not _has_ended(claim)}
    if waiting:
        who = _owner(first[min(waiting)])
        store.say(f"{store.url}: claimed by {who}; waiting up to {lease:g} s to see whether that process still runs")
    for _ in range(10 if waiting else 0):
        sleep(lease / 10)
        for name in sorted(waiting):
            now = _read(store, name)
            if now is not None and now != first[name]:
                raise ConfigError(
                    f"{store.url}: {_owner(now)} is using this run; end that process, or choose another run.name"
                )
    return set(first)


def _names(store: ObjectStore) -> list[str]:
    return [name for name in store.names(CLAIMS_FOLDER) if _NAME.fullmatch(name)]


def _epoch(name: str) -> int:
    return int(name[:6])


def _read(store: ObjectStore, name: str) -> Mapping[str, Any] | None:
    """A claim; None if it is gone, empty if it cannot be read."""
    try:
        found = json.loads(store.read(f"{CLAIMS_FOLDER}/{name}"))
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _owner(claim: Mapping[str, Any]) -> str:
    return f"process {claim.get('pid')} on {claim.get('host')}"


def _machine() -> str | None:
    """Id of this machine's current boot, and of the namespace of process ids (a container has its own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _has_ended(claim: Mapping[str, Any]) -> bool:
    """Whether the claim belongs to a process of this machine that no longer exists."""
    machine = _machine()
    return machine is not None and claim.get("machine") == machine and not Path(f"/proc/{claim.get('pid')}").exists()
