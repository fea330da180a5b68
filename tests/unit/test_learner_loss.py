"""The loss against a loop over tokens in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draco_ray.config.schema import LearnerConfig
from draco_ray.learner.loss import grpo_loss

token = st.tuples(
    st.floats(-30, 0), st.floats(-30, 0), st.floats(-30, 0), st.floats(-4, 4), st.floats(0, 6)
)  # log-probs now, old and of the reference; advantage; entropy


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def naive_loss(tokens: list[tuple[float, ...]], config: LearnerConfig) -> float:
    total = 0.0
    for now, old, reference, advantage, entropy in tokens:
        ratio = math.exp(clamp(now - old, -20, 20))
        loss = max(-advantage * ratio, -advantage * clamp(ratio, 1 - config.clip_low, 1 + config.clip_high))
        if advantage < 0:
            loss = min(loss, -advantage * config.dual_clip)
        d = clamp(reference - now, -20, 20)
        kl = clamp(math.exp(d) - d - 1, -10, 10)
        total += loss + config.kl_coefficient * kl - config.entropy_coefficient * entropy
    return total


@given(st.lists(token, min_size=1, max_size=20), st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from([0.0, 0.1]))
def test_the_sum_equals_a_loop_over_tokens(tokens: list[tuple[float, ...]], kl: float, entropy: float) -> None:
    config = LearnerConfig(kl_coefficient=kl, entropy_coefficient=entropy, clip_low=0.2, clip_high=0.28)
    now, old, reference, advantage, entropies = torch.tensor(tokens, dtype=torch.float64).T
    found = grpo_loss(now, old, reference, advantage, entropies, config)
    assert found.total.item() == pytest.approx(naive_loss(tokens, config), rel=1e-9, abs=1e-9)
    parts = found.policy + kl * found.kl - entropy * entropies.sum()
    assert parts.item() == pytest.approx(found.total.item(), rel=1e-9, abs=1e-9)


def gradient(now: float, old: float, advantage: float) -> float:
    logprob = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    config = LearnerConfig(kl_coefficient=0.0)
    grpo_loss(logprob, old * one, None, advantage * one, one, config).total.backward()
    assert logprob.grad is not None
    return logprob.grad.item()


@pytest.mark.parametrize("advantage", [1.7, -0.4, 0.0])
def test_on_policy_the_push_is_the_advantage(advantage: float) -> None:
    assert gradient(-1.0, -1.0, advantage) == pytest.approx(-advantage)


def test_a_ratio_beyond_the_clip_range_pushes_no_further() -> None:
    assert gradient(-1.0, -1.5, advantage=1.0) == 0.0
    assert gradient(-1.5, -1.0, advantage=-1.0) == 0.0


def test_a_ratio_on_the_wrong_side_is_pushed_back() -> None:
    assert gradient(-1.5, -1.0, advantage=1.0) == pytest.approx(-math.exp(-0.5))


def test_dual_clip_bounds_the_suppression_of_an_exploded_ratio() -> None:
    assert gradient(-1.0, -2.0, advantage=-1.0) == pytest.approx(math.exp(1.0))
    assert gradient(-1.0, -3.0, advantage=-1.0) == 0.0


def test_clipped_tokens_are_counted() -> None:
    old = torch.full((4,), -2.0)
    now = torch.tensor([-2.0, -1.0, -0.5, -2.5])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss = grpo_loss(now, old, None, advantage, torch.zeros(4), LearnerConfig(kl_coefficient=0.0))
    assert (loss.clipped.item(), loss.dual_clipped.item()) == (2, 1)
    assert loss.kl.item() == 0.0


def test_a_ratio_of_exactly_the_dual_clip_is_not_counted_as_cut() -> None:
    one = torch.ones(1, dtype=torch.float64)
    config = LearnerConfig(kl_coefficient=0.0, dual_clip=float(one.exp()))
    loss = grpo_loss(one, 0 * one, None, -one, one, config)
    assert (loss.clipped.item(), loss.dual_clipped.item()) == (0, 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_log_probs_far_apart_leave_loss_and_gradient_finite(advantage: float) -> None:
    """exp of these overflows in single precision, and infinity times the zero of a clipped branch is no number."""
    for now, old, reference in ((0.0, -100.0, -50.0), (-100.0, 0.0, 0.0)):
        logprob = torch.tensor([now], requires_grad=True)
        loss = grpo_loss(
            logprob,
            torch.tensor([old]),
            torch.tensor([reference]),
            torch.tensor([advantage]),
            torch.zeros(1),
            LearnerConfig(kl_coefficient=1.0),
        )
        loss.total.backward()
        assert torch.isfinite(loss.total)
        assert logprob.grad is not None
        assert torch.isfinite(logprob.grad).all()


def test_a_token_that_the_policy_has_all_but_given_up_counts_with_the_least_ratio() -> None:
    far, one = torch.tensor([-100.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    total = grpo_loss(far, 0 * one, None, one, one, LearnerConfig(kl_coefficient=0.0)).total
    assert total.item() == pytest.approx(-math.exp(-20), rel=1e-6, abs=0)


weighed = st.tuples(token, st.floats(0, 5))


@given(st.lists(weighed, min_size=1, max_size=20))
def test_the_weight_multiplies_the_policy_loss_of_its_token_alone(
    tokens: list[tuple[tuple[float, ...], float]],
) -> None:
    config = LearnerConfig(kl_coefficient=0.5)
    now, old, reference, advantage, entropies = torch.tensor([t for t, _ in tokens], dtype=torch.float64).T
    weights = torch.tensor([weight for _, weight in tokens], dtype=torch.float64)
    found = grpo_loss(now, old, reference, advantage, entropies, config, weights).total.item()
    expected = 0.0
    for (logprob, at_start, base, push, entropy), weight in tokens:
        unweighted = naive_loss(
            [(logprob, at_start, base, push, entropy)], config.model_copy(update={"kl_coefficient": 0.0})
        )
        kl_alone = naive_loss([(logprob, at_start, base, 0.0, entropy)], config)
        expected += weight * unweighted + kl_alone
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
