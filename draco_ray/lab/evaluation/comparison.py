"""One setting minus another on the same tasks, and the correction for many such comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draco_ray.lab.evaluation.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``one`` minus ``other`` in one measure on one split."""

    one: str
    other: str
    split: str
    measure: str
    """``TGC p^1``, ``SGC p^3``, ``turns``."""
    difference: Interval
    """Shares, or turns, with the interval over scenarios and training seeds."""
    p_value: float
    """Two-sided."""
    adjusted_p: float
    """After Holm's correction over all comparisons of the same report."""
    tasks: int
    clusters: int
    seeds: tuple[int, int]
    """Training seeds of each."""
    lost: tuple[float, float]
    """Share of rollouts lost of each."""
    protocols: tuple[str, ...] = ()
    """Limits and simulators that were not the same for both."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: the i-th smallest of m times m - i + 1, made monotone, at most 1."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
