"""What judge calls cost in a run's archive: each reply counts once, also where the run was killed and resumed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from draco_ray.records import JudgeCall
from draco_ray.runs.rows import Row, as_paid, call_rows
from draco_ray.runs.store import RunStore


class Bills:
    """The calls that a run has paid for."""

    def __init__(self, store: RunStore, requests_name: str) -> None:
        """
        Args:
            store: of the run.
            requests_name: begins the numbers of the judge requests that this run has paid for.
        """
        self._store = store
        self._requests_name = requests_name

    def rows(self, step: int, key: str, calls: Iterable[JudgeCall]) -> list[Row]:
        """Rows of the archive for the calls of a phase, which is recorded under ``key``.

        A reply from the cache that was paid for earlier in this step keeps its first record.
        """
        made = call_rows(step, [as_paid(call, self._booked, self._requests_name) for call in calls])
        if all(row["requests"] for row in made):
            return made
        paid = {(row["prompt"], row["reply"]): row for row in self._store.part("judge_calls", step, key)}
        return [row if row["requests"] else paid.get((row["prompt"], row["reply"]), row) for row in made]

    @cached_property
    def _booked(self) -> set[str]:
        """Calls in the archive."""
        kept = self._store.directory
        names = ("judge_calls", "heldout_calls")
        return {each for name in names for each in kept.table(name, columns=["call_id"]).column("call_id").to_pylist()}
