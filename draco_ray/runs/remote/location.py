"""The place of a run: a folder, or a folder with a copy in an object store."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draco_ray.config.schema import RunConfig
from draco_ray.errors import ConfigError, StoreError
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.remote.claim import ClaimLost, claim_run
from draco_ray.runs.remote.copier import Copier, restore
from draco_ray.runs.remote.manifest import MARKER_FILE, Manifest, Marker, latest_manifest
from draco_ray.runs.remote.store import URL_OPTIONS_PATTERN, ObjectStore, Say

START_SECONDS, RUN_SECONDS, END_SECONDS, STOPPED_SECONDS = 120.0, 3600.0, 600.0, 60.0
"""Seconds for which a failing request is retried: before a run, during it, at its end, and after it was stopped."""
INTERVAL_SECONDS = 15.0
"""Minimum time between two copies; it is longer if a copy takes long (`MAX_COPY_SHARE`)."""
MAX_COPY_SHARE = 0.2
"""Maximum share of the time that copying may take, so that a large database is not uploaded all the time."""


def is_url(text: object) -> bool:
    """Whether a text is a URL."""
    return isinstance(text, str) and re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


@dataclass(frozen=True, slots=True)
class RunLocation:
    """The folder in which a run works, and the URL of its copy."""

    local: Path
    """The run directory."""
    url: str | None = None
    """URL of the copy; None if there is no copy."""


def run_location(config: RunConfig, name: str) -> RunLocation:
    """The place of the run ``name`` with this configuration."""
    if isinstance(config.root, Path):
        return RunLocation(config.root.resolve() / name)
    base, options = _split(config.root)
    return _remote_place(f"{base.rstrip('/')}/{name}{options}", config.local)


def parse_run_location(given: str | Path, local: Path | None = None, *, trust: bool = False) -> RunLocation:
    """The place of a run that a user names by its folder or its URL.

    Args:
        given: the folder or URL, as the user typed it.
        local: ``run.local``.
        trust: copy to the URL that the folder's marker names, even if somebody else made the folder.

    Raises:
        ConfigError: somebody else made the folder, and its marker names a URL.
    """
    if isinstance(given, str) and is_url(given):
        return _remote_place(given, local)
    folder = Path(given)
    if (marker := Marker.read(folder)) is None:
        return RunLocation(folder)
    folder = folder.resolve()
    if not trust and not RunDirectory.open(folder).ours:
        raise ConfigError(
            f"{folder}: somebody else made this folder, and it would be copied to {marker.url}; to allow this add "
            f"--trust, otherwise remove {folder / MARKER_FILE}"
        )
    return RunLocation(folder, marker.url)


def fetch_run_for_reading(given: str, *, checkpoints: bool = False, say: Say = lambda line: None) -> Path:
    """The folder of a run to read: the given folder, or an up-to-date local copy of the run in the store.

    Args:
        given: a folder or a URL.
        checkpoints: whether checkpoints and judge replies are needed, too.
        say: prints a line when the store does not answer.

    Raises:
        ConfigError: there is no run.
        DamagedRun: a file differs from the store's manifest.
        StoreError: the store cannot be used.
    """
    if not is_url(given):
        return Path(given)
    folder = _folder(given, _caches() / "read")
    store = ObjectStore(given, say, seconds=START_SECONDS)
    large = () if checkpoints else ("checkpoints/", "judge_cache/")
    if restore(store, folder, lambda path: not path.startswith(large)) is None:
        raise ConfigError(f"{given}: no run found; expected the URL of a run, run.root/run.name")
    return folder


def checkpoint_steps(given: str) -> list[int]:
    """Training steps for which a run has a checkpoint, in its folder or at its URL.

    Raises:
        StoreError: the store cannot be used.
        ConfigError: the folder is no run directory.
    """
    if not is_url(given):
        return RunDirectory.open(Path(given)).checkpoint_steps()
    found = latest_manifest(ObjectStore(given, seconds=START_SECONDS))
    return [] if found is None else found.checkpoint_steps


@contextlib.contextmanager
def results_folder(given: str | None, say: Say) -> Iterator[Path | None]:
    """The run directory of ``--out``, which may be a URL: see `open_working_folder`."""
    if given is None:
        yield None
        return
    with open_working_folder(parse_run_location(given), say, again="the same command again") as folder:
        yield folder


def begun(place: RunLocation, say: Say) -> bool:
    """Whether a run at this place has begun."""
    here = (place.local / "config.yaml").is_file() and not RunDirectory.open(place.local).untouched
    if here or place.url is None:
        return here
    found = latest_manifest(ObjectStore(place.url, say, seconds=START_SECONDS))
    return found is not None and found.begun


@contextlib.contextmanager
def open_working_folder(place: RunLocation, say: Say, *, new: bool = False, again: str | None = None) -> Iterator[Path]:
    """Yield the run directory to work in, and copy it to the run's URL, if the run has one.

    If there is a URL, this claims the copy, and restores the folder if it lacks the copy's latest content. During the
    block, a thread copies new files. After the block, this waits until everything is copied.

    Args:
        place: the run's folder and URL.
        say: prints a message.
        new: whether to refuse a run that has begun according to its copy.
        again: the command that continues copying, for messages; None: ``draco train --resume`` with the folder.

    Raises:
        ConfigError: another driver works on the run, or ``new`` is set and the run has begun.
        StoreError: the store cannot be used, or not everything could be copied at the end.
    """
    if place.url is None:
        yield place.local
        return
    store = ObjectStore(place.url, say, seconds=START_SECONDS)
    claim = claim_run(store)
    claim.keep(store.retrying(0.0))
    try:
        latest = latest_manifest(store)
        if new and latest is not None and latest.begun:
            raise ConfigError(
                f"run {place.url} already exists; choose another run.name, or continue it with --resume "
                f"{shlex.quote(place.url)}"
            )
        _bring(store, place.local, latest)
        copier = Copier(store, place.local, claim)
        copier.tidy(store)
        again = again or f"draco train --resume {shlex.quote(str(place.local))}"
        try:
            with _copying(copier, store):
                yield place.local
        except BaseException:
            with contextlib.suppress(StoreError):
                _copy_all(copier, store.retrying(STOPPED_SECONDS), place, again)
            raise
        _copy_all(copier, store.retrying(END_SECONDS), place, again)
    finally:
        # If the release fails, the claim expires.
        with contextlib.suppress(StoreError):
            claim.release(store.retrying(0.0))


@contextlib.contextmanager
def _copying(copier: Copier, store: ObjectStore) -> Iterator[None]:
    """Copy in a thread while the block runs; if another driver takes over, SIGTERM ends this process."""
    stopped = threading.Event()
    patient = store.retrying(RUN_SECONDS, stopped)

    def copy() -> None:
        wait, said = 0.0, ""
        while not stopped.wait(wait):
            began = time.monotonic()
            try:
                copier.copy(patient)
            except ClaimLost as error:
                store.say(str(error))
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except (StoreError, OSError) as error:
                if str(error) != said and not stopped.is_set():
                    said = str(error)
                    store.say(said)
            wait = max(INTERVAL_SECONDS, (time.monotonic() - began) * (1 / MAX_COPY_SHARE - 1))

    thread = threading.Thread(target=copy, name="copy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _copy_all(copier: Copier, store: ObjectStore, place: RunLocation, again: str) -> None:
    """Copy what is not in the store yet. Raises: StoreError: not everything could be copied."""
    try:
        copier.copy(store)
    except ClaimLost:
        raise
    except (StoreError, KeyboardInterrupt) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        line = f"the copy in {store.url} is incomplete: {why}; all files are in {place.local}; to continue run {again}"
        store.say(line)
        raise StoreError(line) from None
    store.say(f"copied to {store.url}")


def _bring(store: ObjectStore, folder: Path, latest: Manifest | None) -> None:
    """Restore the local folder from the store if the folder lacks the latest manifest's content."""
    if latest is None:
        return
    if folder.exists():
        marker = Marker.read(folder)
        if marker is not None and marker.url == store.url and latest.name in marker.manifests:
            return
        number = 1
        while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
            number += 1
        folder.rename(aside)
        store.say(
            f"{folder}: {store.url} is not a copy of this folder, or the run continued elsewhere; the folder was "
            f"moved to {aside}"
        )
    store.say(f"restoring {store.url}")
    unfinished = folder.with_name(f"{folder.name}.restoring")
    if (found := restore(store, unfinished)) is None:
        raise StoreError(f"{store.url}: the manifests are missing; restore one in the store")
    Marker(store.url, (found.name,)).write(unfinished)
    unfinished.rename(folder)


def _remote_place(url: str, local: Path | None) -> RunLocation:
    if re.match(r"[a-z0-9+.-]+://[^/@]*:[^/@]*@", url):
        raise ConfigError(
            "run.root: a URL must not contain a password; use the environment variables of the cloud provider's tools"
        )
    return RunLocation(_folder(url, (local or _caches() / "runs").resolve()), url)


def _folder(url: str, root: Path) -> Path:
    """The local folder of the run at this URL; the last part is the run's name."""
    base, _ = _split(url)
    parent, _, name = base.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/"):
        raise ConfigError(f"{url}: expected the URL of a run, such as s3://BUCKET/PREFIX/NAME")
    return root / hashlib.sha256(parent.encode("utf-8", "surrogatepass")).hexdigest()[:16] / name


def _split(url: str) -> tuple[str, str]:
    """A URL without its options, and the options."""
    found = re.search(URL_OPTIONS_PATTERN, url, re.DOTALL)
    return (url[: found.start()], url[found.start() :]) if found else (url, "")


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draco-ray"
