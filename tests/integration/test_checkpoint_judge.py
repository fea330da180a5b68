"""A run's own checkpoints as its judge: whoever acted in a step answers that step's prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from draco_ray.cli import main
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.judging.completion import Request
from draco_ray.lab.analysis.checkpoint_judge import CheckpointJudge, checkpoints_before, open_checkpoints
from draco_ray.lab.analysis.judges import RuleCompleter
from draco_ray.records import Adapter, Message
from draco_ray.runs.directory import RunDirectory
from tests.support.judged_run import judged_run
from tests.support.small_run import small_run
from tests.support.tiny_model import build_tiny_model


@dataclass
class Engine:
    """Takes adapters and remembers them."""

    policy_version: int = 0
    loaded: list[tuple[int, float]] = field(default_factory=list)

    async def load_adapter(self, adapter: Adapter) -> float:
        self.policy_version = adapter.version
        self.loaded.append((adapter.version, float(adapter.tensors["a"][0])))
        return 0.0


def write_checkpoint(run: RunDirectory, version: int) -> None:
    folder = run.checkpoint(version)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    save_file({"a": np.array([0.5 * version], dtype=np.float32)}, folder / "adapter_model.safetensors")


async def test_each_step_is_asked_of_the_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    run = small_run(tmp_path / "small", steps=3)
    for version in (1, 2, 3):
        write_checkpoint(run, version)
    engine = Engine()
    judge = CheckpointJudge(engine, RuleCompleter(), checkpoints_before(run, [1, 2, 3]))
    await judge.at(1)
    # The model alone acted in the first step; the last checkpoint has acted in none.
    assert engine.loaded == []
    for step in (2, 3, 3):
        await judge.at(step)
    assert engine.loaded == [(1, 0.5), (2, 1.0)]


def test_a_checkpoint_that_was_not_kept_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "small", steps=3)
    write_checkpoint(run, 2)
    assert [checkpoint.version for checkpoint in checkpoints_before(run, [1, 3])] == [2]
    with pytest.raises(ConfigError, match="no checkpoint after step 1, which is the policy of step 2"):
        checkpoints_before(run, [2, 3])
    for options, message in (
        (["--judge", "policy"], "no checkpoint after step 1"),
        (["--judge", "policy", "--api-base", "http://127.0.0.1:1"], "runs in this process"),
        (["--judge", "rules", "--phase", "union", "--pairing", "policy"], "--pairing policy"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(run.path), *options])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.deployment
async def test_a_real_engine_serves_the_model_and_then_its_checkpoint(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = build_tiny_model(tmp_path / "model")
    run = await judged_run(tmp_path / "run")
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {
            "gpus_per_engine": 0,
            "kv_cache_gib": 0.1,
            "max_num_seqs": 4,
            "adapter_directory": str(tmp_path / "adapters"),
        },
        "learner": {"lora_rank": 8},
        "judge": {"temperature": 0.0, "max_tokens": 256},
    }
    run.write_config(json.dumps(settings))
    torch.manual_seed(0)
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False),
    )
    wrapped.save_pretrained(run.checkpoint(1))
    request = Request(messages=(Message(role="user", content="Judge this."),))
    async with open_checkpoints(load_config(str(run.path)), run, [1, 2]) as policy:
        first = await (await policy.at(1))(request)
        again = await (await policy.at(1))(request)
        second = await (await policy.at(2))(request)
    assert first.error is second.error is None
    assert (first.text, first.input_tokens) == (again.text, again.input_tokens)
    assert first.text != second.text
