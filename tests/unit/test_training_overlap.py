"""Overlap of intervals, against a count over a fine grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draco_ray.training import overlap

GRID = 24
intervals = st.lists(
    st.tuples(st.integers(0, GRID), st.integers(0, GRID)).map(lambda pair: (min(pair), max(pair))), max_size=6
)


def _grid(spans: list[tuple[int, int]]) -> np.ndarray:
    counts = np.zeros(GRID, dtype=int)
    for start, end in spans:
        counts[start:end] += 1
    return counts


@given(intervals)
def test_busy_seconds_count_each_moment_once(spans: list[tuple[int, int]]) -> None:
    assert overlap.busy_seconds(spans) == (_grid(spans) > 0).sum()


@given(intervals, intervals)
def test_hidden_seconds_count_all_work_that_runs_beside_something(
    work: list[tuple[int, int]], behind: list[tuple[int, int]]
) -> None:
    assert overlap.hidden_seconds(work, behind) == _grid(work)[_grid(behind) > 0].sum()


def test_hidden_seconds_do_not_compare_everything_with_everything() -> None:
    """A step of 1,024 groups has 21,000 judge phases, and nothing goes on while they are added up."""
    compared = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) < int(other)

    many = [(Counted(2 * at), Counted(2 * at + 1)) for at in range(1000)]
    assert overlap.hidden_seconds(many, many) == 1000
    assert 1000 < compared < 50_000


def test_no_work_has_no_share() -> None:
    assert overlap.hidden_share([], behind=[(0, 1)]) is None
    assert overlap.hidden_share([(0, 4)], behind=[]) == pytest.approx(0.0)
