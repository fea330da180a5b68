"""A server in a jail that forks a process per order of the host. It runs neither the policy's code nor any task itself.

So it can load once what all processes need, and no process sees what the one before it left in a module. The host's end
is `draco_ray.environments.jail.fork_client`. It sends orders over a control socket, one packet each, and waits for the
answer:

    host   any text, with a socket    end the current process and all that it started; fork one that uses the socket
           any text, without          only end the current process
    server [status, CPU seconds]      of the ended process, as in `subprocess`; the status is null if there was none or
                                      if it had to be killed

When the control socket closes, the server ends. The host and a process communicate over the socket sent with the order,
in lines: a number, a space, a JSON object. An answer has the number of its order.

The policy's code may run in a forked process and can write to that socket too: the host does not trust what it reads
there. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import traceback
from abc import ABC, abstractmethod
from typing import Any

from draco_ray.environments.jail import linux

LONGEST_ORDER = 1 << 10
"""Maximum bytes of an order on the control socket."""


class Channel:
    """A forked process's end of its socket: receives the host's orders and answers them."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lines = connection.makefile("rwb")
        self._number = b""

    def receive(self) -> dict[str, Any] | None:
        """Wait for an order; None: the host has closed its end."""
        self._number, _, order = self._lines.readline().partition(b" ")
        return json.loads(order) if order else None

    def answer(self, answer: dict[str, Any]) -> None:
        """Answer the order received last."""
        self._lines.write(self._number + b" " + json.dumps(answer).encode() + b"\n")
        self._lines.flush()

    def close(self) -> None:
        """Close the process's end of the socket."""
        self._lines.close()
        self.connection.close()


class ForkServer(ABC):
    """Forks one process at a time."""

    def __init__(self, control: socket.socket, patience_seconds: float) -> None:
        """``patience_seconds``: time for a process to end by itself before it is killed."""
        self._control = control
        self._patience_seconds = patience_seconds

    @abstractmethod
    def begin(self, order: str, channel: Channel) -> None:
        """The work of a forked process, which ends when this returns or raises."""

    def clear(self) -> None:  # noqa: B027
        """Remove what an ended process left."""

    def run(self) -> None:
        """Serve until the host closes the control socket."""
        child = 0
        # The jail's caretaker process, which must not be ended.
        caretaker = linux.children_of(os.getpid())
        while True:
            order, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_ORDER, 1)
            # No order: the host has closed the control socket, and the process must be killed at once.
            ended = self._end(child, caretaker, self._patience_seconds if order else 0.0)
            if not order:
                return
            self.clear()
            child = self._fork(order.decode(), descriptors[0]) if descriptors else 0
            self._control.send(json.dumps(ended).encode())

    def _end(self, child: int, caretaker: set[int], patience_seconds: float) -> tuple[int | None, float]:
        if child and patience_seconds:
            watched = os.pidfd_open(child)
            select.select([watched], [], [], patience_seconds)
            os.close(watched)
        ended, status, usage = os.wait4(child, os.WNOHANG) if child else (0, 0, None)
        left = linux.end_descendants(caretaker)
        if usage is None:
            return None, 0.0
        code = os.waitstatus_to_exitcode(status if ended else left[child])
        return (None if not ended and code == -signal.SIGKILL else code), usage.ru_utime + usage.ru_stime

    def _fork(self, order: str, descriptor: int) -> int:
        if child := os.fork():
            os.close(descriptor)
            return child
        try:
            self._control.close()
            self.begin(order, Channel(socket.socket(fileno=descriptor)))
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
