"""A linear layer with a LoRA adapter as one operation.

PEFT adds an adapter's share as a chain of operations: what the layer reads is copied to float32, the share is computed,
scaled and added in arrays of the layer's output, and the copy is kept for the backward. Here the share is added into
the layer's own output, and nothing is kept that the layers beside it do not keep as well: what a layer reads, in the
base's type, and the adapter's few inner numbers. The adapter itself, its gradients and its optimizer stay in float32;
it is computed with in the base's type, as the engines do.

The adapter's share is what autograd sees, and its backward is that of the whole layer; the frozen layer's product is
added to it afterwards. By then all that is kept exists, and a checkpoint that computes a decoder layer again stops at
the last thing that is kept: it leaves out the product of the layer's last matrix, a quarter of the whole in an MLP as
wide as these models'.
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
        adapted: Tensor = _Adapter.apply(x, base.weight, scale, base.bias, weight_a, weight_b, self.scaling[name])
        with torch.no_grad():
            weight_IO = whole_weight(base.weight, scale, x.dtype).T
            adapted.detach().view(-1, adapted.shape[-1]).addmm_(x.flatten(0, -2), weight_IO)
        return adapted


class _Adapter(torch.autograd.Function):
    """N tokens, I inputs, O outputs, rank R: forwards bias and share of the adapter, backwards the whole layer."""

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
        # No view is returned: it is added to behind autograd's back.
        share = x.new_empty(*x.shape[:-1], len(b_OR))
        bias, bias_counts = (x.new_zeros(()), 0) if bias_O is None else (bias_O, 1)
        out_NO = share.view(-1, len(b_OR))
        torch.addmm(bias, inner_NR, b_OR.to(x.dtype).T, beta=bias_counts, alpha=scaling, out=out_NO)
        ctx.save_for_backward(x, weight_OI, scale_O1, a_RI, b_OR, inner_NR)
        ctx.scaling = scaling
        return share

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
