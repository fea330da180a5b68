"""A process that has imported what a run's actors need, and forks a worker of Ray's for each client that asks.

Run by path, by `draco_ray.workers.forked`, with the descriptors of a listening socket and of a pipe, which it closes
once it has imported, and the modules to import. It ends with the node manager (raylet) whose id is in RAY_RAYLET_PID.
To Ray, the process that it started is the client (`draco_ray.workers.ask_fork_server`); so a worker and its client end
together, whichever ends first.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from draco_ray.workers.ask_fork_server import FORKED, LENGTH, STATUS

log = logging.getLogger("fork_server")

STANDARD = 3
"""Descriptors that come with a request: the client's input, output and error output."""
REQUEST_SECONDS = 5.0
"""For a request to arrive; a client that is stopped in its midst holds nobody up for longer."""
END_SECONDS = 10.0
"""For workers to notice that their node manager is gone, before they are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A worker that is wanted: what its client would become by `os.execve`."""

    arguments: Sequence[str]
    """The program's path, and what it is told."""
    environment: Mapping[str, str]
    folder: str
    niceness: int
    group: int
    """The client's process group: Ray ends a worker and whatever it has started by the group."""
    blocked: Sequence[int]
    """Signals."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One that was forked, and has not been seen to end."""

    pid: int
    pidfd: int
    client: socket.socket

    def close(self) -> None:
        """Close this process's descriptors of it."""
        os.close(self.pidfd)
        self.client.close()


class ForkServer:
    """What is listened to, and who was forked."""

    def __init__(self, listener: socket.socket, raylet: int) -> None:
        """
        Args:
            listener: where clients connect.
            raylet: pidfd of the node manager.
        """
        self._listener, self._raylet = listener, raylet
        self._workers: dict[int, Worker] = {}
        self._ready = selectors.DefaultSelector()
        self._ready.register(raylet, selectors.EVENT_READ)
        self._ready.register(listener, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Fork for whoever asks. Returns: in a worker its request; here None, once the node manager has ended."""
        while True:
            for key, _ in self._ready.select():
                if key.fd == self._raylet:
                    self._end()
                    return None
                if key.data is None:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.data in self._workers.values():
                    self._finish(key.data)

    def _accept(self) -> Request | None:
        """Fork the worker that a client asks for; returns its request in it, None here."""
        client, _ = self._listener.accept()
        client.settimeout(REQUEST_SECONDS)
        try:
            request, descriptors = receive(client)
        except (OSError, ValueError, TypeError) as error:
            log.info("a client went away before it had asked: %s", error)
            client.close()
            return None
        try:
            pid = os.fork()
        except OSError as error:
            log.info("cannot fork: %s", error)
            pid = -1
        if pid == 0:
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            self._close()
        for descriptor in descriptors:
            os.close(descriptor)
        if pid <= 0:
            client.close()
            return request if pid == 0 else None
        worker = Worker(pid, os.pidfd_open(pid), client)
        self._workers[pid] = worker
        self._ready.register(worker.pidfd, selectors.EVENT_READ, worker)
        self._ready.register(client, selectors.EVENT_READ, worker)
        with contextlib.suppress(OSError):
            client.sendall(FORKED)
        return None

    def _close(self) -> None:
        """Close what is the server's, in a worker."""
        self._ready.close()
        self._listener.close()
        os.close(self._raylet)
        for worker in self._workers.values():
            worker.close()

    def _finish(self, worker: Worker) -> None:
        """A worker or its client has ended: end the other one too."""
        self._ready.unregister(worker.pidfd)
        self._ready.unregister(worker.client)
        del self._workers[worker.pid]
        signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        with contextlib.suppress(OSError):
            worker.client.sendall(STATUS.pack(status))
        worker.close()

    def _end(self) -> None:
        """Leave workers a while to end by themselves, then end them."""
        deadline = time.monotonic() + END_SECONDS
        self._ready.unregister(self._raylet)
        self._ready.unregister(self._listener)
        while self._workers and (seconds := deadline - time.monotonic()) > 0:
            for key, _ in self._ready.select(seconds):
                if key.data in self._workers.values():
                    self._finish(key.data)
        for worker in list(self._workers.values()):
            self._finish(worker)


def receive(client: socket.socket) -> tuple[Request, list[int]]:
    """A client's request, and its descriptors.

    Raises: OSError, ValueError, TypeError: it went away, or said nothing of use.
    """
    descriptors: list[int] = []
    try:
        data, descriptors, _, _ = socket.recv_fds(client, LENGTH.size, STANDARD)
        if len(data) < LENGTH.size or len(descriptors) != STANDARD:
            raise ValueError(f"{len(data)} bytes and {len(descriptors)} descriptors")
        (missing,) = LENGTH.unpack(data)
        parts = []
        while missing:
            part = client.recv(missing)
            if not part:
                raise ValueError(f"{missing} bytes of a request are missing")
            parts.append(part)
            missing -= len(part)
        return Request(**json.loads(b"".join(parts))), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def become(request: Request) -> None:
    """Be, in a forked process, what the client asked for; returns when that has ended."""
    with contextlib.suppress(OSError):  # A group that has gone with its client.
        os.setpgid(0, request.group)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    gc.enable()
    if "numpy" in sys.modules:
        # Each worker's own, as it would be in a new interpreter; the module random sees to itself.
        sys.modules["numpy"].random.seed()
    program = request.arguments[0]
    sys.argv = list(request.arguments)
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


def load(modules: Sequence[str]) -> None:
    """Import for all workers to come. Raises: RuntimeError: they would not have chances of their own."""
    # The collector would look for cycles again and again while what is imported only grows.
    gc.disable()
    began = time.monotonic()
    with chance_untouched():
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception:
                # The worker that needs it says so.
                log.exception("%s cannot be imported", module)
    # And it would make whatever it looks at in a worker that worker's own. Of a million objects it would find here
    # that nobody holds one in seventy.
    gc.freeze()
    log.info("ready after %.1f s, with %d threads", time.monotonic() - began, len(os.listdir("/proc/self/task")))


@contextlib.contextmanager
def chance_untouched() -> Iterator[None]:
    """Keep Ray's library from drawing a random number inside the block, and check that it has drawn none.

    It seeds its generator at the first draw. Workers that were forked after that would all draw the same ids of tasks
    and objects. A class that is an actor by `ray.remote` draws one when it is defined.

    Raises: RuntimeError: something has drawn.
    """
    actor: Any = importlib.import_module("ray.actor")
    once, actor.ActorClassID = actor.ActorClassID, _IdOfAClass
    try:
        yield
    finally:
        actor.ActorClassID = once
    if drawn_in_a_fork() == drawn_in_a_fork():
        raise RuntimeError("what was imported has drawn a random number of Ray's, and all workers would draw alike")


class _IdOfAClass:
    """In place of Ray's own, which draws from its generator."""

    @staticmethod
    def from_random() -> Any:
        from ray import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def drawn_in_a_fork() -> bytes:
    """The first random id of Ray's that a forked process draws."""
    from ray import JobID
    from ray._raylet import TaskID

    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(sink, TaskID.for_fake_task(JobID.from_int(1)).binary())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(sink)
    with open(source, "rb") as drawn:
        return drawn.read()


def main() -> None:
    """Read the command line, import, fork."""
    descriptor, importing, *modules = sys.argv[1:]
    # Of its own: the root logger is the workers', as a new interpreter has it.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    # This folder's files are not to be imported by their bare names.
    sys.path.pop(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    load(modules)
    os.close(int(importing))
    request = ForkServer(socket.socket(fileno=int(descriptor)), raylet).serve()
    if request is None:
        # Nothing is left to do, and to take down all that was imported would take a while.
        os._exit(0)
    code = 1
    try:
        code = exit_code(partial(become, request))
    finally:
        leave(code)


def exit_code(program: Callable[[], None]) -> int:
    """Run to its end what a process does; returns the code with which the interpreter would end it."""
    try:
        program()
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            return asked.code or 0
        print(asked.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End this process as the interpreter does, but for taking down what was imported.

    That would write to every page that the workers share, and so copy it: a second of each worker at the end of a run.
    """
    # One that is told to end while it ends would raise what its handler raises.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading._shutdown()  # type: ignore[attr-defined]  # Waits for threads that are no daemons; not in its stubs.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
