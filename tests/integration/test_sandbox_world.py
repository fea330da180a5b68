"""A small sandbox built, verified and opened with AppWorld's own engine, in AppWorld's own Python."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.algorithm.equations import rubric_rewards, surviving_criteria
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.rules import RULES
from draco_ray.sandbox.world.scripts import VARIETIES, Fault, families
from tests.conftest import REPOSITORY, SANDBOX_WORLD
from tests.support.command import draco, draco_here
from tests.support.rule_judge_runs import run_of
from tests.support.worlds import files

pytestmark = pytest.mark.slow


def run(*arguments: str, given: str | None = None, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    """Run AppWorld's Python from the repository."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [appworld_python(None), *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**environment, "PYTHONHASHSEED": hash_seed},
    )


def sandbox(out: Path, options: dict[str, Any], hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    return run("-m", "draco_ray.sandbox.world", json.dumps({**options, "out": str(out)}), hash_seed=hash_seed)


def manifest(root: Path) -> dict:
    return json.loads((root / "sandbox.json").read_text())


def first_tasks(root: Path) -> dict[str, str]:
    """The first task of each family."""
    return {entry["family"]: task for task, entry in reversed(manifest(root)["tasks"].items())}


@pytest.fixture(scope="module")
def roots(sandbox_root: Path, hard_sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A world of each variety with tasks of all its families; the standard one is built in place of another."""
    root = tmp_path_factory.mktemp("standard") / "world"
    shutil.copytree(sandbox_root, root)
    built = sandbox(root, {"seed": 7, "users": 20, "limit": 15}, hash_seed="2")
    assert built.returncode == 0, built.stderr
    return {"standard": root, "hard": hard_sandbox_root}


@pytest.mark.deployment
def test_a_world_in_place_of_another_is_to_the_byte_what_the_same_seed_gives(
    roots: dict[str, Path], sandbox_root: Path
) -> None:
    made, before = files(roots["standard"]), files(sandbox_root)
    assert {path.parts[2] for path in made if "tasks" in path.parts} == set(manifest(roots["standard"])["tasks"])
    assert len(manifest(roots["standard"])["tasks"]) == 150
    # The replaced world had the first scenarios of this one, and the same people. API docs are copied from it; made
    # anew they are in test_wheel.
    parts = {"api_docs", "base_dbs", "tasks"}
    same = [path for path in before if parts & set(path.parts)]
    assert {path.parts[1] for path in same} == parts
    assert [path for path in same if made.get(path) != before[path]] == []
    splits = [path for path in before if "datasets" in path.parts]
    assert splits
    for path in splits:
        assert set(before[path].split()) <= set(made[path].split()), path
    assert [path.name for path in roots["standard"].parent.iterdir()] == ["world"]


def test_an_up_to_date_world_is_left_as_it_is(sandbox_root: Path) -> None:
    before = (sandbox_root / "sandbox.json").stat().st_mtime_ns
    built = sandbox(sandbox_root, SANDBOX_WORLD)
    assert built.returncode == 0
    assert "up to date" in built.stdout
    assert (sandbox_root / "sandbox.json").stat().st_mtime_ns == before


PLAY = """
import contextlib, gc, importlib, io, json, os, sys
# AppWorld leaves objects behind with every task: collections take ever longer and free nothing.
gc.disable()
from appworld import AppWorld
from appworld.apps import get_all_apps
from appworld.common.path_store import path_store

def evaluated(world):
    tracker = world.evaluate()
    untouched = {"no_op_pass": tracker.passes, "no_op_fail": tracker.failures}
    return {
        "success": tracker.success,
        "broken": [failure["requirement"] for failure in tracker.failures],
        "mislabelled": [
            each["requirement"] for label, found in untouched.items() for each in found if each["label"] != label
        ],
    }

# AppWorld is loaded once, and each world has a process of its own.
for name in get_all_apps():
    importlib.import_module(f"appworld.apps.{name}.apis")
gc.freeze()
for line in sys.stdin:
    order = json.loads(line)
    if os.fork():
        assert os.wait()[1] == 0
        continue
    path_store.update_root(order["root"])
    for job in order["jobs"]:
        with contextlib.redirect_stdout(io.StringIO()):
            with AppWorld(task_id=job["task_id"], experiment_name="played") as world:
                outputs, states = [], {}
                for done in range(len(job["cells"]) + 1):
                    if done in job["evaluate"]:
                        states[done] = evaluated(world)
                    if done < len(job["cells"]):
                        outputs.append(world.execute(job["cells"][done]))
        print(json.dumps({"outputs": outputs, "states": states}), flush=True)
    # AppWorld's interactive shells, one a task, would take minutes to shut down.
    os._exit(0)
"""


@dataclass(frozen=True)
class Played:
    """A script as it went, and how the world was evaluated after it."""

    cells: list[str]
    outputs: list[str]
    success: bool
    broken: list[str]
    """The requirements that are not met."""


@dataclass
class Family:
    """What was played of a family's first task."""

    instruction: str
    reference: Played
    untouched: dict[str, Any]
    """The evaluation before anything was done."""
    after: bool | None
    """Whether the task is still done after a cell too many; None where there was none."""
    faulty: dict[Fault, Played]
    extra: list[Played]


UNEXPECTED_MODELS = "Only the expected models have changed."
EXTRA = {
    "count_contacts_born": {
        'apis.phone.delete_contact(contact_id=rows[0]["contact_id"], access_token=phone_token)': UNEXPECTED_MODELS,
    },
    "deny_relation_requests": {
        'apis.phone.delete_contact(contact_id=people[0]["contact_id"], access_token=phone_token)': UNEXPECTED_MODELS,
        (
            "other = [r for r in rows if r not in requests][0]\n"
            'apis.venmo.deny_payment_request(payment_request_id=other["payment_request_id"], access_token=venmo_token)'
        ): "The changed rows of venmo.PaymentRequest are exactly the expected ones.",
    },
}
"""By family: what is done too much, and what that breaks."""
JUDGED = {
    variety: [name for name in sorted(families()) if families()[name].variety == variety and most(name)]
    for variety, most in {
        "standard": {"approve_relation_requests", "complete_due_tasks"}.__contains__,
        "hard": lambda name: "train" in families()[name].splits,
    }.items()
}
"""By variety: families whose rollouts the rule judge is asked about; a cell too many and a printed password go with
these."""


@pytest.fixture(scope="module")
def played(roots: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Family]]:
    """By variety and family: the first task untouched, done, done too much, and done with each fatal fault."""
    scripts: dict[str, list[tuple[str, Any, list[str], list[int]]]] = {}
    orders = []
    for variety, root in roots.items():
        scripts[variety] = [
            (name, *each) for name in first_tasks(root) for each in _scripts(name, judged=name in JUDGED[variety])
        ]
        # Nothing in the world itself is written to.
        own = tmp_path_factory.mktemp(variety)
        (own / "data").symlink_to(root / "data", target_is_directory=True)
        jobs = [
            {"task_id": first_tasks(root)[name], "cells": cells, "evaluate": evaluate}
            for name, _, cells, evaluate in scripts[variety]
        ]
        orders.append(json.dumps({"root": str(own), "jobs": jobs}) + "\n")
    done = run("-B", "-c", PLAY, given="".join(orders))
    assert done.returncode == 0, done.stderr
    results = iter(map(json.loads, done.stdout.splitlines()))
    found = {}
    for variety, root in roots.items():
        of: dict[str, dict[Any, tuple[list[str], Any]]] = {}
        for name, what, cells, _ in scripts[variety]:
            of.setdefault(name, {})[what] = (cells, next(results))
        found[variety] = {name: _family(root, first_tasks(root)[name], plays) for name, plays in of.items()}
    return found


def _scripts(name: str, *, judged: bool) -> list[tuple[Any, list[str], list[int]]]:
    """What is played of a family: what it is, its cells, and after how many of them the world is evaluated."""
    family = families()[name]
    *cells, completion = family.script()
    report = family.script(frozenset({Fault.NO_COMPLETION}))[-1]
    after = family.script(frozenset({Fault.CONTINUE_AFTER_COMPLETION}))[-1]
    count = len(cells)
    faults = sorted(family.fatal - {Fault.NO_COMPLETION}) + [Fault.PRINT_SECRET] * judged
    faulty = [(fault, family.script(frozenset({fault}))) for fault in faults]
    too_much = [((name, extra), [*cells, extra, completion]) for extra in EXTRA.get(name, {})]
    return [
        # The report is what a run that is never completed ends with: it changes nothing.
        (
            "reference",
            [*cells, report, completion, *([after] if judged else [])],
            [0, count + 1, count + 2, *([count + 3] if judged else [])],
        ),
        *((what, script, [len(script)]) for what, script in (*faulty, *too_much)),
    ]


def _family(root: Path, task_id: str, plays: dict[Any, tuple[list[str], Any]]) -> Family:
    def of(cells: Sequence[str], outputs: Sequence[str], state: dict[str, Any]) -> Played:
        return Played(list(cells), list(outputs), state["success"], state["broken"])

    cells, result = plays.pop("reference")
    outputs, (untouched, reported, completed, *after) = result["outputs"], result["states"].values()
    *work, report, completion = range(len(cells) - len(after))
    faulty = {
        what: of(script, each["outputs"], *each["states"].values())
        for what, (script, each) in plays.items()
        if isinstance(what, Fault)
    }
    faulty[Fault.NO_COMPLETION] = of(cells[: report + 1], outputs[: report + 1], reported)
    whole = [*work, completion]
    return Family(
        json.loads((root / "data" / "tasks" / task_id / "specs.json").read_text())["instruction"],
        of([cells[at] for at in whole], [outputs[at] for at in whole], completed),
        untouched,
        after[0]["success"] if after else None,
        faulty,
        [
            of(script, each["outputs"], *each["states"].values())
            for what, (script, each) in plays.items()
            if isinstance(what, tuple)
        ],
    )


@pytest.mark.deployment
@pytest.mark.parametrize("variety", VARIETIES)
def test_every_family_is_done_by_its_reference_and_by_no_fatal_fault(
    played: dict[str, dict[str, Family]], variety: str
) -> None:
    """As `draco sandbox verify` has it, which also plays each harmless fault."""
    assert sorted(played[variety]) == sorted(name for name, family in families().items() if family.variety == variety)
    for name, family in played[variety].items():
        assert not family.untouched["success"], name
        assert family.untouched["mislabelled"] == [], name
        assert [each for each in family.reference.outputs if "Execution failed" in each] == [], name
        assert family.reference.broken == [], name
        assert family.reference.success, name
        assert family.after is (True if name in JUDGED[variety] else None), name
        expected = dict.fromkeys(families()[name].fatal, False)
        expected |= {Fault.PRINT_SECRET: True} if name in JUDGED[variety] else {}
        assert {fault: each.success for fault, each in family.faulty.items()} == expected, name


@pytest.mark.deployment
def test_a_change_too_many_fails_a_task_that_is_otherwise_solved(played: dict[str, dict[str, Family]]) -> None:
    everything = {**played["standard"], **played["hard"]}
    for name, broken in EXTRA.items():
        assert everything[name].reference.success
        assert [(each.success, each.broken) for each in everything[name].extra] == [
            (False, [requirement]) for requirement in broken.values()
        ]


@pytest.mark.deployment
@pytest.mark.parametrize("variety", VARIETIES)
def test_the_rule_judges_rewards_follow_success(played: dict[str, dict[str, Family]], variety: str) -> None:
    better = pairs = 0
    for name in JUDGED[variety]:
        family = played[variety][name]
        group = [family.reference, *family.faulty.values()]
        runs = [run_of(*zip(each.cells, each.outputs, strict=True)) for each in group]
        rules = [rule for rule in RULES if rule.discovered or rule.applies(family.instruction)]
        verdict_GK = np.array([[int(rule.judge(run, family.instruction).verdict) for rule in rules] for run in runs])
        # The reference violates nothing; every fault violates something.
        assert not (verdict_GK[0] == Verdict.FAIL).any(), family.instruction
        assert (verdict_GK[1:] == Verdict.FAIL).any(axis=1).all(), family.instruction
        reward_G = rubric_rewards(verdict_GK, surviving_criteria(verdict_GK))
        success_G = np.array([each.success for each in group])
        better += int((reward_G[success_G][:, None] > reward_G[~success_G]).sum())
        pairs += int(success_G.sum() * (~success_G).sum())
    assert pairs >= 12
    assert better >= 0.95 * pairs


def test_verify_has_one_line_for_each_failing_task(sandbox_root: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sandbox_root, broken)
    entries = manifest(broken)
    ours = [task for task, entry in entries["tasks"].items() if entry["family"] == "count_contacts_born"]
    untrue, missing, fine = ours[:3]
    entries["tasks"] = {task: entries["tasks"][task] for task in (untrue, missing, fine)}
    (broken / "sandbox.json").write_text(json.dumps(entries))
    (broken / "data" / "tasks" / untrue / "ground_truth" / "answer.json").write_text("12345")
    shutil.rmtree(broken / "data" / "tasks" / missing)
    before = files(broken)
    verified = draco("sandbox", "verify", "--root", str(broken))
    assert verified.returncode == 1
    lines = verified.stdout.splitlines()
    [first] = [line for line in lines if untrue in line]
    assert first.startswith(f"verify: {untrue} (count_contacts_born): the reference fails: The answer")
    [second] = [line for line in lines if missing in line]
    assert second.startswith(f"verify: {missing} (count_contacts_born): cannot be run: ")
    assert [line for line in lines if fine in line] == []
    assert lines[-1] == "verify: 2 failing tasks"
    assert files(broken) == before

    entries["tasks"] = {fine: entries["tasks"][fine]}
    (broken / "sandbox.json").write_text(json.dumps(entries))
    verified = draco("sandbox", "verify", "--root", str(broken), "--jobs", "1")
    assert verified.returncode == 0
    assert verified.stdout.splitlines()[-1] == "verify: all tasks passed the checks"


def test_a_folder_that_is_no_sandbox_gives_one_line(tmp_path: Path) -> None:
    verified = draco_here("sandbox", "verify", "--root", str(tmp_path))
    assert verified.returncode == 1
    assert verified.stderr.startswith(f"draco: {tmp_path} has no sandbox.json")
    assert len(verified.stderr.splitlines()) == 1
