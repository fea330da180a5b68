"""Fused norms and gated MLPs against transformers' own, and what they keep for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from transformers import AutoConfig, AutoModelForCausalLM

from draco_ray.learner.pointwise import fuse
from tests.support.double_learner import COMMON, DELTA

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 8},
    "qwen3_5_text": COMMON | DELTA | {"head_dim": 8},
    "gemma2": COMMON | {"head_dim": 8},
}
TOKENS, WIDTH, INNER = 30, 32, 48
"""The widths are those of `COMMON`."""


def decoder_of(name: str, dtype: torch.dtype) -> Any:
    """With weights of norms away from what they begin with, and nothing to train."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name]))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype).requires_grad_(False).get_decoder()


def outcome(layer: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A layer's output for a row of tokens, as the learner's are, and its gradient."""
    torch.manual_seed(1)
    x = torch.randn(1, TOKENS, width).to(dtype).requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape).to(dtype))
    assert x.grad is not None
    return [y.detach(), x.grad]


def layers_of(decoder: Any) -> dict[str, tuple[Any, int]]:
    """Its norms and MLPs with what they read."""
    found = {}
    for name, module in decoder.named_modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            found[name] = module, len(module.weight)
        elif kind.endswith("MLP"):
            found[name] = module, module.gate_proj.in_features
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "compiled"])
def compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.set_num_threads(1)
    # More threads start an interpreter with a PyTorch of its own, which costs more than what is compiled here.
    one_thread = torch._inductor.config.patch(compile_threads=1)
    # What is compiled too often for too many kinds of tensors would be computed as it is written.
    with one_thread, torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield request.param


COMPILED = ("qwen3", "qwen3_5_text")
"""Between them they have every kernel, a norm with and without a centred weight among them, and norms of two widths."""


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize(
    ("name", "compiled"),
    [(name, compiled) for compiled, names in ((False, MODELS), (True, COMPILED)) for name in names],
    indirect=["compiled"],
)
def test_values_and_gradients_are_the_models(name: str, dtype: torch.dtype, tolerance: float, compiled: bool) -> None:
    decoder = decoder_of(name, dtype)
    layers = layers_of(decoder)
    before = {path: outcome(layer, width, dtype) for path, (layer, width) in layers.items()}
    mlps = sum(path.endswith("mlp") for path in layers)
    # A delta net's own norm is gated, and not one of these; Gemma's MLP has another activation.
    assert fuse(decoder, compiled=compiled) == len(layers) - (mlps if name == "gemma2" else 0)
    for path, (layer, width) in layers.items():
        for found, expected in zip(outcome(layer, width, dtype), before[path], strict=True):
            assert found.dtype == expected.dtype
            gap = (found.double() - expected.double()).norm() / expected.double().norm()
            assert gap < tolerance, path


def test_a_layer_that_computes_something_else_stays_as_it_is() -> None:
    decoder = decoder_of("qwen3", torch.float32)
    norm, mlp = type(decoder.norm), type(decoder.layers[0].mlp)

    class OtherRMSNorm(norm):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.1 * super().forward(x)

    class Other(mlp):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    decoder.norm.__class__ = OtherRMSNorm
    decoder.layers[0].mlp.__class__ = Other
    expected = [outcome(layer, WIDTH, torch.float32) for layer in (decoder.norm, decoder.layers[0].mlp)]
    assert fuse(decoder, compiled=False) == len(layers_of(decoder)) - 1
    found = [outcome(layer, WIDTH, torch.float32) for layer in (decoder.norm, decoder.layers[0].mlp)]
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def kept_bytes(layer: Any, x: torch.Tensor) -> int:
    """What a layer keeps for its backward beside its parameters and what it reads."""
    known = {tensor.untyped_storage()._cdata for tensor in [x, *layer.parameters()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in known:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_a_norm_keeps_a_number_a_token_and_an_mlp_its_two_projections(compiled: bool) -> None:
    decoder = decoder_of("qwen3", torch.bfloat16)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    norm, mlp = decoder.layers[0].input_layernorm, decoder.layers[0].mlp
    projections = 2 * TOKENS * 2 * INNER
    written_out = [kept_bytes(norm, x), kept_bytes(mlp, x)]
    fuse(decoder, compiled=compiled)
    assert [kept_bytes(norm, x), kept_bytes(mlp, x)] == [4 * TOKENS, projections]
    assert written_out[0] > 4 * TOKENS * WIDTH
    assert written_out[1] > projections
