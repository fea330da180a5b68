"""Quantiles of the beta and of Student's t distribution, so that the base install needs no SciPy."""

from __future__ import annotations

import math
from functools import lru_cache

_SMALL, _TERMS, _HALVINGS = 1e-300, 10_000, 64


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(1 - x, b, a)
    front = math.exp(
        a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) - math.log(a)
    )
    # Lentz's algorithm for 1 + d_1 / (1 + d_2 / (1 + ...)); c and d are ratios of successive convergents.
    value, c, d = 1.0, 1.0, 0.0
    for term in range(1, _TERMS):
        m = term // 2
        if term % 2:
            coefficient = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            coefficient = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / ((1 + coefficient * d) or _SMALL)
        c = (1 + coefficient / c) or _SMALL
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front / value


def beta_quantile(a: float, b: float, probability: float) -> float:
    """The x with `beta_cdf` (x, a, b) = probability."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(middle, a, b) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, degrees: float) -> float:
    """The distribution function of Student's t."""
    # For t near 0, degrees / (degrees + t²) would round to 1; use its exact complement there.
    x = t * t / (degrees + t * t)
    tail = (
        1 - beta_cdf(x, 0.5, degrees / 2) if x < 0.5 else beta_cdf(degrees / (degrees + t * t), degrees / 2, 0.5)
    ) / 2
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def student_quantile(degrees: float, probability: float) -> float:
    """The t with `student_cdf` (t, degrees) = probability."""
    tail = min(probability, 1 - probability)
    x = beta_quantile(degrees / 2, 0.5, 2 * tail)
    t = math.sqrt(degrees * (1 - x) / x)
    return t if probability > 0.5 else -t
