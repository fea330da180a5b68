"""The GPU check: its whole path at toy size on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.jobs import load_job


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    return load_job("gpu_check")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_check.main(out=tmp_path / "result.json")
    assert capsys.readouterr().out.startswith("gpu-check: skipped: PyTorch")
    assert not (tmp_path / "result.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_the_environment_cannot_use_is_a_failure(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match="nvidia-smi lists GPU 0: NVIDIA H200 .*`make setup-gpu`"):
        gpu_check.main(out=tmp_path / "result.json")


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"models": "gpt"}, "unknown model 'gpt'"), ({"device": "cpu"}, "cpu together with --tiny")],
)
def test_options_that_make_no_sense_end_it(gpu_check: ModuleType, options: dict[str, str], problem: str) -> None:
    with pytest.raises(SystemExit, match=problem):
        gpu_check.main(**options)


@pytest.mark.slow
def test_engine_and_learner_agree_at_toy_size(gpu_check: ModuleType, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    gpu_check.main(models="qwen2.5-32b", layers=2, device="cpu", tiny=True, out=tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["failed"] == {}
    (model,) = result["models"]
    assert model["model"] == "qwen2.5-32b"
    assert model["gap_mean"] < 0.02 < model["shift_mean"]
    assert model["generated_tokens"] > 0
    assert min(model[f"{what}_tokens_per_second"] for what in ("generated", "updated")) > 0
    assert model["sync_seconds"] > 0
    assert model["learner_peak_gib"] is model["engine_gib"] is model["sleep_seconds"] is None
