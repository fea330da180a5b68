"""Tasks alone: what is listed, what is told, and an evaluator that is a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import Environment, GuardedWorld, make_environment
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldError

ROW = {"id": "a", "instruction": "Do it.", "group": "g", "customer": "Ann", "expected": {"x": 1}}
CHECK = """\
import json, os, sys
given = json.load(sys.stdin)
left = os.listdir(given["workspace"])
told = given["task"]["expected"] == {"x": 1}
print(json.dumps({"told": told, "output": given["output"] == "42", "left": left == ["f"]}))
sys.exit(given["output"] != "42")
"""


def make(folder: Path, *, ground_truth: bool = True, **options: Any) -> Environment:
    (folder / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in (ROW, {**ROW, "id": "b", "split": "dev"})))
    config = EnvironmentConfig(use="tasks", options=options)
    return make_environment(config, DataConfig(root=folder), ground_truth=ground_truth)


def evaluator(folder: Path, source: str) -> str:
    (folder / "check.py").write_text(source)
    return "python check.py"


async def test_a_task_has_no_ground_truth_and_a_folder_of_its_own(tmp_path: Path) -> None:
    environment = make(tmp_path, facts="Be kind.")
    assert (environment.tasks("train"), environment.tasks("dev")) == (["a"], ["b"])
    assert environment.facts.endswith("\n- Be kind.")
    assert not environment.evaluates
    first, second = await environment.open("a"), await environment.open("a")
    assert first.task.fields["customer"] == "Ann"
    assert "expected" not in first.task.fields
    folders = {Path(world.task.fields["workspace"]) for world in (first, second)}
    assert len(folders) == 2
    assert all(folder.is_dir() for folder in folders)
    await first.close()
    await second.close()
    assert not any(folder.exists() for folder in folders)
    with pytest.raises(WorldError, match="no task has split 'test'; expected one of dev, train"):
        environment.tasks("test")
    with pytest.raises(WorldError, match="no task 'c'"):
        environment.task("c")


def test_tests_of_single_tasks_are_enough_to_evaluate(tmp_path: Path) -> None:
    rows = [{"id": "a", "instruction": "Fix.", "expected": {"test": "true"}}, {"id": "b", "instruction": "Fix."}]
    for given, evaluates in [(rows, True), (rows[1:], False)]:
        (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, given)))
        environment = make_environment(EnvironmentConfig(use="workspace"), DataConfig(root=tmp_path), ground_truth=True)
        assert environment.evaluates is evaluates
        if evaluates:
            assert environment.difficulty("a") is None
        with pytest.raises((ConfigError, WorldError), match="task b: no test" if evaluates else "has no evaluator"):
            environment.difficulty("b")


async def test_files_that_the_agent_wants_kept_outlive_the_task(tmp_path: Path) -> None:
    world = GuardedWorld(await make(tmp_path).open("a"), "tasks", 60)
    await world.keep(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    kept = Path(world.task.fields["workspace"]) / "kept"
    (kept / "below").mkdir(parents=True)
    (kept / "below" / "é.json").write_text("1")
    await world.keep(tmp_path / "episodes" / "a")
    await world.close()
    assert (tmp_path / "episodes" / "a" / "below" / "é.json").read_text() == "1"


@pytest.mark.parametrize(("output", "success", "failures"), [("42", True, ()), ("41", False, ("output",))])
async def test_the_evaluator_sees_what_was_handed_in(
    tmp_path: Path, output: str, success: bool, failures: tuple[str, ...]
) -> None:
    environment = make(tmp_path, evaluator=evaluator(tmp_path, CHECK))
    assert environment.evaluates
    world = await environment.open("a")
    Path(world.task.fields["workspace"], "f").write_text("")
    await world.act(output)
    verdict = await world.evaluate()
    assert (verdict.success, verdict.failures, verdict.total_tests) == (success, failures, 3)
    await world.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(3)", "ended with exit code 3, expected 0 or 1"),
        ("import os; os.abort()", "ended with exit code -6"),
        ("import time; time.sleep(600)", "did not end in time"),
        ("print('fine')", "printed 'fine'; expected no output, or a JSON object"),
        ("print({})", "printed '{}'"),
    ],
)
async def test_an_evaluator_that_fails_is_no_verdict(tmp_path: Path, source: str, said: str) -> None:
    environment = make(
        tmp_path, evaluator=evaluator(tmp_path, source), evaluator_seconds=3 if "sleep" in source else 60
    )
    world = await environment.open("a")
    with pytest.raises(EnvironmentCrashed, match=said) as caught:
        await world.evaluate()
    assert "\n" not in str(caught.value)
    await world.close()


async def test_nothing_is_evaluated_without_ground_truth(tmp_path: Path) -> None:
    environment = make(tmp_path, ground_truth=False, evaluator=f"{sys.executable} -c pass")
    world = await environment.open("a")
    with pytest.raises(WorldError, match="opened without ground truth"):
        await world.evaluate()
    await world.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluater": "x"}, "environment.options: evaluater: Extra inputs"),
        ({"evaluator": "no-such-program"}, "no such program"),
        ({"evaluator": "a 'b"}, "No closing quotation"),
        ({"evaluator_seconds": 0}, "evaluator_seconds: Input should be greater than 0"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, **options)
