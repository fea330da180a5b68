"""How samples of very different lengths share forward passes and workers."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Micro-batches of similar lengths, so that little is padding.

    Args:
        lengths: tokens of each sequence.
        token_budget: padded tokens (rows x longest row) of a micro-batch; a longer sequence gets one of its own.
    Returns: indices into `lengths`, every one exactly once; longest first, so that memory peaks at the start.

    >>> pack([10, 3, 9, 4], token_budget=20)
    [[0, 2], [3, 1]]
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


def deal(lengths: Sequence[int], load_W: Sequence[int]) -> list[int]:
    """Give each sequence, longest first, to the worker with the least to do so far.

    Args:
        lengths: tokens of each sequence.
        load_W: tokens each of the W workers already has.
    Returns: the worker of each sequence; the same on every worker that asks with the same numbers.

    >>> deal([5, 9, 4], load_W=[0, 0])
    [1, 0, 1]
    """
    loads = list(load_W)
    workers = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        workers[index] = min(range(len(loads)), key=lambda worker: loads[worker])
        loads[workers[index]] += lengths[index]
    return workers
