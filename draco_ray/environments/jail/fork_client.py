"""The host's end of a `draco_ray.environments.jail.fork_server`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any


class ForkClient:
    """Has one server fork processes, and sends orders to the process forked last. Belongs to one event loop."""

    def __init__(self, control: socket.socket) -> None:
        """``control``: a non-blocking socket that keeps packets apart (SOCK_SEQPACKET)."""
        self._control = control
        self._channel: socket.socket | None = None
        self._number = 0

    async def order(self, order: str, seconds: float, *, fork: bool) -> tuple[int | None, float]:
        """Have the server end its process and, with ``fork``, start another.

        Returns: the ended process's exit status (None if it had to be killed, or there was none) and its CPU seconds.
        Raises: OSError: the server has ended, or did not answer in time; it cannot be used any more, because
            a late answer would be taken for the answer to the next order.
        """
        loop, previous = asyncio.get_running_loop(), self._channel
        self._channel = None
        try:
            async with asyncio.timeout(seconds):
                if fork:
                    self.send_channel(order)
                else:
                    await loop.sock_sendall(self._control, order.encode())
                answer = await loop.sock_recv(self._control, 256)
        finally:
            if previous is not None:
                # Close this socket only after the order is sent, since closing it ends the previous process.
                previous.close()
        if not answer:
            raise ConnectionError("the server has ended")
        status, cpu_seconds = json.loads(answer)
        return status, cpu_seconds

    def send_channel(self, order: str) -> None:
        """Send the server an order with a new socket, without waiting for its answer. Raises: OSError."""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs:
            socket.send_fds(self._control, [order.encode()], [theirs.fileno()])

    async def exchange(self, order: Mapping[str, Any], seconds: float, most_bytes: int) -> bytes:
        """Send the process an order and receive its answer, unparsed.

        Raises: TimeoutError; EOFError, with the reason: the process ended, or sent anything but one answer of at
            most ``most_bytes``.
        """
        loop, channel, received = asyncio.get_running_loop(), self._channel, bytearray()
        self._number += 1
        number = b"%d " % self._number
        line = number + json.dumps(order).encode() + b"\n"
        try:
            if channel is None:
                raise ConnectionError
            with contextlib.suppress(BlockingIOError):
                if channel.recv(1):
                    raise EOFError("sent unexpected output")
                raise ConnectionError
            async with asyncio.timeout(seconds):
                await loop.sock_sendall(channel, line)
                while not received.endswith(b"\n"):
                    part = await loop.sock_recv(channel, 1 << 16)
                    if not part:
                        raise ConnectionError
                    received += part
                    if len(received) > len(number) + most_bytes:
                        raise EOFError(f"sent an answer of more than {most_bytes} bytes")
        except ConnectionError:
            raise EOFError("ended its process") from None
        if not received.startswith(number) or received.index(b"\n") + 1 < len(received):
            raise EOFError("sent unexpected output")
        return bytes(received[len(number) :])

    def hang_up(self) -> None:
        """Close the socket to the process, which then ends by itself."""
        if self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        """Close both sockets, which ends the server."""
        self._control.close()
        self.hang_up()
