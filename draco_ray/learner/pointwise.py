"""RMS norms and gated MLPs as single autograd functions, which save less memory for the backward pass.

In transformers' code an RMS norm in float32 and ``silu(gate) * up`` are chains of operations that save every
intermediate. Here a norm saves its input, in the base model's dtype, and one number per token, and a gated MLP its two
projections; the rest is recomputed in the backward pass. Results and rounding are those of transformers' code. Before a
kind of layer is replaced, its results are compared with that code; a kind that differs is left unchanged.

The arithmetic is in four functions without autograd, which torch.compile compiles with ``learner.compile``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TOLERANCE = 0.01
"""Maximum mean relative difference from the output of transformers' own layer; bfloat16 rounds to 0.004."""
MLP_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def normed(x: Tensor, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """RMS norm over the last dimension.

    Args:
        x: ... x H.
        weight: H factors; with ``centred`` the factors minus 1.
        eps: added to the mean square.
        centred: Qwen3.5's form, which multiplies before rounding; otherwise Llama's, which rounds first.
    Returns: the norm in the dtype of ``x``, and 1 / root mean square, ... x 1, in at least float32.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if centred:
        return (wide * scale * (1.0 + weight.to(wide.dtype))).to(x.dtype), scale
    return weight * (wide * scale).to(x.dtype), scale


def norm_input_grad(slope: Tensor, x: Tensor, weight: Tensor, scale: Tensor, centred: bool) -> Tensor:
    """Gradient with respect to ``x``, given the gradient with respect to the norm."""
    unit = x.to(scale.dtype) * scale
    factor = 1.0 + weight.to(scale.dtype) if centred else weight
    slope = (slope * factor).to(scale.dtype)
    along = (slope * unit).mean(dim=-1, keepdim=True)
    return ((slope - unit * along) * scale).to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return torch.nn.functional.silu(gate) * up


def gated_grads(slope: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to ``gate`` and ``up``, given the gradient with respect to their product."""
    gate_slope = torch.ops.aten.silu_backward(slope * up, gate)
    return gate_slope, slope * torch.nn.functional.silu(gate)


@cache
def kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """``function``, or its form compiled by torch.compile at first use, which takes any number of tokens."""
    return torch.compile(function, dynamic=True) if compiled else function


def fuse(decoder: torch.nn.Module, *, compiled: bool) -> int:
    """Replace the forward of a decoder's norms and gated MLPs.

    Args:
        decoder: not sharded yet, on any device, with its adapter, if any.
        compiled: `learner.compile`.
    Returns: the number of replaced layers.
    """
    alike: dict[tuple[type, int], Callable[[Any], Callable[[Tensor], Tensor]] | None] = {}
    fused = 0
    for module in decoder.modules():
        width = _width(module)
        if width is None:
            continue
        kind = (type(module), width)
        if kind not in alike:
            alike[kind] = _equal(module, width, compiled)
        make = alike[kind]
        if make is not None:
            module.forward = make(module)
            fused += 1
    return fused


def _width(module: Any) -> int | None:
    """Input width of an RMS norm or a gated MLP, which are recognised by their attributes; None for other layers."""
    if type(module).__name__.endswith("RMSNorm") and _eps(module) is not None:
        return len(module.weight)
    if all(hasattr(module, part) for part in MLP_PARTS) and not module.gate_proj.weight.requires_grad:
        return int(module.gate_proj.in_features)
    return None


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _equal(module: Any, width: int, compiled: bool) -> Callable[[Any], Callable[[Tensor], Tensor]] | None:
    """Find a fused form that computes the same as a layer's own code, up to `TOLERANCE`.

    Returns: a function that makes the fused forward of any layer of this kind; None if no form computes the same.
    """
    weight = next(module.parameters())
    drawn = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    x = drawn.to(weight.device, weight.dtype)[None]
    expected = module(x).float()
    forms: list[Callable[[Any], Callable[[Tensor], Tensor]]] = [partial(_mlp, compiled=compiled)]
    if _eps(module) is not None:
        forms = [partial(_norm, centred=centred, compiled=compiled) for centred in (False, True)]
    for make in forms:
        gap = (make(module)(x).float() - expected).abs().mean()
        if gap <= TOLERANCE * expected.abs().mean():
            return make
    return None


def _norm(norm: Any, centred: bool, compiled: bool) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        output: Tensor = _Norm.apply(hidden_states, norm.weight, _eps(norm), centred, compiled)
        return output

    return forward


def _mlp(mlp: Any, compiled: bool) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        output: Tensor = mlp.down_proj(_Gated.apply(mlp.gate_proj(x), mlp.up_proj(x), compiled))
        return output

    return forward


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centred: bool, compiled: bool) -> Tensor:
        # Detach here and below, since torch.compile would compile again for tensors that require gradients.
        y, scale = kernel(normed, compiled)(x.detach(), weight, eps, centred)
        ctx.save_for_backward(x, weight, scale)
        ctx.centred, ctx.compiled = centred, compiled
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        slope = kernel(norm_input_grad, ctx.compiled)(gradients[0], x, weight, scale, ctx.centred)
        return slope, None, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.compiled = compiled
        output: Tensor = kernel(gated, compiled)(gate.detach(), up.detach())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *kernel(gated_grads, ctx.compiled)(gradients[0], gate, up), None
