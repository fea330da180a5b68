"""One step of staleness: the weight of what an older adapter sampled, in the learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import FloatArray, TrainingSample
from tests.support.tiny_model import VOCABULARY, build_tiny_model

CONFIG = LearnerConfig(gpus_per_worker=0, lora_rank=4, lora_alpha=8, gradient_checkpointing=False, kl_coefficient=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    torch.set_num_threads(1)
    path: Path = build_tiny_model(tmp_path_factory.mktemp("model"))
    return ModelConfig(path=str(path), dtype="float32")


def make_learner(model: ModelConfig, cap: float | None) -> LoraLearner:
    return LoraLearner(model, CONFIG.model_copy(update={"importance_cap": cap}), seed=0)


def make_samples() -> list[TrainingSample]:
    random = np.random.default_rng(0)
    samples = []
    for rollout in range(3):
        mask_T = random.random(30) < 0.5
        mask_T[:3] = False
        samples.append(
            TrainingSample(
                group="step1/t_1",
                task_id="t_1",
                rollout=rollout,
                policy_version=0,
                token_ids_T=random.integers(0, VOCABULARY // 2, 30),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, random.normal(), 0.0).astype(np.float32),
                logprob_T=np.zeros(30, dtype=np.float32),
                prompt_length=3,
            )
        )
    return samples


def sampled_at(samples: list[TrainingSample], logprobs: list[FloatArray], lower: float) -> list[TrainingSample]:
    """The samples as an engine would have sampled them that gave every token so much less log-prob."""
    told = []
    for sample, logprob_V in zip(samples, logprobs, strict=True):
        logprob_T = np.zeros(len(sample.token_ids_T), dtype=np.float32)
        logprob_T[sample.loss_mask_T] = logprob_V - lower
        told.append(replace(sample, logprob_T=logprob_T))
    return told


def gradient(learner: LoraLearner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters if p.grad is not None])


@pytest.mark.parametrize(("lower", "weight"), [(0.0, 1.0), (np.log(1.5), 1.5), (-np.log(4.0), 0.25), (3.0, 2.0)])
def test_the_gradient_is_weighed_by_who_sampled(model: ModelConfig, lower: float, weight: float) -> None:
    plain, corrected = make_learner(model, None), make_learner(model, 2.0)
    samples = make_samples()
    samples = sampled_at(samples, plain.old_logprobs(samples), lower)
    plain.accumulate(samples)
    corrected.accumulate(samples)
    scale = float(gradient(plain).abs().max())
    torch.testing.assert_close(gradient(corrected), weight * gradient(plain), rtol=1e-3, atol=1e-4 * scale)
    metrics, unweighed = corrected.step(), plain.step()
    assert metrics.importance_weight == pytest.approx(weight, rel=1e-4)
    assert metrics.truncated_fraction == (1.0 if lower == 3.0 else 0.0)
    assert metrics.engine_gap == pytest.approx(abs(lower), abs=1e-4)
    assert (unweighed.importance_weight, unweighed.truncated_fraction) == (1.0, 0.0)


def test_without_a_cap_the_engines_logprobs_change_nothing(model: ModelConfig) -> None:
    samples = make_samples()
    one, other = make_learner(model, None), make_learner(model, None)
    logprobs = one.old_logprobs(samples)
    one.accumulate(sampled_at(samples, logprobs, 0.0))
    other.accumulate(sampled_at(samples, logprobs, 2.0))
    assert torch.equal(gradient(one), gradient(other))
