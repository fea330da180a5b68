"""The learner on a random two-layer Qwen3 model: gradients, updates, checkpoints, adapters."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import ConfigError, LearnerError
from draco_ray.learner.lora_learner import SUMS, LoraLearner, trained_length
from draco_ray.learner.loss import HISTOGRAM_BINS
from draco_ray.learner.worker import LearnerWorker
from draco_ray.records import TrainingSample
from draco_ray.runs.checkpoints import ADAPTER, OPTIMIZER, read_updates
from tests.support.killed import SimulatedKill, kill_after_changes

WORDS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    torch.manual_seed(1)
    torch.set_num_threads(1)
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
        attention_dropout=0.1,  # must be switched off by the learner
    )
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return ModelConfig(path=str(path), dtype="float32")


CONFIG = LearnerConfig(
    gpus_per_worker=0,
    lora_rank=4,
    lora_alpha=8,
    gradient_checkpointing=False,
    logprob_chunk_tokens=7,
    learning_rate=1e-2,
)


def make_learner(model: ModelConfig, *, seed: int = 0, **changes: Any) -> LoraLearner:
    """A learner whose adapter is already away from zero."""
    learner = LoraLearner(model, CONFIG.model_copy(update=changes), seed=seed)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.from_numpy(array) + 0.1 * torch.randn(array.shape, generator=generator)
        for name, array in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(tensors, "a perturbed copy")
    return learner


def make_samples(number: int = 8, seed: int = 0) -> list[TrainingSample]:
    random = np.random.default_rng(seed)
    samples = []
    for rollout in range(number):
        length = int(random.integers(8, 40))
        mask_T = random.random(length) < 0.5
        mask_T[:3] = False
        mask_T[4] = True
        samples.append(
            TrainingSample(
                group=f"step0/t_{rollout // 4}",
                task_id=f"t_{rollout // 4}",
                rollout=rollout % 4,
                policy_version=0,
                token_ids_T=random.integers(0, WORDS, length),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, random.normal(size=length), 0.0).astype(np.float32),
                logprob_T=np.where(mask_T, -3.0, 0.0).astype(np.float32),
                prompt_length=3,
            )
        )
    return samples


def gradients(learner: LoraLearner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters if p.grad is not None])


def weights(learner: LoraLearner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.policy.parameters])


def naive_gradients(learner: LoraLearner, samples: Sequence[TrainingSample], old: Sequence[np.ndarray]) -> torch.Tensor:
    """The summed loss in double precision, one sequence and one token at a time, from the whole logits."""
    model = learner.policy.peft.to(torch.float64)
    config = CONFIG
    total = torch.zeros((), dtype=torch.float64)
    for sample, old_V in zip(samples, old, strict=True):
        token_ids = torch.from_numpy(np.array(sample.token_ids_T))[None]
        with torch.no_grad(), model.disable_adapter():
            reference_TW = model(input_ids=token_ids).logits[0].log_softmax(-1)
        current_TW = model(input_ids=token_ids).logits[0].log_softmax(-1)
        valid = iter(old_V)
        for t in np.flatnonzero(sample.loss_mask_T):
            word, advantage = token_ids[0, t], float(sample.advantage_T[t])
            now, reference = current_TW[t - 1, word], reference_TW[t - 1, word]
            ratio = (now - float(next(valid))).exp()
            pushed = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
            if advantage < 0:
                pushed = torch.maximum(pushed, torch.tensor(config.dual_clip * advantage))
            d = reference - now
            total = total - pushed + config.kl_coefficient * (d.exp() - d - 1).clamp(max=10)
    found = torch.autograd.grad(total, learner.policy.parameters)
    return torch.cat([gradient.flatten() for gradient in found])


def test_gradients_equal_a_naive_double_precision_loop(model: ModelConfig) -> None:
    learner, samples = make_learner(model), make_samples()
    random = np.random.default_rng(3)
    old = [
        logprobs + random.normal(scale=0.3, size=len(logprobs)).astype(np.float32)
        for logprobs in learner.old_logprobs(samples)
    ]
    sums = learner.accumulate(samples, old)
    assert sums["clip_fraction"] > 0
    expected = naive_gradients(make_learner(model), samples, old)
    torch.testing.assert_close(
        gradients(learner).double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
    )


def test_one_by_eight_eight_by_one_and_two_workers_give_the_gradient_of_the_loop(model: ModelConfig) -> None:
    """The gradient of the minibatch's token-mean, however its eight samples are cut up, and from the loop."""
    samples = make_samples()
    random = np.random.default_rng(3)
    old = [
        logprobs + random.normal(scale=0.3, size=len(logprobs)).astype(np.float32)
        for logprobs in make_learner(model).old_logprobs(samples)
    ]

    def flat_sums(shares: Sequence[slice], **changes: Any) -> torch.Tensor:
        """What the workers' all-reduce adds up: counts, then gradients."""
        vectors: list[torch.Tensor] = []
        for share in shares:
            worker = make_learner(model, **changes)
            worker._reduce = lambda flat: vectors.append(flat.clone())
            worker.accumulate(samples[share], old[share])
            worker.step()
        return torch.stack(vectors).double().sum(0)

    tokens = sum(int(sample.loss_mask_T.sum()) for sample in samples)
    expected = naive_gradients(make_learner(model), samples, old) / tokens
    ways = {
        "1x8": flat_sums([slice(0, 8)], micro_batch_tokens=10**6),
        "8x1": flat_sums([slice(0, 8)], micro_batch_tokens=1),
        "two workers": flat_sums([slice(0, 3), slice(3, 8)]),
    }
    scale = float(expected.abs().max())
    whole = ways["1x8"][len(SUMS) + HISTOGRAM_BINS :] / tokens
    for summed in ways.values():
        assert summed[SUMS.index("valid_tokens")] == tokens
        gradient = summed[len(SUMS) + HISTOGRAM_BINS :] / tokens
        # Single against double precision, and single precision against itself in another order.
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * scale)
        torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "changes", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 100}, {"gradient_checkpointing": True}]
)
def test_the_gradient_does_not_depend_on_micro_batches(model: ModelConfig, changes: dict[str, Any]) -> None:
    whole, cut = make_learner(model), make_learner(model, **changes)
    samples = make_samples()
    expected, found = whole.accumulate(samples), cut.accumulate(samples)
    torch.testing.assert_close(gradients(cut), gradients(whole), rtol=1e-4, atol=1e-5)
    assert {**found, "computed_tokens": 0} == pytest.approx({**expected, "computed_tokens": 0}, rel=1e-4)


def test_nor_on_how_many_calls_it_took(model: ModelConfig) -> None:
    once, streamed = make_learner(model), make_learner(model)
    samples = make_samples()
    once.accumulate(samples)
    for start in range(0, 8, 3):
        streamed.accumulate(samples[start : start + 3])
    torch.testing.assert_close(gradients(streamed), gradients(once), rtol=1e-4, atol=1e-5)


def test_without_old_logprobs_the_ratio_is_one(model: ModelConfig) -> None:
    given, implied = make_learner(model), make_learner(model)
    samples = make_samples()
    given.accumulate(samples, given.old_logprobs(samples))
    sums = implied.accumulate(samples)
    torch.testing.assert_close(gradients(given), gradients(implied), rtol=1e-3, atol=1e-4)
    pushed = -sum(float(sample.advantage_T.sum()) for sample in samples)
    assert sums["policy_loss"] == pytest.approx(pushed, rel=1e-5)
    assert sums["clip_fraction"] == 0


def test_what_follows_the_last_valid_token_and_padding_change_nothing(model: ModelConfig) -> None:
    learner = make_learner(model)
    sample = make_samples(1)[0]
    alone = learner.old_logprobs([sample])[0]
    longer = learner.old_logprobs([*make_samples(5, seed=9), sample])[-1]
    np.testing.assert_allclose(longer, alone, atol=1e-5)
    end = trained_length(sample)
    assert sample.loss_mask_T[end - 1]
    assert not sample.loss_mask_T[end:].any()
    every = learner.token_logprobs(sample.token_ids_T)
    np.testing.assert_allclose(every[sample.loss_mask_T], alone, atol=1e-5)


def test_token_logprobs_equal_the_models_own(model: ModelConfig) -> None:
    learner = make_learner(model)
    token_ids = torch.arange(5, 15)[None]
    for adapter in (True, False):
        with torch.no_grad(), learner.policy.adapter_off() if not adapter else torch.no_grad():
            logits = learner.policy.peft(input_ids=token_ids).logits
        expected = logits.log_softmax(-1)[0, :-1].gather(1, token_ids[0, 1:, None])[:, 0]
        found = learner.token_logprobs(token_ids[0].tolist(), adapter=adapter)
        assert found[0] == 0.0
        np.testing.assert_allclose(found[1:], expected.numpy(), atol=1e-5)


def test_of_one_token_nothing_is_predicted(model: ModelConfig) -> None:
    assert make_learner(model).token_logprobs([7]).tolist() == [0.0]


def test_an_untrained_adapter_is_the_base_model(model: ModelConfig) -> None:
    learner = LoraLearner(model, CONFIG, seed=0)
    token_ids = list(range(20))
    assert learner.token_logprobs(token_ids).tolist() == learner.token_logprobs(token_ids, adapter=False).tolist()
    assert learner.accumulate(make_samples())["kl"] == pytest.approx(0.0, abs=1e-6)


def test_every_layer_that_runs_is_progress_also_while_gradients_are_computed(model: ModelConfig) -> None:
    """Else a long backward pass would be taken for one that hangs."""
    learner = make_learner(model, gradient_checkpointing=True, kl_coefficient=0.0)
    layers = learner.policy.peft.config.num_hidden_layers
    before = learner.policy.progress
    learner.token_logprobs(list(range(9)))
    assert learner.policy.progress == before + layers
    learner.accumulate(make_samples(1))
    assert learner.policy.progress == before + layers + 2 * layers


def test_the_seed_decides_the_adapter(model: ModelConfig) -> None:
    first, same, other = (weights(LoraLearner(model, CONFIG, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_all_linear_reaches_every_projection_and_nothing_else_is_trained(model: ModelConfig) -> None:
    learner = LoraLearner(model, CONFIG, seed=0)
    projections = {name.split(".")[-3] for name in learner.adapter(0).tensors}
    assert {name.split(".")[-2] for name in learner.adapter(0).tensors} == {"lora_A", "lora_B"}
    assert projections == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    trained = [p for p in learner.policy.peft.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in learner.policy.parameters}


def test_a_bfloat16_base_has_a_float32_adapter_and_near_logprobs(model: ModelConfig) -> None:
    exact, rounded = make_learner(model), make_learner(model.model_copy(update={"dtype": "bfloat16"}))
    assert {p.dtype for p in rounded.policy.parameters} == {torch.float32}
    token_ids = np.random.default_rng(0).integers(0, WORDS, 64)
    gap = np.abs(exact.token_logprobs(token_ids) - rounded.token_logprobs(token_ids))
    assert 0 < gap.mean() < 0.05


def test_an_update_divides_by_the_valid_tokens_and_clips(model: ModelConfig) -> None:
    learner, samples = make_learner(model), make_samples()
    learner.accumulate(samples)
    summed = gradients(learner)
    tokens = sum(int(sample.loss_mask_T.sum()) for sample in samples)
    before = weights(learner)
    metrics = learner.step()
    assert metrics.valid_tokens == tokens
    assert metrics.samples == 8
    assert metrics.grad_norm == pytest.approx(float(summed.norm()) / tokens, rel=1e-4)
    assert metrics.skipped is None
    # Adam's first step is the sign of the gradient times the learning rate, after weight decay.
    decayed = before * (1 - CONFIG.learning_rate * CONFIG.weight_decay)
    clear = summed.abs() > 1e-3 * summed.abs().max()
    moved = (weights(learner) - decayed)[clear]
    torch.testing.assert_close(moved, -CONFIG.learning_rate * summed[clear].sign(), rtol=1e-2, atol=1e-5)
    assert learner.updates == 1


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.6)])
def test_updates_are_those_of_adamw_by_hand(model: ModelConfig, betas: tuple[float, float], decay: float) -> None:
    """Three updates: decay is taken off the weights, not put into the gradient; both moments are corrected."""
    learner = make_learner(model, adam_beta1=betas[0], adam_beta2=betas[1], weight_decay=decay, max_grad_norm=1e9)
    expected = weights(learner).double()
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for update in (1, 2, 3):
        samples = make_samples(seed=update)
        learner.accumulate(samples)
        gradient = gradients(learner).double() / sum(int(sample.loss_mask_T.sum()) for sample in samples)
        learner.step()
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        moved = mean / (1 - betas[0] ** update) / ((square / (1 - betas[1] ** update)).sqrt() + 1e-8)
        expected = expected * (1 - CONFIG.learning_rate * decay) - CONFIG.learning_rate * moved
        torch.testing.assert_close(weights(learner).double(), expected, rtol=1e-4, atol=1e-5)


def test_two_workers_update_as_one(model: ModelConfig) -> None:
    samples = make_samples()
    alone = make_learner(model)
    alone.accumulate(samples)
    vectors: list[torch.Tensor] = []
    far = make_learner(model)
    far._reduce = vectors.append
    far.accumulate(samples[:2])
    far.step()
    near = make_learner(model)
    sent = vectors[0]
    near._reduce = lambda flat: flat.add_(sent)
    near.accumulate(samples[2:])
    together, single = near.step(), alone.step()
    assert together.valid_tokens == single.valid_tokens
    assert together.grad_norm == pytest.approx(single.grad_norm, rel=1e-4)
    torch.testing.assert_close(weights(near), weights(alone), rtol=1e-3, atol=2e-4)


def test_clipping_bounds_what_adam_sees(model: ModelConfig) -> None:
    free, clipped = make_learner(model, max_grad_norm=1e9), make_learner(model, max_grad_norm=1e-9)
    for learner in (free, clipped):
        learner.accumulate(make_samples())
    before = weights(clipped)
    assert clipped.step().grad_norm == pytest.approx(free.step().grad_norm)
    # A gradient that small drowns in Adam's epsilon.
    assert (weights(clipped) - before).abs().max() < 0.2 * (weights(free) - before).abs().max()


def test_a_gradient_that_is_not_finite_is_skipped_and_said(model: ModelConfig) -> None:
    learner, samples = make_learner(model), make_samples()
    before = weights(learner)
    learner.accumulate(samples)
    grad = learner.policy.parameters[0].grad
    assert grad is not None
    grad[0] = float("nan")
    metrics = learner.step()
    assert metrics.skipped == "gradient norm is nan"
    assert torch.equal(weights(learner), before)
    learner.accumulate(samples)
    assert learner.step().skipped is None


def test_log_probs_that_are_not_finite_do_not_end_the_learner(model: ModelConfig) -> None:
    learner, samples = make_learner(model), make_samples()
    # The engine's are only compared where nothing is weighted by them.
    unknown = [replace(each, logprob_T=np.full_like(each.logprob_T, np.nan)) for each in samples]
    learner.accumulate(unknown)
    assert learner.step().skipped is None
    with torch.no_grad():
        learner.policy.parameters[0][0] = float("nan")
    learner.accumulate(samples)
    assert learner.step().skipped == "gradient norm is nan"


def test_an_update_of_nothing_is_skipped(model: ModelConfig) -> None:
    learner = make_learner(model)
    before = weights(learner)
    assert learner.accumulate([])["valid_tokens"] == 0
    assert learner.step().skipped == "no valid tokens"
    assert torch.equal(weights(learner), before)


def test_a_sample_without_valid_tokens_adds_nothing(model: ModelConfig) -> None:
    sample = make_samples(1)[0]
    silent = TrainingSample(
        **{**{f: getattr(sample, f) for f in sample.__slots__}, "loss_mask_T": np.zeros_like(sample.loss_mask_T)}
    )
    learner = make_learner(model)
    assert learner.accumulate([silent])["computed_tokens"] == 0
    assert [len(logprobs) for logprobs in learner.old_logprobs([silent, sample])] == [0, int(sample.loss_mask_T.sum())]


def test_a_first_token_that_is_valid_is_refused(model: ModelConfig) -> None:
    sample = make_samples(1)[0]
    sample.loss_mask_T[0] = True
    with pytest.raises(ValueError, match="first token is marked valid"):
        make_learner(model).accumulate([sample])


def test_updates_raise_the_probability_of_what_is_rewarded(model: ModelConfig) -> None:
    learner = make_learner(model, kl_coefficient=0.0, weight_decay=0.0)
    samples = [
        TrainingSample(**{**{f: getattr(s, f) for f in s.__slots__}, "advantage_T": np.where(s.loss_mask_T, sign, 0.0)})
        for s, sign in zip(make_samples(2), (1.0, -1.0), strict=True)
    ]
    first = [logprobs.sum() for logprobs in learner.old_logprobs(samples)]
    for _ in range(3):
        learner.accumulate(samples)
        learner.step()
    last = [logprobs.sum() for logprobs in learner.old_logprobs(samples)]
    assert last[0] > first[0] + 1
    assert last[1] < first[1] - 1


def test_a_checkpoint_loads_in_plain_peft(model: ModelConfig, tmp_path: Path) -> None:
    learner = make_learner(model)
    learner.save(tmp_path / "step00001")
    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, str(tmp_path / "step00001")).eval()
    token_ids = torch.arange(30)[None]
    with torch.no_grad():
        logprobs = plain(input_ids=token_ids).logits.log_softmax(-1)[0, :-1].gather(1, token_ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(learner.token_logprobs(token_ids[0].tolist())[1:], logprobs.numpy(), atol=1e-5)


def test_an_adapter_has_the_names_and_the_config_that_peft_writes(model: ModelConfig, tmp_path: Path) -> None:
    learner = make_learner(model)
    learner.policy.peft.save_pretrained(str(tmp_path))
    adapter = learner.adapter(7)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert adapter.version == 7
    assert {n: t.shape for n, t in adapter.tensors.items()} == {n: t.shape for n, t in written.items()}
    assert all(np.array_equal(tensor, adapter.tensors[name]) for name, tensor in written.items())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter.config == config | {"target_modules": sorted(config["target_modules"])}


def test_training_continues_identically_from_a_checkpoint(model: ModelConfig, tmp_path: Path) -> None:
    first = make_learner(model)
    first.accumulate(make_samples(seed=1))
    first.step()
    first.save(tmp_path / "step00001")
    resumed = LoraLearner(model, CONFIG, seed=99)
    resumed.load(tmp_path / "step00001")
    for learner in (first, resumed):
        learner.accumulate(make_samples(seed=2))
        learner.step()
    assert torch.equal(weights(first), weights(resumed))
    assert first.updates == resumed.updates == 2


def test_a_checkpoint_replaces_an_older_one_and_leaves_nothing_else(model: ModelConfig, tmp_path: Path) -> None:
    learner = make_learner(model)
    learner.save(tmp_path / "step00001")
    learner.accumulate(make_samples())
    learner.step()
    learner.save(tmp_path / "step00001")
    assert [path.name for path in tmp_path.iterdir()] == ["step00001"]
    assert read_updates(tmp_path / "step00001") == 1


def test_a_checkpoint_holds_the_weights_it_was_asked_for_whatever_is_learned_before_it_is_written(
    model: ModelConfig, tmp_path: Path
) -> None:
    learner, apart = make_learner(model), make_learner(model)
    worker = make_worker(learner)
    for each in (worker, make_worker(apart)):
        each.accumulate(make_samples(seed=1))
        each.step()
    apart.save(tmp_path / "at-once")
    first = worker.snapshot()
    worker.accumulate(make_samples(seed=2))
    worker.step()
    second = worker.snapshot()
    assert first is not None
    assert second is not None
    second.write(tmp_path / "step00002")
    first.write(tmp_path / "step00001")
    for name in (ADAPTER, OPTIMIZER):
        written, expected = (tmp_path / folder / name for folder in ("step00001", "at-once"))
        assert written.read_bytes() == expected.read_bytes()
    assert (tmp_path / "step00002" / ADAPTER).read_bytes() != (tmp_path / "at-once" / ADAPTER).read_bytes()


def test_a_checkpoint_is_whole_or_the_one_before_wherever_its_writer_is_killed(
    model: ModelConfig, tmp_path: Path
) -> None:
    learner = make_learner(model)
    learner.accumulate(make_samples())
    learner.step()
    at, changes = tmp_path / "step00001", 0
    while True:
        shutil.rmtree(at, ignore_errors=True)
        try:
            with kill_after_changes(changes):
                learner.save(at)
        except SimulatedKill:
            if at.exists():
                make_learner(model).load(at)
            changes += 1
            continue
        break
    # Three folders' changes and four files at the least.
    assert changes >= 4
    make_learner(model).load(at)


def test_no_checkpoint_in_the_middle_of_a_minibatch(model: ModelConfig, tmp_path: Path) -> None:
    learner = make_learner(model)
    learner.accumulate(make_samples(2))
    with pytest.raises(LearnerError, match="2 samples are accumulated but not applied"):
        learner.save(tmp_path / "early")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_rank_or_none_at_all_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    make_learner(model, lora_rank=2).save(tmp_path / "rank2")
    with pytest.raises(LearnerError, match=r"rank2: 28 tensors do not fit this model"):
        make_learner(model).load(tmp_path / "rank2")
    with pytest.raises(LearnerError, match=r"nowhere is damaged: learner\.json: it is missing"):
        make_learner(model).load(tmp_path / "nowhere")


def damaged(folder: Path, name: str, damage: str) -> None:
    """Harm one file of a checkpoint."""
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage == "loop":
        path.symlink_to(path.name)
    elif damage == "queue":
        os.mkfifo(path)
    elif damage != "missing":
        pickled = pickle.dumps(Opened(str(folder / "harm")))
        parts = {"truncated": content[: len(content) // 2], "empty": b"", "garbage": b"\x93\x00garbage\xff" * 9}
        path.write_bytes({**parts, "pickle": pickled, "json": b'["step"]'}[damage])


class Opened:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


@pytest.fixture(scope="module")
def updated(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoraLearner, Path]:
    """A learner after an update, and its checkpoint, for tests that load another one in vain."""
    learner, path = make_learner(model), tmp_path_factory.mktemp("updated") / "step00001"
    learner.accumulate(make_samples())
    learner.step()
    learner.save(path)
    return learner, path


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "garbage", "pickle", "json", "missing", "directory", "loop", "queue"]
)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "learner.json"])
def test_a_damaged_checkpoint_is_one_line_that_names_the_file(
    updated: tuple[LoraLearner, Path], tmp_path: Path, name: str, damage: str
) -> None:
    learner, whole = updated
    shutil.copytree(whole, tmp_path / "step00001")
    damaged(tmp_path / "step00001", name, damage)
    with pytest.raises(LearnerError) as caught:
        learner.load(tmp_path / "step00001")
    assert f"checkpoint {tmp_path / 'step00001'} is damaged: {name}: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "step00001" / "harm").exists()


def test_no_file_of_a_checkpoint_can_hold_code(updated: tuple[LoraLearner, Path]) -> None:
    _, whole = updated
    assert {path.suffix for path in whole.iterdir()} == {".json", ".safetensors"}


def test_an_optimizer_of_another_adapter_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    learner = make_learner(model)
    for step in (1, 2):
        learner.accumulate(make_samples())
        learner.step()
        learner.save(tmp_path / f"step0000{step}")
    (tmp_path / "step00001" / OPTIMIZER).replace(tmp_path / "step00002" / OPTIMIZER)
    with pytest.raises(LearnerError, match=r"step00002 is damaged: optimizer\.safetensors: its SHA-256 differs"):
        learner.load(tmp_path / "step00002")


def test_a_checkpoint_whose_weights_are_not_finite_is_not_written(model: ModelConfig, tmp_path: Path) -> None:
    learner = make_learner(model)
    learner.save(tmp_path / "step00001")
    with torch.no_grad():
        learner.policy.parameters[0][0, 0] = torch.nan
    for step in (1, 2):
        with pytest.raises(
            LearnerError, match=r"was not kept: adapter_model\.safetensors: tensor .*lora_A.* contains NaN"
        ):
            learner.save(tmp_path / f"step0000{step}")
    learner.load(tmp_path / "step00001")


def test_a_model_that_cannot_be_loaded_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        LoraLearner(ModelConfig(path=str(tmp_path)), CONFIG, seed=0)


def make_worker(learner: LoraLearner, rank: int = 0, workers: int = 1) -> LearnerWorker:
    return LearnerWorker(learner, rank=rank, workers=workers)


def test_workers_share_every_sample_between_them(model: ModelConfig) -> None:
    samples = make_samples(7)
    workers = [make_worker(make_learner(model), rank, workers=3) for rank in range(3)]
    tokens = []
    for worker in workers:
        for call in (worker.remember_old_logprobs, worker.accumulate):
            for group in (samples[:4], samples[4:]):
                call(group)
        tokens.append(worker._learner._sums["valid_tokens"])
    assert sum(tokens) == sum(int(sample.loss_mask_T.sum()) for sample in samples)
    assert min(tokens) > 0


def test_sharded_workers_make_equally_many_passes_and_few_empty_ones(model: ModelConfig) -> None:
    """A short first group is dealt to two of three workers; what one has too many of waits for the next commands."""
    samples = make_samples(14)
    groups = [samples[:2], samples[2:7], samples[7:8], samples[8:14]]
    learners = [make_learner(model, micro_batch_tokens=1) for _ in range(3)]
    passes: list[list[int]] = []
    for learner in learners:
        learner.sharded = True
        seen: list[int] = []
        learner.policy.logprobs = watched(learner.policy.logprobs, seen)  # type: ignore[method-assign]
        passes.append(seen)
    workers = [make_worker(learner, rank, workers=3) for rank, learner in enumerate(learners)]
    added = []
    for group in groups[:3]:
        for worker in workers:
            worker.accumulate(group)
        added.append([learner._sums["samples"] for learner in learners])
        assert len({len(seen) for seen in passes}) == 1
    for worker in workers:
        worker.remember_old_logprobs(groups[3])
    assert added[0] == [0, 0, 0]
    assert sum(added[-1]) == 6
    vectors: list[torch.Tensor] = []
    for learner, worker in zip(learners, workers, strict=True):
        learner._reduce = lambda flat: vectors.append(flat.clone())
        worker.step()
    assert len({len(seen) for seen in passes}) == 1
    # A reference and a training pass for each of eight samples, a pass for each of six old log-probs: 22 over three.
    assert sum(map(len, passes)) <= 3 * 9

    alone = make_learner(model)
    alone.accumulate(samples[:8])
    expected = gradients(alone)
    summed = torch.stack(vectors).sum(0)
    assert summed[SUMS.index("samples")] == 8
    torch.testing.assert_close(
        summed[len(SUMS) + HISTOGRAM_BINS :], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
    )

    for worker in workers:
        worker.accumulate(groups[3])
    later = [learner._sums["samples"] for learner in learners]
    for worker in workers:
        worker.step()
    assert sum(later) <= 6
    assert len({len(seen) for seen in passes}) == 1


def test_no_checkpoint_while_samples_wait(model: ModelConfig, tmp_path: Path) -> None:
    learner = make_learner(model)
    learner.sharded = True
    worker = make_worker(learner, rank=0, workers=2)
    worker.accumulate(make_samples(1))
    with pytest.raises(ValueError, match="in the middle of a training step"):
        worker.snapshot()


def watched(function: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """The function, which notes that it was called."""

    def call(*arguments: Any) -> Any:
        seen.append(1)
        return function(*arguments)

    return call


def test_later_minibatches_use_the_old_logprobs_of_the_steps_start(model: ModelConfig, tmp_path: Path) -> None:
    worker, samples = make_worker(make_learner(model)), make_samples()
    worker.accumulate(samples[:4])
    worker.remember_old_logprobs(samples[4:])
    assert worker.step().clip_fraction == 0
    with pytest.raises(ValueError, match="in the middle of a training step"):
        worker.snapshot()
    worker.accumulate(samples[4:])
    second = worker.step()
    assert second.clip_fraction > 0  # the first update, at this learning rate, moved the ratios out of the clip range
    worker.weights(version=1)
    worker.accumulate(samples[:4])
    assert worker.step().clip_fraction == 0


@pytest.mark.parametrize("share", [0.4, 1.0, 0.0])
def test_after_an_update_a_shared_gpu_gets_its_memory_back(
    model: ModelConfig, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine wakes up into it (`engine.colocate`): by then nothing of the update may be alive."""
    learner = make_learner(model, gpus_per_worker=share)
    seen: list[list[torch.Tensor | None]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append([p.grad for p in learner.policy.parameters]))
    worker = make_worker(learner)
    worker.accumulate(make_samples())
    assert seen == []
    worker.step()
    given_back = [None] * len(learner.policy.parameters)
    assert seen == ([given_back] if share == 0.4 else [])
    # The canary's pass: the last before the engines wake, at the start as well.
    worker.token_logprobs(token_ids=(1, 2, 3), adapter=True)
    assert seen == ([given_back] * 2 if share == 0.4 else [])


def test_samples_that_were_not_remembered_are_refused_after_an_update(model: ModelConfig) -> None:
    worker, samples = make_worker(make_learner(model)), make_samples()
    worker.accumulate(samples[:4])
    worker.step()
    with pytest.raises(ValueError, match=r"4 samples \(first: \('step0/t_1', 0, 0\)\) arrived after an update"):
        worker.accumulate(samples[4:])


def test_branches_of_one_rollout_are_remembered_each_for_itself(model: ModelConfig) -> None:
    samples = make_samples()
    branches = [replace(sample, rollout=7, branch=branch) for branch, sample in enumerate(samples[4:])]
    updates = []
    for later in (samples[4:], branches):
        worker = make_worker(make_learner(model))
        worker.remember_old_logprobs(later)
        worker.accumulate(samples[:4])
        worker.step()
        worker.accumulate(later)
        updates.append(worker.step())
    assert updates[0] == updates[1]


def test_rank_zero_speaks_for_all(model: ModelConfig) -> None:
    learner = make_learner(model)
    for rank in (0, 1):
        worker = make_worker(learner, rank, workers=2)
        canary = worker.token_logprobs(token_ids=(1, 2, 3), adapter=True)
        adapter = worker.weights(version=3)
        snapshot = worker.snapshot()
        assert (canary is None, adapter is None, snapshot is None) == (rank == 1,) * 3
