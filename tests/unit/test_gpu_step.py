"""The GPU step: what only a GPU runs must at least be a run that can be configured and planned."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.jobs import JOBS, load_job

GIB = 2**30


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(JOBS))
    return load_job("gpu_step")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.main(out=tmp_path / "result.json")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu-step: skipped: PyTorch")
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"model": "gpt"}, "unknown model 'gpt'"), ({"rollouts": 20}, "expected a multiple of 6")],
)
def test_options_that_make_no_sense_end_it(job: ModuleType, options: dict[str, object], problem: str) -> None:
    with pytest.raises(SystemExit, match=problem):
        job.main(**options)


@pytest.mark.deployment
def test_as_many_layers_are_built_as_the_plan_finds_room_for(job: ModuleType, tmp_path: Path) -> None:
    config = job.configured(job.overrides(tmp_path, 24, tiny=False), tiny=False)
    assert config.engine.colocate
    layers = [job.layers_that_fit(config, "qwen3.6-27b", gpu * GIB, tmp_path) for gpu in (8, 80, 140)]
    assert layers[0] == 0
    assert 0 < layers[1] < layers[2] == 64
    assert layers[1] % job.LAYERS_AT_A_TIME == 0


def test_every_word_of_the_tokenizer_is_one_token_and_back(job: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    job.write_tokenizer(tmp_path, 512)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    said = load_job("gpu_step_world").words(20, "seed")
    tokens = tokenizer.encode(said, add_special_tokens=False)
    assert len(tokens) == 20
    assert tokenizer.decode(tokens) == said
    assert tokenizer.eos_token_id == 1


def test_figures_are_held_against_the_targets_where_there_is_a_plan(job: ModuleType) -> None:
    found = [
        {"name": "step 2", "value": 100.0, "plan": 116.0},
        {"name": "step: tokens", "value": 1500.0, "plan": 1.0},
        {"name": "peak memory", "value": 100.0, "plan": 91.0},
        {"name": "learner: MFU", "value": 39.9, "plan": 40.0},
    ]
    assert job.targets(found) == [
        "plan of step 2 +16.0 %, target within 15 %: missed",
        "plan of peak memory -9.0 %, target within 10 %: met",
        "learner: MFU 39.9 %, target at least 40 %: missed",
    ]
    assert job.targets([{"name": "step 2", "value": 100.0, "plan": None}]) == []


def test_our_lines_are_in_both_published_definitions(job: ModuleType) -> None:
    found = [
        {"name": "step 2", "value": 120.0},
        {"name": "learning: tokens", "value": 5000.0},
        {"name": "step: tokens", "value": 1500.0},
        {"name": "learner: MFU", "value": 41.2},
    ]
    table = job.comparison(json.loads(json.dumps(found)), "qwen3.6-27b")
    assert "| ours | qwen3.6-27b, LoRA | 5,000 | as prime-rl's | 41 % | |" in table
    assert "| ours | qwen3.6-27b, LoRA | 1,500 | as NeMo RL's; one GPU does both | | 120 s |" in table
