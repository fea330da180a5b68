"""The GRPO loss with per-token advantages, as verl computes it.

The loss is a sum over tokens. For the token mean, the optimizer step divides once by the valid tokens of the whole
minibatch, over all micro-batches and workers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draco_ray.config.schema import ImportanceLevel, LearnerConfig, MaskLevel

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus or minus this before exponentiation."""
HISTOGRAM_BOUND, HISTOGRAM_BINS = 2.0, 800
"""Log-ratios are counted in bins from -bound to bound, each 0.5 % of ratio wide; the outer two are unbounded."""


class ImportanceWeights(NamedTuple):
    """Importance weights of the tokens' policy loss."""

    weight_V: Tensor | None
    """None if all weights are 1."""
    truncated: Tensor
    """Number of tokens whose ratio was truncated at the cap."""
    masked: Tensor
    """Number of tokens with weight 0."""


def importance_weights(
    old_logprob_V: Tensor, sampled_logprob_V: Tensor, sample_V: Tensor, config: LearnerConfig
) -> ImportanceWeights:
    """Importance weights, at most `learner.importance_cap`, and 0 outside `learner.mask_low` to `learner.mask_high`.

    A masked token keeps its KL and entropy terms and still counts in the token mean.

    Args:
        old_logprob_V: log-probs under the policy at the start of the training step.
        sampled_logprob_V: log-probs under the policy that sampled the tokens, as the engine reported them.
        sample_V: index of each token's sample, from 0; every sample has a token.
        config: level and cap of the weights, level and bounds of the mask.
    """
    log_ratio_V = old_logprob_V - sampled_logprob_V
    weight_V = None
    truncated = masked = torch.zeros((), dtype=torch.int64, device=log_ratio_V.device)
    if config.importance_cap is not None:
        weight_V = log_ratios_at(log_ratio_V, sample_V, config.importance_level).exp().clamp(max=config.importance_cap)
        truncated = (weight_V >= config.importance_cap).sum()
    if config.mask_low is not None or config.mask_high is not None:
        kept_V = _kept(log_ratio_V, sample_V, config)
        masked = (~kept_V).sum()
        weight_V = kept_V.to(log_ratio_V.dtype) if weight_V is None else weight_V * kept_V
    return ImportanceWeights(weight_V=weight_V, truncated=truncated, masked=masked)


def log_ratios_at(log_ratio_V: Tensor, sample_V: Tensor, level: ImportanceLevel) -> Tensor:
    """Each token's log-ratio by ``level``: its own, its sample's sum, or its sample's mean; clamped to ±20."""
    if level != "token":
        samples = int(sample_V.max()) + 1
        sum_S = log_ratio_V.new_zeros(samples).index_add_(0, sample_V, log_ratio_V)
        if level == "geometric":
            sum_S = sum_S / torch.bincount(sample_V, minlength=samples)
        log_ratio_V = sum_S[sample_V]
    return log_ratio_V.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _kept(log_ratio_V: Tensor, sample_V: Tensor, config: LearnerConfig) -> Tensor:
    level: MaskLevel = config.mask_level
    ratio_V = log_ratios_at(log_ratio_V, sample_V, "token" if level == "any_token" else level).exp()
    outside_V = torch.zeros_like(ratio_V, dtype=torch.bool)
    if config.mask_low is not None:
        outside_V |= ratio_V < config.mask_low
    if config.mask_high is not None:
        outside_V |= ratio_V > config.mask_high
    if level == "any_token":
        found_S = torch.zeros(int(sample_V.max()) + 1, dtype=torch.bool, device=ratio_V.device)
        found_S[sample_V[outside_V]] = True
        return ~found_S[sample_V]
    return ~outside_V


def k3_estimates(log_ratio_V: Tensor) -> Tensor:
    """Each token's k3 estimate r - 1 - log r of KL(sampling policy || learner); never negative; nats."""
    log_ratio_V = log_ratio_V.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.expm1(log_ratio_V) - log_ratio_V).clamp(min=0.0)


def log_ratio_histogram(log_ratio_V: Tensor) -> Tensor:
    """Number of log-ratios in each of `HISTOGRAM_BINS` bins; histograms of disjoint sets of tokens can be added."""
    # An update with NaN log-probs is skipped later; the histogram must not fail on them first.
    bounded_V = log_ratio_V.nan_to_num(nan=HISTOGRAM_BOUND).clamp(-HISTOGRAM_BOUND, HISTOGRAM_BOUND)
    share_V = (bounded_V + HISTOGRAM_BOUND) / (2 * HISTOGRAM_BOUND)
    bin_V = (share_V * HISTOGRAM_BINS).long().clamp(max=HISTOGRAM_BINS - 1)
    return torch.bincount(bin_V, minlength=HISTOGRAM_BINS).to(torch.float32)


def ratio_quantile(histogram_B: Tensor, share: float) -> float:
    """A quantile of the ratio, as the middle of its bin; 1 if there are no tokens."""
    counted_B = histogram_B.double().cumsum(0)
    if counted_B[-1] == 0:
        return 1.0
    bin_ = int(torch.searchsorted(counted_B, share * counted_B[-1]))
    return float(torch.tensor((bin_ + 0.5) / HISTOGRAM_BINS * 2 * HISTOGRAM_BOUND - HISTOGRAM_BOUND).exp())


K3_BOUND = 10.0
"""Maximum KL estimate of a token."""


class LossSums(NamedTuple):
    """Sums over valid tokens; only ``total`` has a gradient."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    clipped: Tensor
    """Number of tokens at which the clipped ratio is active."""
    dual_clipped: Tensor
    """Number of tokens at which the dual clip is active."""


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
        logprob_V: log-probs under the current policy, with gradient.
        old_logprob_V: log-probs under the policy at the start of the training step.
        reference_logprob_V: log-probs under the base model; None if the KL coefficient is 0.
        advantage_V: a_j of each token's step, 0 on sampled tokens outside any step.
        entropy_V: nats; has a gradient only if its coefficient is positive.
        config: clip ranges and coefficients.
        importance_V: factor on each token's policy loss, see `importance_weights`; None is 1.
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
