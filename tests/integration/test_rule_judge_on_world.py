"""The rule judge on real rollouts of a generated world: its reward follows success by AppWorld's own evaluator."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from draco_ray.algorithm.reward import rubric_rewards, surviving_criteria
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import Case
from draco_ray.sandbox.rule_judge.catalogue import discoveries, proposals
from draco_ray.sandbox.world.scripts import Fault, families
from tests.support.rule_judge_runs import run_of

pytestmark = pytest.mark.slow

PLAY = """
import contextlib, gc, io, json, os, sys
gc.disable()  # as `draco_ray.sandbox.starter.execute` has it, and the end likewise
from appworld import AppWorld
for line in sys.stdin:
    job = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()):
        with AppWorld(task_id=job["task_id"], experiment_name="judged") as world:
            outputs = [world.execute(cell) for cell in job["cells"]]
            success = world.evaluate(suppress_errors=True).success
    print(json.dumps({"outputs": outputs, "success": success}), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("world", ["sandbox_root", "hard_sandbox_root"])
def test_rewards_follow_success(world: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    root: Path = request.getfixturevalue(world)
    manifest = json.loads((root / "sandbox.json").read_text())["tasks"]
    tasks = [task_id for task_id, entry in sorted(manifest.items()) if entry["split"] == "train" and task_id[-1] == "1"]
    jobs = []
    for task_id in tasks:
        family = families()[manifest[task_id]["family"]]
        variants = [[], *([fault] for fault in sorted(family.fatal)), [Fault.PRINT_SECRET]]
        jobs += [{"task_id": task_id, "cells": family.script(frozenset(faults))} for faults in variants]
    (tmp_path / "data").symlink_to(root / "data", target_is_directory=True)
    done = subprocess.run(
        [appworld_python(None), "-B", "-c", PLAY],
        input="".join(json.dumps(job) + "\n" for job in jobs),
        env={**os.environ, "APPWORLD_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    played = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(played) == len(jobs)
    better = pairs = 0
    for task_id in tasks:
        task = json.loads((root / "data" / "tasks" / task_id / "specs.json").read_text())["instruction"]
        group = [(job, result) for job, result in zip(jobs, played, strict=True) if job["task_id"] == task_id]
        cases = [Case(run_of(*zip(job["cells"], result["outputs"], strict=True)), task) for job, result in group]
        rules = [*proposals(cases[0].demands), *discoveries()]
        verdict_GK = np.array([[int(rule.judge(case).verdict) for rule in rules] for case in cases])
        # The reference violates nothing; every fault violates something.
        assert not (verdict_GK[0] == Verdict.FAIL).any(), task
        assert (verdict_GK[1:] == Verdict.FAIL).any(axis=1).all(), task
        reward_G = rubric_rewards(verdict_GK, surviving_criteria(verdict_GK))
        success_G = np.array([result["success"] for _, result in group])
        assert success_G[0]
        better += int((reward_G[success_G][:, None] > reward_G[~success_G]).sum())
        pairs += int(success_G.sum() * (~success_G).sum())
    assert pairs >= 12
    assert better >= 0.95 * pairs
