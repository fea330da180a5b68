"""Handle SIGTERM (`ray job stop`, the end of a container) like Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def sigterm_as_interrupt(said: str = "") -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; main thread only.

    ``said`` is written at once, before any cleanup: the sender may follow with SIGKILL (`ray job stop` after three
    seconds, unless ``RAY_JOB_STOP_WAIT_TIME_S`` says otherwise).

    A shell starts background jobs of a script with SIGINT ignored; the block then handles SIGINT as well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handler_kept(signal.SIGTERM), handler_kept(signal.SIGINT):
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt(*_: object) -> None:
            if said:
                # Not print(): this handler may interrupt a print(), and a nested one raises an error.
                with contextlib.suppress(OSError):
                    os.write(1, f"{said}\n".encode())
            signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGTERM, interrupt)
        yield


@contextlib.contextmanager
def handler_kept(number: signal.Signals) -> Iterator[None]:
    """Restore the handler of a signal after the block; main thread only.

    When Ray is started or joined it replaces the handler of SIGTERM by one that ends the process with a stack trace.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    try:
        yield
    finally:
        # None: the handler was not installed by Python.
        if before is not None:
            signal.signal(number, before)
