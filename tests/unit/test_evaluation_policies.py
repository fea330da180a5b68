"""What --policy and --run may name, and which checkpoints the protocol takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from draco_ray.cli import main
from draco_ray.commands.evaluate import EvaluateOptions, find_policy_and_config
from draco_ray.config.load import dump_config, load_config
from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.lab.evaluation.policies import (
    every_checkpoint,
    find_policy,
    last_epochs,
    load_adapter,
    lora_rank,
    outcome_settings,
)
from draco_ray.runs.directory import RunDirectory
from draco_ray.terminal import escape_control
from draco_ray.training.resume import adopt_tasks
from draco_ray.training.trainer import OrderRules, TaskOrder


def a_run(path: Path, steps: list[int]) -> Path:
    """A run directory with adapters after those steps."""
    RunDirectory.create(path, dump_config(load_config("sandbox", setting="no-credit")))
    for step in steps:
        an_adapter(path / "checkpoints" / f"step{step:05d}", step)
    return path


def an_adapter(path: Path, value: int) -> Path:
    path.mkdir(parents=True)
    config = {"r": 4, "lora_alpha": 8, "base_model_name_or_path": "owner/model"}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"a.lora_B.weight": np.full((2, 4), value, dtype=np.float32)}, path / "adapter_model.safetensors")
    return path


def test_each_kind_of_policy_is_found(tmp_path: Path) -> None:
    starter = tmp_path / "starter"
    starter.mkdir()
    (starter / "config.json").write_text("{}", encoding="utf-8")
    found = find_policy("starter", starter)
    assert (found.config, found.model, found.checkpoints[0].adapter) == ("sandbox", str(starter), None)
    model = find_policy(str(starter), tmp_path / "none")
    assert (model.label, model.model, model.config) == ("starter", str(starter), None)
    api = find_policy("litellm:openrouter/moonshotai/kimi-k2", starter)
    assert (api.api_model, api.label) == ("openrouter/moonshotai/kimi-k2", "kimi-k2")
    assert "/" not in api.checkpoints[0].name
    hub = find_policy("Qwen/Qwen3.6-27B", starter)
    assert (hub.model, hub.label) == ("Qwen/Qwen3.6-27B", "Qwen3.6-27B")


def test_a_run_is_its_last_checkpoint_and_a_checkpoint_knows_its_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [2, 10])
    last = find_policy(str(run), tmp_path)
    assert [checkpoint.version for checkpoint in last.checkpoints] == [10]
    assert (last.label, last.config) == ("no-credit", str(run))
    one = find_policy(str(run / "checkpoints" / "step00002"), tmp_path)
    assert [checkpoint.version for checkpoint in one.checkpoints] == [2]
    assert one.config == str(run)
    alone = find_policy(str(an_adapter(tmp_path / "alone", 3)), tmp_path)
    assert (alone.model, alone.config) == ("owner/model", None)
    adapter = load_adapter(one.checkpoints[0])
    assert adapter.version == 2
    assert np.all(adapter.tensors["a.lora_B.weight"] == 2)
    assert lora_rank(run / "checkpoints" / "step00002") == 4


@pytest.mark.parametrize("name", ["nowhere", "litellm:", "starter", "./a/b/c"])
def test_what_is_nothing_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        find_policy(name, tmp_path / "no-starter")
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        find_policy(str(a_run(tmp_path / "run", [])), tmp_path)


def test_the_protocol_takes_the_ends_of_the_last_epochs(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", list(range(1, 18)))
    policy = last_epochs(run, 3, 5)
    assert [checkpoint.version for checkpoint in policy.checkpoints] == [5, 10, 15]
    assert [checkpoint.version for checkpoint in last_epochs(run, 1, 17).checkpoints] == [17]
    with pytest.raises(
        ConfigError, match="only 3 complete epochs of 5 steps have a checkpoint, but --last-epochs is 4"
    ):
        last_epochs(run, 4, 5)
    sparse = a_run(tmp_path / "sparse", [4, 10, 15])
    with pytest.raises(ConfigError, match="no checkpoint after step 5"):
        last_epochs(sparse, 3, 5)


@pytest.mark.parametrize(("steps", "ends"), [(100, [90, 95, 100]), (75, [65, 70, 75]), (98, [85, 90, 95])])
def test_the_papers_checkpoints_end_epochs_of_90_tasks(tmp_path: Path, steps: int, ends: list[int]) -> None:
    run = a_run(tmp_path / "run", list(range(60, steps + 1)))
    per_epoch = TaskOrder([f"task_{number}" for number in range(90)], 16, seed=0).steps_per_epoch
    assert [checkpoint.version for checkpoint in last_epochs(run, 3, per_epoch).checkpoints] == ends


def test_a_run_from_another_machine_is_evaluated_with_the_data_root_it_is_given(tmp_path: Path) -> None:
    run = tmp_path / "run"
    elsewhere = [f"data.root={tmp_path / 'gone'}", f"model.path={tmp_path / 'gone'}", "train.prompts_per_step=5"]
    made = RunDirectory.create(run, dump_config(load_config("sandbox", elsewhere)))
    tasks = [f"task_{number}" for number in range(17)]
    adopt_tasks(made, tasks, OrderRules(per_step=5, seed=0, skip_solved=None, behind=0), 0, Console())
    for epoch in (1, 2):
        an_adapter(run / "checkpoints" / f"step{epoch * 3:05d}", epoch)
    options = EvaluateOptions(
        policy=None,
        run=run,
        last_epochs=2,
        train_curve=False,
        every=None,
        split=None,
        runs=1,
        config=None,
        # Another size of steps than the run's would be another length of epochs.
        overrides=[f"data.root={tmp_path}", f"model.path={tmp_path}", "train.prompts_per_step=2"],
        out=None,
        label=None,
        api_base=None,
        api_key_env=None,
        api_temperature=None,
    )
    policy, config = find_policy_and_config(options, tmp_path)
    assert [checkpoint.version for checkpoint in policy.checkpoints] == [3, 6]
    assert config.data.root == tmp_path
    (run / "tasks.json").unlink()
    with pytest.raises(DamagedRun, match="tasks.json: damaged: it is missing"):
        find_policy_and_config(options, tmp_path)


def test_the_curve_begins_untrained_and_ends_with_the_last(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [1, 2, 3, 4, 5])
    policy = every_checkpoint(run, 2)
    assert [checkpoint.version for checkpoint in policy.checkpoints] == [0, 2, 4, 5]
    assert policy.checkpoints[0].adapter is None


def test_other_weights_are_another_evaluation_but_other_slots_are_not(tmp_path: Path) -> None:
    policy = find_policy(str(a_run(tmp_path / "run", [1])), tmp_path)
    config = load_config("sandbox")
    before = outcome_settings(config, policy)
    assert outcome_settings(load_config("sandbox", ["environment.slots=3", "ray.dashboard=false"]), policy) == before
    assert outcome_settings(load_config("sandbox", ["agent.max_turns=3"]), policy) != before
    adapter = policy.checkpoints[0].adapter
    assert adapter is not None
    save_file({"a.lora_B.weight": np.ones((2, 4), dtype=np.float32) / 2}, adapter / "adapter_model.safetensors")
    assert outcome_settings(config, policy) != before


@pytest.mark.parametrize("name", ["x" * 300, f"{'x' * 300}/y", "a\nb", "a\x00b"])
def test_a_policy_that_no_path_can_be_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.json").write_text(json.dumps({"settings": {"A": name}, "splits": ["dev"]}), encoding="utf-8")
    words = ["eval-set", str(tmp_path / "set.json"), "--out", str(tmp_path), "data.root=/nowhere"]
    with pytest.raises(SystemExit, match="[12]"):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert escape_control(name.splitlines()[0])[:200] in line
