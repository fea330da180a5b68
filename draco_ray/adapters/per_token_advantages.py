"""Assigns step advantages to tokens, for trainers that take an advantage per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.algorithm.equations import step_advantages
from draco_ray.records import FloatArray, IntArray


def sampled_spans(mask: ArrayLike) -> list[tuple[int, int]]:
    """The agent's turns in a response: half-open spans of tokens that it sampled, in order.

    >>> sampled_spans([0, 1, 1, 0, 1])
    [(1, 3), (4, 5)]
    """
    padded = np.concatenate([[0], (np.asarray(mask) != 0).astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(padded))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def token_advantages(
    advantage: float, quality: Sequence[float | None], acted: Sequence[bool], mask: ArrayLike
) -> FloatArray:
    """An advantage for every token of one response (Eq. `credit`).

    Args:
        advantage: A_i, as the trainer computed it.
        quality: Q_j of each step; None if no step is cited.
        acted: for each of the agent's turns in the response, whether it is a step.
        mask: (T,) 1 where the agent sampled the token.
    Returns: (T,) float32, 0 off the mask and on turns that are not steps. A_i on every sampled token if there is no
        step, no citation, or if the number of turns differs from ``acted`` (for example, in a truncated response).
    """
    mask_T = np.asarray(mask) != 0
    runs = sampled_spans(mask_T)
    uniform_T = np.where(mask_T, np.float32(advantage), np.float32(0.0))
    if len(runs) != len(acted) or sum(acted) != len(quality) or not quality or any(q is None for q in quality):
        return uniform_T
    spans = [span for span, step in zip(runs, acted, strict=True) if step]
    tokens_M: IntArray = np.array([end - begin for begin, end in spans], dtype=np.int64)
    advantage_M = step_advantages(advantage, np.array(quality, dtype=float), tokens_M)
    found_T = np.zeros(len(mask_T), dtype=np.float32)
    for (begin, end), value in zip(spans, advantage_M, strict=True):
        found_T[begin:end] = value
    return found_T


def spread_rows(
    advantage: float, quality: Sequence[float | None], acted: Sequence[bool], masks: Sequence[ArrayLike]
) -> list[FloatArray]:
    """`token_advantages` of one trajectory that a trainer holds as several rows, each with whole turns.

    Args:
        advantage: A_i.
        quality: Q_j of each step of the trajectory.
        acted: for each of its turns, whether it is a step.
        masks: (T,) for each row, in the trajectory's order.

    Returns: (T,) float32 for each row.
    """
    rows = [np.asarray(mask) for mask in masks]
    # An unsampled token between two rows keeps their turns apart.
    whole = token_advantages(advantage, quality, acted, np.concatenate([np.append(row, 0) for row in rows]))
    ends = np.cumsum([len(row) + 1 for row in rows])
    return [whole[end - len(row) - 1 : end - 1] for row, end in zip(rows, ends, strict=True)]
