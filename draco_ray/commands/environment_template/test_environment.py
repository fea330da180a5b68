"""One training step in this environment, end to end, on two cores: about a minute.

The policy is trained on demonstrations.jsonl only, and the judge is canned: its replies have the right form, but its
verdicts mean nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

THIS_FOLDER = Path(__file__).parent


def _acts_twice(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    acts = [step for step in steps if not step.message]
    return (Verdict.PASS if len(acts) > 1 else Verdict.FAIL), [steps[-1].number]


canned = rule_judge([SimpleRule(title="Canned", instruction="At least two turns call tools.", check=_acts_twice)])


def draco(*arguments: object) -> None:
    """Run a command of draco."""
    subprocess.run([sys.executable, "-m", "draco_ray.cli", *map(str, arguments)], check=True)


def test_one_training_step(tmp_path: Path) -> None:
    """The step is trained, and the model has called the tools."""
    small, policy = THIS_FOLDER / "small.yaml", tmp_path / "policy"
    draco("sft", small, THIS_FOLDER / "demonstrations.jsonl", "--new", "--epochs", 40, "--out", policy)
    draco("train", small, f"model.path={policy}", f"run.root={tmp_path}", "run.name=test")
    (metrics,) = [json.loads(line) for line in (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()]
    assert metrics["updates"] == 1
    assert metrics["turns"] > 1
