"""Log-probs of tokens from hidden states, and the GRPO loss with per-token advantages over them, as verl computes it.

The loss is a sum over tokens: token-mean divides once, at the optimizer step, by the valid tokens of the whole
minibatch over all micro-batches and workers.

The full logits never exist: for one 28,672-token trajectory over 248,320 words they would take 28.5 GB in float32. The
LM head and the log-softmax run over chunks of tokens. The head is frozen, so the gradient of a token's log-prob by its
hidden state does not depend on the loss:

    d log p(y) / d h = W[y] - sum_v p(v) W[v].

It is computed with the chunk's logits and stored instead of the hidden state; the backward pass multiplies it by the
incoming gradient, and recomputes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draco_ray.config.schema import ImportanceLevel, LearnerConfig, MaskLevel


def token_logprobs(
    hidden_VH: Tensor,
    head: torch.nn.Linear,
    target_V: Tensor,
    *,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token, and the entropy of the distribution it was drawn from.

    Args:
        hidden_VH: last hidden states at the V positions that predict a target.
        head: the frozen LM head; its weight receives no gradient.
        target_V: token ids.
        chunk_tokens: positions whose logits exist at one time.
        entropy_gradient: whether the entropy is part of the loss; without, it is a number only.
    Returns: logprob_V and entropy_V, nats, in float32 (float64 where the hidden states are); differentiable in
            `hidden_VH`, once.
    """
    logprob_V, entropy_V = _ChunkedLogprobs.apply(
        hidden_VH, head.weight, head.bias, target_V, chunk_tokens, entropy_gradient
    )
    return logprob_V, entropy_V


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_VH: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_V: Tensor,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens = len(target_V)
        precision = torch.promote_types(hidden_VH.dtype, torch.float32)
        logprob_V = torch.empty(tokens, dtype=precision, device=hidden_VH.device)
        entropy_V = torch.empty_like(logprob_V)
        needs_gradient = ctx.needs_input_grad[0]
        logprob_slope_VH = torch.empty_like(hidden_VH) if needs_gradient else None
        entropy_slope_VH = torch.empty_like(hidden_VH) if needs_gradient and entropy_gradient else None
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logprob_V[chunk], entropy_V[chunk], logprob_slope, entropy_slope = _of_one_chunk(
                hidden_VH[chunk], weight, bias, target_V[chunk], needs_gradient, needs_gradient and entropy_gradient
            )
            if logprob_slope_VH is not None and logprob_slope is not None:
                logprob_slope_VH[chunk] = logprob_slope
            if entropy_slope_VH is not None and entropy_slope is not None:
                entropy_slope_VH[chunk] = entropy_slope
        ctx.save_for_backward(logprob_slope_VH, entropy_slope_VH)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_V)
        return logprob_V, entropy_V

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logprob_gradient_V, entropy_gradient_V = gradients
        logprob_slope_VH, entropy_slope_VH = ctx.saved_tensors
        gradient_VH = logprob_slope_VH * logprob_gradient_V[:, None].to(logprob_slope_VH.dtype)
        if entropy_slope_VH is not None:
            gradient_VH += entropy_slope_VH * entropy_gradient_V[:, None].to(entropy_slope_VH.dtype)
        return gradient_VH, None, None, None, None, None


def _of_one_chunk(
    hidden_CH: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_C: Tensor,
    needs_logprob_slope: bool,
    needs_entropy_slope: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probs, entropies and their slopes, of which None are not needed.

    A function of its own so that nothing of a chunk outlives it. Two float32 arrays of the size of its logits are the
    most that exists at a time: the logits, and their exponentials, which become probabilities where slopes are needed.
    """
    logits = torch.nn.functional.linear(hidden_CH, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest_C1 = logits.amax(dim=-1, keepdim=True)
    exponentials = (logits - largest_C1).exp_()
    sum_C1 = exponentials.sum(dim=-1, keepdim=True)
    normaliser_C1 = largest_C1 + sum_C1.log()
    target_C1 = target_C[:, None]
    logprob_C1 = logits.gather(1, target_C1) - normaliser_C1
    # As a batched matrix product, which needs no product array of the size of the logits.
    mean_logit_C1 = torch.bmm(exponentials[:, None, :], logits[:, :, None])[:, :, 0] / sum_C1
    logprob_slope_CH = entropy_slope_CH = None
    if needs_logprob_slope or needs_entropy_slope:
        probabilities = exponentials.div_(sum_C1)
        if needs_entropy_slope:
            # -p (log p + entropy)
            logits.sub_(mean_logit_C1).mul_(probabilities).neg_()
            entropy_slope_CH = logits.to(weight.dtype) @ weight
        del logits
        if needs_logprob_slope:
            slope = probabilities.neg_().scatter_add_(1, target_C1, torch.ones_like(sum_C1))
            logprob_slope_CH = slope.to(weight.dtype) @ weight
    return logprob_C1[:, 0], (normaliser_C1 - mean_logit_C1)[:, 0], logprob_slope_CH, entropy_slope_CH


LOG_RATIO_BOUND = 20.0
"""Clamp on differences of log-probs before they are exponentiated."""
SPREAD_BOUND, SPREAD_BINS = 2.0, 800
"""Log-ratios are counted in so many bins from -bound to bound, half a percent of ratio each; the outermost are open."""


class Correction(NamedTuple):
    """What the policy loss of each token is multiplied by, and how many tokens it changed the most."""

    weight_V: Tensor | None
    """None where nothing is corrected, which is a factor of 1."""
    truncated: Tensor
    """Tokens whose ratio was cut at the cap."""
    masked: Tensor
    """Tokens with weight 0."""


def correction(old_logprob_V: Tensor, sampled_logprob_V: Tensor, sample_V: Tensor, config: LearnerConfig) -> Correction:
    """Importance weights, at most `learner.importance_cap`, and 0 outside `learner.mask_low` to `learner.mask_high`.

    A masked token still counts among those that the loss is divided by, and keeps its KL and entropy terms: the mask is
    a weight, so the rest of the minibatch is pushed as if it were not there.

    Args:
        old_logprob_V: under the policy of the start of the training step.
        sampled_logprob_V: under the policy that sampled the token, as the engine reported it.
        sample_V: which sample a token is of, 0 to the number of samples - 1; each has a token.
        config: levels and bounds.
    """
    log_ratio_V = old_logprob_V - sampled_logprob_V
    weight_V = None
    truncated = masked = torch.zeros((), dtype=torch.int64, device=log_ratio_V.device)
    if config.importance_cap is not None:
        weight_V = levelled(log_ratio_V, sample_V, config.importance_level).exp().clamp(max=config.importance_cap)
        truncated = (weight_V >= config.importance_cap).sum()
    if config.mask_low is not None or config.mask_high is not None:
        kept_V = _kept(log_ratio_V, sample_V, config)
        masked = (~kept_V).sum()
        weight_V = kept_V.to(log_ratio_V.dtype) if weight_V is None else weight_V * kept_V
    return Correction(weight_V=weight_V, truncated=truncated, masked=masked)


def levelled(log_ratio_V: Tensor, sample_V: Tensor, level: ImportanceLevel) -> Tensor:
    """Each token's log-ratio at a level: its own, the sum over its sample, or the mean over its sample; within ±20."""
    if level != "token":
        samples = int(sample_V.max()) + 1
        sum_S = log_ratio_V.new_zeros(samples).index_add_(0, sample_V, log_ratio_V)
        if level == "geometric":
            sum_S = sum_S / torch.bincount(sample_V, minlength=samples)
        log_ratio_V = sum_S[sample_V]
    return log_ratio_V.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _kept(log_ratio_V: Tensor, sample_V: Tensor, config: LearnerConfig) -> Tensor:
    level: MaskLevel = config.mask_level
    ratio_V = levelled(log_ratio_V, sample_V, "token" if level == "any_token" else level).exp()
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
    """Each token's share r - 1 - log r of an estimate of KL(who sampled || who learns), never negative; nats."""
    log_ratio_V = log_ratio_V.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.expm1(log_ratio_V) - log_ratio_V).clamp(min=0.0)


def spread(log_ratio_V: Tensor) -> Tensor:
    """How many log-ratios are in each of `SPREAD_BINS` bins. Of parts of the tokens it adds up to that of all."""
    share_V = (log_ratio_V.clamp(-SPREAD_BOUND, SPREAD_BOUND) + SPREAD_BOUND) / (2 * SPREAD_BOUND)
    bin_V = (share_V * SPREAD_BINS).long().clamp(max=SPREAD_BINS - 1)
    return torch.bincount(bin_V, minlength=SPREAD_BINS).to(torch.float32)


def ratio_quantile(spread_B: Tensor, share: float) -> float:
    """The ratio below which that share of the tokens lies: the middle of its bin; 1 where there are no tokens."""
    counted_B = spread_B.double().cumsum(0)
    if counted_B[-1] == 0:
        return 1.0
    bin_ = int(torch.searchsorted(counted_B, share * counted_B[-1]))
    return float(torch.tensor((bin_ + 0.5) / SPREAD_BINS * 2 * SPREAD_BOUND - SPREAD_BOUND).exp())


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
        importance_V: factor on each token's policy loss, see `draco_ray.learner.loss.correction`; None is 1.
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
