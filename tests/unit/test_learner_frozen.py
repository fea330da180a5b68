"""A base in 8 bits: against a model whose weights were rounded to the same grid, and against the unrounded one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import CanaryFailed
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.model import FORMATS, QuantizedLinear, dequantized, quantized
from tests.support.double_learner import (
    CASES,
    MODELS,
    gradient_of,
    learner_of,
    oracle,
    samples_of,
    save_models,
    use_double_precision,
)
from tests.unit.test_engine_canary import judge

PRECISIONS = list(FORMATS)
ERROR = {"int8": 0.012, "fp8": 0.03}
"""Most that rounding moves normally distributed weights, relative to them."""
GAP = {"int8": 0.08, "fp8": 0.2}
"""The same for log-probs of these tiny models, nats a token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def save_rounded(folder: Path, kind: str, precision: str, at: Path) -> None:
    """The model of that kind, each weight of its decoder's linear layers on the grid."""
    model = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32)
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.Linear):
            # Each row's largest weight is the largest code.
            dtype, largest = FORMATS[precision]
            scale = module.weight.data.abs().max(dim=1, keepdim=True).values / largest
            codes = (module.weight.data / scale).clamp(-largest, largest)
            codes = codes.to(dtype) if dtype.is_floating_point else codes.round()
            module.weight.data = codes.to(torch.float64) * scale.to(torch.float64)
    model.save_pretrained(at / kind)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_rounded_to_the_nearest_code_of_their_row(precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 512, generator=generator) * torch.logspace(-6, 6, 64)[:, None]
    weight[3] = 0
    codes, scale = quantized(weight, precision)
    assert codes.element_size() == 1
    found = dequantized(codes, scale, torch.float32)
    assert found[3].abs().max() == 0
    rows = [row for row in range(64) if row != 3]
    error = (found - weight).norm(dim=1)[rows] / weight.norm(dim=1)[rows]
    assert error.max() < ERROR[precision]
    # Rounding what is on the grid already changes nothing.
    torch.testing.assert_close(dequantized(*quantized(found, precision), torch.float32), found, rtol=1e-6, atol=0)
    half = quantized(weight.bfloat16(), precision)
    assert half[1].dtype == torch.bfloat16
    assert dequantized(*half, torch.bfloat16).isfinite().all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_a_model_on_the_grid(
    kind: str, precision: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In double precision, of the whole model on padded sequences."""
    torch.set_num_threads(1)
    use_double_precision(kind, monkeypatch.setattr)
    samples = samples_of(CASES["several groups"])
    learner = learner_of(folder, kind, base_precision=precision, gradient_checkpointing=True)
    old = learner.old_logprobs(samples)
    save_rounded(folder, kind, precision, tmp_path)
    logprobs, total, gradient = oracle(learner, tmp_path, kind, samples, old, tmp_path / "adapter")
    for found, expected in zip(old, logprobs, strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-9)
    sums = learner.accumulate(samples, old)
    torch.testing.assert_close(gradient_of(learner), gradient, rtol=1e-9, atol=1e-9 * float(gradient.abs().max()))
    assert sums["policy_loss"] + 0.1 * sums["kl"] == pytest.approx(total, rel=1e-9, abs=1e-9)
    # The unrounded model's are others.
    whole = learner_of(folder, kind)
    whole.accumulate(samples, old)
    assert (gradient_of(whole) - gradient).norm() > 1e-3 * gradient.norm()


def held(learner: LoraLearner) -> tuple[int, int]:
    """Bytes of the decoder's frozen linear layers, and how many weights they have."""
    frozen = [
        layer
        for layer in learner.policy.peft.get_base_model().get_decoder().modules()
        if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad
    ]
    parameters = [parameter for layer in frozen for parameter in layer.parameters()]
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return size, sum(layer.weight.numel() for layer in frozen)


def plain(folder: Path, kind: str, precision: str, dtype: str = "float32") -> LoraLearner:
    config = LearnerConfig(gpus_per_worker=0, lora_rank=2, lora_alpha=4, base_precision=precision)
    return LoraLearner(ModelConfig(path=str(folder / kind), dtype=dtype), config, seed=0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_weight_takes_one_byte_and_the_adapter_is_what_it_was(kind: str, precision: str, folder: Path) -> None:
    learner, usual = plain(folder, kind, precision, "bfloat16"), plain(folder, kind, "model", "bfloat16")
    size, weights = held(learner)
    usual_size, usual_weights = held(usual)
    assert weights == usual_weights
    assert weights < size < 0.6 * usual_size
    linears = {
        name
        for name, module in learner.policy.peft.get_base_model().get_decoder().named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert linears
    assert all(parameter.dtype == torch.float32 for parameter in learner.policy.parameters)
    for name, values in usual.adapter(0).tensors.items():
        np.testing.assert_array_equal(learner.adapter(0).tensors[name], values)


def test_nothing_whole_is_kept_for_the_backward() -> None:
    torch.manual_seed(0)
    layer = QuantizedLinear(torch.nn.Linear(48, 40).requires_grad_(False), "int8")
    x = torch.randn(7, 48, requires_grad=True)
    kept: list[Tensor] = []

    def keep(one: Tensor) -> Tensor:
        kept.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        y = layer(x)
    assert {one.data_ptr() for one in kept} == {layer.weight.data_ptr(), layer.weight_scale.data_ptr()}
    y.sum().backward()
    expected = dequantized(layer.weight, layer.weight_scale, torch.float32).sum(dim=0).expand(7, -1)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_what_rounding_does_to_log_probs_is_bounded_and_an_adapter_that_is_not_live_shows(
    kind: str, folder: Path
) -> None:
    """The engine serves the base unrounded: the learner's gap to it, and the canary's at a band above that gap."""
    torch.set_num_threads(1)
    ids = np.random.default_rng(0).integers(0, 61, 200)
    engine = plain(folder, kind, "model")
    noise = {
        name: torch.from_numpy(values) + 0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        for name, values in engine.adapter(0).tensors.items()
    }
    off = engine.token_logprobs(ids, adapter=False)[1:]
    engine.policy.load_adapter(noise, "noise")
    on = engine.token_logprobs(ids)[1:]
    gaps = {}
    for precision in PRECISIONS:
        learner = plain(folder, kind, precision)
        learner.policy.load_adapter(noise, "noise")
        mine = learner.token_logprobs(ids)[1:]
        mine_off = learner.token_logprobs(ids, adapter=False)[1:]
        reading = judge(on, mine, off=off, again=off, learner_off=mine_off, tolerance=GAP[precision])
        assert reading.live
        gaps[precision] = reading.gap_mean
        # A tolerance that hides the effect; its noise is not zero.
        with pytest.raises(CanaryFailed, match="closer to the base model"):
            judge(off, mine, off=off, again=on, learner_off=mine_off, tolerance=10.0)
    assert 0 < gaps["int8"] < gaps["fp8"]
