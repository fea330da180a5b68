"""Importance weights and masks against loops over tokens and samples; what is measured against numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from draco_ray.config.schema import LearnerConfig
from draco_ray.learner.base import UpdateMetrics, over_workers
from draco_ray.learner.loss import HISTOGRAM_BINS, importance_weights, k3_estimates, log_ratio_histogram, ratio_quantile

samples = st.lists(st.lists(st.floats(-30, 30), min_size=1, max_size=6), min_size=1, max_size=5)
"""Log-ratios of each sample's tokens."""
levels = st.sampled_from(["token", "sequence", "geometric"])
mask_levels = st.sampled_from(["token", "sequence", "geometric", "any_token"])
fuzz = settings(deadline=None)
bounds = st.none() | st.floats(0.1, 8)


def corrected(told: list[list[float]], **keys: Any) -> tuple[list[float] | None, int, int]:
    """The weights, and how many were cut and masked."""
    log_ratio = torch.tensor([value for sample in told for value in sample], dtype=torch.float64)
    sample = torch.tensor([index for index, values in enumerate(told) for _ in values])
    weight, truncated, masked = importance_weights(
        log_ratio, torch.zeros_like(log_ratio), sample, LearnerConfig(**keys)
    )
    return None if weight is None else weight.tolist(), int(truncated), int(masked)


def ratios(told: list[list[float]], level: str) -> list[float]:
    found = []
    for sample in told:
        mean = {"sequence": sum(sample), "geometric": sum(sample) / len(sample)}
        found += [math.exp(min(max(mean.get(level, value), -20), 20)) for value in sample]
    return found


@fuzz
@given(samples, st.floats(1, 5), levels)
def test_weights_are_ratios_of_their_level_cut_from_above_only(told: list[list[float]], cap: float, level: str) -> None:
    expected = [min(ratio, cap) for ratio in ratios(told, level)]
    found, truncated, masked = corrected(told, importance_cap=cap, importance_level=level)
    assert found == pytest.approx(expected, rel=1e-9)
    assert masked == 0
    assert truncated == sum(weight == cap for weight in found or [])


@fuzz
@given(samples, bounds, bounds, mask_levels)
def test_what_is_outside_the_range_weighs_nothing(
    told: list[list[float]], first: float | None, second: float | None, level: str
) -> None:
    low, high = (first, second) if first is None or second is None else sorted((first, second))
    inside = [(low is None or r >= low) and (high is None or r <= high) for r in ratios(told, level)]
    if level == "any_token":
        own = iter(inside)
        by_sample = [[next(own) for _ in sample] for sample in told]
        inside = [all(kept) for kept in by_sample for _ in kept]
    found, _, masked = corrected(told, mask_low=low, mask_high=high, mask_level=level)
    if low is None and high is None:
        assert (found, masked) == (None, 0)
    else:
        assert found == [float(kept) for kept in inside]
        assert masked == inside.count(False)
    both, _, _ = corrected(told, mask_low=low, mask_high=high, mask_level=level, importance_cap=2.0)
    weights = [min(ratio, 2.0) for ratio in ratios(told, "token")]
    assert both == pytest.approx([weight * kept for weight, kept in zip(weights, inside, strict=True)], rel=1e-9)


def test_of_equal_log_probs_every_level_weighs_one() -> None:
    for level in ("token", "sequence", "geometric"):
        assert corrected([[0.0, 0.0], [0.0]], importance_cap=2.0, importance_level=level)[0] == [1.0, 1.0, 1.0]


def test_by_default_nothing_is_corrected() -> None:
    assert corrected([[9.0, -9.0]]) == (None, 0, 0)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"learner\.mask_low=2 is above learner\.mask_high=0\.5"):
        LearnerConfig(mask_low=2.0, mask_high=0.5)


@fuzz
@given(st.lists(st.floats(-25, 25), min_size=1, max_size=50))
def test_k3_is_never_negative_and_zero_where_both_agree(told: list[float]) -> None:
    found = k3_estimates(torch.tensor(told, dtype=torch.float64))
    assert (found >= 0).all()
    assert k3_estimates(torch.zeros(1)).item() == 0


def test_quantiles_of_parts_are_those_of_the_whole_to_half_a_percent() -> None:
    log_ratios = np.random.default_rng(0).normal(scale=0.4, size=10_001)
    parts = [torch.from_numpy(part) for part in np.array_split(log_ratios, 7)]
    added = torch.stack([log_ratio_histogram(part) for part in parts]).sum(0)
    for share in (0.01, 0.5, 0.99):
        expected = math.exp(float(np.quantile(log_ratios, share)))
        assert ratio_quantile(added, share) == pytest.approx(expected, rel=0.01)


def test_of_nothing_the_quantile_is_one_and_of_the_far_it_is_the_bound() -> None:
    assert ratio_quantile(torch.zeros(HISTOGRAM_BINS), 0.5) == 1.0
    far = log_ratio_histogram(torch.tensor([-50.0, 50.0, 50.0]))
    assert far.sum() == 3
    assert ratio_quantile(far, 0.01) == pytest.approx(math.exp(-2), rel=0.01)
    assert ratio_quantile(far, 0.99) == pytest.approx(math.exp(2), rel=0.01)


def test_the_extremes_of_an_update_are_those_of_all_workers() -> None:
    one = UpdateMetrics(
        update=1,
        skipped=None,
        grad_norm=1.0,
        samples=1,
        valid_tokens=1,
        computed_tokens=1,
        policy_loss=0.0,
        kl=0.0,
        entropy=0.0,
        clip_fraction=0.0,
        dual_clip_fraction=0.0,
        engine_gap=0.0,
        learning_rate=1.0,
        engine_ratio_min=0.5,
        engine_ratio_max=1.5,
    )
    other = replace(one, engine_ratio_min=0.9, engine_ratio_max=3.0)
    assert over_workers([one, other]) == replace(one, engine_ratio_min=0.5, engine_ratio_max=3.0)
    outside = replace(one, engine_ratio_p01=0.49, engine_ratio_p99=3.01)
    combined = over_workers([outside, other])
    assert (combined.engine_ratio_p01, combined.engine_ratio_p50, combined.engine_ratio_p99) == (0.5, 1.0, 3.0)
