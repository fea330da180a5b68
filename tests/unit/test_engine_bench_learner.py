"""The benchmark against TRL: its workload, our side of it, and how the two are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.support.jobs import load_job


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


def test_our_side_updates_the_adapter_it_was_given(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    small = {
        "VOCABULARY": 128,
        "HIDDEN": 32,
        "INTERMEDIATE": 64,
        "LAYERS": 2,
        "HEADS": 2,
        "KV_HEADS": 1,
        "HEAD_DIM": 16,
    }
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    bench.build_model(tmp_path / "model")
    bench.build_adapter(tmp_path / "model", tmp_path / "adapter.safetensors")
    rollouts = bench.workload((1, 2, 1, 3))
    update, tensors = bench.draco_side(tmp_path, rollouts)
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    longest = max(len(rollout.token_ids) for rollout in rollouts)
    assert tokens <= update.computed_tokens < len(rollouts) * longest
    assert update.grad_norm > 0
    assert update.peak_mib >= update.loaded_mib > 0
    np.savez(tmp_path / "cell-draco-0.npz", **tensors)
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
    text = bench.table("equal", {"draco": ours, "trl": theirs})
    assert "| seconds | 2.0 | 4.0 | 0.50 |" in text
    assert "| of it above the loaded model, MiB | 50 | 200 | 0.25 |" in text


def test_sides_that_computed_different_updates_end_it(bench: ModuleType, tmp_path: Path) -> None:
    before = {"a": np.zeros(3, dtype=np.float32)}
    save_file(before, tmp_path / "adapter.safetensors")
    np.savez(tmp_path / "cell-draco-0.npz", a=np.array([1.0, 2.0, 3.0]))
    np.savez(tmp_path / "cell-trl-0.npz", a=np.array([1.0, 2.0, 3.001]))
    update = bench.Update(
        seconds=1.0, cpu_seconds=1.0, loaded_mib=1.0, peak_mib=1.0, computed_tokens=1, loss=0.5, grad_norm=1.0
    )
    text = bench.agreement("cell", {"draco": [update], "trl": [replace(update, loss=0.50001)]}, tmp_path)
    assert text.startswith("loss 0.500000 and 0.500010")
    with pytest.raises(SystemExit, match="different updates: loss 0.5"):
        bench.agreement("cell", {"draco": [update], "trl": [replace(update, grad_norm=1.1)]}, tmp_path)
    np.savez(tmp_path / "cell-trl-0.npz", a=np.array([1.0, 2.0, -3.0]))
    with pytest.raises(SystemExit, match="different updates"):
        bench.agreement("cell", {"draco": [update], "trl": [update]}, tmp_path)


def test_an_unknown_cell_and_a_missing_environment_are_one_clear_line(bench: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown cell 'square'"):
        bench.main(cells="square")
    with pytest.raises(SystemExit, match="run `make bench-learner`"):
        bench.main(trl_python=tmp_path / "python")
