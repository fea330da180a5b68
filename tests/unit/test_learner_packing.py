"""Micro-batches and the dealing of samples to workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draco_ray.learner.packing import deal, pack

lengths = st.lists(st.integers(1, 500), max_size=60)


@given(lengths, st.integers(1, 2000))
def test_every_sequence_is_in_exactly_one_micro_batch(lengths: list[int], budget: int) -> None:
    assert sorted(index for batch in pack(lengths, budget) for index in batch) == list(range(len(lengths)))


@given(lengths, st.integers(1, 2000))
def test_padded_tokens_stay_in_the_budget_unless_one_sequence_exceeds_it(lengths: list[int], budget: int) -> None:
    for batch in pack(lengths, budget):
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= budget or len(batch) == 1


@given(lengths, st.integers(1, 2000))
def test_the_longest_come_first(lengths: list[int], budget: int) -> None:
    order = [lengths[index] for batch in pack(lengths, budget) for index in batch]
    assert order == sorted(order, reverse=True)


def test_similar_lengths_share_a_micro_batch() -> None:
    assert pack([2, 100, 2, 98, 2], token_budget=200) == [[1, 3], [0, 2, 4]]


@given(lengths, st.integers(1, 8))
def test_no_worker_is_ahead_by_more_than_one_sequence(lengths: list[int], workers: int) -> None:
    owners = deal(lengths, [0] * workers)
    loads = [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == w) for w in range(workers)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_dealing_goes_on_where_it_stopped() -> None:
    assert deal([5, 5], load_W=[9, 0, 0]) == [1, 2]
