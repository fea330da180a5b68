"""SIGTERM (`ray job stop`, a container's end) as Ctrl-C: what is stopped says what is finished and how to go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; main thread only.

    A shell starts what it runs behind a script with SIGINT ignored: then, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handler_kept(signal.SIGTERM), handler_kept(signal.SIGINT):
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        yield


@contextlib.contextmanager
def handler_kept(number: signal.Signals) -> Iterator[None]:
    """What a signal did before the block it does after it; main thread only.

    Ray puts a handler of SIGTERM in the place of another when it is started or joined: one that ends the process where
    it stands, with a stack trace.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    try:
        yield
    finally:
        # None is a handler that was not installed by Python.
        if before is not None:
            signal.signal(number, before)
