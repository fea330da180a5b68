"""Log-probs in chunks against the plain computation over the full logits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draco_ray.learner.logprobs import token_logprobs

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


PEAK_OF = """
import sys
import torch
from draco_ray.learner.logprobs import token_logprobs

way, tokens, chunk_tokens, words = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
head = torch.nn.Linear(16, words, bias=False, dtype=torch.bfloat16).requires_grad_(False)

def update(tokens):
    hidden = torch.randn(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, words, (tokens,))
    if way == "chunked":
        logprob = token_logprobs(hidden, head, target, chunk_tokens=chunk_tokens)[0]
    else:
        logprob = head(hidden).float().log_softmax(-1).gather(1, target[:, None])[:, 0]
    logprob.sum().backward()

def high_water():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

update(1)
before = high_water()
update(tokens)
print(high_water() - before)
"""
"""Bytes by which a process's resident memory peaks above what it held before a forward and a backward."""


def peak_of(way: str, tokens: int, chunk_tokens: int, words: int) -> int:
    command = [sys.executable, "-c", PEAK_OF, way, str(tokens), str(chunk_tokens), str(words)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process's memory")
def test_the_peak_of_a_process_is_one_chunk_however_long_the_context() -> None:
    """Forward and backward with Qwen3.6's vocabulary and hidden size 16, in chunks of 128 tokens and plainly.

    Bound: two float32 arrays of one chunk of logits, and a tenth. The plain computation holds three of all logits.
    """
    words, chunk_tokens = 248_320, 128
    bound = 1.1 * 2 * 4 * chunk_tokens * words
    assert peak_of("chunked", 512, chunk_tokens, words) < bound
    assert peak_of("chunked", 2048, chunk_tokens, words) < bound
    assert peak_of("plain", 512, chunk_tokens, words) > 2.9 * 4 * 512 * words
