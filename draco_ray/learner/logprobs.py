"""Token log-probs from hidden states, without the full logits.

At the paper's scale the logits of one 28,672-token trajectory over 248,320 words take 28.5 GB in float32. Here the LM
head and the log-softmax run over chunks of tokens, and one chunk's logits exist at a time. The head is frozen, and the
gradient of a token's log-prob with respect to its hidden state does not depend on the loss: it is

    d log p(y) / d h = W[y] - sum_v p(v) W[v],

so it is computed while the chunk's logits are there, and kept in the place of the hidden state. The backward then
multiplies it by the incoming gradient: nothing is recomputed and no logits are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
