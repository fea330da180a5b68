"""A taskset of verifiers: one flight to book."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Booking"]


class BookingTask(vf.Task):
    """A task without a reward of its own."""


class Booking(vf.Taskset[BookingTask]):
    """A taskset with one task."""

    def load(self) -> Iterator[BookingTask]:
        """Return the only task."""
        yield BookingTask(
            vf.TaskData(name="jfk-sfo", prompt="Book the cheapest flight: UA1 420, DL9 380."), self.config.task
        )
