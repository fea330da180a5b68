"""Log-probs in chunks against the plain computation over the full logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draco_ray.learner.model import token_logprobs

TOKENS, HIDDEN, WORDS = 37, 16, 211


def inputs(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, WORDS, bias=bias, dtype=dtype).requires_grad_(False)
    hidden = (3 * torch.randn(TOKENS, HIDDEN)).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, WORDS, (TOKENS,))


def plain(hidden: torch.Tensor, head: torch.nn.Linear, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = head(hidden).log_softmax(-1)
    return logprobs.gather(1, target[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_equal_the_plain_computation(
    chunk_tokens: int, bias: bool, entropy_gradient: bool
) -> None:
    hidden, head, target = inputs(bias)
    weight_of_token = torch.linspace(-2, 2, TOKENS)
    expected = plain(hidden, head, target)
    wanted = (expected[0] * weight_of_token).sum() + (0.3 * expected[1].sum() if entropy_gradient else 0.0)
    (expected_gradient,) = torch.autograd.grad(wanted, hidden)

    logprob, entropy = token_logprobs(
        hidden, head, target, chunk_tokens=chunk_tokens, entropy_gradient=entropy_gradient
    )
    ours = (logprob * weight_of_token).sum() + (0.3 * entropy.sum() if entropy_gradient else 0.0)
    (gradient,) = torch.autograd.grad(ours, hidden)
    torch.testing.assert_close(logprob.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32() -> None:
    hidden, head, target = inputs(bias=False, dtype=torch.bfloat16)
    exact = plain(hidden.float(), head.float(), target)[0]
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, WORDS, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    logprob, _ = token_logprobs(hidden, head, target, chunk_tokens=8)
    assert logprob.dtype == torch.float32
    assert (logprob - exact).abs().max() < 0.05


def test_no_tokens_are_no_logprobs() -> None:
    hidden, head, target = inputs(bias=False)
    logprob, entropy = token_logprobs(hidden[:0], head, target[:0], chunk_tokens=8)
    assert logprob.shape == entropy.shape == (0,)


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def test_no_tensor_is_larger_than_one_chunk_of_logits() -> None:
    hidden, head, target = inputs(bias=False)
    with LargestTensor() as chunked:
        token_logprobs(hidden, head, target, chunk_tokens=5)[0].sum().backward()
    with LargestTensor() as whole:
        plain(hidden, head, target)[0].sum().backward()
    assert whole.elements == TOKENS * WORDS
    assert chunked.elements <= max(5 * WORDS, WORDS * HIDDEN)


def peak_bytes(way: str, tokens: int, chunk_tokens: int, words: int) -> int:
    """Most that a forward and a backward hold at a time, as they ask PyTorch's allocator for it.

    What the process's resident memory shows is what the allocator keeps, which differs from machine to machine.
    """
    head = torch.nn.Linear(HIDDEN, words, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, words, (tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        if way == "chunked":
            logprob = token_logprobs(hidden, head, target, chunk_tokens=chunk_tokens)[0]
        else:
            logprob = head(hidden).float().log_softmax(-1).gather(1, target[:, None])[:, 0]
        logprob.sum().backward()
    assert seen.profiler is not None
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("tokens", [512, 2048])
def test_the_peak_is_one_chunk_however_long_the_context(tokens: int) -> None:
    """Bound: two float32 arrays of a chunk of logits, and a tenth. The plain computation holds three of all logits."""
    words, chunk_tokens = 6_000, 64
    assert peak_bytes("chunked", tokens, chunk_tokens, words) < 1.1 * 2 * 4 * chunk_tokens * words
    assert peak_bytes("plain", tokens, chunk_tokens, words) > 2.9 * 4 * tokens * words
