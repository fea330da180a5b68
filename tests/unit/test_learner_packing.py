"""Rows of sequences and the dealing of samples to workers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draco_ray.learner.packing import (
    SHORTEST_COMMON,
    InputSequence,
    Segment,
    balance,
    common_prefix,
    concatenate,
    pack,
    token_shard,
)

lengths = st.lists(st.integers(1, 500), max_size=60)
shapes = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 3)).map(lambda one: (one[0] + 40 * one[1], 40 * one[1], one[1])),
    max_size=40,
)
"""Tokens, tokens of the prompt, family; family 0 has no prompt."""


def row_tokens(sequences: list[tuple[int, int, int]], row: list[int]) -> int:
    prompts = {sequences[index][2]: sequences[index][1] for index in row}
    return sum(prompts.values()) + sum(sequences[index][0] - sequences[index][1] for index in row)


@given(shapes, st.integers(1, 2000))
def test_every_sequence_is_in_exactly_one_row(sequences: list[tuple[int, int, int]], budget: int) -> None:
    rows = pack(sequences, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(sequences)))


@given(shapes, st.integers(1, 2000))
def test_a_row_stays_in_the_budget_unless_one_sequence_exceeds_it(
    sequences: list[tuple[int, int, int]], budget: int
) -> None:
    for row in pack(sequences, budget):
        assert row_tokens(sequences, row) <= budget or len(row) == 1


@given(shapes, st.integers(1, 2000))
def test_the_first_row_has_the_longest_piece(sequences: list[tuple[int, int, int]], budget: int) -> None:
    rows = pack(sequences, budget)
    if rows and max(one[0] for one in sequences) > budget:
        assert row_tokens(sequences, rows[0]) == max(one[0] for one in sequences)


@given(shapes, st.integers(1, 2000), st.integers(0, 10))
def test_the_first_rows_are_the_same_without_the_others(
    sequences: list[tuple[int, int, int]], budget: int, kept: int
) -> None:
    """Sharded workers make as many passes as each other, and keep what is in later rows for the next time."""
    rows = pack(sequences, budget)[:kept]
    mine = sorted(index for row in rows for index in row)
    again = pack([sequences[index] for index in mine], budget)
    assert [[mine[index] for index in row] for row in again] == rows


def test_a_group_shares_its_prompt_and_a_row() -> None:
    group = [(110, 100, "a"), (120, 100, "a"), (105, 100, "a")]
    assert pack([*group, (30, 10, "b")], token_budget=165) == [[1, 0, 2, 3]]
    assert pack([*group, (31, 10, "b")], token_budget=165) == [[1, 0, 2], [3]]


def test_a_row_has_the_prompt_once_and_wanted_tokens_in_the_order_of_the_sequences() -> None:
    def packable(token_ids: list[int], wanted: list[int], prompt: int) -> InputSequence:
        return InputSequence(np.array(token_ids), np.isin(np.arange(len(token_ids)), wanted), prompt)

    row = concatenate(
        [packable([7, 8, 1, 2], [2, 3], 2), packable([5, 6, 4], [1, 2], 1), packable([7, 8, 3], [2], 2)],
    )
    assert row.token_ids_T.tolist() == [7, 8, 1, 2, 3, 5, 6, 4]
    assert row.position_T.tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert row.segments == (Segment(0, 2, None), Segment(2, 2, 0), Segment(4, 1, 0), Segment(5, 3, None))
    assert row.predictor_V.tolist() == [1, 2, 5, 6, 1]
    assert row.target_V.tolist() == [1, 2, 6, 4, 3]


def test_what_all_prompts_begin_with_is_in_a_row_once() -> None:
    """System prompt and tools of two groups, of which one has two sequences, and of one whose prompt is no longer."""
    system = [9] * SHORTEST_COMMON
    n = len(system)
    sequences = [[*system, 1, 2, 3], [*system, 4, 5], [*system, 1, 2, 6, 7], [*system, 8]]
    row = concatenate(
        [
            InputSequence(np.array(ids), np.arange(len(ids)) >= n + prompt, n + prompt)
            for ids, prompt in zip(sequences, (2, 1, 2, 0), strict=True)
        ]
    )
    assert row.token_ids_T.tolist() == [*system, 1, 2, 3, 6, 7, 4, 5, 8]
    assert [segment[1:] for segment in row.segments] == [(n, None), (2, 0), (1, 1), (2, 1), (2, 0), (1, 0)]
    assert row.position_T[n:].tolist() == [n, n + 1, n + 2, n + 2, n + 3, n, n + 1, n]
    assert row.target_V.tolist() == [3, 5, 6, 7, 8]
    assert row.predictor_V.tolist() == [n + 1, n + 5, n + 1, n + 3, n - 1]


def test_a_few_common_tokens_are_not_shared() -> None:
    ids_T = np.ones(SHORTEST_COMMON + 1, dtype=np.int64)
    ids_T[-2:] = 2, 3
    other_T = np.where(ids_T == 2, 4, ids_T)
    sequences = [InputSequence(ids, np.arange(len(ids)) == len(ids) - 1, len(ids) - 1) for ids in (ids_T, other_T)]
    assert common_prefix(sequences) == 0
    assert len(concatenate(sequences).segments) == 2


def test_sequences_without_a_prompt_share_nothing() -> None:
    alike = InputSequence(np.array([1, 2]), np.array([False, True]), 0)
    assert concatenate([alike, alike]).segments == (Segment(0, 2, None), Segment(2, 2, None))


@given(lengths, st.integers(1, 8))
def test_no_worker_is_ahead_by_more_than_one_sequence(lengths: list[int], workers: int) -> None:
    owners = balance(lengths, [0] * workers)
    loads = [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == w) for w in range(workers)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_dealing_goes_on_where_it_stopped() -> None:
    assert balance([5, 5], loads=[9, 0, 0]) == [1, 2]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 9))
def test_the_parts_of_a_row_are_the_row_and_what_fills_it_up(lengths: list[int], prompt: int, workers: int) -> None:
    row = concatenate(
        [InputSequence(np.arange(n) + 1, np.arange(n) >= min(prompt + 1, n - 1), min(prompt, n - 1)) for n in lengths]
    )
    parts = [token_shard(row, worker, workers) for worker in range(workers)]
    tokens, filling = len(row.token_ids_T), -len(row.token_ids_T) % workers
    assert {len(part.token_ids_T) for part, _ in parts} == {(tokens + filling) // workers}
    assert filling < workers
    for name, filled in (("token_ids_T", 0), ("position_T", 0)):
        together = np.concatenate([getattr(part, name) for part, _ in parts])
        np.testing.assert_array_equal(together, [*getattr(row, name), *[filled] * filling])
    # Every wanted token is one worker's, which has the token before it.
    assert sorted(index for _, mine_V in parts for index in mine_V) == list(range(len(row.target_V)))
    for part, mine_V in parts:
        np.testing.assert_array_equal(part.token_ids_T[part.predictor_V], row.token_ids_T[row.predictor_V[mine_V]])
        np.testing.assert_array_equal(part.target_V, row.target_V[mine_V])
        assert part.segments[:-1] == row.segments[:-1]
        assert part.segments[-1].start + part.segments[-1].length == tokens + filling
