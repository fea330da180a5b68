"""`draco report DIR --serve`: the page of a continuing run, on this machine only.

The page polls every few seconds, and is rendered again when the run has changed. The server listens on loopback. Its
address has a token against other users of the machine, and the Host header is checked against DNS rebinding.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from draco_ray.errors import ConfigError, DracoError
from draco_ray.lab.report.page import write_report
from draco_ray.runs.directory import RunDirectory
from draco_ray.temp_dirs import PrivateTempDir

HOST = "127.0.0.1"
PORT = 8321
"""Default port, always the same, since a browser stores labels by address."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def state_of(run: RunDirectory) -> str:
    """A digest that changes whenever the run has written something that its page shows."""
    digest = hashlib.sha256()
    shown = [run.metrics_file, *_files(run.tables), *_files(run.path / "evaluations")]
    for path in shown:
        try:
            status = path.stat()
        except OSError:
            # Merged into another file in the meantime.
            continue
        digest.update(f"{path}\0{status.st_mtime_ns}\0{status.st_size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    return sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names)


class LivePage:
    """The page of a run that may still be running."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._state = ""
        self._page = b""

    @property
    def state(self) -> str:
        """`state_of` the run now."""
        return state_of(self._run)

    def page(self) -> bytes:
        """The page, rendered again if the run has changed.

        Raises:
            DracoError: the run cannot be read; while a file is being replaced the last page is returned instead.
        """
        with self._lock:
            state = self.state
            if state != self._state:
                try:
                    with PrivateTempDir() as folder:
                        path = folder / "report.html"
                        write_report(RunDirectory.open(self._run.path), path, live=state)
                        self._page, self._state = path.read_bytes(), state
                except DracoError:
                    if not self._page or state == self.state:
                        raise
            return self._page


class ReportServer(ThreadingHTTPServer):
    """Serves the page at ``/TOKEN/`` and the run's state at ``/TOKEN/state``."""

    daemon_threads = True

    def __init__(self, run: RunDirectory, port: int = PORT) -> None:
        """
        Args:
            run: with rows.
            port: 0 takes a free one.

        Raises:
            ConfigError: the port is taken.
        """
        self.live = LivePage(run)
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another one, or 0 for any") from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        port = self.server.server_port
        path, _, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        known = hmac.compare_digest(path.encode(), self.server.token.encode())
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}") or not known:
            return self._answer(
                HTTPStatus.NOT_FOUND, b"no such page; the address that draco report printed has a token"
            )
        if rest == "state":
            return self._answer(HTTPStatus.OK, self.server.live.state.encode())
        if rest:
            return self._answer(HTTPStatus.NOT_FOUND, b"no such page")
        try:
            return self._answer(HTTPStatus.OK, self.server.live.page(), "text/html")
        except DracoError as error:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"draco: {error}".encode("utf-8", "replace"))

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **_HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the address contains the token."""
