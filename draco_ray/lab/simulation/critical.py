"""What a simulated step was waiting for, from its end back to its beginning."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from draco_ray.lab.simulation.work import PARTS, WAITS

ROUNDING = 1e-6
UPDATE = "update"
LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that was done in a simulated step."""

    stage: str
    group: str
    """Of the pipeline; `LEARNER` for an update, which is of no group."""
    ready: float
    """When all that it needs was there."""
    ended: float
    parts: Mapping[str, float]
    """What the time between went to, in order; adds up to it."""


def longest_path(entries: Iterable[Entry], began: float, ended: float, tail: float) -> dict[str, float]:
    """Part of the path -> seconds; they add up to ``ended - began``.

    An entry's predecessor is what ended last before it was ready: of its own group, and before the learner's work also
    of all that the learner did. What an entry did before the step began (it ran ahead) is no part of the path.

    Args:
        entries: of the step, and of what ran ahead of it.
        began: the step's beginning.
        ended: its end.
        tail: seconds after its last update.
    """
    by_group: dict[str, list[Entry]] = defaultdict(list)
    for each in entries:
        by_group[each.group].append(each)
    learned = [each for group in by_group.values() for each in group if WAITS["learner"] in each.parts]
    path = dict.fromkeys(PARTS, 0.0)
    path["sync and checkpoint"] = tail
    at = ended - tail
    passed: set[int] = set()
    entry: Entry | None = max(learned, key=lambda each: each.ended, default=None)
    while entry is not None and at > began + ROUNDING:
        _spend(path, entry, began)
        passed.add(id(entry))
        at = entry.ready
        # The learner's work waits for its group, or for an update, which waits for all of it.
        known = [*by_group[entry.group], *learned] if WAITS["learner"] in entry.parts else by_group[entry.group]
        entry = _before(known, at, passed)
        if entry is None or entry.ended < at - ROUNDING:
            # Of several things that took no time the wrong one may have been followed: go on where something ended.
            entry = _before(itertools.chain(*by_group.values()), at, passed) or entry
    path["between steps"] = max(0.0, ended - began - math.fsum(path.values()))
    return {part: seconds for part, seconds in path.items() if seconds > ROUNDING}


def _before(entries: Iterable[Entry], at: float, passed: set[int]) -> Entry | None:
    """What ended last, not after ``at``, of those not passed."""
    ended = (each for each in entries if each.ended <= at + ROUNDING and id(each) not in passed)
    return max(ended, key=lambda each: each.ended, default=None)


def _spend(path: dict[str, float], entry: Entry, began: float) -> None:
    """Add an entry's parts; of one that began before the step, the last ones."""
    left = entry.ended - max(entry.ready, began)
    for part, seconds in reversed(list(entry.parts.items())):
        spent = min(seconds, left)
        path[part] += spent
        left -= spent
