"""SIGTERM (`ray job stop`, a container's end) as Ctrl-C: what is stopped says what is finished and how to go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; main thread only."""
    with handler_of_sigterm_kept():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        yield


@contextlib.contextmanager
def handler_of_sigterm_kept() -> Iterator[None]:
    """What SIGTERM did before the block it does after it; main thread only.

    Ray puts a handler of its own in the place of another when it is started or joined: one that ends the process where
    it stands, with a stack trace.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None is a handler that was not installed by Python.
        if before is not None:
            signal.signal(signal.SIGTERM, before)
