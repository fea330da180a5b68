"""When a learner worker counts as hung."""

from __future__ import annotations

import threading

import pytest

from draco_ray.engine.actor import StallDetector
from draco_ray.learner import train_loop
from draco_ray.learner.train_loop import end_if_hung


class Worker:
    """Counts the looks at it, and comes further with each where it is told to."""

    def __init__(self, *, advances: bool) -> None:
        self.ended, self.looked = threading.Event(), threading.Semaphore(0)
        self.watch = StallDetector(0.003, 0.001)
        self._advances, self._progress = advances, 0
        hung = (self.watch, self.progress, self.ended.set)
        threading.Thread(target=end_if_hung, args=hung, daemon=True).start()

    def progress(self) -> int:
        self._progress += self._advances
        self.looked.release()
        return self._progress


def looks(worker: Worker, number: int) -> None:
    for _ in range(number):
        assert worker.looked.acquire(timeout=60)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_loop, "LOOK_SECONDS", 0.001)


def test_a_command_that_comes_no_further_ends_the_worker() -> None:
    worker = Worker(advances=False)
    # A worker that waits for a command does not hang.
    looks(worker, 10)
    assert not worker.ended.is_set()
    with worker.watch.call():
        assert worker.ended.wait(60)


def test_one_that_takes_long_and_comes_further_does_not() -> None:
    worker = Worker(advances=True)
    with worker.watch.call():
        looks(worker, 20)
    assert not worker.ended.is_set()
