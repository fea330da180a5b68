"""The benchmark against TRL: its workload, our side of it, and how the two are compared."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from draco_ray.lab.planning.model_shape import model_shape, read_shape
from tests.support.jobs import JOBS, load_job


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_job("bench_learner")


def test_rollouts_begin_with_the_prompt_end_with_a_sampled_turn_and_are_the_same_for_both_sides(
    bench: ModuleType,
) -> None:
    rollouts = bench.workload(bench.CELLS["ragged"])
    assert rollouts == bench.workload(bench.CELLS["ragged"])
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    assert max(lengths) > 3 * min(lengths)
    for start in range(0, len(rollouts), bench.GROUP):
        group = rollouts[start : start + bench.GROUP]
        assert len({tuple(rollout.token_ids[: bench.PROMPT_TOKENS]) for rollout in group}) == 1
    for rollout, turns in zip(rollouts, bench.CELLS["ragged"], strict=True):
        assert len(rollout.sampled) == len(rollout.token_ids)
        assert not any(rollout.sampled[: bench.PROMPT_TOKENS])
        assert rollout.sampled[-1]
        assert sum(rollout.sampled) == turns * bench.SAMPLED_TOKENS
    assert len({len(rollout.token_ids) for rollout in bench.workload(bench.CELLS["equal"])}) == 1


def test_advantages_are_standardised_in_their_group(bench: ModuleType) -> None:
    advantages = np.array([rollout.advantage for rollout in bench.workload(bench.CELLS["ragged"])])
    for group in advantages.reshape(-1, bench.GROUP):
        assert group.mean() == pytest.approx(0, abs=1e-9)
        assert group.std(ddof=1) == pytest.approx(1, abs=1e-3)


def test_the_head_is_a_twentieth_of_a_pass_in_one_shape_and_half_of_it_in_the_other(bench: ModuleType) -> None:
    shares = {}
    for name, values in bench.SHAPES.items():
        shape = read_shape({"model_type": "qwen3", "tie_word_embeddings": True} | values, name)
        head = shape.vocabulary * shape.hidden
        shares[name] = head / (head + shape.matrix_parameters)
        assert shape.vocabulary >= bench.FIRST_WORDS
    assert 0.04 < shares["27b"] < 0.06
    assert 0.4 < shares["small"] < 0.6


def test_our_side_updates_the_adapter_it_was_given_as_a_loop_by_hand_does(bench: ModuleType, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    small = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    bench.build_model(tmp_path / "model", small)
    bench.build_adapter(tmp_path / "model", tmp_path / "adapter.safetensors")
    rollouts = bench.workload((1, 2, 1, 3))
    update, tensors = bench.draco_side(tmp_path, rollouts)
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    # Rollouts in a row compute their prompt once, and nothing is padded.
    assert tokens - (bench.GROUP - 1) * bench.PROMPT_TOKENS <= update.computed_tokens < tokens
    assert update.grad_norm > 0
    assert update.peak_mib >= update.loaded_mib > 0
    other, theirs = bench.peft_side(tmp_path, rollouts)
    assert other.computed_tokens == tokens
    assert (other.loss, other.grad_norm) == pytest.approx((update.loss, update.grad_norm), rel=1e-3)
    for name, values in (("draco", tensors), ("peft", theirs)):
        np.savez(tmp_path / f"cell-{name}-0.npz", **values)
    assert "packed PEFT loop: loss" in bench.agreement("cell", {"draco": [update], "peft": [other]}, tmp_path)
    step = bench.moved(tmp_path / "cell-draco-0.npz", tmp_path / "adapter.safetensors")
    assert 0 < np.abs(step).max() <= 1.1 * bench.LEARNING_RATE
    assert bench.cosine(step, 2 * step) == pytest.approx(1)
    assert bench.cosine(step, -step) == pytest.approx(-1)


def test_the_table_shows_medians_beside_each_other(bench: ModuleType) -> None:
    update = bench.Update(
        seconds=2.0, cpu_seconds=3.0, loaded_mib=100.0, peak_mib=150.0, computed_tokens=9000, loss=0.5, grad_norm=1.0
    )
    ours = [replace(update, seconds=seconds) for seconds in (1.0, 2.0, 30.0)]
    theirs = [replace(update, seconds=4.0, peak_mib=300.0)] * 3
    grouped = [replace(update, seconds=2.5, peak_mib=110.0)] * 3
    text = bench.table("27b", "equal", {"draco": ours, "trl": theirs, "trl_grouped": grouped})
    assert "| seconds | 2.0 | 4.0 | 2.5 | 0.50 | 0.80 |" in text
    assert "| of it above the loaded model, MiB | 50 | 200 | 10 | 0.25 | 5.00 |" in text
    text = bench.table("smollm2", "equal", {"draco": ours, "peft": grouped, "trl": theirs})
    assert "| | draco-ray | packed PEFT loop | TRL | draco-ray / packed PEFT loop | draco-ray / TRL |" in text
    assert "| seconds | 2.0 | 2.5 | 4.0 | 0.80 | 0.50 |" in text


def test_a_side_that_a_gpu_alone_has_is_left_out_where_it_did_not_play(bench: ModuleType) -> None:
    update = bench.Update(
        seconds=2.0, cpu_seconds=3.0, loaded_mib=100.0, peak_mib=150.0, computed_tokens=9000, loss=0.5, grad_norm=1.0
    )
    played = {"draco": [update], "trl": [update], "trl_liger": [replace(update, seconds=8.0)]}
    text = bench.table("27b-layers", "long", played)
    assert "| | draco-ray | TRL | TRL, padded by group, Liger | draco-ray / TRL | draco-ray / TRL, padded by" in text
    assert "| seconds | 2.0 | 2.0 | 8.0 | 1.00 | 0.25 |" in text


def test_layers_for_a_gpu_have_the_width_and_the_share_of_the_head_of_the_models(bench: ModuleType) -> None:
    real = model_shape("Qwen/Qwen3.6-27B")
    shape = read_shape({"model_type": "qwen3", "tie_word_embeddings": True} | bench.SHAPES["27b-layers"], "layers")
    assert (shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim) == (
        *(real.hidden, real.intermediate, real.heads, real.kv_heads, real.head_dim),
    )
    assert shape.vocabulary / len(shape.layers) == real.vocabulary / len(real.layers)
    assert "27b-layers" not in bench.ON_CPU[0]


def test_sides_that_computed_different_updates_end_it(bench: ModuleType, tmp_path: Path) -> None:
    before = {"a": np.zeros(3, dtype=np.float32)}
    save_file(before, tmp_path / "adapter.safetensors")
    np.savez(tmp_path / "cell-draco-0.npz", a=np.array([1.0, 2.0, 3.0]))
    np.savez(tmp_path / "cell-trl-0.npz", a=np.array([1.0, 2.0, 3.001]))
    np.savez(tmp_path / "cell-trl_grouped-0.npz", a=np.array([1.0, 2.0, 3.0]))
    update = bench.Update(
        seconds=1.0, cpu_seconds=1.0, loaded_mib=1.0, peak_mib=1.0, computed_tokens=1, loss=0.5, grad_norm=1.0
    )
    alike = {"draco": [update], "trl": [replace(update, loss=0.50001)], "trl_grouped": [update]}
    text = bench.agreement("cell", alike, tmp_path)
    assert text.startswith("TRL: loss 0.500000 and 0.500010")
    assert "TRL, padded by group: loss 0.500000 and 0.500000" in text
    for side in ("trl", "trl_grouped"):
        with pytest.raises(SystemExit, match="different updates: TRL.*: loss 0.5"):
            bench.agreement("cell", alike | {side: [replace(update, grad_norm=1.1)]}, tmp_path)
    np.savez(tmp_path / "cell-trl-0.npz", a=np.array([1.0, 2.0, -3.0]))
    with pytest.raises(SystemExit, match="different updates"):
        bench.agreement("cell", alike, tmp_path)
    # In bfloat16 nothing can be concluded from it, but it is said.
    assert "or another update)" in bench.agreement("cell", alike, tmp_path, exact=False)


def test_medians_of_a_gpu_and_sides_that_failed_are_kept_beside_its_other_checks(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(JOBS))
    gpu_check = importlib.import_module("gpu_check")
    monkeypatch.setattr(gpu_check, "machine", lambda device: f"a {device}")
    update = bench.Update(
        seconds=2.0, cpu_seconds=1.0, loaded_mib=1.0, peak_mib=2048.0, computed_tokens=1, loss=0.5, grad_norm=1.0
    )
    bench.keep_medians(
        tmp_path / "r.json", "27b-layers", "ragged", {"draco": [update]}, ["TRL, ragged: failed: memory"]
    )
    table = gpu_check.table(json.loads((tmp_path / "r.json").read_text()))
    assert "### update beside TRL, 27b-layers, ragged: a cuda" in table
    assert "skipped: TRL, ragged: failed: memory" in table
    assert "| draco-ray: update | 3,568 tokens/s |" in table
    assert "| draco-ray: peak memory | 2 GiB |" in table


def test_an_unknown_cell_and_a_missing_environment_are_one_clear_line(bench: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown cell 'square'"):
        bench.main(cells="square")
    with pytest.raises(SystemExit, match="unknown shape 'round'"):
        bench.main(shapes="round")
    with pytest.raises(SystemExit, match="run `make bench-learner`"):
        bench.main(trl_python=tmp_path / "python")
