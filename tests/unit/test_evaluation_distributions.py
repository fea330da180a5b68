"""Quantiles against SciPy's, which the development environment has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betainc, betaincinv, stdtr, stdtrit

from draco_ray.algorithm.distributions import beta_cdf, beta_quantile, student_cdf, student_quantile

SIZES = st.floats(0.05, 5000)


@given(SIZES, SIZES, st.floats(0, 1))
def test_the_beta_distribution(a: float, b: float, x: float) -> None:
    assert beta_cdf(x, a, b) == pytest.approx(betainc(a, b, x), abs=1e-9)


@given(st.floats(0.3, 2000), st.floats(0.3, 2000), st.sampled_from([0.005, 0.025, 0.5, 0.975, 0.995]))
def test_its_quantiles(a: float, b: float, probability: float) -> None:
    assert beta_quantile(a, b, probability) == pytest.approx(betaincinv(a, b, probability), rel=1e-7, abs=1e-12)


@given(st.floats(1, 1e5), st.floats(-30, 30), st.sampled_from([0.005, 0.025, 0.6, 0.975, 0.995]))
def test_students_t(degrees: float, t: float, probability: float) -> None:
    assert student_cdf(t, degrees) == pytest.approx(stdtr(degrees, t), abs=1e-7)
    assert student_quantile(degrees, probability) == pytest.approx(stdtrit(degrees, probability), rel=1e-7)
