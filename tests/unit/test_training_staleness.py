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


def test_every_step_says_how_far_engine_and_learner_are_apart(model: ModelConfig) -> None:
    samples = make_samples()
    learner = make_learner(model, None)
    logprobs = learner.old_logprobs(samples)
    random = np.random.default_rng(1)
    apart = [random.normal(scale=0.2, size=len(logprob_V)).astype(np.float32) for logprob_V in logprobs]
    told = [logprob_V - gap_V for logprob_V, gap_V in zip(logprobs, apart, strict=True)]
    learner.accumulate(sampled_at(samples, told, 0.0))
    metrics = learner.step()
    log_ratio_V = np.concatenate(apart).astype(np.float64)
    assert metrics.engine_k1 == pytest.approx(-log_ratio_V.mean(), abs=1e-5)
    assert metrics.engine_k3 == pytest.approx((np.exp(log_ratio_V) - 1 - log_ratio_V).mean(), abs=1e-5)
    assert metrics.engine_ratio_min == pytest.approx(np.exp(log_ratio_V.min()), rel=1e-4)
    assert metrics.engine_ratio_max == pytest.approx(np.exp(log_ratio_V.max()), rel=1e-4)
    assert metrics.engine_ratio_p01 < metrics.engine_ratio_p50 < metrics.engine_ratio_p99
    learner.accumulate(sampled_at(samples, learner.old_logprobs(samples), 0.0))
    assert learner.step().engine_ratio_max == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("level", "kept"), [("token", (10, 10, 9)), ("geometric", (10, 10, 10)), ("any_token", (10, 10, 0))]
)
def test_masked_tokens_push_nothing_and_still_count(model: ModelConfig, level: str, kept: tuple[int, ...]) -> None:
    """The last token of the third sample is one that the engine found ten times as likely."""
    config = CONFIG.model_copy(update={"mask_low": 0.5, "mask_high": 2.0, "mask_level": level})
    samples = [replace(sample, loss_mask_T=np.arange(30) >= 20) for sample in make_samples()]
    learner, plain = LoraLearner(model, config, seed=0), make_learner(model, None)
    logprobs = plain.old_logprobs(samples)
    logprobs[2][-1] += np.log(10.0)
    told = sampled_at(samples, logprobs, 0.0)
    learner.accumulate(told)
    push = [
        np.where(np.arange(30) < 20 + count, sample.advantage_T, 0.0) for sample, count in zip(told, kept, strict=True)
    ]
    plain.accumulate(
        [replace(sample, advantage_T=push_T.astype(np.float32)) for sample, push_T in zip(told, push, strict=True)]
    )
    torch.testing.assert_close(gradient(learner), gradient(plain), rtol=1e-4, atol=1e-6)
    metrics = learner.step()
    assert metrics.masked_fraction == pytest.approx(1 - sum(kept) / 30)
    assert metrics.valid_tokens == 30
