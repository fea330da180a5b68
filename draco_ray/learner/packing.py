"""Packing sequences of very different lengths into micro-batches without padding, and balancing them over workers.

The tokens of a micro-batch are concatenated segments: a whole sequence, the common prefix of all prompts (system prompt
and tools), the rest of a prompt that several sequences share, or the unshared rest of a sequence. A shared segment is
computed once, and its gradient is the sum over the sequences that share it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from draco_ray.records import BoolArray, IntArray

SHORTEST_COMMON = 16
"""Minimum length of a shared common prefix, in tokens; for a shorter one, another segment costs more than it saves."""


class Segment(NamedTuple):
    """Consecutive tokens that attend to each other, and to the tokens of the segments that they continue."""

    start: int
    length: int
    after: int | None
    """Index of the earlier segment that these tokens continue; None: they begin a sequence."""


class InputSequence(NamedTuple):
    """One sequence of a `MicroBatch`, with its targets."""

    token_ids_T: IntArray
    target_mask_T: BoolArray
    """Tokens whose log-prob is computed; never the first, which nothing predicts."""
    prompt_length: int
    """Number of leading tokens, before the first target, that other sequences may share."""

    @property
    def prompt_key(self) -> Hashable:
        """A key that is equal for sequences with the same prompt."""
        return self.token_ids_T[: self.prompt_length].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward pass: T tokens with V targets, which are in the order of the sequences."""

    token_ids_T: IntArray
    position_T: IntArray
    """Position of each token in its own sequence."""
    segments: tuple[Segment, ...]
    predictor_V: IntArray
    """Index of the token before each target."""
    target_V: IntArray
    """Token ids of the targets."""


@dataclass(slots=True)
class _Bin:
    """Sequences, by their indices, that are packed together."""

    tokens: int
    members: list[int] = field(default_factory=list)


def pack(sequences: Sequence[tuple[int, int, Hashable]], token_budget: int) -> list[list[int]]:
    """Pack sequences by first-fit: those with a common prompt into bins, then the bins into micro-batches.

    Removing the sequences of the last micro-batches does not change the others, so workers that process only some of
    them agree on the rest.

    Args:
        sequences: length, prompt length, and prompt key of each.
        token_budget: tokens of a micro-batch, counting a shared prompt once; a longer sequence gets its own batch.
    Returns: indices into ``sequences``, each exactly once; those with a common prompt next to each other.

    >>> pack([(10, 4, "a"), (3, 1, "b"), (9, 4, "a"), (4, 1, "c")], token_budget=16)
    [[0, 2], [3, 1]]
    """
    by_prompt: dict[Hashable, list[_Bin]] = {}
    with_prompt: list[_Bin] = []
    for index in sorted(range(len(sequences)), key=lambda index: -sequences[index][0]):
        length, prompt, key = sequences[index]
        same = by_prompt.setdefault(key, [])
        found = next((each for each in same if each.tokens + length - prompt <= token_budget), None)
        if found is None:
            found = _Bin(tokens=prompt)
            same.append(found)
            with_prompt.append(found)
        found.tokens += length - prompt
        found.members.append(index)
    packed: list[_Bin] = []
    for part in sorted(with_prompt, key=lambda each: -each.tokens):
        found = next((each for each in packed if each.tokens + part.tokens <= token_budget), None)
        if found is None:
            found = _Bin(tokens=0)
            packed.append(found)
        found.tokens += part.tokens
        found.members += part.members
    return [each.members for each in packed]


def common_prefix(sequences: Sequence[InputSequence]) -> int:
    """Length of the common prefix of all prompts, in tokens; 0 if it is shorter than `SHORTEST_COMMON`."""
    shortest = min((each.prompt_length for each in sequences), default=0)
    equal_T = np.ones(shortest, dtype=bool)
    for each in sequences:
        equal_T &= each.token_ids_T[:shortest] == sequences[0].token_ids_T[:shortest]
    length = shortest if equal_T.all() else int(np.argmin(equal_T))
    return length if length >= SHORTEST_COMMON else 0


def concatenate(sequences: Sequence[InputSequence]) -> MicroBatch:
    """Make a micro-batch: each shared prompt is followed by its sequences; targets keep the order of ``sequences``."""
    by_prompt: dict[Hashable, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt_key, []).append(index)
    segments: list[Segment] = []
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    predictors: list[IntArray] = [np.zeros(0, dtype=np.int64) for _ in sequences]

    def append(sequence: InputSequence, first: int, end: int, after: int | None) -> int:
        start = segments[-1].start + segments[-1].length if segments else 0
        segments.append(Segment(start, end - first, after))
        tokens.append(sequence.token_ids_T[first:end])
        positions.append(np.arange(first, end))
        return start

    # If all sequences have the same prompt, they share it below in any case.
    common = common_prefix(sequences) if len(by_prompt) > 1 else 0
    if common:
        append(sequences[0], 0, common, None)
    for members in by_prompt.values():
        shared, after = common, 0 if common else None
        place_P = np.arange(common)
        prompt = sequences[members[0]].prompt_length
        if len(members) > 1 and prompt > common:
            start = append(sequences[members[0]], common, prompt, after)
            place_P = np.append(place_P, np.arange(start, start + prompt - common))
            shared, after = prompt, len(segments) - 1
        for index in members:
            sequence = sequences[index]
            start = append(sequence, shared, len(sequence.token_ids_T), after)
            place_T = np.append(place_P, np.arange(start, start + len(sequence.token_ids_T) - shared))
            # The last token of the shared prefix predicts the first token after the prefix.
            predictors[index] = place_T[np.flatnonzero(sequence.target_mask_T) - 1]
    return MicroBatch(
        token_ids_T=np.concatenate(tokens).astype(np.int64),
        position_T=np.concatenate(positions),
        segments=tuple(segments),
        predictor_V=np.concatenate(predictors).astype(np.int64),
        target_V=np.concatenate([each.token_ids_T[each.target_mask_T] for each in sequences]).astype(np.int64),
    )


def token_shard(batch: MicroBatch, worker: int, workers: int) -> tuple[MicroBatch, IntArray]:
    """One worker's tokens of a micro-batch that workers share in equal parts; padding fills the last part.

    Args:
        batch: T tokens with V targets.
        worker: index of the worker.
        workers: number of workers that share the micro-batch.
    Returns: the part, with all segments of the micro-batch (the last one includes the padding), and the indices of the
            targets that are predicted in this part.
    """
    tokens = -(-len(batch.token_ids_T) // workers)
    missing = tokens * workers - len(batch.token_ids_T)
    first, end = worker * tokens, (worker + 1) * tokens
    mine_V = np.flatnonzero((batch.predictor_V >= first) & (batch.predictor_V < end))
    last = batch.segments[-1]
    part = MicroBatch(
        token_ids_T=np.pad(batch.token_ids_T, (0, missing))[first:end],
        position_T=np.pad(batch.position_T, (0, missing))[first:end],
        segments=(*batch.segments[:-1], last._replace(length=last.length + missing)),
        predictor_V=batch.predictor_V[mine_V] - first,
        target_V=batch.target_V[mine_V],
    )
    return part, mine_V


def balance(lengths: Iterable[int], loads: list[int]) -> list[int]:
    """Assign each sequence, longest first, to the shard with the fewest tokens so far.

    Args:
        lengths: tokens of each sequence.
        loads: tokens that each shard already has; the list is updated with the new sequences.
    Returns: the shard of each sequence; the same on every worker for the same arguments.

    >>> balance([5, 9, 4], loads=[0, 0])
    [1, 0, 1]
    """
    tokens = list(lengths)
    shards = [0] * len(tokens)
    for index in sorted(range(len(tokens)), key=lambda index: -tokens[index]):
        shards[index] = min(range(len(loads)), key=lambda shard: loads[shard])
        loads[shards[index]] += tokens[index]
    return shards
