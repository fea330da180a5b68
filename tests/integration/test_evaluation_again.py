"""An evaluation whose rollouts are all there: nothing is started, and its summary is written anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from draco_ray.config.load import load_config
from draco_ray.errors import TooManyLost
from draco_ray.lab.evaluation.evaluate import evaluate_policy, plan_policy
from draco_ray.lab.evaluation.policies import find_policy
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.records import Usage
from tests.support.evaluations import a_result
from tests.support.lost_results import lost_rollout


@pytest.mark.slow
def test_what_is_finished_is_summed_up_again_unless_too_much_is_lost(sandbox_root: Path, tmp_path: Path) -> None:
    config = load_config("sandbox", [f"data.root={sandbox_root}", "data.eval_tasks=3"])
    policy = find_policy("litellm:openai/some-model", tmp_path)
    _, _, plan = plan_policy(policy, config, split="dev", runs=1)
    directory = EvaluationDirectory.begin(tmp_path / "out", plan)
    (measurement,) = plan.measurements
    *solved, lost = plan.tasks
    for task in solved:
        directory.add(measurement, a_result(task, 0, success=True))
    directory.add(measurement, lost_rollout(lost, 0, Usage(), seconds=1.0, attempts=1, error="the world is gone"))
    with pytest.raises(TooManyLost, match=r"1 of 3 rollouts were lost, .*=0.3 \(the last: the world is gone\)"):
        evaluate_policy(policy, config, split="dev", runs=1, out=directory.path, max_lost_share=0.3)
    file = directory.path / "summary.json"
    assert not file.exists()
    # One that was damaged is no obstacle.
    for text in (None, "{"):
        if text is not None:
            file.write_text(text, encoding="utf-8")
        result = evaluate_policy(policy, config, split="dev", runs=1, out=directory.path, max_lost_share=0.34)
        assert (result.tgc[0].mean, result.lost) == (pytest.approx(2 / 3), 1)
        assert json.loads(file.read_text(encoding="utf-8"))["tgc"][0]["mean"] == pytest.approx(2 / 3)
    assert not ray.is_initialized()
