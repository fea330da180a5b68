"""The GRPO loss with per-token advantages, as verl computes it, summed over tokens.

A sum and not a mean: token-mean divides by the valid tokens of the whole minibatch, over all micro-batches and workers,
so the division happens once, at the optimizer step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draco_ray.config.schema import LearnerConfig
from draco_ray.learner.mismatch import LOG_RATIO_BOUND

K3_BOUND = 10.0
"""Most that a token's KL estimate may be."""


class LossSums(NamedTuple):
    """Sums over valid tokens; `total` carries the gradient."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    clipped: Tensor
    """Tokens where the clipped ratio decided."""
    dual_clipped: Tensor
    """Tokens where the dual clip decided."""


def grpo_loss(
    logprob_V: Tensor,
    old_logprob_V: Tensor,
    reference_logprob_V: Tensor | None,
    advantage_V: Tensor,
    entropy_V: Tensor,
    config: LearnerConfig,
    importance_V: Tensor | None = None,
) -> LossSums:
    """Clipped policy loss, plus k3 KL to the base model, minus the entropy bonus, summed over the V valid tokens.

    Per token, with r = exp(clamp(log p - log p_old, ±20)): max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at
    most -A times the dual-clip constant; k3 = min(exp(d) - d - 1, 10), never negative, with d = clamp(log p_ref - log
    p, ±20).

    Args:
        logprob_V: under the current policy, with gradient.
        old_logprob_V: under the policy of the start of the training step.
        reference_logprob_V: under the base model; None where the KL coefficient is 0.
        advantage_V: a_j of each token's step, 0 on sampled tokens outside any step.
        entropy_V: nats; carries a gradient only where its coefficient is positive.
        config: clip ranges and coefficients.
        importance_V: factor on each token's policy loss, see `draco_ray.learner.mismatch.correction`; None is 1.
    """
    ratio_V = (logprob_V - old_logprob_V).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    plain_V = -advantage_V * ratio_V
    clipped_V = -advantage_V * ratio_V.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    outer_V = torch.maximum(plain_V, clipped_V)
    bound_V = -advantage_V * config.dual_clip
    losing_V = advantage_V < 0
    policy_V = torch.where(losing_V, torch.minimum(outer_V, bound_V), outer_V)
    policy = (policy_V if importance_V is None else policy_V * importance_V).sum()
    if reference_logprob_V is None:
        kl = torch.zeros_like(policy)
    else:
        difference_V = (reference_logprob_V - logprob_V).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        kl = (difference_V.exp() - difference_V - 1.0).clamp(max=K3_BOUND).sum()
    return LossSums(
        total=policy + config.kl_coefficient * kl - config.entropy_coefficient * entropy_V.sum(),
        policy=policy.detach(),
        kl=kl.detach(),
        clipped=(clipped_V > plain_V).sum(),
        dual_clipped=(losing_V & (outer_V > bound_V)).sum(),
    )
