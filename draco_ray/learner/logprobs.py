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
    Returns: logprob_V and entropy_V in float32, nats; differentiable in `hidden_VH`, once.
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
        logprob_V = torch.empty(tokens, dtype=torch.float32, device=hidden_VH.device)
        entropy_V = torch.empty_like(logprob_V)
        needs_gradient = ctx.needs_input_grad[0]
        logprob_slope_VH = torch.empty_like(hidden_VH) if needs_gradient else None
        entropy_slope_VH = torch.empty_like(hidden_VH) if needs_gradient and entropy_gradient else None
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            target = target_V[chunk]
            logprobs = torch.nn.functional.linear(hidden_VH[chunk], weight, bias).float()
            logprobs -= torch.logsumexp(logprobs, dim=-1, keepdim=True)
            probabilities = logprobs.exp()
            logprob_V[chunk] = logprobs.gather(1, target[:, None])[:, 0]
            # As a batched matrix product, which needs no product array of the size of the logits.
            entropy = -torch.bmm(probabilities[:, None, :], logprobs[:, :, None])[:, 0, 0]
            entropy_V[chunk] = entropy
            if entropy_slope_VH is not None:
                slope = -probabilities * (logprobs + entropy[:, None])
                entropy_slope_VH[chunk] = slope.to(weight.dtype) @ weight
            if logprob_slope_VH is not None:
                slope = probabilities.neg_()
                slope[torch.arange(len(target), device=target.device), target] += 1.0
                logprob_slope_VH[chunk] = slope.to(weight.dtype) @ weight
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
