"""Ending a learner worker whose passes stand still: a kernel that never ends, a thread that was stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from draco_ray.engine.core_watch import CoreWatch

LOOK_SECONDS = 5.0


class PassWatch:
    """Looks from a thread of its own whether a command comes any further.

    Ray Train asks the process, which answers beside the thread that computes; so it sees a process that is stopped, and
    not a pass that is.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], int],
        end: Callable[[], object],
        *,
        look_seconds: float | None = None,
    ) -> None:
        """
        Args:
            seconds: without progress, after which a command counts as hung.
            progress: grows while a command comes further.
            end: called then, once, in the watch's thread.
            look_seconds: between two looks; None: `LOOK_SECONDS`.
        """
        self._look_seconds = LOOK_SECONDS if look_seconds is None else look_seconds
        self._watch = CoreWatch(seconds, self._look_seconds)
        self._progress, self._end = progress, end

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look for as long as the block runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over,), name="pass watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def command(self) -> Iterator[None]:
        """A command is carried out inside the block."""
        with self._watch.call():
            yield

    def _look(self, over: threading.Event) -> None:
        while not over.wait(self._look_seconds):
            if self._watch.stands_still(self._progress()):
                self._end()
                return
