"""The credit rule as the paper states it: P1-P7, the worked example, the traced rollout, every degenerate case."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draco_ray.algorithm.equations import (
    credit_fallback,
    is_inert,
    quality_spread,
    step_advantages,
    step_quality,
    step_weights,
)
from draco_ray.records import Attribution, CreditFallback, FloatArray, IntArray, Verdict

Case = tuple[float, FloatArray, IntArray]


@st.composite
def judged(draw: st.DrawFn) -> Case:
    """A_i, Q_M as ratios of small counts, n_M: what a judge and a policy can produce."""
    votes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any), min_size=1, max_size=50))
    tokens = draw(st.lists(st.integers(1, 4000), min_size=len(votes), max_size=len(votes)))
    advantage = draw(st.floats(0.01, 5)) * draw(st.sampled_from([-1, 1]))
    return advantage, np.array([passed / (passed + failed) for passed, failed in votes]), np.array(tokens)


@st.composite
def cited(draw: st.DrawFn) -> tuple[list[Attribution], np.ndarray, int]:
    """Attributions of up to 12 criteria to up to 20 steps, with dropout."""
    steps = draw(st.integers(1, 20))
    surviving = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    attributions = [
        Attribution(
            criterion=criterion,
            verdict=draw(st.sampled_from(list(Verdict))),
            steps=tuple(sorted(draw(st.sets(st.integers(1, steps), max_size=steps)))),
        )
        for criterion in range(len(surviving))
        if draw(st.booleans())
    ]
    return attributions, np.array(surviving), steps


def reallocated(case: Case) -> bool:
    return credit_fallback(*case) is CreditFallback.NONE


@given(judged())
def test_p1_the_total_push_is_that_of_baseline_grpo(case: Case) -> None:
    advantage, _, tokens_M = case
    assert tokens_M @ step_advantages(*case) == pytest.approx(advantage * tokens_M.sum())


@given(judged(), st.floats(0.01, 1.0))
def test_p2_constant_weights_give_equal_step_totals(case: Case, quality: float) -> None:
    advantage, quality_M, tokens_M = case
    constant_M = np.full_like(quality_M, quality if advantage >= 0 else 1 - quality)
    assume(reallocated((advantage, constant_M, tokens_M)))
    totals = tokens_M * step_advantages(advantage, constant_M, tokens_M)
    assert totals == pytest.approx(np.full(len(tokens_M), advantage * tokens_M.sum() / len(tokens_M)))


@given(judged())
def test_p3_no_step_is_pushed_against_the_trajectory(case: Case) -> None:
    assert (step_advantages(*case) * np.sign(case[0]) >= 0).all()


@given(judged())
def test_p4_push_rises_with_quality_on_winners_and_falls_on_losers(case: Case) -> None:
    advantage, quality_M, tokens_M = case
    assume(reallocated(case))
    push = np.abs(tokens_M * step_advantages(*case))
    better = quality_M if advantage >= 0 else -quality_M
    order = np.argsort(better, kind="stable")
    assert (np.diff(push[order]) >= -1e-9 * push.max()).all()
    for worse, good in pairwise(order):
        if better[good] - better[worse] > 1e-9:
            assert push[good] > push[worse]


@given(judged(), st.integers(0, 49), st.integers(1, 4000))
def test_p5_a_step_cannot_buy_influence_by_length(case: Case, step: int, length: int) -> None:
    advantage, quality_M, tokens_M = case
    assume(reallocated(case))  # the uniform fallback is per token, the one exception
    padded_M = tokens_M.copy()
    padded_M[step % len(padded_M)] = length

    def share(lengths: IntArray) -> FloatArray:
        return lengths * step_advantages(advantage, quality_M, lengths) / (advantage * lengths.sum())

    assert share(padded_M) == pytest.approx(share(tokens_M))


@given(judged(), st.floats(0.01, 100))
def test_p6_scaling_the_advantage_scales_every_step_alike(case: Case, scale: float) -> None:
    advantage, quality_M, tokens_M = case
    assert step_advantages(advantage * scale, quality_M, tokens_M) == pytest.approx(scale * step_advantages(*case))


@given(judged())
def test_p7_a_loser_is_the_winner_with_quality_flipped(case: Case) -> None:
    advantage, quality_M, tokens_M = case
    assert step_advantages(-advantage, 1 - quality_M, tokens_M) == pytest.approx(-step_advantages(*case), abs=1e-9)


@given(judged())
def test_the_credit_rule_equals_a_loop_over_steps(case: Case) -> None:
    """a_j = A N w_j / (n_j sum_k w_k), w = Q on a winner and 1 - Q on a loser, one step after the other."""
    advantage, quality_M, tokens_M = case
    weights = [quality if advantage >= 0 else 1 - quality for quality in quality_M.tolist()]
    assert step_weights(advantage, quality_M) == pytest.approx(np.array(weights))
    assume(sum(weights) > 0)
    tokens = sum(tokens_M.tolist())
    expected = [advantage * tokens * w / (n * sum(weights)) for w, n in zip(weights, tokens_M.tolist(), strict=True)]
    assert step_advantages(*case) == pytest.approx(np.array(expected))


def test_weights_are_quality_on_a_winner_and_its_complement_on_a_loser() -> None:
    quality_M = np.array([1.0, 0.25, 0.0])
    assert step_weights(0.3, quality_M).tolist() == [1.0, 0.25, 0.0]
    assert step_weights(0.0, quality_M).tolist() == [1.0, 0.25, 0.0]
    assert step_weights(-0.3, quality_M).tolist() == [0.0, 0.75, 1.0]


def test_worked_example_equal_quality_buys_equal_totals() -> None:
    tokens_M = np.array([2, 4])
    advantage_M = step_advantages(1.0, np.array([1.0, 1.0]), tokens_M)
    assert advantage_M.tolist() == [1.5, 0.75]
    assert (tokens_M * advantage_M).tolist() == [3.0, 3.0]


def test_worked_example_the_better_step_claims_twice_the_total() -> None:
    tokens_M = np.array([2, 4])
    advantage_M = step_advantages(1.0, np.array([0.5, 1.0]), tokens_M)
    assert advantage_M.tolist() == [1.0, 1.0]
    assert (tokens_M * advantage_M).tolist() == [2.0, 4.0]
    # Here that equals no credit at all; the same steps of a loser, and at other lengths, do not.
    assert step_advantages(-1.0, np.array([0.5, 0.0]), tokens_M).tolist() == [-1.0, -1.0]
    assert step_advantages(1.0, np.array([0.5, 1.0]), np.array([4, 2])).tolist() == [0.5, 2.0]
    assert step_advantages(-1.0, np.array([0.5, 1.0]), np.array([4, 2])).tolist() == [-1.5, 0.0]


TRACED = [
    Attribution(criterion=0, verdict=Verdict.FAIL, steps=(4, 6)),
    Attribution(criterion=1, verdict=Verdict.FAIL, steps=(5, 6)),
    Attribution(criterion=2, verdict=Verdict.FAIL, steps=(3, 4, 5)),
    Attribution(criterion=3, verdict=Verdict.PASS, steps=(5,)),
    Attribution(criterion=4, verdict=Verdict.PASS, steps=(1, 2, 3, 4, 5, 6)),
]
"""The appendix's running example."""


def test_traced_rollout_tallies_and_qualities() -> None:
    quality = step_quality(TRACED, np.ones(5, dtype=bool), steps=7)
    assert quality.passed_M.dtype == quality.failed_M.dtype == np.int64
    assert quality.passed_M.tolist() == [1, 1, 1, 1, 2, 1, 0]
    assert quality.failed_M.tolist() == [0, 0, 1, 2, 2, 2, 0]
    assert quality.cited_M.tolist() == [True] * 6 + [False]
    assert quality.quality_M.round(3).tolist() == [1.0, 1.0, 0.5, 0.333, 0.5, 0.333, 0.611]


def test_traced_rollout_weights_advantages_and_totals() -> None:
    quality_M = step_quality(TRACED, np.ones(5, dtype=bool), steps=7).quality_M
    tokens_M = np.array([40, 40, 30, 50, 30, 60, 60])
    weight_M = step_weights(1.0, quality_M)
    advantage_M = step_advantages(1.0, quality_M, tokens_M)
    totals_M = tokens_M * advantage_M
    assert weight_M.sum() == pytest.approx(4.278, abs=5e-4)
    assert advantage_M.round(3).tolist() == [1.812, 1.812, 1.208, 0.483, 1.208, 0.403, 0.738]
    assert totals_M.round(2).tolist() == [72.47, 72.47, 36.23, 24.16, 36.23, 24.16, 44.29]
    assert totals_M.sum() == pytest.approx(310.0)


@given(cited())
def test_step_quality_equals_counting_by_hand(case: tuple[list[Attribution], np.ndarray, int]) -> None:
    attributions, surviving_K, steps = case
    expected: list[float | None] = []
    for step in range(1, steps + 1):
        citing = [
            a.verdict
            for a in attributions
            if surviving_K[a.criterion] and a.verdict != Verdict.NOT_APPLICABLE and step in a.steps
        ]
        expected.append(citing.count(Verdict.PASS) / len(citing) if citing else None)
    known = [quality for quality in expected if quality is not None]
    quality = step_quality(attributions, surviving_K, steps)
    assert quality.cited_M.tolist() == [value is not None for value in expected]
    if known:
        inherited = sum(known) / len(known)
        assert quality.quality_M == pytest.approx(np.array([inherited if q is None else q for q in expected]))
    else:
        assert np.isnan(quality.quality_M).all()


@given(cited(), st.sampled_from([-1.0, 1.0]), st.data())
def test_any_citations_conserve_the_total_and_a_fallback_is_always_inert(
    case: tuple[list[Attribution], np.ndarray, int], advantage: float, data: st.DataObject
) -> None:
    attributions, surviving_K, steps = case
    tokens_M = np.array(data.draw(st.lists(st.integers(0, 500), min_size=steps, max_size=steps)))
    quality = step_quality(attributions, surviving_K, steps)
    advantage_M = step_advantages(advantage, quality.quality_M, tokens_M)
    assert tokens_M @ advantage_M == pytest.approx(advantage * tokens_M.sum())
    fallback = credit_fallback(advantage, quality.quality_M, tokens_M)
    assert fallback is CreditFallback.NONE or is_inert(quality, fallback)
    if (tokens_M > 0).all():
        assert is_inert(quality, fallback) == (not quality.mixed)


def test_no_citation_falls_back_to_the_uniform_advantage() -> None:
    quality_M = step_quality([], np.ones(3, dtype=bool), steps=2).quality_M
    assert credit_fallback(-0.5, quality_M, np.array([3, 9])) is CreditFallback.NO_CITATION
    assert step_advantages(-0.5, quality_M, np.array([3, 9])).tolist() == [-0.5, -0.5]


def test_not_applicable_and_dropped_criteria_cite_nothing() -> None:
    attributions = [
        Attribution(criterion=0, verdict=Verdict.NOT_APPLICABLE, steps=(1,)),
        Attribution(criterion=1, verdict=Verdict.FAIL, steps=(2,)),
    ]
    quality = step_quality(attributions, np.array([True, False]), steps=2)
    assert not quality.cited_M.any()
    assert np.isnan(quality.quality_M).all()


@pytest.mark.parametrize(
    ("advantage", "quality"), [(0.7, 0.0), (-0.7, 1.0)], ids=["winner, all fail", "loser, all pass"]
)
def test_a_vanishing_normaliser_falls_back_to_the_uniform_advantage(advantage: float, quality: float) -> None:
    quality_M, tokens_M = np.full(3, quality), np.array([1, 2, 3])
    assert credit_fallback(advantage, quality_M, tokens_M) is CreditFallback.VANISHING_NORMALISER
    assert step_advantages(advantage, quality_M, tokens_M).tolist() == [advantage] * 3


@pytest.mark.parametrize(
    ("advantage", "quality"), [(0.6, 1.0), (-0.6, 0.0)], ids=["winner, all pass", "loser, all fail"]
)
def test_unanimous_verdicts_give_equal_totals_not_equal_tokens(advantage: float, quality: float) -> None:
    advantage_M = step_advantages(advantage, np.full(2, quality), np.array([2, 4]))
    assert advantage_M == pytest.approx(advantage * np.array([1.5, 0.75]))


def test_zero_advantage_pushes_nothing() -> None:
    assert step_advantages(0.0, np.array([0.2, 0.9]), np.array([5, 6])).tolist() == [0.0, 0.0]


def test_a_single_step_takes_the_whole_advantage() -> None:
    assert step_advantages(-1.3, np.array([0.5]), np.array([17])) == pytest.approx(np.array([-1.3]))


def test_a_step_without_tokens_gets_nothing_and_leaves_the_normaliser() -> None:
    with_empty = step_advantages(1.0, np.array([1.0, 1.0, 0.5]), np.array([2, 0, 4]))
    without = step_advantages(1.0, np.array([1.0, 0.5]), np.array([2, 4]))
    assert with_empty.tolist() == [without[0], 0.0, without[1]]


def test_weight_only_on_empty_steps_is_a_vanishing_normaliser() -> None:
    quality_M, tokens_M = np.array([1.0, 0.0]), np.array([0, 4])
    assert credit_fallback(1.0, quality_M, tokens_M) is CreditFallback.VANISHING_NORMALISER
    assert step_advantages(1.0, quality_M, tokens_M).tolist() == [0.0, 1.0]


def test_a_trajectory_without_steps_has_no_step_advantages() -> None:
    assert step_advantages(1.0, np.zeros(0), np.zeros(0, dtype=np.int64)).tolist() == []
    assert credit_fallback(1.0, np.zeros(0), np.zeros(0, dtype=np.int64)) is CreditFallback.NO_STEP


@pytest.mark.parametrize(
    ("attribution", "message"),
    [
        (Attribution(criterion=0, verdict=Verdict.PASS, steps=(0,)), "cites step 0, but the trajectory has 3 steps"),
        (Attribution(criterion=0, verdict=Verdict.FAIL, steps=(1, 4)), "cites step 4, but the trajectory has 3 steps"),
        (Attribution(criterion=2, verdict=Verdict.PASS, steps=(1,)), "criterion 2 is attributed, but the rubric has 2"),
        (
            Attribution(criterion=-1, verdict=Verdict.PASS, steps=(1,)),
            "criterion -1 is attributed, but the rubric has 2",
        ),
    ],
)
def test_citations_out_of_range_are_refused(attribution: Attribution, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_quality([attribution], np.ones(2, dtype=bool), steps=3)


def test_a_criterion_attributed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="criterion 1 is attributed twice"):
        step_quality([Attribution(criterion=1, verdict=Verdict.PASS, steps=(1,))] * 2, np.ones(2, dtype=bool), steps=1)


@pytest.mark.parametrize(
    ("quality_M", "tokens_M", "message"),
    [
        ([0.5], [1, 2], "expected two equal vectors"),
        ([0.5, 1.5], [1, 2], "outside \\[0, 1\\]"),
        ([0.5, np.nan], [1, 2], "outside \\[0, 1\\]"),
        ([0.5, 0.5], [1, -2], "negative number of tokens"),
    ],
)
def test_impossible_steps_are_refused(quality_M: list[float], tokens_M: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_advantages(1.0, np.array(quality_M), np.array(tokens_M))


def test_inert_is_decided_by_the_verdicts_that_cite() -> None:
    surviving_K = np.array([True, True, False])

    def inert(*verdicts: Verdict, steps: tuple[int, ...] = (1,)) -> bool:
        attributions = [Attribution(criterion=k, verdict=verdict, steps=steps) for k, verdict in enumerate(verdicts)]
        quality = step_quality(attributions, surviving_K, steps=2)
        return is_inert(quality, credit_fallback(1.0, quality.quality_M, np.array([3, 4])))

    assert not inert(Verdict.PASS, Verdict.FAIL)
    assert inert(Verdict.PASS, Verdict.PASS)
    assert inert(Verdict.FAIL, Verdict.FAIL)
    assert inert(Verdict.PASS, Verdict.NOT_APPLICABLE)
    assert inert(Verdict.PASS, Verdict.PASS, Verdict.FAIL)  # the failed criterion was dropped
    assert inert(Verdict.PASS, Verdict.FAIL, steps=())


@pytest.mark.filterwarnings("error")
def test_quality_spread() -> None:
    assert quality_spread(np.array([1.0, 1.0])) == 0.0
    assert quality_spread(np.array([0.0, 0.5, 1.0])) == pytest.approx((1 / 6) ** 0.5)
    assert np.isnan(quality_spread(np.full(3, np.nan)))
    assert np.isnan(quality_spread(np.zeros(0)))
