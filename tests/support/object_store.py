"""Object stores that fail: one in memory that is killed at a chosen operation, and a real S3 server behind a proxy."""

from __future__ import annotations

import hashlib
import http.client
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from draco_ray.runs.remote.store import ObjectStore
from tests.support.killed import SimulatedKill


class MemoryStore(ObjectStore):
    """A stand-in that holds its objects in memory; its user is killed before or after a change."""

    def __init__(self) -> None:
        super().__init__("file:///in-memory/run")
        self.objects: dict[str, bytes] = {}
        self.left: int | None = None
        """The kill comes in the change after ``left // 2`` others: before it is made or, if odd, after; None: never."""
        self.changes = 0

    def names(self, folder: str) -> list[str]:
        return sorted(name.removeprefix(f"{folder}/") for name in self.objects if name.startswith(f"{folder}/"))

    def read(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def fetch(self, name: str, to: Path) -> None:
        to.write_bytes(self.read(name))

    def write(self, name: str, data: bytes) -> None:
        with self._changing():
            self.objects[name] = data

    def upload(self, name: str, file: Path) -> str:
        data = file.read_bytes()
        self.write(name, data)
        return hashlib.sha256(data).hexdigest()

    def delete(self, name: str) -> None:
        with self._changing():
            self.objects.pop(name, None)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self.changes += 1
        dies = self.left is not None and self.changes > self.left // 2
        if dies and self.left is not None and self.left % 2 == 0:
            raise SimulatedKill
        yield
        if dies:
            raise SimulatedKill


class Faults:
    """What a proxy does with the next requests; without an order it forwards them."""

    def __init__(self) -> None:
        self.orders: deque[str] = deque()
        """``503``, ``cut`` (the connection ends within the reply), ``dropped`` (no reply), ``slow``."""
        self.down = False
        """Whether every request gets 503."""
        self.asked: list[str] = []


@contextmanager
def faulty_proxy(port: int) -> Iterator[tuple[int, Faults]]:
    """A proxy for a server on this machine's ``port``; yields the proxy's port, and its `Faults`."""
    faults = Faults()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(port, faults))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(port: int, faults: Faults) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            faults.asked.append(f"{self.command} {self.path}")
            order = "503" if faults.down else faults.orders.popleft() if faults.orders else ""
            body = self._body()
            if order == "503":
                self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                return
            if order == "dropped":
                self.close_connection = True
                return
            if order == "slow":
                time.sleep(1.0)
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            server.request(self.command, self.path, body, dict(self.headers))
            reply = server.getresponse()
            data = reply.read()
            server.close()
            self._answer(reply.status, dict(reply.getheaders()), data, cut=order == "cut")

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                data = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                del self.headers["Transfer-Encoding"]
                return data
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {"content-length", "connection", "transfer-encoding", "server", "date"}:
                    self.send_header(name, value)
            length = headers.get("Content-Length", headers.get("content-length", "0"))
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data) + cut))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else data)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

        def log_message(self, format: str, *arguments: object) -> None:
            return

    return Handler
