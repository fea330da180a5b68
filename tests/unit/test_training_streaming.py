"""A step's updates fed in the order in which groups finish: the same updates, and nobody waits for a slow group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
import torch

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.learner.base import UpdateMetrics
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.worker import LearnerWorker
from draco_ray.records import TrainingSample
from draco_ray.training.trainer import StreamedUpdate, streamed_update
from tests.support.tiny_model import VOCABULARY, build_tiny_model

CONFIG = LearnerConfig(
    gpus_per_worker=0, lora_rank=4, lora_alpha=8, gradient_checkpointing=False, learning_rate=3e-3, minibatch_prompts=2
)
GROUPS = 4

Samples = list[TrainingSample]


class LocalLearner:
    """One worker of the learner in this process, and what it was asked, by group."""

    def __init__(self, learner: LoraLearner) -> None:
        self.learner = learner
        self.asked: list[tuple[str, str]] = []
        self._worker = LearnerWorker(learner, rank=0, workers=1)

    async def accumulate(self, group: Samples) -> None:
        self.asked.append(("accumulate", group[0].task_id))
        await asyncio.sleep(0)
        self._worker.accumulate(group)

    async def remember_old_logprobs(self, group: Samples) -> None:
        self.asked.append(("remember", group[0].task_id))
        await asyncio.sleep(0)
        self._worker.remember_old_logprobs(group)

    async def step(self) -> UpdateMetrics:
        self.asked.append(("update", ""))
        return self._worker.step()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    torch.set_num_threads(1)
    return ModelConfig(path=str(build_tiny_model(tmp_path_factory.mktemp("model"))), dtype="float32")


def make_group(index: int, size: int = 3) -> Samples:
    random = np.random.default_rng(index)
    group = []
    for rollout in range(size):
        length = int(random.integers(10, 40))
        mask_T = random.random(length) < 0.5
        mask_T[:3] = False
        mask_T[4] = True
        group.append(
            TrainingSample(
                group=f"step1/t_{index}",
                task_id=f"t_{index}",
                rollout=rollout,
                policy_version=0,
                token_ids_T=random.integers(0, VOCABULARY // 2, length),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, random.normal(), 0.0).astype(np.float32),
                logprob_T=np.where(mask_T, -5.0, 0.0).astype(np.float32),
                prompt_length=3,
            )
        )
    return group


def unstreamed(learner: LoraLearner, groups: Sequence[Samples], size: int) -> list[UpdateMetrics]:
    """Whole minibatches, one after the other; old log-probs of the later ones from the adapter that sampled them."""
    minibatches = [[s for group in groups[at : at + size] for s in group] for at in range(0, len(groups), size)]
    old = [None, *(learner.old_logprobs(samples) for samples in minibatches[1:])]
    updates = []
    for samples, logprobs in zip(minibatches, old, strict=True):
        learner.accumulate(samples, logprobs)
        updates.append(learner.step())
    return updates


async def streamed(
    learner: LocalLearner,
    groups: Sequence[Samples | None],
    arrivals: Sequence[int],
    size: int,
    *,
    in_order: bool = False,
) -> StreamedUpdate:
    """The groups become ready one by one, in that order."""
    ready: list[asyncio.Future[Samples | None]] = [asyncio.get_running_loop().create_future() for _ in groups]
    update = asyncio.ensure_future(streamed_update(learner, ready, size, in_order=in_order))
    for index in arrivals:
        for _ in range(5):
            await asyncio.sleep(0)
        ready[index].set_result(groups[index])
    return await update


def weights(learner: LoraLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.policy.parameters])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
async def test_the_streamed_update_is_the_unstreamed_one(model: ModelConfig, size: int) -> None:
    groups = [make_group(index) for index in range(GROUPS)]
    whole = LoraLearner(model, CONFIG, seed=0)
    expected = unstreamed(whole, groups, size)
    orders = list(permutations(range(GROUPS)))
    for arrivals in (orders[0], orders[-1], orders[9]):
        local = LocalLearner(LoraLearner(model, CONFIG, seed=0))
        found = (await streamed(local, groups, arrivals, size)).updates
        assert [update.valid_tokens for update in found] == [update.valid_tokens for update in expected]
        for name in ("grad_norm", "policy_loss", "kl", "clip_fraction"):
            assert [getattr(update, name) for update in found] == pytest.approx(
                [getattr(update, name) for update in expected], rel=1e-3, abs=1e-6
            )
        # Adam divides by the gradient's own size, which magnifies rounding where a gradient is nearly zero.
        torch.testing.assert_close(weights(local.learner), weights(whole), rtol=1e-3, atol=1e-4)
    # The later updates are off-policy, or old log-probs of the wrong weights would go unnoticed.
    for at, update in enumerate(expected[1:], start=1):
        pushed = sum(s.advantage_T.sum() for group in groups[at * size : (at + 1) * size] for s in group)
        assert abs(update.policy_loss + float(pushed) / update.valid_tokens) > 1e-4


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_in_order_the_weights_do_not_depend_on_the_order_of_arrival(model: ModelConfig, size: int) -> None:
    groups = [make_group(0), None, make_group(2), make_group(3)]
    found = []
    for arrivals in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        local = LocalLearner(LoraLearner(model, CONFIG, seed=0))
        updates = (await streamed(local, groups, arrivals, size, in_order=True)).updates
        found.append((weights(local.learner), [update.grad_norm for update in updates], local.asked))
    assert all(torch.equal(found[0][0], other[0]) and found[0][1:] == other[1:] for other in found[1:])


async def test_a_slow_group_holds_up_no_other(model: ModelConfig) -> None:
    groups = [make_group(index) for index in range(GROUPS)]
    local = LocalLearner(LoraLearner(model, CONFIG, seed=0))
    ready: list[asyncio.Future[Samples | None]] = [asyncio.get_running_loop().create_future() for _ in groups]
    update = asyncio.ensure_future(streamed_update(local, ready, 2))
    for index in (3, 1, 2):
        ready[index].set_result(groups[index])
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(local.asked) == [("accumulate", "t_1"), ("remember", "t_2"), ("remember", "t_3")]
    ready[0].set_result(groups[0])
    await update
    assert local.asked[3:5] == [("accumulate", "t_0"), ("update", "")]
    assert sorted(local.asked[5:7]) == [("accumulate", "t_2"), ("accumulate", "t_3")]
    assert local.asked[7:] == [("update", "")]


async def test_failed_groups_are_left_out(model: ModelConfig) -> None:
    local = LocalLearner(LoraLearner(model, CONFIG, seed=0))
    found = await streamed(local, [None, make_group(1), None, None], (0, 1, 2, 3), 2)
    assert [update.skipped for update in found.updates] == [None, "no valid tokens"]
    assert [samples[0].task_id for samples in found.fed] == ["t_1"]


async def test_the_first_error_ends_the_step(model: ModelConfig) -> None:
    local = LocalLearner(LoraLearner(model, CONFIG, seed=0))
    ready: list[asyncio.Future[Samples | None]] = [asyncio.get_running_loop().create_future() for _ in range(GROUPS)]
    update = asyncio.ensure_future(streamed_update(local, ready, 2))
    ready[2].set_exception(RuntimeError("the judge refuses us"))
    with pytest.raises(RuntimeError, match="refuses us"):
        await update
    assert local.asked == []
