"""Learners of several gloo workers against one: the base sharded over them, and rows that they share."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn, start_processes
from transformers import AutoConfig, AutoModelForCausalLM

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import ConfigError
from draco_ray.learner.base import UpdateMetrics, over_workers
from draco_ray.learner.context_parallel import context_group
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.learner.worker import LearnerWorker
from draco_ray.records import TrainingSample
from tests.support import double_learner

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

WORDS, WORKERS, SHARING = 300, 2, 4
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
    "experts": COMMON
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
CASES: dict[str, tuple[str, str, bool]] = {
    "qwen2": ("qwen2", "float32", False),
    "tied, checkpointed": ("tied", "float32", True),
    "qwen3_5, checkpointed": ("qwen3_5", "float32", True),
    "qwen2, bfloat16, checkpointed": ("qwen2", "bfloat16", True),
    "experts, checkpointed": ("experts", "float32", True),
    "qwen2 in int8": ("qwen2", "float32", False),
    "qwen3_5 in fp8, checkpointed": ("qwen3_5", "float32", True),
}
"""Model, its type, gradient checkpointing."""
PRECISIONS = {"qwen2 in int8": "int8", "qwen3_5 in fp8, checkpointed": "fp8"}
"""Cases whose base is held in 8 bits."""
SHARED = {
    # Two rows at a time, each shared by two workers, and the base sharded over all four.
    "qwen2": {"context_parallel": 2, "sharding": "full"},
    # A row over four, more than there are heads of keys.
    "tied, checkpointed": {"context_parallel": 4, "sharding": "none", "offload_activations": True},
    "experts, checkpointed": {"context_parallel": 2, "sharding": "full"},
}
"""Cases that four workers play as well, and with which keys."""
MEASURED = {
    "importance_cap": 1.01,
    "importance_level": "geometric",
    "mask_low": 0.5,
    "mask_level": "any_token",
    "entropy_coefficient": 0.1,
    "gradient_checkpointing": True,
    "offload_activations": True,
}
EXACT: dict[str, tuple[str, dict[str, Any]]] = {case: (case, {}) for case in double_learner.CASES}
EXACT["sequences weighed as wholes, recomputed"] = ("several groups", MEASURED)
"""Samples and keys of what is computed in double precision."""
ROWS = [
    *(("qwen3_5_text", name) for name in EXACT),
    # How a row is laid out and divided is no business of its model.
    *(
        ("qwen3", name)
        for name in ("replies of one token", "several groups", "sequences weighed as wholes, recomputed")
    ),
]
"""Of which models."""


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
        base_precision=PRECISIONS.get(case, "model"),
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
    computed = count_samples(worker._learner)

    def counted(call: Callable[..., None], group: list[TrainingSample]) -> dict[str, int]:
        before = sum(computed)
        call(group)
        return {"samples": sum(computed) - before}

    def learned(group: list[TrainingSample]) -> UpdateMetrics:
        worker.accumulate(group)
        return worker.step()

    answers: dict[str, Any] = {
        "uneven": counted(worker.accumulate, uneven),
        "single": counted(worker.accumulate, single),
        "remembered": counted(worker.remember_old_logprobs, later),
        "first": worker.step(),
        "second": learned(later),
        "logprobs": worker.token_logprobs(token_ids=range(30), adapter=True),
        "base": worker.token_logprobs(token_ids=range(30), adapter=False),
        "adapter": worker.weights(version=1),
    }
    snapshot = worker.snapshot()
    if snapshot is not None:
        # The command log would write what the worker of rank 0 answers.
        snapshot.write(directory / "checkpoint")
    answers["weights"] = [parameter.detach().numpy() for parameter in worker._learner.policy.parameters]
    return answers


def count_samples(learner: LoraLearner) -> list[int]:
    """The numbers of samples that a learner is given from now on, one for each call."""
    counts: list[int] = []

    def counted(compute: Any) -> Any:
        def count(given: Any, *more: Any, **options: Any) -> Any:
            counts.append(len(given))
            return compute(given, *more, **options)

        return count

    for name in ("accumulate", "old_logprobs"):
        setattr(learner, name, counted(getattr(learner, name)))
    return counts


def frozen_bytes(learner: LoraLearner) -> int:
    """Bytes of the base that this process keeps."""
    frozen = [parameter for name, parameter in learner.policy.peft.named_parameters() if "lora_" not in name]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in frozen]
    return sum(parameter.numel() * parameter.element_size() for parameter in local)


def worker_of(learner: LoraLearner, rank: int, workers: int) -> LearnerWorker:
    return LearnerWorker(learner, rank=rank, workers=workers)


def in_double(directory: Path, kind: str, name: str, **group: Any) -> dict[str, Any]:
    """What a learner, or one that shares its rows, makes of samples in double precision."""
    case, changes = EXACT[name]
    learner = double_learner.learner_of(directory / "double", kind, **group, **changes)
    samples = double_learner.samples_of(double_learner.CASES[case])
    logprobs = learner.old_logprobs(samples)
    random = np.random.default_rng(3)
    old = [logprob_V + random.normal(scale=0.3, size=len(logprob_V)) for logprob_V in logprobs]
    sums = learner.accumulate(samples, old)
    gradient = double_learner.gradient_of(learner)
    if group:
        torch.distributed.all_reduce(gradient)
    return {"logprobs": logprobs, "old": old, "sums": sums, "gradient": gradient}


def join_group(rank: int, directory: Path, workers: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous{workers}", rank=rank, world_size=workers
    )


def run_all(_: int, directory: Path) -> None:
    """Every process is forked from this one, which has imported everything and computed nothing."""
    torch.set_num_threads(1)
    for run, workers in ((run_rank, WORKERS), (run_sharing_rank, SHARING)):
        start_processes(run, args=(directory,), nprocs=workers, start_method="fork")


def run_sharing_rank(rank: int, directory: Path) -> None:
    """One of the four processes that share rows: a training step as it is, then sums and gradients in double."""
    join_group(rank, directory, SHARING)
    found: dict[str, Any] = {}
    for case, changes in SHARED.items():
        model, config = settings(directory, case)
        config = LearnerConfig(**config.model_dump() | changes | {"workers": SHARING})
        learner = LoraLearner(
            model,
            config,
            seed=0,
            reduce=torch.distributed.all_reduce,
            mesh=init_device_mesh("cpu", (SHARING,)) if config.sharding == "full" else None,
            context=context_group(SHARING, config.context_parallel, "cpu"),
        )
        (directory / f"shared {case}").mkdir(exist_ok=True)
        found[case] = play(worker_of(learner, rank, SHARING), directory / f"shared {case}")
    four = context_group(SHARING, SHARING, "cpu")
    with pytest.raises(ConfigError) as refused:
        LoraLearner(*settings(directory, "qwen3_5, checkpointed"), seed=0, context=four)
    found["refused"] = str(refused.value)
    for kind, name in ROWS:
        double_learner.use_double_precision(kind)
        found[f"{kind} {name}"] = in_double(directory, kind, name, shared=four, reduce=torch.distributed.all_reduce)
    (directory / f"sharing{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


def run_rank(rank: int, directory: Path) -> None:
    """One of the two processes: every case, and a checkpoint loaded again."""
    join_group(rank, directory, WORKERS)
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
    double_learner.save_models(directory / "double")
    processes = spawn(run_all, args=(directory,), nprocs=1, join=False)
    while not processes.join(timeout=5):
        pass
    return directory


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    return [pickle.loads((directory / f"rank{rank}.pickle").read_bytes()) for rank in range(WORKERS)]


@pytest.fixture(scope="module")
def sharing(directory: Path) -> list[dict[str, Any]]:
    return [pickle.loads((directory / f"sharing{rank}.pickle").read_bytes()) for rank in range(SHARING)]


def assert_one_learner(found: list[dict[str, Any]], alone: dict[str, Any], *, exact: bool) -> None:
    """What all workers of a learner have answered, and have become, is what one does alone."""
    near: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4} if exact else {"rtol": 0.05, "atol": 0.05}
    loose: dict[str, Any] = {"rel": near["rtol"], "abs": near["atol"]}
    for update in ("first", "second"):
        metrics = [one[update] for one in found]
        together = over_workers(metrics)
        assert together == over_workers(metrics[::-1])
        assert together.skipped is None
        # The answer of a single worker is combined as well.
        for name, expected in dataclasses.asdict(over_workers([alone[update]])).items():
            if name not in ("computed_tokens", "skipped"):
                assert getattr(together, name) == pytest.approx(expected, **loose), name
    for one in found:
        for mine, first, expected in zip(one["weights"], found[0]["weights"], alone["weights"], strict=True):
            assert np.array_equal(mine, first)
            # Adam divides by the gradient's own size, which magnifies rounding where a gradient is nearly zero.
            np.testing.assert_allclose(mine, expected, atol=1e-4 if exact else 2.5e-3)
    assert all(one["adapter"] is None for one in found[1:])
    assert found[0]["adapter"].tensors.keys() == alone["adapter"].tensors.keys()
    for name in ("logprobs", "base"):
        np.testing.assert_allclose(found[0][name], alone[name], **near)


@pytest.mark.parametrize("case", CASES)
def test_two_sharded_workers_are_one_that_is_whole(
    case: str, directory: Path, ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    model, config = settings(directory, case)
    whole = LoraLearner(model, config, seed=0)
    alone = play(worker_of(whole, 0, 1), tmp_path)
    first, second = (rank[case] for rank in ranks)
    # One long sample against three in two passes, of which the second waits for the update.
    assert (first["uneven"]["samples"], second["uneven"]["samples"]) == (1, 2)
    assert (first["single"]["samples"], second["single"]["samples"]) == (0, 0)
    assert_one_learner([first, second], alone, exact=model.dtype == "float32")
    for name in ("logprobs", "base"):
        np.testing.assert_array_equal(first[name], second[name])
    np.testing.assert_array_equal(first["resumed"], first["logprobs"])

    total = frozen_bytes(whole)
    kept = [rank[case]["bytes"] for rank in ranks]
    embedding = WORDS * COMMON["hidden_size"] * 4 if case.startswith("tied") else 0
    # Whole on both: a tied embedding, and the last norm.
    assert sum(kept) <= total + embedding + COMMON["hidden_size"] * 4
    assert max(kept) < 0.51 * (total - embedding) + embedding


@pytest.mark.parametrize("case", SHARED)
def test_four_workers_that_share_rows_are_one_learner(
    case: str, directory: Path, sharing: list[dict[str, Any]], tmp_path: Path
) -> None:
    model, config = settings(directory, case)
    alone = play(worker_of(LoraLearner(model, config, seed=0), 0, 1), tmp_path)
    found = [rank[case] for rank in sharing]
    assert_one_learner(found, alone, exact=True)
    each = SHARED[case]["context_parallel"]
    # Those that share rows work on the same samples.
    assert [one["remembered"]["samples"] for one in found] == ([1, 1, 2, 2] if each == 2 else [3] * 4)
    assert [one["uneven"]["samples"] for one in found] == ([1, 1, 2, 2] if each == 2 else [4] * 4)
    loaded = LoraLearner(model, config, seed=3)
    loaded.load(directory / f"shared {case}" / "checkpoint")
    np.testing.assert_allclose(loaded.token_logprobs(range(30)), found[0]["logprobs"], atol=1e-4)


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_row_over_four_workers_is_the_whole_model(
    kind: str,
    name: str,
    directory: Path,
    sharing: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log-probs, sums and gradients; where nothing is weighed, against padded sequences in plain PEFT."""
    double_learner.use_double_precision(kind, monkeypatch.setattr)
    alone, found = in_double(directory, kind, name), [rank[f"{kind} {name}"] for rank in sharing]
    logprobs, gradient = alone["logprobs"], alone["gradient"]
    case, changes = EXACT[name]
    if not changes:
        samples = double_learner.samples_of(double_learner.CASES[case])
        learner = double_learner.learner_of(directory / "double", kind)
        padded, _, gradient = double_learner.oracle(
            learner, directory / "double", kind, samples, alone["old"], tmp_path / "adapter"
        )
        logprobs = [logprob_V.numpy() for logprob_V in padded]
    first = found[0]
    for one in found:
        for mine, expected in zip(one["logprobs"], logprobs, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(one["gradient"], gradient, rtol=1e-9, atol=1e-9 * float(gradient.abs().max()))
        assert one is first or set(one["sums"].values()) == {0.0}
    assert first["sums"] == pytest.approx(alone["sums"], rel=1e-9, abs=1e-9)


def test_heads_that_do_not_divide_are_refused(sharing: list[dict[str, Any]]) -> None:
    (line,) = {rank["refused"] for rank in sharing}
    assert line.startswith("learner.context_parallel=4 does not divide the 3 heads of model ")
    assert line.endswith("(linear_num_value_heads); expected one of 1")


def test_a_checkpoint_of_sharded_workers_continues_on_one(directory: Path, ranks: list[dict[str, Any]]) -> None:
    assert os.listdir(directory / "qwen2" / "checkpoint")
    model, config = settings(directory, "qwen2")
    resumed = LoraLearner(model, config, seed=3)
    resumed.load(directory / "qwen2" / "checkpoint")
    assert resumed.updates == 2
    np.testing.assert_allclose(resumed.token_logprobs(range(30)), ranks[0]["qwen2"]["logprobs"], atol=1e-4)
