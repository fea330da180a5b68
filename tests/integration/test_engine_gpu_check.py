"""The GPU check: its parts at toy size on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draco_ray.config.schema import ModelConfig
from draco_ray.lab.planning.model_shape import model_shape
from tests.conftest import REPOSITORY
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
    [
        ({"models": "gpt"}, "unknown model 'gpt'"),
        ({"parts": "sampler"}, "unknown part 'sampler'; expected one of learner, kernels, engine"),
        ({"device": "cpu"}, "cpu together with --tiny"),
    ],
)
def test_options_that_make_no_sense_end_it(gpu_check: ModuleType, options: dict[str, str], problem: str) -> None:
    with pytest.raises(SystemExit, match=problem):
        gpu_check.main(**options)


def test_a_part_without_its_packages_is_skipped_and_what_was_measured_before_stays(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a borrowed machine the learner is measured where vLLM is not; the table is of all that is in the file."""
    out = tmp_path / "result.json"
    earlier = {"figures": [], "machine": "another GPU"}
    out.write_text(json.dumps({"parts": {"engine, qwen2.5-32b, toy size": earlier}}))
    monkeypatch.setitem(gpu_check.PARTS, "engine", ("vllm_of_the_gpu_build",))
    asked: list[tuple[str, str]] = []

    def measured(part: str, model: str, options: list[str], log: Path) -> dict[str, Any]:
        asked.append((part, model))
        return {"figures": [{"name": "update", "value": 10.0, "unit": "tokens/s", "plan": 20.0, "most": None}]}

    monkeypatch.setattr(gpu_check, "in_a_process", measured)
    gpu_check.main(parts="learner engine", device="cpu", tiny=True, out=out)
    assert asked == [("learner", "qwen3.6-27b"), ("learner", "qwen2.5-32b")]
    capsys.readouterr()
    gpu_check.main(out=out, print_only=True)
    printed = capsys.readouterr().out
    assert "### engine, qwen2.5-32b, toy size: another GPU" in printed
    assert "skipped: vllm_of_the_gpu_build not installed" in printed
    assert "| update | 10 tokens/s | 20 |  |" in printed


def test_a_figure_out_of_its_bound_and_a_part_that_dies_end_with_one(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(
        [
            {"figures": [{"name": "gradient", "value": math.nan, "unit": "", "plan": None, "most": 0.1}]},
            {"failed": "OutOfMemoryError"},
        ]
    )
    monkeypatch.setattr(gpu_check, "in_a_process", lambda *_: next(answers))
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(parts="learner", device="cpu", tiny=True, out=tmp_path / "result.json")
    assert str(ended.value.code) == (
        "gpu-check: failed: learner, qwen2.5-32b, toy size; learner, qwen3.6-27b, toy size: gradient"
    )


def test_a_part_that_takes_too_long_is_given_up(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "PART_SECONDS", 0.01)
    log = tmp_path / "part.log"
    found = gpu_check.in_a_process("learner", "qwen2.5-32b", [], log)
    assert found == {"figures": [], "failed": f"not finished within 0.01 s\n(full log: {log})"}


def test_what_a_part_measured_before_it_failed_is_kept(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "part.py"
    part.write_text(
        "import pathlib, sys\n"
        'figure = \'{"name": "update", "value": 10.0, "unit": "tokens/s", "plan": null, "most": null}\'\n'
        "pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text(f'[{figure}]')\n"
        "sys.exit('OutOfMemoryError: of the second way')\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(part))
    with pytest.raises(SystemExit, match="gpu-check: failed: learner, qwen2.5-32b, toy size"):
        gpu_check.main(parts="learner", models="qwen2.5-32b", device="cpu", tiny=True, out=tmp_path / "result.json")
    printed = capsys.readouterr().out
    assert "| update | 10 tokens/s |  |  |" in printed
    assert "FAILED: OutOfMemoryError: of the second way" in printed


def test_figures_are_written_down_one_by_one(gpu_check: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"

    def breaks_off(check: Any) -> None:
        check.figure("engine: start", 3.0, "s")
        raise RuntimeError

    gpu_check.CHECKS["start"] = breaks_off
    try:
        with pytest.raises(RuntimeError):
            gpu_check.run_part("start", "qwen2.5-32b", 2, device="cpu", tiny=True, out=out)
    finally:
        del gpu_check.CHECKS["start"]
    assert [figure["name"] for figure in json.loads(out.read_text(encoding="utf-8"))] == ["engine: start"]


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen2.5-32b"])
def test_the_runs_that_are_planned_beside_a_gpus_figures_can_be_configured(gpu_check: ModuleType, name: str) -> None:
    """What only a GPU computes is found out there; what it is compared with must stand before."""
    model = ModelConfig(path=gpu_check.MODELS[name])
    for keys in gpu_check.WAYS.values():
        assert gpu_check.learning_run(model, gpu_check.REAL, on_gpu=True, **keys).learner.gpus_per_worker == 1
    engine = gpu_check.engine_config(gpu_check.REAL, Path("adapters"), on_gpu=True)
    planned = gpu_check.generating_run(model, gpu_check.REAL, engine, on_gpu=True)
    assert planned.learner.gpus_per_worker == pytest.approx(1 - planned.engine.gpus_per_engine)
    shape = model_shape(model.path)
    memory = gpu_check.engine_memory(planned, shape, 141 * 2**30, 2 * 2**30)
    assert gpu_check.step_time(planned, shape, memory, gpu_check.Assumptions()).generation > 0


def figures(found: list[Any]) -> dict[str, Any]:
    return {figure.name: figure for figure in found}


@pytest.mark.slow
@pytest.mark.deployment
def test_the_learner_is_measured_in_a_process_of_its_own(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    out = tmp_path / "result.json"
    gpu_check.main(parts="learner", models="qwen2.5-32b", layers=2, device="cpu", tiny=True, out=out)
    (part,) = json.loads(out.read_text(encoding="utf-8"))["parts"].values()
    assert [figure["name"] for figure in part["figures"]] == [
        "update, as it ships",
        "update, activations on the host",
        "update, base in 8 bits",
    ]
    assert min(figure["value"] for figure in part["figures"]) > 0


@pytest.mark.slow
@pytest.mark.deployment
def test_fused_passes_are_held_against_plain_ones(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    found = figures(gpu_check.run_part("kernels", "qwen3.6-27b", 4, device="cpu", tiny=True))
    assert not any(figure.failed for figure in found.values())
    for what in ("log-probs", "gradient"):
        bound = gpu_check.ROUNDING * found[f"plain: {what} from float32"].value
        assert found[f"fused, in a row: {what} from float32"].most == bound > 0

    exact = gpu_check.LoraLearner.old_logprobs

    def wrong_in_a_row(learner: Any, samples: Any) -> Any:
        rows = len(learner.micro_batches(samples))
        return [logprobs + (0.1 if rows == 1 else 0.0) for logprobs in exact(learner, samples)]

    monkeypatch.setattr(gpu_check.LoraLearner, "old_logprobs", wrong_in_a_row)
    found = figures(gpu_check.run_part("kernels", "qwen2.5-32b", 2, device="cpu", tiny=True))
    failed = [name for name, figure in found.items() if figure.failed]
    assert failed == ["fused, in a row: log-probs from float32"]


@pytest.mark.slow
@pytest.mark.deployment
def test_engine_and_learner_agree_at_toy_size(gpu_check: ModuleType) -> None:
    torch.set_num_threads(1)
    found = figures(gpu_check.run_part("engine", "qwen2.5-32b", 2, device="cpu", tiny=True))
    gap = found["engine and learner: gap of log-probs"].value
    assert gap < 0.02 < found["engine: effect of the adapter"].value
    assert found["engine: requests of the wrong version"].value == 0
    assert found["update while serving: gap of log-probs"].value < 0.02
    assert found["engine: generation, prefill included"].value > 0
    assert "engine: sleep" not in found
    assert "engine: memory" not in found
