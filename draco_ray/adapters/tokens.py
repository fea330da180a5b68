"""Step advantages to tokens, for trainers that take an advantage for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.algorithm.credit import step_advantages
from draco_ray.records import FloatArray, IntArray


def sampled_runs(mask: ArrayLike) -> list[tuple[int, int]]:
    """The agent's turns in a response: half-open spans of tokens that it sampled, in order.

    >>> sampled_runs([0, 1, 1, 0, 1])
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
        advantage: A_i, by whatever rule the trainer has.
        quality: Q_j of each step, None where nothing is cited.
        acted: of each of the agent's turns in the response, whether it is a step.
        mask: (T,) 1 where the agent sampled the token.
    Returns: (T,) float32, 0 off the mask and on turns that are no step. A_i on every sampled token where there is no
        step, no citation, or where the response has another number of turns than ``acted`` (it was cut, say).
    """
    mask_T = np.asarray(mask) != 0
    runs = sampled_runs(mask_T)
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
    """`token_advantages` of one trajectory that a trainer keeps in several rows, each with whole turns.

    Args:
        advantage: A_i.
        quality: Q_j of each step of the trajectory.
        acted: of each of its turns.
        masks: (T,) of each row, in the trajectory's order.

    Returns: (T,) float32 for each row.
    """
    rows = [np.asarray(mask) for mask in masks]
    # A token of the environment between two rows keeps their turns apart.
    whole = token_advantages(advantage, quality, acted, np.concatenate([np.append(row, 0) for row in rows]))
    ends = np.cumsum([len(row) + 1 for row in rows])
    return [whole[end - len(row) - 1 : end - 1] for row, end in zip(rows, ends, strict=True)]


def advantage_matrix(
    advantages: Sequence[float],
    qualities: Sequence[Sequence[float | None]],
    acted: Sequence[Sequence[bool]],
    response_mask: ArrayLike,
) -> FloatArray:
    """`token_advantages` of a batch: what verl's and SkyRL's estimators return, as NumPy.

    Args:
        advantages: A_i of each response.
        qualities: Q_j of the steps of each.
        acted: the turns of each.
        response_mask: (B, T), 1 where the agent sampled the token (verl's ``response_mask``, SkyRL's too).
    Returns: (B, T) float32.
    Raises: ValueError if the numbers of responses differ.
    """
    mask_BT = np.asarray(response_mask)
    if not len(advantages) == len(qualities) == len(acted) == len(mask_BT):
        raise ValueError(
            f"{len(advantages)} advantages, {len(qualities)} qualities, {len(acted)} turns and {len(mask_BT)} rows of "
            "the mask: expected one of each per response"
        )
    rows = [token_advantages(*each) for each in zip(advantages, qualities, acted, mask_BT, strict=True)]
    return np.stack(rows) if rows else np.zeros(mask_BT.shape, dtype=np.float32)
