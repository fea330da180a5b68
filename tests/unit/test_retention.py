"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.training.resume import config_changes
from draco_ray.training.trainer import checkpoints_to_keep, drop_checkpoints

RATES = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.9, 5: 0.3, 6: None, 7: 0.4}
METRICS = [{"step": step, "pass_rate": rate} for step, rate in RATES.items()]


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ([], {1, 2, 3, 4, 5, 6, 7}),
        (["keep_last=1"], {7}),
        (["keep_last=2", "keep_every=3"], {3, 6, 7}),
        # The rollouts of step 4 measure the policy after step 3; of equals the later one.
        (["keep_last=1", "keep_best=1"], {3, 7}),
        (["keep_last=1", "keep_best=2"], {1, 3, 7}),
        (["keep_last=1", "keep_best=1", "staleness=1"], {2, 7}),
        (["keep_last=100", "keep_best=100"], {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_the_last_every_so_many_and_the_best_stay(keys: list[str], kept: set[int]) -> None:
    config = load_config(None, [f"train.{key}" for key in keys]).train
    assert checkpoints_to_keep(range(1, 8), METRICS, config) == kept


def test_without_a_judge_the_mean_reward_says_what_is_best() -> None:
    lines = [{"step": step, "pass_rate": None, "reward": reward} for step, reward in {2: 0.9, 3: 0.1, 4: 0.2}.items()]
    config = load_config(None, ["train.keep_last=1", "train.keep_best=1"]).train
    assert checkpoints_to_keep(range(1, 5), lines, config) == {1, 4}


def test_what_does_not_stay_is_removed_and_the_last_never_is(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "")
    config = load_config(None, ["train.keep_last=1", "train.keep_every=2"])
    for step in range(1, 6):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "counters.json").write_text("{}")
        RunStore(run).write_metrics(step, {"step": step, "pass_rate": None})
        drop_checkpoints(run, config.train)
        assert run.checkpoint_steps()[-1] == step
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step00002", "step00004", "step00005"]
    # A run may be continued with another choice.
    assert config_changes(DracoConfig(), config) == []
