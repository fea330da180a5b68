"""The adapted linear layer against PEFT's own chain of operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from vllm.lora.ops.torch_ops import lora_ops

from draco_ray.learner.model import FusedLora

TOKENS, INPUTS, OUTPUTS, RANK = 30, 48, 40, 4


class Two(torch.nn.Module):
    """Two layers that read the same, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(INPUTS, OUTPUTS)
        self.right = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(x)


def adapted(fused: bool, dtype: torch.dtype) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["left", "right"])
    if fused:
        config._register_custom_module({torch.nn.Linear: FusedLora})
    model = get_peft_model(Two().to(dtype).requires_grad_(False), config)
    torch.manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(2, TOKENS // 2, INPUTS).to(dtype).requires_grad_()


def outcome(model: PeftModel, x: torch.Tensor, run: Any = None) -> dict[str, torch.Tensor]:
    """The output, and every gradient."""
    y = model(x) if run is None else run(model, x)
    y.float().pow(2).sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_values_and_gradients_are_pefts(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = (outcome(adapted(fused, dtype), inputs(dtype)) for fused in (True, False))
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 + 4
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype
        gap = (ours[name].double() - expected.double()).norm() / expected.double().norm()
        assert gap < tolerance, name


def test_the_output_is_rounded_as_vllms_is() -> None:
    """vLLM adds two rounded products: nearly all numbers are equal bit for bit, unlike those of a rounded sum."""
    model, x = adapted(True, torch.bfloat16), inputs(torch.bfloat16).detach()
    layer = model.base_model.model.left
    rows = x.flatten(0, -2)
    nobody = torch.zeros(len(rows), dtype=torch.long)
    inner = torch.zeros(len(rows), RANK)
    lora_ops.bgmv_shrink(rows, layer.lora_A["default"].weight.bfloat16()[None], inner, nobody, layer.scaling["default"])
    expected = torch.nn.functional.linear(rows, layer.base_layer.weight, layer.base_layer.bias)
    lora_ops.bgmv_expand(inner, layer.lora_B["default"].weight.bfloat16()[None], expected, nobody)
    ours = layer(x).view_as(expected)
    assert (ours == expected).float().mean() > 0.95
    base = rows.float() @ layer.base_layer.weight.float().T + layer.base_layer.bias.float()
    once = base + inner.bfloat16().float() @ layer.lora_B["default"].weight.bfloat16().float().T
    assert (once.bfloat16() == expected).float().mean() < 0.8


def test_recomputed_in_the_backward_and_without_a_gradient_below_it_is_the_same() -> None:
    model = adapted(True, torch.float32)
    plain = outcome(model, inputs(torch.float32))
    model.zero_grad()
    again = outcome(model, inputs(torch.float32), lambda model, x: checkpoint(model, x, use_reentrant=False))
    for name, expected in plain.items():
        torch.testing.assert_close(again[name], expected)
    model.zero_grad()
    model(inputs(torch.float32).detach()).pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(parameter.grad, plain[name])


class Products(TorchDispatchMode):
    """Counts the products with a frozen weight, forwards and in a recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(args[-1].shape)
        return func(*args, **(kwargs or {}))


def test_a_recomputation_leaves_out_the_last_product() -> None:
    """Nothing after it is kept, and so nothing needs it; the backward's own is of the weight the other way around."""

    class Last(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.right(self.left(x)[..., :1].expand_as(x))

    model = adapted(True, torch.float32)
    model.base_model.model.__class__ = Last
    x = inputs(torch.float32)
    with Products() as forwards:
        y = checkpoint(model, x, use_reentrant=False)
    with Products() as backwards:
        y.sum().backward()
    weight = torch.Size([INPUTS, OUTPUTS])
    assert forwards.shapes.count(weight) == 2
    assert backwards.shapes.count(weight) == 1


def test_with_the_adapter_off_it_is_the_base_layer() -> None:
    model = adapted(True, torch.bfloat16)
    x = inputs(torch.bfloat16)
    base = Two.forward(model.base_model.model, x)
    with model.disable_adapter():
        off = model(x)
    torch.manual_seed(0)
    assert torch.equal(off, Two().to(torch.bfloat16)(x))
    assert not torch.equal(off, base)


@contextmanager
def kept_bytes(known: list[torch.Tensor]) -> Iterator[list[int]]:
    """Collects the sizes of what is kept for the backward, each storage once."""
    storages = {tensor.untyped_storage()._cdata for tensor in known}
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages.add(storage._cdata)
            sizes.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def test_nothing_is_kept_but_what_is_read_and_the_inner_numbers() -> None:
    """And the two outputs, for their product."""
    x = inputs(torch.bfloat16)
    outputs, inner = 2 * 2 * TOKENS * OUTPUTS, 2 * 2 * TOKENS * RANK
    for fused in (True, False):
        model = adapted(fused, torch.bfloat16)
        with kept_bytes([x, *model.parameters()]) as sizes:
            model(x)
        ours = outputs + inner
        assert sum(sizes) == ours if fused else sum(sizes) > ours + 4 * TOKENS * INPUTS
