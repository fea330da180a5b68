"""Where a run is: a folder, or a folder with a copy in an object store."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from draco_ray.config.schema import RunConfig
from draco_ray.errors import ConfigError, StoreError
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.remote.claim import Claim, ClaimLost, take
from draco_ray.runs.remote.manifest import Manifest, latest_manifest
from draco_ray.runs.remote.marker import Marker
from draco_ray.runs.remote.replica import SAY_SECONDS, Copying, Replica
from draco_ray.runs.remote.restore import restore
from draco_ray.runs.remote.store import OPTIONS, ArrowStore, Patient

START_SECONDS, RUN_SECONDS, END_SECONDS, STOPPED_SECONDS = 120.0, 3600.0, 600.0, 60.0
"""For which one request is tried again: before a run begins, while it goes on, at its end, and where it was stopped."""

Say = Callable[[str], object]


def is_url(text: object) -> bool:
    """Whether a text names a place in an object store."""
    return isinstance(text, str) and re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run works, and where its copy is."""

    local: Path
    """The run directory."""
    url: str | None = None
    """Of its copy; None: it has none."""

    @property
    def name(self) -> str:
        """What names it on a command line."""
        return self.url or str(self.local)


def place_of(config: RunConfig, name: str) -> Place:
    """The place of a run of this configuration."""
    if isinstance(config.root, Path):
        return Place(config.root.resolve() / name)
    return _place(_below(config.root, name), config.local)


def place_at(given: str | Path, local: Path | None = None, *, trust: bool = False) -> Place:
    """The place of a run that a user names by its folder or its URL.

    Args:
        given: what they typed.
        local: ``run.local``.
        trust: whether to go on copying to where a folder says that its copy is, although somebody else made it.

    Raises:
        ConfigError: somebody else's folder says so.
    """
    if isinstance(given, str) and is_url(given):
        return _place(given, local)
    folder = Path(given)
    if (marker := Marker.read(folder)) is None:
        return Place(folder)
    folder = folder.resolve()
    if not trust and not RunDirectory.open(folder).ours:
        raise ConfigError(
            f"{folder}: not made here, and it would be copied to {marker.url}: add --trust, or remove "
            f"{folder / '.store.json'}"
        )
    return Place(folder, marker.url)


def readable(given: str, *, checkpoints: bool = False, say: Say = lambda line: None) -> Path:
    """The folder of a run to read: itself, or a copy of what is in the store, brought up to date.

    Args:
        given: a folder or a URL.
        checkpoints: whether checkpoints are read.
        say: takes a line when the store does not answer.

    Raises:
        ConfigError: there is no run.
        DamagedRun: a file is not what the store's manifest says.
        StoreError: the store cannot be used.
    """
    if not is_url(given):
        return Path(given)
    folder = _folder(given, _caches() / "read")
    store = Patient(ArrowStore(given), given, say, seconds=START_SECONDS)
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (
        restore(store, folder, given, lambda path: checkpoints or not path.startswith(("checkpoints/", "judge_cache/")))
        is None
    ):
        raise ConfigError(f"{given}: no run is there; expected the URL of a run, run.root/run.name")
    return folder


def checkpoint_steps(given: str, say: Say = lambda line: None) -> list[int]:
    """Training steps of which a run has a checkpoint: in its folder, or in the store that a URL names.

    Raises:
        StoreError: the store cannot be used.
        ConfigError: the folder is no run directory.
    """
    if not is_url(given):
        return RunDirectory.open(Path(given)).checkpoint_steps()
    found = latest_manifest(Patient(ArrowStore(given), given, say, seconds=START_SECONDS), given)
    return [] if found is None else found.checkpoint_steps


@contextlib.contextmanager
def results_folder(given: str | None, say: Say) -> Iterator[Path | None]:
    """The run directory of ``--out``, which may be a URL: as `working`."""
    if given is None:
        yield None
        return
    with working(place_at(given), say, again="the same command") as folder:
        yield folder


def begun(place: Place, say: Say) -> bool:
    """Whether a run at this place has begun."""
    here = (place.local / "config.yaml").is_file() and not RunDirectory.open(place.local).untouched
    if here or place.url is None:
        return here
    found = latest_manifest(Patient(ArrowStore(place.url), place.url, say, seconds=START_SECONDS), place.url)
    return found is not None and found.begun


@contextlib.contextmanager
def working(place: Place, say: Say, *, new: bool = False, again: str | None = None) -> Iterator[Path]:
    """The run directory to work in. Where the run has a copy, that is claimed, restored from if it is ahead, and kept
    up to date; the block's end waits until everything is there.

    Args:
        place: of the run.
        say: takes lines for people.
        new: the run must not have begun.
        again: the command that goes on, for people; None: ``draco train --resume`` with the folder.

    Raises:
        ConfigError: another driver works on it, or ``new`` and it has begun.
        StoreError: the store cannot be used, or at the end not everything could be copied.
    """
    if place.url is None:
        yield place.local
        return
    url, raw = place.url, ArrowStore(place.url)
    store = Patient(raw, url, say, seconds=START_SECONDS)
    claim = take(store, url, say)
    claim.keep(raw)
    try:
        latest = latest_manifest(store, url)
        if new and latest is not None and latest.begun:
            raise ConfigError(
                f"run {url} already exists; choose another run.name, or continue it with --resume {shlex.quote(url)}"
            )
        _bring(store, place.local, url, latest, say)
        replica = Replica(store, place.local, url, claim)
        replica.tidy(store)
        stopped = threading.Event()
        patient = Patient(raw, url, say, seconds=RUN_SECONDS, stopped=stopped)
        copying = Copying(replica, patient, stopped, say, partial(os.kill, os.getpid(), signal.SIGTERM))
        copying.start()
        try:
            yield place.local
        except BaseException:
            copying.stop()
            with contextlib.suppress(StoreError):
                _copy_all(replica, raw, place, say, again, STOPPED_SECONDS)
            raise
        copying.stop()
        _copy_all(replica, raw, place, say, again, END_SECONDS)
    finally:
        _release(claim, raw)


def _copy_all(replica: Replica, raw: ArrowStore, place: Place, say: Say, again: str | None, seconds: float) -> None:
    """Copy what is not there yet. Raises: StoreError: not everything could be."""
    url, done = place.url or "", threading.Event()

    def progress() -> None:
        while not done.wait(SAY_SECONDS):
            now = replica.progress
            say(f"copying to {url}: {now.sent / 2**20:.0f} of {now.size / 2**20:.0f} MiB")

    threading.Thread(target=progress, name="replica-progress", daemon=True).start()
    try:
        replica.copy(Patient(raw, url, say, seconds=seconds))
    except ClaimLost:
        raise
    except (StoreError, KeyboardInterrupt) as error:
        again = again or f"draco train --resume {shlex.quote(str(place.local))}"
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        line = f"not everything is in {url}: {why}; it is all in {place.local}: {again} goes on with copying"
        say(line)
        raise StoreError(line) from None
    finally:
        done.set()
    say(f"copied to {url}")


def _bring(store: Patient, folder: Path, url: str, latest: Manifest | None, say: Say) -> None:
    """Make the local folder hold at least what the store holds."""
    if latest is None:
        return
    marker = Marker.read(folder)
    if folder.exists():
        if marker is not None and marker.url == url and marker.of(latest.name):
            return
        aside = next(
            path for n in range(1, 10**6) if not (path := folder.with_name(f"{folder.name}.before-{n}")).exists()
        )
        folder.rename(aside)
        say(f"{folder}: {url} is not a copy of this folder, or has gone on elsewhere; it is moved to {aside}")
    say(f"restoring {url}")
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = folder.with_name(f"{folder.name}.restoring")
    if (found := restore(store, unfinished, url)) is None:
        raise StoreError(f"{url}: its manifests have gone")
    Marker(url, found.name).write(unfinished)
    unfinished.rename(folder)


def _release(claim: Claim, store: ArrowStore) -> None:
    """Give a claim up; where that fails it lapses."""
    with contextlib.suppress(StoreError, OSError):
        claim.release(store)


def _below(url: str, name: str) -> str:
    base, options = _split(url)
    return f"{base.rstrip('/')}/{name}{options}"


def _place(url: str, local: Path | None) -> Place:
    if re.match(r"[a-z0-9+.-]+://[^/@]*:[^/@]*@", url):
        raise ConfigError(
            "run.root: a URL with a password in it is not taken; use the variables of the cloud's own tools"
        )
    return Place(_folder(url, (local or _caches() / "runs").resolve()), url)


def _folder(url: str, root: Path) -> Path:
    """Where a run of this URL lies on this machine; the last part is the run's name."""
    base, _ = _split(url)
    parent, _, name = base.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/"):
        raise ConfigError(f"{url}: expected the URL of a run, such as s3://BUCKET/PREFIX/NAME")
    return root / hashlib.sha256(parent.encode("utf-8", "surrogatepass")).hexdigest()[:16] / name


def _split(url: str) -> tuple[str, str]:
    found = re.fullmatch(rf"(.*?)({OPTIONS})?", url, re.DOTALL)
    assert found is not None
    return found[1], found[2] or ""


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draco-ray"
