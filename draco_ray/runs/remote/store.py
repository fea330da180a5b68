"""Object stores through pyarrow: S3, Google Cloud Storage, Azure, and folders."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import quote

from pyarrow import ArrowException, ArrowInvalid, fs

from draco_ray.config.config_signature import private_opener
from draco_ray.errors import ConfigError, StoreError, one_line

CHUNK_BYTES = 8 * 2**20
"""Bytes read or written at a time."""
ATTEMPTS = 3
"""The S3 client's own attempts per request; `ObjectStore` retries requests that still fail."""
GOOGLE = "retry_limit_seconds=10"
"""Option of Google's client, which by default retries for a quarter of an hour before it reports an error."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first retry, and the longest wait before a retry."""
URL_OPTIONS_PATTERN = r"\?((?:endpoint_override|region|scheme|allow_bucket_creation)=.*)"
"""Options after a URL; any other question mark is part of a name."""
REFUSED_PATTERN = re.compile(
    r"ACCESS_DENIED|PERMISSION_DENIED|NO_SUCH_BUCKET"
    r"|AWS Error (?:INVALID_|MISSING_|SIGNATURE_DOES_NOT_MATCH|REQUEST_TIME_TOO_SKEWED)"
    r"|AWS Error UNKNOWN \(HTTP status (?:301|400|401|403)\)"
)
"""Error messages after which a retry is useless, such as a wrong key, or a missing permission or bucket."""

Say = Callable[[str], object]
ResultT = TypeVar("ResultT")


class ObjectStore:
    """The objects below a URL. Writes are atomic: an object appears whole or not at all."""

    def __init__(self, url: str, say: Say = lambda line: None, *, seconds: float = 0.0) -> None:
        """
        Args:
            url: of a folder, such as ``s3://bucket/prefix``. Names in it are literal, including blanks, % and #.
            say: prints a message when an outage begins and when it ends.
            seconds: how long a failing request is retried.

        Raises:
            ConfigError: pyarrow has no file system for the URL.
        """
        try:
            self._files, self._base = _file_system(url)
        except (OSError, ValueError, ArrowException) as error:
            raise ConfigError(
                f"{url}: cannot be opened: {one_line(error)}; expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
                "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX or file:///FOLDER"
            ) from None
        self.url = url
        self.say = say
        self.first_wait = FIRST_WAIT
        self._seconds = seconds
        self._stopped: threading.Event | None = None
        self._away = False

    def retrying(self, seconds: float, stopped: threading.Event | None = None) -> ObjectStore:
        """The same store, retrying each request for ``seconds``; during a run also at most until ``stopped`` is set."""
        other = copy.copy(self)
        other._seconds, other._stopped, other._away = seconds, stopped, False
        return other

    def names(self, folder: str) -> list[str]:
        """Names of the objects ``folder/NAME``, without the folder, sorted. Raises: StoreError."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        found = self._retry(lambda: self._files.get_file_info(selector))
        return sorted(each.base_name for each in found if each.is_file and not each.base_name.endswith(".part"))

    def read(self, name: str) -> bytes:
        """A small object. Raises: StoreError, FileNotFoundError."""

        def read() -> bytes:
            with self._files.open_input_stream(self._path(name)) as stream:
                data: bytes = stream.read()
            return data

        return self._retry(read)

    def fetch(self, name: str, to: Path) -> None:
        """Write an object into a new local file. Raises: StoreError, FileNotFoundError."""

        def fetch() -> None:
            with (
                self._files.open_input_stream(self._path(name)) as stream,
                open(to, "wb", opener=private_opener) as file,
            ):
                while data := stream.read(CHUNK_BYTES):
                    file.write(data)

        self._retry(fetch)

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a small object. Raises: StoreError."""
        self._retry(lambda: self._put(name, io.BytesIO(data)))

    def upload(self, name: str, file: Path) -> str:
        """Create an object from a file; returns the SHA-256 of what was read. Raises: StoreError."""

        def upload() -> str:
            with open(file, "rb") as source:
                return self._put(name, source)

        return self._retry(upload)

    def delete(self, name: str) -> None:
        """Remove an object; does nothing if it does not exist. Raises: StoreError."""

        def delete() -> None:
            try:
                self._files.delete_file(self._path(name))
            except FileNotFoundError:
                return

        self._retry(delete)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _put(self, name: str, source: IO[bytes]) -> str:
        path, digest = self._path(name), hashlib.sha256()
        # In a folder, writes are not atomic, so the file is renamed once it is complete.
        local = self._files.type_name == "local"
        if local:
            self._files.create_dir(os.path.dirname(path), recursive=True)
        with self._files.open_output_stream(f"{path}.part" if local else path) as stream:
            while data := source.read(CHUNK_BYTES):
                digest.update(data)
                stream.write(data)
        if local:
            self._files.move(f"{path}.part", path)
        return digest.hexdigest()

    def _retry(self, request: Callable[[], ResultT]) -> ResultT:
        end, wait = time.monotonic() + self._seconds, self.first_wait
        stopped = self._stopped or threading.Event()
        while True:
            try:
                result = request()
            except FileNotFoundError:
                raise
            except (OSError, ArrowException) as error:
                left = end - time.monotonic()
                if _is_refusal(error) or left <= 0 or stopped.is_set():
                    raise StoreError(f"{self.url}: cannot be used: {one_line(error)}") from None
                if not self._away:
                    self._away = True
                    meanwhile = "" if self._stopped is None else ", the run continues in its local folder"
                    self.say(f"{self.url}: {one_line(error)}; trying again{meanwhile}")
                stopped.wait(min(wait, left))
                wait = min(2 * wait, LONGEST_WAIT)
            else:
                if self._away:
                    self._away = False
                    self.say(f"{self.url}: the store answers again")
                return result


def _file_system(url: str) -> tuple[fs.FileSystem, str]:
    """A file system of pyarrow, and the path in it."""
    found = re.fullmatch(rf"([a-z0-9+.-]+)://([^/]*)(/.*?)?/*(?:{URL_OPTIONS_PATTERN})?", url, re.DOTALL)
    if found is None:
        raise ValueError("not a URL")
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
            # Write a small object in one request, which creates it whole or not at all.
            allow_delayed_open=True,
        )
    return files, base


def _is_refusal(error: BaseException) -> bool:
    """Whether a retry would get the same answer."""
    return isinstance(error, ArrowInvalid) or REFUSED_PATTERN.search(str(error)) is not None
