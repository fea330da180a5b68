"""Frozen linear layers whose weights are held in 8 bits (``learner.base_precision``).

A weight is a code times the scale of its output row. It is made whole for each product, forward and backward, and not
kept: a layer's backward finds codes and scales where its forward found them. What is trained, the adapter, is not
rounded, nor are embedding, LM head, norms and convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FORMATS: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Type of the codes, and the largest of them, which is that of the row's largest weight."""


class RoundedLinear(torch.nn.Linear):
    """A frozen linear layer: codes O x I in `weight`, scales O x 1, in the layer's type, in `weight_scale`."""

    def __init__(self, layer: torch.nn.Linear, precision: str) -> None:
        """Round the layer's weights to the nearest of `precision`, a name in `FORMATS`."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        codes, scale = rounded(layer.weight, precision)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """The product with the rounded weights, in the type of the input."""
        product: Tensor = _RoundedProduct.apply(input, self.weight, self.weight_scale, self.bias)
        return product


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes_OI, scale_O1)
        return torch.nn.functional.linear(x, whole_weight(codes_OI, scale_O1, x.dtype), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes_OI, scale_O1 = ctx.saved_tensors
        return gradients[0] @ whole_weight(codes_OI, scale_O1, gradients[0].dtype), None, None, None


@torch.no_grad()
def rounded(weight_OI: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Codes O x I and the scale of each row, O x 1 in the weight's type, whose product is nearest to the weight."""
    dtype, largest = FORMATS[precision]
    rows_O1 = weight_OI.to(torch.float32).abs().amax(dim=1, keepdim=True)
    # A row of zeros has a scale, too; and a scale that was rounded down must not push a code over the largest.
    scale_O1 = (rows_O1 / largest).clamp_min(torch.finfo(weight_OI.dtype).tiny).to(weight_OI.dtype)
    codes_OI = (weight_OI.to(torch.float32) / scale_O1.to(torch.float32)).clamp_(-largest, largest)
    return (codes_OI if dtype.is_floating_point else codes_OI.round_()).to(dtype), scale_O1


def whole_weight(weight_OI: Tensor, scale_O1: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight that codes and scales stand for; without scales it is itself."""
    return weight_OI if scale_O1 is None else weight_OI.to(dtype, copy=True).mul_(scale_O1)


def round_base(model: torch.nn.Module, precision: str) -> None:
    """Put rounded layers into the place of a decoder's frozen linear layers, under their names.

    Args:
        model: its adapter, if any, is in place; only that requires gradients.
        precision: `learner.base_precision`; "model" leaves all as it is.
    """
    if precision == "model":
        return
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad:
                setattr(parent, name, RoundedLinear(layer, precision))
