"""The adapters with the real packages, each in its own environment.

``make adapters-check`` makes these environments and runs this; a variable below names another.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray import step_advantages
from draco_ray.adapters.per_token_advantages import sampled_spans
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


def run(script: str, variable: str, usual: str, **settings: str) -> Any:
    """What a script prints in the environment that a variable, else a folder, names."""
    python = Path(os.environ.get(variable) or REPOSITORY / usual)
    if not python.is_file():
        pytest.skip(f"{variable} names no python")
    code = RUN.format(site=sysconfig.get_path("purelib"), tests=str(REPOSITORY / "tests"), script=script)
    environment = {**os.environ, **settings, "PYTHONPATH": str(REPOSITORY), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    ran.setdefault(version_of(variable.split("_", 1)[1].rpartition("_")[0], python), []).append(script)
    return json.loads(done.stdout.splitlines()[-1])


ran: dict[str, list[str]] = {}
"""Package and version -> scripts that ran with it."""
DISTRIBUTIONS = {"ART": "openpipe-art", "INSPECT": "inspect_ai", "TINKER": "tinker-cookbook"}


def version_of(name: str, python: Path) -> str:
    """A package's version, or the commit of its checkout."""
    if name in ("PRIME_RL", "SLIME"):
        commit = subprocess.run(
            ["git", "-C", os.environ[f"DRACO_{name}"], "rev-parse", "HEAD"], capture_output=True, text=True
        )
        return f"{name.lower().replace('_', '-')} {commit.stdout[:8] or '(no commit)'}"
    folders = [str(path) for path in python.parent.parent.glob("lib/python*/site-packages")]
    for found in importlib.metadata.distributions(name=DISTRIBUTIONS.get(name, name.lower()), path=folders):
        return f"{found.name} {found.version}"
    return f"{name.lower()} (unknown version)"


@pytest.fixture(scope="module", autouse=True)
def summary(request: pytest.FixtureRequest) -> Iterator[None]:
    """At the end, print what ran with which version."""
    yield
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        for version in sorted(ran):
            reporter.write_line(f"\nran with {version}: {', '.join(dict.fromkeys(ran[version]))}")


TRAINERS = REPOSITORY / "examples" / "trainers"
PROGRAMS = {
    "trl": ("DRACO_TRL_PYTHON", ".venv-bench"),
    "verifiers": ("DRACO_VERIFIERS_PYTHON", ".venv-verifiers"),
    **{
        name: (f"DRACO_{name.upper()}_PYTHON", f".venv-adapter-{name}")
        for name in ("skyrl", "openrlhf", "tinker", "art", "inspect")
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_programs_imports_exist(name: str, tmp_path: Path) -> None:
    variable, usual = PROGRAMS[name]
    programs = [*TRAINERS.glob(f"{name}/*.py")]
    if name == "trl":
        text = (REPOSITORY / "docs" / "adapters.md").read_text(encoding="utf-8")
        (block,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        programs.append(tmp_path / "page.py")
        programs[-1].write_text(block, encoding="utf-8")
    assert programs
    found = run("programs", variable, f"{usual}/bin/python", PROGRAMS=" ".join(map(str, programs)))
    assert [*found] == [str(path) for path in programs]
    # Undefined names, of what is not run here too.
    subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select=F,E9", *programs], check=True)


def test_configurations_name_what_exists() -> None:
    for name in ("verl/run.sh", "slime/draco.yaml", "prime_rl/run.toml"):
        named = re.findall(r"draco_ray\.adapters\.(\w+)\.(\w+)", (TRAINERS / name).read_text(encoding="utf-8"))
        assert named
        for module, each in named:
            source = (REPOSITORY / "draco_ray" / "adapters" / f"{module}.py").read_text(encoding="utf-8")
            assert re.search(rf"^(class|def) {each}\b", source, flags=re.MULTILINE), f"{name}: {each}"


FLIGHTS = ("DL9", "UA1", "UA1", "XX0")


def expected(tokens: list[list[int]], epsilon: float) -> list[list[float]]:
    """Advantages of each turn of runs that book `FLIGHTS`: the closed form of those that could be scored.

    All cite their second step only, so that the others have its quality. The run that could not be scored has 0.
    """
    verdicts, citations = [[1], [-1], [-1]], [{0: [2]}] * 3
    of_runs = step_advantages(verdicts=verdicts, citations=citations, tokens=tokens[:3], std_epsilon=epsilon)
    return [*map(list, of_runs), [0.0] * 3]


def check_rows(rows: list[dict[str, Any]], epsilon: float) -> None:
    """All rows that a loss of TRL was computed of have our advantages on each token."""
    for row in rows:
        values = expected([row["tokens"]] * 3, epsilon)[FLIGHTS.index(row["flight"])]
        for turn, value in zip(row["advantages"], values, strict=True):
            assert turn == pytest.approx([value, value], rel=1e-5, abs=1e-9)
        assert row["elsewhere"] == 0.0


def test_trls_trainer_is_pushed_by_our_advantages_through_its_own_tool_loop() -> None:
    found = run("trl_sync", "DRACO_TRL_PYTHON", ".venv-bench/bin/python")
    check_rows(found["rows"], epsilon=1e-4)
    # Two groups in shuffled batches, each used again when the policy has moved.
    assert sorted(row["flight"] for row in found["rows"]) == sorted(FLIGHTS * 4)
    assert {row["step"] for row in found["rows"]} == {0, 1, 2, 3}
    assert found["moved"]
    assert found["counts"] == {"spread": 6, "failed": 2}
    assert "no verdict" in found["stale"]
    for said, name in zip(found["refused"], ("RLOOTrainer", "GMPOTrainer"), strict=True):
        assert f"the loss of {name} takes no per-token advantages" in said


def test_trls_trainer_judges_a_group_that_is_split_over_two_processes_as_one() -> None:
    parts = run("trl_sync", "DRACO_TRL_PYTHON", ".venv-bench/bin/python", FLIGHTS_SPLIT="1")
    for found in parts:
        check_rows(found["rows"], epsilon=1e-4)
        assert found["moved"]
    flights = [{row["flight"] for row in found["rows"]} for found in parts]
    assert flights == [{"DL9", "UA1"}, {"UA1", "XX0"}]


def test_trls_asynchronous_trainer_is_pushed_by_our_advantages() -> None:
    found = run("trl_async", "DRACO_TRL_PYTHON", ".venv-bench/bin/python")
    # The standard deviation is numpy's here, of all, not of a sample.
    for row in found["rows"]:
        for turn, value in zip(
            row["advantages"], expected([row["tokens"]] * 3, 0.0)[FLIGHTS.index(row["flight"])], strict=True
        ):
            assert turn == pytest.approx([value * 1.5**0.5] * 2, rel=1e-5, abs=1e-9)
        assert row["elsewhere"] == 0.0
    assert {row["flight"] for row in found["rows"]} == set(FLIGHTS)
    assert found["moved"]
    assert set(found["counts"]) == {"spread", "failed"}
    assert "no verdict" in found["stale"]


def test_traces_of_verifiers_get_rewards_and_advantages() -> None:
    found = run("verifiers_group", "DRACO_VERIFIERS_PYTHON", ".venv-verifiers/bin/python")
    assert found["rewards"] == [-1.0, 0.0, 1.0]
    assert found["advantages"][1] is None
    good, bad = step_advantages(verdicts=[[1], [-1]], citations=[{0: [2]}, {0: [2]}], tokens=[[3, 4, 2], [3, 4, 2]])
    for row, advantage_M in zip(found["advantages"][::-2], (good, bad), strict=True):
        assert row == pytest.approx([*[advantage_M[0]] * 3, *[advantage_M[1]] * 4, *[advantage_M[2]] * 2])


def test_vf_eval_runs_our_environment_which_judges_in_its_finalize() -> None:
    found = run("verifiers_eval", "DRACO_VERIFIERS_PYTHON", ".venv-verifiers/bin/python")
    (value,) = step_advantages(verdicts=[[1], [-1]], citations=[{0: [1]}] * 2, tokens=[[1], [1]])[0]
    assert found == {
        "The cheapest is DL9.": [{"score": 1.0, "weight": 1.0}, {"step_advantages": [pytest.approx(value)]}],
        "I take UA1.": [{"score": -1.0, "weight": 1.0}, {"step_advantages": [pytest.approx(-value)]}],
        "It is XX0.": [None, None],
    }


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
    unscored, *found = run("art_group", "DRACO_ART_PYTHON", ".venv-adapter-art/bin/python")
    # As with RULER, a group with a failed judgement is dropped.
    assert unscored is None
    assert [each["reward"] for each in found] == [1.0, -1.0]
    assert [each["before"] for each in found] == [0.25, 0.25]
    assert found[0]["metrics"] == {"independent_reward": 0.25, "draco_score": 1.0}
    assert len(json.loads(found[0]["metadata"]["step_advantages"])) == 3
    assert found[1]["logs"][0] == "FAIL: Books the cheapest flight (steps 2): because"


def runs_of(values: list[float], mask: list[float]) -> list[list[float]]:
    """The values of each run of sampled tokens."""
    return [values[begin:end] for begin, end in sampled_spans(mask)]


def check_pushed(values: list[list[float]], session: int) -> None:
    """What a loss passes on to each turn's tokens, for the runs of `tests.support.adapters.verl_runs`."""
    wanted = expected([[3, 4, 2], [4, 5, 3], [3, 4, 2]], epsilon=1e-6)[session]
    for turn, value in zip(values, wanted, strict=True):
        assert turn == pytest.approx([value] * len(turn), rel=1e-5, abs=1e-9)


def test_verls_policy_loss_passes_our_advantages_on() -> None:
    found = run("verl_loss", "DRACO_VERL_PYTHON", ".venv-adapter-verl/bin/python")
    # A validation sample was neither judged nor given a reward.
    rewards = {f"train prompt_{uid}_{n}_0": value for uid in (0, 1) for n, value in enumerate((1.0, -1.0, -1.0, 0.0))}
    assert found["rewards"] == {**rewards, "val unseen_0_0": -9.0}
    for row in found["rows"]:
        check_pushed(runs_of(row["pushed"], row["mask"]), int(row["key"].split("_")[2]))
    assert found["counts"] == {"spread": 6, "failed": 2}
    assert "(stale)" in found["stale"]


def test_verls_own_trainer_is_pushed_by_our_advantages() -> None:
    found = run("verl_loop", "DRACO_VERL_PYTHON", ".venv-adapter-verl/bin/python")
    rows = [row for row in found["rows"] if any(row["mask"])]
    # Two steps of two groups; one run of each group crashed, for which verl pads the batch.
    flights = [next(each for each in FLIGHTS if f"Booked {each}" in row["text"]) for row in rows]
    assert sorted(flights) == sorted(FLIGHTS * 4)
    assert len(found["rows"]) == 20
    for flight, row in zip(flights, rows, strict=True):
        turns = runs_of(row["pushed"], row["mask"])
        values = expected([[len(turn) for turn in turns]] * 3, epsilon=1e-6)[FLIGHTS.index(flight)]
        for turn, value in zip(turns, values, strict=True):
            assert turn == pytest.approx([value] * len(turn), rel=1e-5, abs=1e-9)
    assert {row["rank"] for row in rows} == {0, 1}
    assert len(found["weights"]) == 2
    for weights in found["weights"]:
        assert len(set(weights)) == len(weights) == 3


def test_skyrls_policy_loss_passes_our_advantages_on() -> None:
    whole, step_wise, merged = run("skyrl_batch", "DRACO_SKYRL_PYTHON", ".venv-adapter-skyrl/bin/python")
    for found in (whole, merged):
        for uid, ids, pushed, mask in zip(*(found[name] for name in ("uids", "ids", "pushed", "mask")), strict=True):
            session = (next(each for each in ids if each >= 100) - 100) // 5
            # A group of which one run could be judged is not judged.
            if session == 3 or uid == "prompt_2":
                assert not any(mask)
            else:
                check_pushed(runs_of(pushed, mask), session)
    # Three rows a trajectory, in the same order, have the same values as its three turns.
    turns = [turn for row in zip(whole["pushed"], whole["mask"], strict=True) for turn in runs_of(*row) or [[]] * 3]
    rows = [
        [p for p, m in zip(*row, strict=True) if m] for row in zip(step_wise["pushed"], step_wise["mask"], strict=True)
    ]
    assert len(turns) == len(rows) == 36
    for turn, row in zip(turns, rows, strict=True):
        assert row == pytest.approx(turn, rel=1e-5)
    for found in (whole, step_wise, merged):
        assert found["counts"] == {"spread": 6}
        assert "no verdict" in found["stale"]
        assert found["refused"] == [
            "skyrl 0.3.0: trainer.algorithm.advantage_estimator=gae computes no advantage within a group; expected "
            "grpo, rloo or maxrl",
            "skyrl 0.3.0: trainer.algorithm.dynamic_sampling.type=filter drops groups by the environment's rewards, "
            "before they are judged; leave it out",
        ]


def test_openrlhfs_policy_loss_passes_our_advantages_on() -> None:
    found = run("openrlhf_batch", "DRACO_OPENRLHF_PYTHON", ".venv-adapter-openrlhf/bin/python")
    # Against group_norm's advantages 1.1547, -0.5774, -0.5774 of the rewards 1, -1, -1.
    for estimator, factor in (("group_norm", 1.0), ("dr_grpo", 2 / 3**0.5), ("rloo", 3**0.5)):
        rows = found[estimator]["rows"]
        assert sorted(row["session"] for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert found[estimator]["counts"] == {"spread": 6, "failed": 2}
        for row in rows:
            turns = runs_of(row["pushed"], row["mask"])
            check_pushed([[each / factor for each in turn] for turn in turns], row["session"])
    # reinforce_baseline whitens over all tokens, those of the unjudged run (0) included.
    tokens, values = np.array([9, 12, 9, 12]), np.array([4 / 3, -2 / 3, -2 / 3, 0.0])
    mean = np.average(values, weights=tokens)
    white = (values - mean) / np.average((values - mean) ** 2, weights=tokens) ** 0.5
    for row in found["reinforce_baseline"]["rows"]:
        session = row["session"]
        counts = [len(turn) for turn in runs_of(row["pushed"], row["mask"])]
        share = 0.0 if session == 3 else white[session] * tokens[session] / 3
        for turn, count in zip(runs_of(row["pushed"], row["mask"]), counts, strict=True):
            assert turn == pytest.approx([share / count] * count, rel=1e-5, abs=1e-7)
    assert "no verdict" in found["stale"]
    reasons = ("--algo.advantage.estimator=gae", "--algo.dynamic_filtering_enable", "--train.async_enable")
    for said, reason in zip(found["refused"], reasons, strict=True):
        assert said.startswith(f"openrlhf 0.11.2: {reason}")


def test_slimes_policy_loss_passes_our_advantages_on() -> None:
    if "DRACO_SLIME" not in os.environ:
        pytest.skip("DRACO_SLIME names no checkout")
    found = run("slime_batch", "DRACO_SLIME_PYTHON", ".venv-bench/bin/python")
    rewards = {"DL9": 1.0, "UA1": -1.0, "XX0": 0.0}
    assert found["rewards"] == [rewards[flight] for flight in found["flights"]]
    assert sorted(row["session"] for row in found["rows"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    for row in found["rows"]:
        if row["session"] < 3:
            check_pushed(runs_of(row["pushed"], row["mask"]), row["session"])
        else:
            assert not any(row["mask"])
            assert not any(row["pushed"])
    assert "no verdict" in found["stale"]
    assert "drops groups by the environment's rewards" in found["refused"][0]
    assert "credit would be uniform" in found["refused"][1]


def test_tinkers_data_hold_our_advantages() -> None:
    found = run("tinker_data", "DRACO_TINKER_PYTHON", ".venv-adapter-tinker/bin/python")
    quality, tokens = np.array([1.0, 0.25, 0.5]), np.array([3, 4, 2])
    values = 0.7 * 9 * quality / quality.sum() / tokens
    for data in found["cookbook"]:
        pairs = [
            (advantage, target)
            for datum in data
            for advantage, mask, target in zip(
                *(datum[name] for name in ("advantages", "mask", "target_tokens")), strict=True
            )
            if mask
        ]
        assert [target for _, target in pairs] == [10, 11, 12, 20, 21, 22, 23, 30, 31]
        assert [advantage for advantage, _ in pairs] == pytest.approx(np.repeat(values, tokens).tolist(), rel=1e-5)
    assert [len(data) for data in found["cookbook"]] == [1, 2]
    plain = found["plain"]
    assert "the data have 3 sampled turns, 2 were judged" in found["stale"]
    assert {name: plain[name] for name in found["ours"]} == found["ours"]


def test_prime_rls_loss_passes_our_advantages_on() -> None:
    if "DRACO_PRIME_RL" not in os.environ:
        pytest.skip("DRACO_PRIME_RL names no checkout")
    found = run("prime_rl_group", "DRACO_PRIME_RL_PYTHON", ".venv-adapter-prime-rl/bin/python")
    assert found["pushed"] == [pytest.approx(row, rel=1e-5) for row in found["advantages"]]
    # prime-rl's GRPO has no standard deviation: rewards 1, -1, -1 minus their mean.
    quality = {"UA1": -2 / 3, "DL9": 4 / 3, "XX0": 0.0}
    for row, flight in zip(found["advantages"], ("UA1", "XX0", "DL9", "UA1"), strict=True):
        share = quality[flight] * 9 / 3
        assert row == pytest.approx([share / 3] * 3 + [share / 4] * 4 + [share / 2] * 2, rel=1e-5)


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
