"""Handle SIGTERM (`ray job stop`, the end of a container) like Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_as_interrupted(said: str = "") -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; main thread only.

    ``said`` is written at once, before anything is tidied up: whoever sent the signal may kill in seconds (`ray job
    stop` after three, unless ``RAY_JOB_STOP_WAIT_TIME_S`` says otherwise).

    A shell starts what it runs behind a script with SIGINT ignored: then, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handler_kept(signal.SIGTERM), handler_kept(signal.SIGINT):
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt(*_: object) -> None:
            if said:
                # print() may be interrupted by this handler.
                with contextlib.suppress(OSError):
                    os.write(1, f"{said}\n".encode())
            signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGTERM, interrupt)
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
