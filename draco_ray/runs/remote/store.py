"""What is asked of an object store, over the file systems of pyarrow: S3, Google Cloud Storage, Azure, and folders."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

from pyarrow import ArrowException, ArrowInvalid, fs

from draco_ray.config.origin import private
from draco_ray.errors import ConfigError, StoreError

CHUNK = 8 * 2**20
"""Bytes read or written at a time."""
ATTEMPTS = 3
"""The S3 client's own, of a request; what still fails is tried again by `Patient`."""
GOOGLE = "retry_limit_seconds=10"
"""Of the client for Google's store, which else tries for a quarter of an hour before it says anything."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between two tries."""
OPTIONS = r"\?((?:endpoint_override|region|scheme|allow_bucket_creation)=.*)"
"""What may follow a URL; any other question mark is part of a name."""

REFUSED = re.compile(
    r"ACCESS_DENIED|PERMISSION_DENIED|NO_SUCH_BUCKET"
    r"|AWS Error (?:INVALID_|MISSING_|SIGNATURE_DOES_NOT_MATCH|REQUEST_TIME_TOO_SKEWED)"
    r"|AWS Error UNKNOWN \(HTTP status (?:301|400|401|403)\)"
)
"""In what a store's client says: another try gets the same answer; the key, the right or the bucket is missing."""

ResultT = TypeVar("ResultT")


class ObjectStore(Protocol):
    """A flat set of objects under names; an object appears whole or not at all."""

    def names(self, folder: str) -> list[str]:
        """Names of the objects ``folder/NAME``, without the folder, sorted."""
        ...

    def read(self, name: str) -> bytes:
        """A small object. Raises: FileNotFoundError."""
        ...

    def fetch(self, name: str, to: Path, offset: int = 0, size: int | None = None) -> None:
        """Write an object, or a part of it, into a new file of this machine. Raises: FileNotFoundError."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a small object."""
        ...

    def upload(self, name: str, file: Path) -> str:
        """Make an object of a file; returns the SHA-256 of what was read."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...


class ArrowStore:
    """An `ObjectStore` below a URL; every failure is an OSError."""

    def __init__(self, url: str) -> None:
        """
        Args:
            url: of a folder, ``s3://bucket/prefix`` say. Names in it are taken literally, blanks, % and # included.

        Raises:
            ConfigError: no file system of pyarrow reads it.
        """
        try:
            self._files, self._base = _file_system(url)
        except (OSError, ValueError, ArrowException) as error:
            raise ConfigError(
                f"{url}: cannot be opened: {one_line(error)}; expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
                "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX or file:///FOLDER"
            ) from None
        self._folders = self._files.type_name == "local"

    def names(self, folder: str) -> list[str]:
        """See `ObjectStore`."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        found = self._files.get_file_info(selector)
        return sorted(each.base_name for each in found if each.is_file and not each.base_name.endswith(".part"))

    def read(self, name: str) -> bytes:
        """See `ObjectStore`."""
        with self._files.open_input_stream(self._path(name)) as stream:
            data: bytes = stream.read()
        return data

    def fetch(self, name: str, to: Path, offset: int = 0, size: int | None = None) -> None:
        """See `ObjectStore`."""
        to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._files.open_input_file(self._path(name)) as stream, open(to, "wb", opener=private) as file:
            stream.seek(offset)
            left = stream.size() - offset if size is None else size
            while left and (data := stream.read(min(CHUNK, left))):
                file.write(data)
                left -= len(data)

    def write(self, name: str, data: bytes) -> None:
        """See `ObjectStore`."""
        path = self._path(name)
        # A folder has no puts: an object is renamed to its name once it is whole.
        written = f"{path}.part" if self._folders else path
        if self._folders:
            self._files.create_dir(os.path.dirname(path), recursive=True)
        with self._files.open_output_stream(written) as stream:
            stream.write(data)
        if self._folders:
            self._files.move(written, path)

    def upload(self, name: str, file: Path) -> str:
        """See `ObjectStore`."""
        path, digest = self._path(name), hashlib.sha256()
        written = f"{path}.part" if self._folders else path
        if self._folders:
            self._files.create_dir(os.path.dirname(path), recursive=True)
        with open(file, "rb") as source, self._files.open_output_stream(written) as stream:
            while data := source.read(CHUNK):
                digest.update(data)
                stream.write(data)
        if self._folders:
            self._files.move(written, path)
        return digest.hexdigest()

    def delete(self, name: str) -> None:
        """See `ObjectStore`."""
        try:
            self._files.delete_file(self._path(name))
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"


def _file_system(url: str) -> tuple[fs.FileSystem, str]:
    """A file system of pyarrow and the path in it."""
    found = re.fullmatch(rf"([a-z0-9+.-]+)://([^/]*)(/.*?)?/*(?:{OPTIONS})?", url, re.DOTALL)
    if found is None:
        raise ValueError("no URL")
    scheme, host, path, options = found[1], found[2], found[3] or "", found[4]
    query = "&".join(each for each in (options, GOOGLE if scheme in ("gs", "gcs") else None) if each)
    files, base = fs.FileSystem.from_uri(f"{scheme}://{host}{quote(path)}{f'?{query}' if query else ''}")
    if files.type_name == "s3":
        given = dict(each.split("=", 1) for each in (options or "").split("&") if "=" in each)
        files = fs.S3FileSystem(
            region=files.region,
            endpoint_override=given.get("endpoint_override"),
            scheme=given.get("scheme"),
            connect_timeout=10,
            request_timeout=60,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
            # A small object is one request, which makes it whole or not at all.
            allow_delayed_open=True,
        )
    return files, base


class Patient:
    """An `ObjectStore` that tries again what fails, for a while, and says so once."""

    def __init__(
        self,
        store: ObjectStore,
        place: str,
        say: Callable[[str], object],
        *,
        seconds: float,
        stopped: threading.Event | None = None,
        first_wait: float = FIRST_WAIT,
    ) -> None:
        """
        Args:
            store: whose methods these are.
            place: its name in messages.
            say: takes a line when an outage begins, and one when it is over.
            seconds: for which one thing is tried.
            stopped: nothing is tried again once it is set. Of a run that goes on meanwhile, which is said.
            first_wait: seconds before the second try; each wait is twice the one before.
        """
        self._store, self._place, self._say = store, place, say
        self._seconds, self._first, self._stopped = seconds, first_wait, stopped or threading.Event()
        self._meanwhile = "" if stopped is None else ", the run goes on in its local folder"
        self._away = False

    def names(self, folder: str) -> list[str]:
        """See `ObjectStore`. Raises: StoreError."""
        return self._tried(lambda: self._store.names(folder))

    def read(self, name: str) -> bytes:
        """See `ObjectStore`. Raises: StoreError, FileNotFoundError."""
        return self._tried(lambda: self._store.read(name))

    def fetch(self, name: str, to: Path, offset: int = 0, size: int | None = None) -> None:
        """See `ObjectStore`. Raises: StoreError, FileNotFoundError."""
        self._tried(lambda: self._store.fetch(name, to, offset, size))

    def write(self, name: str, data: bytes) -> None:
        """See `ObjectStore`. Raises: StoreError."""
        self._tried(lambda: self._store.write(name, data))

    def upload(self, name: str, file: Path) -> str:
        """See `ObjectStore`. Raises: StoreError."""
        return self._tried(lambda: self._store.upload(name, file))

    def delete(self, name: str) -> None:
        """See `ObjectStore`. Raises: StoreError."""
        self._tried(lambda: self._store.delete(name))

    def _tried(self, work: Callable[[], ResultT]) -> ResultT:
        began, wait = time.monotonic(), self._first
        while True:
            try:
                result = work()
            except FileNotFoundError:
                raise
            except (OSError, ArrowException) as error:
                left = began + self._seconds - time.monotonic()
                if _refused(error) or left <= 0 or self._stopped.is_set():
                    raise StoreError(f"{self._place}: cannot be used: {one_line(error)}") from None
                if not self._away:
                    self._away = True
                    self._say(f"{self._place}: {one_line(error)}; trying again{self._meanwhile}")
                self._stopped.wait(min(wait, left))
                wait = min(2 * wait, LONGEST_WAIT)
            else:
                if self._away:
                    self._away = False
                    self._say(f"{self._place}: answers again")
                return result


def _refused(error: BaseException) -> bool:
    """Whether another try gets the same answer."""
    return isinstance(error, ArrowInvalid) or REFUSED.search(str(error)) is not None


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
