"""When a learner worker counts as hung."""

from __future__ import annotations

import threading

from draco_ray.learner.train_loop import HangWatchdog


class Worker:
    """Counts the looks at it, and comes further with each where it is told to."""

    def __init__(self, *, advances: bool) -> None:
        self.ended, self.looked = threading.Event(), threading.Semaphore(0)
        self.watch = HangWatchdog(0.003, self.progress, self.ended.set, look_seconds=0.001)
        self._advances, self._progress = advances, 0

    def progress(self) -> int:
        self._progress += self._advances
        self.looked.release()
        return self._progress


def looks(worker: Worker, number: int) -> None:
    for _ in range(number):
        assert worker.looked.acquire(timeout=60)


def test_a_command_that_comes_no_further_ends_the_worker() -> None:
    worker = Worker(advances=False)
    with worker.watch.watching():
        # Waiting for a command is none.
        looks(worker, 10)
        assert not worker.ended.is_set()
        with worker.watch.command():
            assert worker.ended.wait(60)


def test_one_that_takes_long_and_comes_further_does_not() -> None:
    worker = Worker(advances=True)
    with worker.watch.watching(), worker.watch.command():
        looks(worker, 20)
    assert not worker.ended.is_set()
    # And nobody looks any more.
    assert not [thread for thread in threading.enumerate() if thread.name == "pass watch"]
