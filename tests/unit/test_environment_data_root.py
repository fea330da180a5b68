"""Data roots and interpreters that can and cannot be used, and what is said of those that cannot."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.data_root import check_data_root, check_readable, load_split, load_task
from draco_ray.environments.appworld.interpreter import PYTHON_VARIABLE, appworld_python
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.errors import WorldError
from draco_ray.rollout.worker import _opened

SPECS = {
    "instruction": "Like all songs.",
    "supervisor": {
        "first_name": "Ann",
        "last_name": "Lee",
        "email": "ann@lee.example",
        "phone_number": "5551234",
    },
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("tasks/abc_1", "base_dbs", "api_docs", "datasets"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "tasks" / "abc_1" / "specs.json").write_text(json.dumps(SPECS))
    (tmp_path / "data" / "datasets" / "train.txt").write_text("abc_1\n\n")
    (tmp_path / "data" / "datasets" / "empty.txt").write_text("\n")
    (tmp_path / "data" / "datasets" / "gone.txt").write_text("abc_1:2\nabc_2\nabc_3\n")
    return tmp_path


def test_a_root_that_can_be_used(root: Path) -> None:
    check_data_root(root)
    assert load_split(root, "train") == ["abc_1"]
    task = load_task(root, "abc_1")
    assert (task.task_id, task.group, task.instruction) == ("abc_1", "abc", "Like all songs.")
    assert (task.fields["supervisor_first_name"], task.fields["supervisor_phone_number"]) == ("Ann", "5551234")


def test_roots_that_cannot(root: Path, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="nowhere' does not exist; .*draco sandbox build"):
        check_data_root(tmp_path / "nowhere")
    (root / "data" / "api_docs").rmdir()
    with pytest.raises(WorldError, match="has no folder data/api_docs"):
        check_data_root(root)
    (root / "data" / "api_docs").mkdir()
    (root / "data" / "tasks" / "abc_1" / "specs.json").unlink()
    with pytest.raises(WorldError, match="has no tasks"):
        AppWorldSlot(EnvironmentConfig(appworld_python=sys.executable), root, load_ground_truth=False, name="x")


async def test_data_that_are_gone_when_a_rollout_begins_end_the_run_with_the_host_that_lacks_them(root: Path) -> None:
    slot = AppWorldSlot(EnvironmentConfig(appworld_python=sys.executable), root, load_ground_truth=False, name="x")
    (root / "data").rename(root / "unmounted")
    environment = SimpleNamespace(name="x", open=slot.open)
    with pytest.raises(WorldError, match=rf"^on host {platform.node()}: data root .* has no task 'abc_1'$"):
        await _opened(environment, "abc_1")  # type: ignore[arg-type]


@pytest.mark.parametrize("closed", ["data", "data/tasks/abc_1", "data/tasks/abc_1/specs.json"])
def test_a_root_closed_to_the_users_that_tasks_are(root: Path, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    os.chmod(root / "data", 0o755)
    check_readable(root, ["abc_1"])
    (root / closed).chmod(0o700)
    with pytest.raises(WorldError, match=rf"{closed}: other users cannot read it.*chmod -R a\+rX"):
        check_readable(root, ["abc_1"])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("tran", "has no split 'tran'; expected one of empty, gone, train"),
        ("empty", "has no tasks"),
        ("gone", "lists 2 tasks that do not exist, first 'abc_2'"),
    ],
)
def test_splits_that_cannot_be_used(root: Path, split: str, message: str) -> None:
    with pytest.raises(WorldError, match=message) as caught:
        load_split(root, split)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task_id", ["", "../abc_1", ".", "a/b"])
def test_what_is_no_task_id(root: Path, task_id: str) -> None:
    with pytest.raises(WorldError, match="is not a task id"):
        load_task(root, task_id)


def test_tasks_that_cannot_be_read(root: Path) -> None:
    with pytest.raises(WorldError, match="has no task 'abc_9'"):
        load_task(root, "abc_9")
    specs = root / "data" / "tasks" / "abc_1" / "specs.json"
    for broken in ("{", "[]", json.dumps({"instruction": "x"})):
        specs.write_text(broken)
        with pytest.raises(WorldError, match="is not a valid specs.json") as caught:
            load_task(root, "abc_1")
        assert "\n" not in str(caught.value)


def test_where_appworlds_python_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    local = tmp_path / ".venv-appworld" / "bin" / "python"
    local.parent.mkdir(parents=True)
    local.symlink_to(sys.executable)
    # The link itself: a virtual environment is known by it.
    assert appworld_python(None) == str(local)
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert appworld_python(None) == sys.executable
    assert appworld_python(str(local)) == str(local)
    with pytest.raises(WorldError, match="is not an executable file; correct environment.appworld_python"):
        appworld_python(str(tmp_path / "nothing"))
