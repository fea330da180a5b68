"""How much two kinds of work overlap, from recorded intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

Interval = tuple[float, float]
"""Start and end, seconds."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; the result is in ascending order.

    >>> merged([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def busy_seconds(intervals: Iterable[Interval]) -> float:
    """Seconds during which at least one of the intervals runs.

    >>> busy_seconds([(0, 2), (1, 3), (5, 6)])
    4
    """
    return sum(end - start for start, end in merged(intervals))


def hidden_seconds(work: Iterable[Interval], behind: Iterable[Interval]) -> float:
    """Sum over the intervals of ``work`` of the seconds in which ``behind`` runs as well.

    >>> hidden_seconds([(0, 2), (0, 2), (9, 10)], behind=[(1, 5)])
    2
    """
    cover = merged(behind)
    begins = [begin for begin, _ in cover]
    before = [0, *accumulate(stop - begin for begin, stop in cover)]

    def covered(until: float) -> float:
        begun = bisect_right(begins, until)
        # The last interval that has begun may not have ended.
        return before[begun] - (max(0, cover[begun - 1][1] - until) if begun else 0)

    return sum(max(0, covered(end) - covered(start)) for start, end in work)


def seconds_together(lanes: Mapping[str, Iterable[Interval]]) -> dict[frozenset[str], float]:
    """Seconds in which exactly these lanes run at the same time, for each set of lanes.

    >>> seconds_together({"a": [(0, 2), (0, 1)], "b": [(1, 4)]}) == {
    ...     frozenset({"a"}): 1, frozenset({"a", "b"}): 1, frozenset({"b"}): 2
    ... }
    True
    """
    changes = sorted(
        change for lane, work in lanes.items() for start, end in merged(work) for change in ((start, lane), (end, lane))
    )
    running: frozenset[str] = frozenset()
    found: dict[frozenset[str], float] = {}
    for index, (moment, lane) in enumerate(changes):
        if running and moment > changes[index - 1][0]:
            found[running] = found.get(running, 0) + moment - changes[index - 1][0]
        running = running ^ {lane}
    return found


def hidden_share(work: Iterable[Interval], behind: Iterable[Interval]) -> float | None:
    """`hidden_seconds` as a share of all of ``work``; None without work.

    >>> hidden_share([(0, 2), (4, 6)], behind=[(0, 3)])
    0.5
    """
    work = list(work)
    total = sum(end - start for start, end in work)
    return hidden_seconds(work, behind) / total if total > 0 else None
