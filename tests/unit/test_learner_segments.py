"""Rows of segments against the whole model on padded sequences, in double precision."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.learner.lora_learner import LoraLearner
from tests.support.double_learner import (
    CASES,
    COMMON,
    MODELS,
    gradient_of,
    learner_of,
    oracle,
    samples_of,
    save_models,
    use_double_precision,
)


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A family of models, whose norms, gates and states are computed in double precision."""
    torch.set_num_threads(1)
    use_double_precision(request.param, monkeypatch.setattr)
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


SYSTEM = 20
"""Tokens that all prompts of the case "one system prompt" begin with."""


@pytest.mark.parametrize("case", [*CASES, "all equal", "one system prompt"])
def test_a_row_is_the_padded_whole_model(kind: str, case: str, folder: Path, tmp_path: Path) -> None:
    equal = case == "all equal"
    system = SYSTEM if case == "one system prompt" else 0
    if system:
        samples = samples_of(
            [(SYSTEM + 5, [20, 3]), (SYSTEM + 70, [66, 4]), (SYSTEM, [9]), (SYSTEM + 1, [7])], system=SYSTEM
        )
    else:
        samples = samples_of([(6, [8, 8, 8])] if equal else CASES[case], equal=equal)
    learner = learner_of(folder, kind)
    random = np.random.default_rng(3)
    old = [logprob_V + random.normal(scale=0.3, size=len(logprob_V)) for logprob_V in learner.old_logprobs(samples)]
    logprobs, total, gradient = oracle(learner, folder, kind, samples, old, tmp_path / "adapter")
    for found, expected in zip(learner.old_logprobs(samples), logprobs, strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-9)
    sums = learner.accumulate(samples, old)
    torch.testing.assert_close(gradient_of(learner), gradient, rtol=1e-9, atol=1e-9 * float(gradient.abs().max()))
    assert sums["policy_loss"] + 0.1 * sums["kl"] == pytest.approx(total, rel=1e-9, abs=1e-9)
    shared = {sample.group: sample.prompt_length for sample in samples}
    replies = sum(len(sample.token_ids_T) - sample.prompt_length for sample in samples)
    assert sums["computed_tokens"] == system + sum(prompt - system for prompt in shared.values()) + replies


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"micro_batch_tokens": 40}])
def test_nor_do_checkpointing_and_the_cut_into_rows_matter(kind: str, changes: dict[str, Any], folder: Path) -> None:
    samples = samples_of(CASES["several groups"])
    gradients = []
    for keys in ({}, changes):
        learner = learner_of(folder, kind, **keys)
        learner.accumulate(samples)
        gradients.append(gradient_of(learner))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-9 * float(gradients[0].abs().max()))


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_model_with_windows_is_computed_one_sequence_a_pass(name: str, tmp_path: Path) -> None:
    """Its own attention, which sees the last four tokens; in a row of sequences ours would see all."""
    values = COMMON | {"head_dim": 8, "sliding_window": 4}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **values)).save_pretrained(tmp_path)
    config = LearnerConfig(gpus_per_worker=0, lora_rank=2, lora_alpha=4)
    learner = LoraLearner(ModelConfig(path=str(tmp_path), dtype="float32"), config, seed=0)
    assert not learner.policy.packs
    samples = samples_of([(12, [20, 3, 11])])
    assert [len(batch) for batch in learner.micro_batches(samples)] == [1, 1, 1]
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for sample, found in zip(samples, learner.old_logprobs(samples), strict=True):
        ids_BT = torch.from_numpy(sample.token_ids_T)[None]
        with torch.no_grad():
            every = base(input_ids=ids_BT).logits[0, :-1].log_softmax(-1).gather(1, ids_BT[0, 1:, None])[:, 0]
        np.testing.assert_allclose(found, every.numpy()[sample.loss_mask_T[1:]], atol=1e-4)


def test_offloading_without_recomputation_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"learner\.offload_activations without learner\.gradient_checkpointing"):
        LearnerConfig(offload_activations=True, gradient_checkpointing=False)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5_text"])
def test_a_row_that_is_computed_leaves_nothing_for_the_garbage_collector(name: str, folder: Path) -> None:
    """A cycle around a layer's states would keep a pass's memory until the collector happens to run."""
    learner = LoraLearner(
        ModelConfig(path=str(folder / name), dtype="float32"), LearnerConfig(gpus_per_worker=0), seed=0
    )
    samples = samples_of(CASES["several groups"])
    learner.accumulate(samples)
    gc.collect()
    gc.disable()
    try:
        learner.accumulate(samples)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
