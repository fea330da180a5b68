"""How samples of very different lengths share forward passes and workers: one row a pass, nothing padded.

A row is segments, one behind the other: a whole sequence, a prompt that several sequences of the row begin with, or
what one of these has after it. The prompt is computed once, and its gradient is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from draco_ray.records import BoolArray, IntArray


class Segment(NamedTuple):
    """Tokens of a row that attend to each other, and to those of the segment that they continue."""

    start: int
    length: int
    after: int | None
    """Which segment of the row these tokens continue, an earlier one; None: they begin a sequence."""


class Packable(NamedTuple):
    """One sequence on its way into a row."""

    token_ids_T: IntArray
    wanted_T: BoolArray
    """Tokens whose log-prob is wanted; never the first, which nothing predicts."""
    prompt: int
    """Tokens at its start, before the first wanted one, that others may begin with as well."""

    @property
    def family(self) -> Hashable:
        """Equal for sequences with the same prompt."""
        return self.token_ids_T[: self.prompt].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one forward pass computes: T tokens, of which V log-probs are wanted, sequence after sequence."""

    token_ids_T: IntArray
    position_T: IntArray
    """Each token's place in its own sequence."""
    segments: tuple[Segment, ...]
    predictor_V: IntArray
    """Where in the row the token before each wanted one is."""
    target_V: IntArray
    """The wanted tokens."""


@dataclass(slots=True)
class _Piece:
    """Sequences of one family that are in the same row."""

    tokens: int
    members: list[int] = field(default_factory=list)


def pack(sequences: Sequence[tuple[int, int, Hashable]], token_budget: int) -> list[list[int]]:
    """Rows of at most so many tokens, as few as first-fit finds: families first, then what is left of them together.

    Which rows there are does not change when those from some place on are taken away: workers that keep a part for
    later agree on the rest.

    Args:
        sequences: tokens, tokens of the prompt, and the family of each, which is equal where the prompts are.
        token_budget: tokens of a row, a shared prompt counted once; a longer sequence gets a row of its own.
    Returns: indices into `sequences`, every one exactly once; a family's next to each other.

    >>> pack([(10, 4, "a"), (3, 1, "b"), (9, 4, "a"), (4, 1, "c")], token_budget=16)
    [[0, 2], [3, 1]]
    """
    families: dict[Hashable, list[_Piece]] = {}
    pieces: list[_Piece] = []
    for index in sorted(range(len(sequences)), key=lambda index: -sequences[index][0]):
        length, prompt, family = sequences[index]
        mine = families.setdefault(family, [])
        piece = next((piece for piece in mine if piece.tokens + length - prompt <= token_budget), None)
        if piece is None:
            piece = _Piece(tokens=prompt)
            mine.append(piece)
            pieces.append(piece)
        piece.tokens += length - prompt
        piece.members.append(index)
    rows: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        row = next((row for row in rows if row.tokens + piece.tokens <= token_budget), None)
        if row is None:
            row = _Piece(tokens=0)
            rows.append(row)
        row.tokens += piece.tokens
        row.members += piece.members
    return [row.members for row in rows]


def lay_out(sequences: Sequence[Packable]) -> Row:
    """Put sequences into one row, those with the same prompt behind it. Wanted tokens keep the order of `sequences`."""
    members: dict[Hashable, list[int]] = {}
    for index, sequence in enumerate(sequences):
        members.setdefault(sequence.family, []).append(index)
    segments: list[Segment] = []
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    predictors: list[IntArray] = [np.zeros(0, dtype=np.int64) for _ in sequences]

    def append(sequence: Packable, first: int, end: int, after: int | None) -> int:
        start = segments[-1].start + segments[-1].length if segments else 0
        segments.append(Segment(start, end - first, after))
        tokens.append(sequence.token_ids_T[first:end])
        positions.append(np.arange(first, end))
        return start

    for family in members.values():
        shared = sequences[family[0]].prompt if len(family) > 1 else 0
        after = None
        if shared:
            prompt_start = append(sequences[family[0]], 0, shared, None)
            after = len(segments) - 1
        for index in family:
            sequence = sequences[index]
            start = append(sequence, shared, len(sequence.token_ids_T), after)
            before_V = np.flatnonzero(sequence.wanted_T) - 1
            # The prompt's last token predicts the first one after it.
            predictors[index] = np.where(
                before_V < shared, prompt_start + before_V if shared else 0, start + before_V - shared
            )
    return Row(
        token_ids_T=np.concatenate(tokens).astype(np.int64),
        position_T=np.concatenate(positions),
        segments=tuple(segments),
        predictor_V=np.concatenate(predictors).astype(np.int64),
        target_V=np.concatenate([one.token_ids_T[one.wanted_T] for one in sequences]).astype(np.int64),
    )


def part_of(row: Row, worker: int, workers: int) -> tuple[Row, IntArray]:
    """One worker's tokens of a row that several share, equally many each: tokens that count for nothing fill it up.

    Args:
        row: T tokens, of which V log-probs are wanted.
        worker: whose part.
        workers: how many share the row.
    Returns: the part, whose segments are those of the whole row with what fills it up behind the last one; and which of
            the row's wanted tokens are predicted there.
    """
    tokens = -(-len(row.token_ids_T) // workers)
    missing = tokens * workers - len(row.token_ids_T)
    first, end = worker * tokens, (worker + 1) * tokens
    mine_V = np.flatnonzero((row.predictor_V >= first) & (row.predictor_V < end))
    last = row.segments[-1]
    part = Row(
        token_ids_T=np.pad(row.token_ids_T, (0, missing))[first:end],
        position_T=np.pad(row.position_T, (0, missing))[first:end],
        segments=(*row.segments[:-1], last._replace(length=last.length + missing)),
        predictor_V=row.predictor_V[mine_V] - first,
        target_V=row.target_V[mine_V],
    )
    return part, mine_V


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
