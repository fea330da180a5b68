"""The learner behind Ray Train: real workers, real collectives, workers that die or stand still."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import LearnerError
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.ray_lora import RayLoraLearner
from draco_ray.records import Adapter, TrainingSample
from draco_ray.training.cluster import start_ray
from tests.support.autoscaling import poll_until
from tests.support.command import descendants

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

WORDS = 300
CONFIG = LearnerConfig(
    workers=2,
    gpus_per_worker=0,
    cpus_per_worker=1,
    lora_rank=4,
    lora_alpha=8,
    gradient_checkpointing=False,
    learning_rate=1e-3,
    max_failures=2,
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Time in which Ray Train lets workers leave their group, which those that wait for a lost one cannot: 30 s.
        patch.setenv("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "1")
        start_ray(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("model")
    shape = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return ModelConfig(path=str(path), dtype="float32")


def make_group(step: int, task: int, size: int = 3) -> list[TrainingSample]:
    random = np.random.default_rng((step, task))
    group = []
    for rollout in range(size):
        length = int(random.integers(20, 60))
        mask_T = random.random(length) < 0.6
        mask_T[:4] = False
        group.append(
            TrainingSample(
                group=f"step{step}/t_{task}",
                task_id=f"t_{task}",
                rollout=rollout,
                policy_version=step,
                token_ids_T=random.integers(0, WORDS, length),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, random.normal(), 0.0).astype(np.float32),
                logprob_T=np.where(mask_T, -5.0, 0.0).astype(np.float32),
                prompt_length=4,
            )
        )
    return group


@pytest.fixture
async def learner(model: ModelConfig, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[RayLoraLearner]:
    config = CONFIG.model_copy(update=getattr(request, "param", {}))
    group = RayLoraLearner(model, config, run=tmp_path / "run", seed=0)
    await group.start()
    yield group
    await group.stop()


def train_alone(alone: LoraLearner, step: int) -> list[float]:
    """One training step of two minibatches in this process; returns the gradient norms."""
    first = [sample for task in (0, 1) for sample in make_group(step, task)]
    second = [sample for task in (2, 3) for sample in make_group(step, task)]
    alone.accumulate(first)
    old = alone.old_logprobs(second)
    norms = [alone.step().grad_norm]
    alone.accumulate(second, old)
    return [*norms, alone.step().grad_norm]


async def train(learner: RayLoraLearner, step: int) -> list[float]:
    """The same step through Ray, one group at a time."""
    groups = [ray.put(make_group(step, task)) for task in range(4)]
    for group in groups[:2]:
        await learner.accumulate(group)
    for group in groups[2:]:
        await learner.remember_old_logprobs(group)
    norms = [(await learner.step()).grad_norm]
    for group in groups[2:]:
        await learner.accumulate(group)
    return [*norms, (await learner.step()).grad_norm]


def assert_same_adapter(found: Adapter, expected: Adapter) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        # Adam divides by the gradient's own size, which magnifies rounding where a gradient is nearly zero.
        np.testing.assert_allclose(found.tensors[name], tensor, atol=1e-4, err_msg=name)


async def test_two_steps_on_two_workers_equal_one_process(
    learner: RayLoraLearner, model: ModelConfig, tmp_path: Path
) -> None:
    assert worker_pids()
    # Which would ask whatever Ray listens at the default port whether they are still needed.
    assert not descendants(os.getpid(), "PlacementGroupCleaner")
    alone = LoraLearner(model, CONFIG, seed=0)
    untrained: Adapter = await (await learner.weights(0))
    assert_same_adapter(untrained, alone.adapter(0))

    for step in range(2):
        assert await train(learner, step) == pytest.approx(train_alone(alone, step), rel=1e-3)
        adapter: Adapter = await (await learner.weights(step + 1))
        assert adapter.version == step + 1
        assert_same_adapter(adapter, alone.adapter(step + 1))
    assert any(np.abs(adapter.tensors[name] - untrained.tensors[name]).max() > 1e-3 for name in adapter.tensors)

    await learner.checkpoint(tmp_path / "step00002")
    token_ids = list(range(40))
    logprobs = await learner.token_logprobs(token_ids)
    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, str(tmp_path / "step00002")).eval()
    ids = torch.tensor(token_ids)[None]
    with torch.no_grad():
        expected = plain(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(logprobs[1:], expected.numpy(), atol=1e-4)

    resumed = LoraLearner(model, CONFIG, seed=5)
    resumed.load(tmp_path / "step00002")
    assert resumed.updates == 4
    assert await train(learner, 2) == pytest.approx(train_alone(resumed, 2), rel=1e-3)

    # Interrupted while they wait for work: their place is free at once, and not when this job ends.
    await learner.stop(timeout=0)
    await poll_until(lambda: not worker_pids())
    await poll_until(lambda: ray.available_resources().get("CPU") == 2)
    assert ray.available_resources().get("CPU") == 2


async def test_a_checkpoint_that_does_not_fit_stops_at_once(model: ModelConfig, tmp_path: Path) -> None:
    LoraLearner(model, CONFIG.model_copy(update={"lora_rank": 2}), seed=0).save(tmp_path / "rank2")
    group = RayLoraLearner(
        model, CONFIG.model_copy(update={"workers": 1}), run=tmp_path, seed=0, resume_from=tmp_path / "rank2"
    )
    with pytest.raises(LearnerError, match="rank2: 28 tensors do not fit this model"):
        await group.start()
    await group.stop()


def worker_pids() -> list[int]:
    """Process ids of Ray Train's workers; Ray was started here, so they are our descendants."""
    return [process.pid for process in descendants(os.getpid(), "RayTrainWorker")]


async def outlive_deaths(learner: RayLoraLearner, times: int) -> None:
    """Kill a worker so many times, and have each death outlived."""
    for _ in range(times):
        os.kill(worker_pids()[0], signal.SIGKILL)
        await learner.weights(2)


# The other worker is then waiting for its part.
@pytest.mark.parametrize("learner", [{"sharding": "full", "stall_seconds": 20}], indirect=True)
async def test_a_worker_that_stands_still_or_dies_costs_nothing_but_time_until_it_happens_too_often(
    learner: RayLoraLearner, model: ModelConfig, tmp_path: Path
) -> None:
    alone = LoraLearner(model, CONFIG, seed=0)
    await train(learner, 0)
    train_alone(alone, 0)
    await learner.checkpoint(tmp_path / "step00001")
    await learner.accumulate(ray.put(make_group(1, 0)))
    alone.accumulate(make_group(1, 0))

    await learner.remember_old_logprobs(ray.put(make_group(1, 1)))
    with pytest.raises(LearnerError, match="in the middle of a training step"):
        await learner.checkpoint(tmp_path / "early")

    os.kill(worker_pids()[0], signal.SIGSTOP)
    metrics = await learner.step()
    assert metrics.grad_norm == pytest.approx(alone.step().grad_norm, rel=1e-3)
    assert metrics.update == 3
    assert_same_adapter(await (await learner.weights(2)), alone.adapter(2))

    with pytest.raises(LearnerError, match=r"the learner failed 3 times since the last checkpoint"):
        await outlive_deaths(learner, 3)
    # They end together, and by themselves: Ray would keep the CPUs of a group that was ended by force.
    await learner.stop(timeout=3600)


@pytest.mark.parametrize("learner", [{"context_parallel": 2, "sharding": "none", "max_failures": 1}], indirect=True)
async def test_a_worker_that_dies_while_it_shares_rows_costs_nothing_but_time(
    learner: RayLoraLearner, model: ModelConfig, tmp_path: Path
) -> None:
    """The other one waits in an exchange that nobody answers any more."""
    alone, first, second = LoraLearner(model, CONFIG, seed=0), make_group(0, 0), make_group(0, 1)
    norms = []
    for group in (first, second):
        alone.accumulate(group)
        norms.append(alone.step().grad_norm)
    await learner.accumulate(ray.put(first))
    assert (await learner.step()).grad_norm == pytest.approx(norms[0], rel=1e-3)
    await learner.weights(1)
    await learner.checkpoint(tmp_path / "step00001")
    await learner.accumulate(ray.put(second))
    victims = worker_pids()
    assert len(victims) == 2
    os.kill(victims[-1], signal.SIGKILL)
    metrics = await learner.step()
    assert metrics.update == 2
    assert metrics.grad_norm == pytest.approx(norms[1], rel=1e-3)


class HangsOnce:
    """A group that hangs whoever reads it first, as a kernel would: its process goes on answering."""

    def __init__(self, first: Path, group: list[TrainingSample]) -> None:
        first.touch()
        self._first, self._group = first, group

    def __reduce__(self) -> tuple[Any, ...]:
        return read_or_hang, (self._first, self._group)


def read_or_hang(first: Path, group: list[TrainingSample]) -> list[TrainingSample]:
    if first.exists():
        first.unlink()
        threading.Event().wait()
    return group


@pytest.mark.parametrize("learner", [{"workers": 1, "hang_seconds": 10}], indirect=True)
async def test_a_worker_that_hangs_in_a_command_is_started_anew_and_does_it_again(
    learner: RayLoraLearner, model: ModelConfig, tmp_path: Path
) -> None:
    alone = LoraLearner(model, CONFIG, seed=0)
    (before,) = worker_pids()
    # A worker cannot import this module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    await learner.accumulate(ray.put(HangsOnce(tmp_path / "first", make_group(1, 0))))
    alone.accumulate(make_group(1, 0))
    assert worker_pids() != [before]
    assert (await learner.step()).grad_norm == pytest.approx(alone.step().grad_norm, rel=1e-3)


async def test_workers_end_where_nobody_is_left_to_tell_them_what_to_do(learner: RayLoraLearner) -> None:
    """Started anew they would find nobody either, and Ray Train would start them without end."""
    await train(learner, 0)
    (log,) = descendants(os.getpid(), "CommandLog")
    log.kill()
    with pytest.raises(LearnerError, match=r"the learner's actor was lost"):
        await learner.step()
    await learner.stop(timeout=3600)
