"""The group-standardised advantage of GRPO (Eq. `grpo-adv`)."""

from __future__ import annotations

import numpy as np

from draco_ray.records import FloatArray

STD_EPSILON = 1e-6
"""Added to the standard deviation; verl's value, as we follow its conventions."""


def group_advantages_G(reward_G: FloatArray, *, std_epsilon: float = STD_EPSILON) -> FloatArray:
    """A_i = (R_i - mean(R)) / (std(R) + epsilon), the standard deviation with Bessel's correction.

    Args:
        reward_G: rewards of the group's scored rollouts.
        std_epsilon: added to the standard deviation.
    Returns: advantage_G, unitless. Exactly 0 for every member when the rewards do not differ, and for a group of one,
        which has no baseline.
    Raises: ValueError on rewards that are not finite or not one-dimensional.

    >>> group_advantages_G(np.array([1.0, 0.0, -1.0]), std_epsilon=0.0)
    array([ 1.,  0., -1.])
    >>> group_advantages_G(np.array([0.3, 0.3]))
    array([0., 0.])
    """
    if reward_G.ndim != 1 or not np.isfinite(reward_G).all():
        raise ValueError(f"reward_G must be a vector of finite rewards, got shape {reward_G.shape}: {reward_G}")
    # Compare the rewards themselves: rounding of the mean would leave a tiny spread, which the division magnifies.
    if len(reward_G) < 2 or (reward_G == reward_G[0]).all():
        return np.zeros(len(reward_G))
    largest = np.abs(reward_G).max()
    if not 1e-100 < largest < 1e100:
        # Squares of such rewards overflow or vanish. Scaling by a power of two is exact.
        exponent = -int(np.frexp(largest)[1])
        with np.errstate(over="ignore"):
            reward_G, std_epsilon = np.ldexp(reward_G, exponent), float(np.ldexp(std_epsilon, exponent))
    return (reward_G - reward_G.mean()) / (reward_G.std(ddof=1) + std_epsilon)
