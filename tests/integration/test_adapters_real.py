"""The adapters with the real TRL, verifiers, Inspect, ART and verl, each in an environment that has it.

``make adapters-check`` makes these environments and runs this; a variable below names another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray import step_advantages
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

# Its own packages come first, then those that draco-ray needs; `tests` is ours, whatever packages call theirs.
RUN = """
import runpy, sys, types
sys.path.append({site!r})
ours = types.ModuleType("tests")
ours.__path__ = [{tests!r}]
sys.modules["tests"] = ours
runpy.run_module("tests.support.adapters.{script}", run_name="__main__")
"""


def run(script: str, variable: str, usual: str) -> Any:
    """What a script prints in the environment that a variable, else a folder, names."""
    python = Path(os.environ.get(variable) or REPOSITORY / usual)
    if not python.is_file():
        pytest.skip(f"{variable} names no python")
    code = RUN.format(site=sysconfig.get_path("purelib"), tests=str(REPOSITORY / "tests"), script=script)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_real_step_of_trl_is_pushed_by_our_advantages() -> None:
    found = run("trl_step", "DRACO_TRL_PYTHON", ".venv-bench/bin/python")
    assert found["rewards"] == [1.0, -1.0]
    assert found["moved"]
    given = np.array(found["advantages"])
    # Both runs cite their second step only, so the others have its quality: the same total for 3, 4 and 2 tokens.
    expected = step_advantages(
        verdicts=[[1], [-1]], citations=[{0: [2]}, {0: [2]}], tokens=[[3, 4, 2], [3, 4, 2]], std_epsilon=1e-4
    )
    for row, advantage_M in zip(given, expected, strict=True):
        assert row[:3].tolist() == pytest.approx([advantage_M[0]] * 3, rel=1e-5)
        assert row[5:9].tolist() == pytest.approx([advantage_M[1]] * 4, rel=1e-5)
        assert row[11:13].tolist() == pytest.approx([advantage_M[2]] * 2, rel=1e-5)
    assert not given[:, [3, 4, 9, 10]].any()


def test_traces_of_verifiers_get_rewards_and_advantages() -> None:
    found = run("verifiers_group", "DRACO_VERIFIERS_PYTHON", ".venv-adapter-verifiers/bin/python")
    assert found["rewards"] == [1.0, -1.0]
    good, bad = step_advantages(verdicts=[[1], [-1]], citations=[{0: [2]}, {0: [2]}], tokens=[[3, 4, 2], [3, 4, 2]])
    for row, advantage_M in zip(found["advantages"], (good, bad), strict=True):
        assert row == pytest.approx([*[advantage_M[0]] * 3, *[advantage_M[1]] * 4, *[advantage_M[2]] * 2])


def test_inspects_log_holds_the_verdicts() -> None:
    found = run("inspect_score", "DRACO_INSPECT_PYTHON", ".venv-adapter-inspect/bin/python")
    assert found["status"] == "success"
    assert {name: score["value"] for name, score in found["scores"].items()} == {"DL9": 1.0, "UA1": 0.5}
    assert [each["verdict"] for each in found["scores"]["UA1"]["metadata"]["verdicts"]] == ["FAIL", "PASS"]
    assert found["scores"]["DL9"]["metadata"]["verdicts"][0]["steps"] == [1]


def test_scouts_results_hold_the_verdicts() -> None:
    found = run("scout_scan", "DRACO_INSPECT_PYTHON", ".venv-adapter-inspect/bin/python")
    assert found["complete"]
    assert {name: result["value"] for name, result in found["results"].items()} == {"DL9": 1.0, "UA1": 0.5}
    assert "FAIL" in str(found["results"]["UA1"]["metadata"])


def test_a_group_of_art_comes_back_scored() -> None:
    found = run("art_group", "DRACO_ART_PYTHON", ".venv-adapter-art/bin/python")
    assert [each["reward"] for each in found] == [1.0, -1.0]
    assert [each["before"] for each in found] == [0.25, 0.25]
    assert found[0]["metrics"] == {"independent_reward": 0.25, "draco_score": 1.0}
    assert len(json.loads(found[0]["metadata"]["step_advantages"])) == 3
    assert found[1]["logs"][0] == "FAIL: Books the cheapest flight (steps 2): because"


def test_verls_batch_holds_our_advantages() -> None:
    found = run("verl_estimator", "DRACO_VERL_PYTHON", ".venv-adapter-verl/bin/python")
    good, bad = step_advantages(
        verdicts=[[1], [-1]], citations=[{0: [2]}, {0: [2]}], tokens=[[3, 4, 2], [4, 2, 2]], std_epsilon=1e-6
    )
    assert found["of_sequences"] == pytest.approx([0.707106, -0.707106], abs=1e-4)
    rows = found["advantages"]
    assert rows[0] == pytest.approx([*[good[0]] * 3, 0, *[good[1]] * 4, 0, *[good[2]] * 2], rel=1e-5)
    assert rows[1] == pytest.approx([*[bad[0]] * 4, 0, *[bad[1]] * 2, 0, *[bad[2]] * 2, 0], rel=1e-5)


def test_inspect_opens_the_logs_of_a_run_and_packs_them() -> None:
    plain, packed = run("inspect_log", "DRACO_INSPECT_PYTHON", ".venv-adapter-inspect/bin/python")
    assert plain == packed
    tasks = ("aaa1111_1", "bbb2222_1")
    assert plain["samples"] == [[task, epoch] for task in tasks for epoch in (1, 2)]
    assert (plain["logs"], plain["status"], plain["summaries"]) == (3, "success", 4)
    assert (plain["value"], plain["mean"]) == (1.0, 0.0)
    assert plain["verdicts"] == ["PASS"] * 3
    assert plain["steps"] == [[2], [1, 2], []]
    assert plain["roles"] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_inspect_opens_the_logs_of_evaluated_rollouts_and_packs_them() -> None:
    plain, packed = run("inspect_evaluations", "DRACO_INSPECT_PYTHON", ".venv-adapter-inspect/bin/python")
    assert plain == packed
    assert plain == {
        "run, test after step 2": {
            "accuracy": 0.5,
            "samples": [["aaa1111_1", 1, 1.0, 7, None], ["bbb2222_1", 1, 0.0, 7, None]],
        },
        "Base, appworld test_normal, starter": {
            "accuracy": pytest.approx(2 / 3),
            "samples": [
                ["a_1", 1, 1.0, 0, None],
                ["b_1", 1, 1.0, 0, None],
                ["c_1", 1, 0.0, 0, "the world is gone"],
            ],
        },
    }
