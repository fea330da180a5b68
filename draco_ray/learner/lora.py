"""A linear layer with a LoRA adapter as one operation.

PEFT adds an adapter's share as a chain of operations: what the layer reads is copied to float32, the share is computed,
scaled and added in arrays of the layer's output, and the copy is kept for the backward. Here the share is added into
the layer's own output, and nothing is kept that the layers beside it do not keep as well: what a layer reads, in the
base's type, and the adapter's few inner numbers. The adapter itself, its gradients and its optimizer stay in float32;
it is computed with in the base's type, as the engines do.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor
from torch.autograd.function import once_differentiable

from draco_ray.learner.frozen import whole_weight


class FusedLora(lora.Linear):
    """PEFT's LoRA layer around a frozen linear layer, for one adapter without dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's output plus ``scaling * B A x``; the base layer's alone where adapters are disabled."""
        base = self.base_layer
        if self.disable_adapters:
            output: Tensor = base(x)
            return output
        (name,) = self.active_adapters
        weight_a, weight_b = self.lora_A[name].weight, self.lora_B[name].weight
        scale = getattr(base, "weight_scale", None)
        adapted: Tensor = _AdaptedLinear.apply(x, base.weight, scale, base.bias, weight_a, weight_b, self.scaling[name])
        return adapted


class _AdaptedLinear(torch.autograd.Function):
    """N tokens, I inputs, O outputs, rank R."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        scale_O1: Tensor | None,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        inner_NR = x.flatten(0, -2) @ a_RI.to(x.dtype).T
        y = torch.nn.functional.linear(x, whole_weight(weight_OI, scale_O1, x.dtype), bias_O)
        y.view(-1, y.shape[-1]).addmm_(inner_NR, b_OR.to(x.dtype).T, alpha=scaling)
        ctx.save_for_backward(x, weight_OI, scale_O1, a_RI, b_OR, inner_NR)
        ctx.scaling = scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, scale_O1, a_RI, b_OR, inner_NR = ctx.saved_tensors
        slope_NO = gradients[0].flatten(0, -2)
        inner_slope_NR = (slope_NO @ b_OR.to(x.dtype)).mul_(ctx.scaling)
        x_slope = None
        if ctx.needs_input_grad[0]:
            x_slope_NI = slope_NO @ whole_weight(weight_OI, scale_O1, x.dtype)
            x_slope = x_slope_NI.addmm_(inner_slope_NR, a_RI.to(x.dtype)).view_as(x)
        a_slope_RI = (inner_slope_NR.T @ x.flatten(0, -2)).to(a_RI.dtype)
        b_slope_OR = (slope_NO.T @ inner_NR).to(b_OR.dtype).mul_(ctx.scaling)
        return x_slope, None, None, None, a_slope_RI, b_slope_OR, None
