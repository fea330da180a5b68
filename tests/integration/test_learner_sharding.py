"""The base sharded over two gloo workers against one worker that holds it whole."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.messages import Accumulate, Publish, Remember, SaveCheckpoint, TokenLogprobs, Update
from draco_ray.learner.worker import LearnerWorker
from draco_ray.records import TrainingSample

pytestmark = pytest.mark.slow

WORDS, WORKERS = 300, 2
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": COMMON | {"model_type": "qwen2", "num_hidden_layers": 3},
    "tied": COMMON | {"model_type": "qwen2", "num_hidden_layers": 2, "tie_word_embeddings": True},
    # One gated delta-net layer to one of full attention; five value heads would not divide by two.
    "qwen3_5": COMMON
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
}
CASES = {
    "qwen2": ("qwen2", "float32", False),
    "tied, checkpointed": ("tied", "float32", True),
    "qwen3_5, checkpointed": ("qwen3_5", "float32", True),
    "qwen2, bfloat16, checkpointed": ("qwen2", "bfloat16", True),
}
"""Model, its type, gradient checkpointing."""


def settings(directory: Path, case: str) -> tuple[ModelConfig, LearnerConfig]:
    name, dtype, checkpointing = CASES[case]
    config = LearnerConfig(
        workers=WORKERS,
        sharding="full",
        gpus_per_worker=0,
        lora_rank=4,
        lora_alpha=8,
        gradient_checkpointing=checkpointing,
        micro_batch_tokens=48,  # one pass for a long sample, another for two short ones
        logprob_chunk_tokens=16,
        learning_rate=1e-3,
    )
    return ModelConfig(path=str(directory / name), dtype=dtype), config


def samples(group: int, lengths: Sequence[int]) -> list[TrainingSample]:
    random = np.random.default_rng(group)
    made = []
    for rollout, length in enumerate(lengths):
        mask_T = random.random(length) < 0.6
        mask_T[:3] = False
        mask_T[-1] = True
        made.append(
            TrainingSample(
                group=f"step0/t_{group}",
                task_id=f"t_{group}",
                rollout=rollout,
                policy_version=0,
                token_ids_T=random.integers(0, WORDS, length),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, random.normal(size=length), 0.0).astype(np.float32),
                logprob_T=np.where(mask_T, -5.0, 0.0).astype(np.float32),
                prompt_length=3,
            )
        )
    return made


def play(worker: LearnerWorker, directory: Path) -> dict[str, Any]:
    """A training step of two updates, and what it answered: samples divide one to three, none to one, one to two."""
    uneven, single = samples(0, [70, 20, 22, 24]), samples(1, [30])
    later = samples(2, [40, 25, 10])
    answers = {
        "uneven": worker.execute(Accumulate(groups=(uneven,))),
        "single": worker.execute(Accumulate(groups=(single,))),
        "remembered": worker.execute(Remember(groups=(later,))),
        "first": worker.execute(Update()),
        "later": worker.execute(Accumulate(groups=(later,))),
        "second": worker.execute(Update()),
        "logprobs": worker.execute(TokenLogprobs(token_ids=tuple(range(30)), adapter=True)),
        "base": worker.execute(TokenLogprobs(token_ids=tuple(range(30)), adapter=False)),
        "adapter": worker.execute(Publish(version=1)),
    }
    worker.execute(SaveCheckpoint(directory=str(directory / "checkpoint")))
    answers["weights"] = [parameter.detach().numpy() for parameter in worker._learner.policy.parameters]
    return answers


def frozen_bytes(learner: LoraLearner) -> int:
    """Bytes of the base that this process keeps."""
    frozen = [parameter for name, parameter in learner.policy.peft.named_parameters() if "lora_" not in name]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in frozen]
    return sum(parameter.numel() * parameter.element_size() for parameter in local)


def worker_of(learner: LoraLearner, rank: int, workers: int) -> LearnerWorker:
    return LearnerWorker(learner, rank=rank, workers=workers, fetch=lambda groups: groups, publish=lambda one: one)


def run_rank(rank: int, directory: Path) -> None:
    """One of the two processes: every case, and a checkpoint loaded again."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORKERS
    )
    mesh = init_device_mesh("cpu", (WORKERS,))
    found: dict[str, Any] = {}
    for case in CASES:
        model, config = settings(directory, case)
        learner = LoraLearner(model, config, seed=0, reduce=torch.distributed.all_reduce, mesh=mesh)
        answers = play(worker_of(learner, rank, WORKERS), directory / case)
        torch.distributed.barrier()  # rank 0 has written the checkpoint
        resumed = LoraLearner(model, config, seed=7, reduce=torch.distributed.all_reduce, mesh=mesh)
        resumed.load(directory / case / "checkpoint")
        found[case] = answers | {
            "bytes": frozen_bytes(learner),
            "resumed": resumed.token_logprobs(range(30)),
        }
    (directory / f"rank{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and what both ranks found."""
    directory = tmp_path_factory.mktemp("sharding")
    torch.set_num_threads(1)
    for name, values in MODELS.items():
        torch.manual_seed(1)
        config = AutoConfig.for_model(**values)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
    for case in CASES:
        (directory / case).mkdir(exist_ok=True)
    processes = spawn(run_rank, args=(directory,), nprocs=WORKERS, join=False)
    while not processes.join(timeout=5):
        pass
    return directory


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    return [pickle.loads((directory / f"rank{rank}.pickle").read_bytes()) for rank in range(WORKERS)]


@pytest.mark.parametrize("case", CASES)
def test_two_sharded_workers_are_one_that_is_whole(
    case: str, directory: Path, ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    model, config = settings(directory, case)
    whole = LoraLearner(model, config, seed=0)
    alone = play(worker_of(whole, 0, 1), tmp_path)
    exact = model.dtype == "float32"
    near: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4} if exact else {"rtol": 0.05, "atol": 0.05}
    loose: dict[str, Any] = {"rel": near["rtol"], "abs": near["atol"]}
    first, second = (rank[case] for rank in ranks)
    # One long sample against three in two passes, of which the second waits for the update.
    assert (first["uneven"]["samples"], second["uneven"]["samples"]) == (1, 2)
    assert (first["single"]["samples"], second["single"]["samples"]) == (0, 0)
    for update in ("first", "second"):
        both = Update().combine([first[update], second[update]])
        assert both == Update().combine([second[update], first[update]])
        assert both.skipped is None
        for name, expected in dataclasses.asdict(alone[update]).items():
            if name not in ("computed_tokens", "skipped"):
                assert getattr(both, name) == pytest.approx(expected, **loose), name
    for mine, other, expected in zip(first["weights"], second["weights"], alone["weights"], strict=True):
        assert np.array_equal(mine, other)
        # Adam divides by the gradient's own size, which magnifies rounding where a gradient is nearly zero.
        np.testing.assert_allclose(mine, expected, atol=1e-4 if exact else 2.5e-3)
    assert second["adapter"] is None
    assert first["adapter"].tensors.keys() == alone["adapter"].tensors.keys()
    for name in ("logprobs", "base"):
        np.testing.assert_allclose(first[name], alone[name], **near)
        np.testing.assert_array_equal(first[name], second[name])
    np.testing.assert_array_equal(first["resumed"], first["logprobs"])

    total = frozen_bytes(whole)
    kept = [rank[case]["bytes"] for rank in ranks]
    embedding = WORDS * COMMON["hidden_size"] * 4 if case.startswith("tied") else 0
    # Whole on both: a tied embedding, and the last norm.
    assert sum(kept) <= total + embedding + COMMON["hidden_size"] * 4
    assert max(kept) < 0.51 * (total - embedding) + embedding


def test_a_checkpoint_of_sharded_workers_continues_on_one(directory: Path, ranks: list[dict[str, Any]]) -> None:
    assert os.listdir(directory / "qwen2" / "checkpoint")
    model, config = settings(directory, "qwen2")
    resumed = LoraLearner(model, config, seed=3)
    resumed.load(directory / "qwen2" / "checkpoint")
    assert resumed.updates == 2
    np.testing.assert_allclose(resumed.token_logprobs(range(30)), ranks[0]["qwen2"]["logprobs"], atol=1e-4)
