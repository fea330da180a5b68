"""A decoder's norms and gated MLPs as one operation each.

Written out, an RMS norm in float32 and ``silu(gate) * up`` are chains of operations that keep what is between them.
Here a norm keeps what it reads, in the base's type, and a number a token; a gated MLP its two projections; the rest is
computed again in the backward. What is computed, and where it is rounded, is as in transformers' own code, which each
kind of layer is compared with when it is put in place; one that differs stays as it is.

The arithmetic is in four functions without autograd, which ``learner.compile`` lets torch.compile make kernels of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TOLERANCE = 0.01
"""Largest mean relative difference from the layer's own code: bfloat16 rounds to 0.004 at one place or another."""
MLP_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def normed(x: Tensor, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """RMS norm over the last dimension.

    Args:
        x: ... x H.
        weight: H factors; with `centred` one more than it is.
        eps: added to the mean square.
        centred: Qwen3.5's form, which multiplies before it rounds; otherwise Llama's, which rounds before.
    Returns: the norm in `x`'s type, and 1 / root mean square, ... x 1, in float32 at least.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if centred:
        return (wide * scale * (1.0 + weight.to(wide.dtype))).to(x.dtype), scale
    return weight * (wide * scale).to(x.dtype), scale


def norm_slope(slope: Tensor, x: Tensor, weight: Tensor, scale: Tensor, centred: bool) -> Tensor:
    """The loss's gradient by `x`, given that by the norm."""
    unit = x.to(scale.dtype) * scale
    factor = 1.0 + weight.to(scale.dtype) if centred else weight
    slope = (slope * factor).to(scale.dtype)
    along = (slope * unit).mean(dim=-1, keepdim=True)
    return ((slope - unit * along) * scale).to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return torch.nn.functional.silu(gate) * up


def gated_slopes(slope: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The loss's gradients by `gate` and `up`, given that by their product."""
    gate_slope = torch.ops.aten.silu_backward(slope * up, gate)
    return gate_slope, slope * torch.nn.functional.silu(gate)


class Kernels(NamedTuple):
    """The four functions above, as they are or compiled."""

    normed: Callable[..., tuple[Tensor, Tensor]]
    norm_slope: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    gated_slopes: Callable[..., tuple[Tensor, Tensor]]


def kernels(*, compiled: bool) -> Kernels:
    """As they are, or one kernel each for any number of tokens, made at its first use."""
    if not compiled:
        return Kernels(normed, norm_slope, gated, gated_slopes)

    def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = torch.compile(function, dynamic=True)
        return made

    return Kernels(kernel(normed), kernel(norm_slope), kernel(gated), kernel(gated_slopes))


def fuse(decoder: torch.nn.Module, using: Kernels) -> int:
    """Put the fused operations into the place of a decoder's norms and gated MLPs.

    Args:
        decoder: whole, on any device; its adapter, if any, is in place.
        using: what computes them.
    Returns: how many layers are fused; those that are neither, or compute something else, stay as they are.
    """
    alike: dict[tuple[type, int], Callable[[Any], Callable[[Tensor], Tensor]] | None] = {}
    fused = 0
    for module in decoder.modules():
        width = _width(module)
        if width is None:
            continue
        kind = (type(module), width)
        if kind not in alike:
            alike[kind] = _equal(module, width, using)
        make = alike[kind]
        if make is not None:
            module.forward = make(module)
            fused += 1
    return fused


def _width(module: Any) -> int | None:
    """Numbers of a token that the layer reads; None if it is neither a norm nor a gated MLP by its parts."""
    if type(module).__name__.endswith("RMSNorm") and _eps(module) is not None:
        return len(module.weight)
    if all(hasattr(module, part) for part in MLP_PARTS) and not module.gate_proj.weight.requires_grad:
        return int(module.gate_proj.in_features)
    return None


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _equal(module: Any, width: int, using: Kernels) -> Callable[[Any], Callable[[Tensor], Tensor]] | None:
    """The fused form of a layer that computes what its own code does; None if there is none."""
    weight = next(module.parameters())
    drawn = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    x = drawn.to(weight.device, weight.dtype)[None]
    expected = module(x).float()
    forms: list[Callable[[Any], Callable[[Tensor], Tensor]]] = [partial(_mlp, using=using)]
    if _eps(module) is not None:
        forms = [partial(_norm, centred=centred, using=using) for centred in (False, True)]
    for make in forms:
        gap = (make(module)(x).float() - expected).abs().mean()
        if gap <= TOLERANCE * expected.abs().mean():
            return make
    return None


def _norm(norm: Any, centred: bool, using: Kernels) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        output: Tensor = _Norm.apply(hidden_states, norm.weight, _eps(norm), centred, using)
        return output

    return forward


def _mlp(mlp: Any, using: Kernels) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        output: Tensor = mlp.down_proj(_Gated.apply(mlp.gate_proj(x), mlp.up_proj(x), using))
        return output

    return forward


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centred: bool, using: Kernels) -> Tensor:
        # Detached here and below: one kernel is compiled for tensors with gradients, another for those without.
        y, scale = using.normed(x.detach(), weight, eps, centred)
        ctx.save_for_backward(x, weight, scale)
        ctx.centred, ctx.using = centred, using
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        return ctx.using.norm_slope(gradients[0], x, weight, scale, ctx.centred), None, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, using: Kernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.using = using
        return using.gated(gate.detach(), up.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *ctx.using.gated_slopes(gradients[0], gate, up), None
