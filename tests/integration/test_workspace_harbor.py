"""Harbor's task folders as tasks in a workspace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draco_ray.environments.tools.rows import read_rows
from draco_ray.errors import ConfigError
from tests.conftest import NEEDS_BUBBLEWRAP
from tests.integration.test_workspace import play, printed
from tests.integration.test_workspace_container import MOUNTS, STAND_IN
from tests.integration.test_workspace_container import play as play_contained
from tests.support.coding_agents import Workspaces

TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
cd /app
PYTHONPATH=. python3 /tests/test_add.py
echo $((1 - $?)) > /logs/verifier/reward.txt
exit 0
"""


def harbor_task(folder: Path, name: str = "fix-add", test: str = TEST, split: str = "train") -> Path:
    """A task as ``harbor tasks init`` lays it out."""
    files = {
        "task.toml": f'version = "1.0"\n[metadata]\nsplit = "{split}"\n[environment]\ndocker_image = "python:3.12"\n',
        "instruction.md": "# Fix add\n\nAdd is wrong.\n",
        "environment/Dockerfile": "FROM python:3.12\nCOPY add.py /app/\n",
        "environment/add.py": "def add(a, b):\n    return a - b\n",
        "solution/solve.sh": "sed -i s/-.b/+b/ add.py\n",
        "tests/test.sh": test,
        "tests/test_add.py": "from add import add\n\nassert add(1, 2) == 3\n",
    }
    for path, text in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    return folder / name


def workspaces(folder: Path, isolation: str = "namespaces") -> Workspaces:
    return Workspaces(
        folder, isolation=isolation, tasks=str(folder / "harbor"), test="", repository="", reference="HEAD"
    )


@pytest.mark.parametrize("level", ["namespaces", pytest.param("bubblewrap", marks=NEEDS_BUBBLEWRAP)])
async def test_a_task_is_played_and_only_its_evaluator_has_the_tests(tmp_path: Path, level: str) -> None:
    harbor_task(tmp_path / "harbor")
    at = workspaces(tmp_path, level)
    assert at.environment().evaluates
    look = 'cat; ls; ls /tests/ /solution; cat "$DRACO_TASK_FILE"; grep -rl "assert add" /run /app'
    played = await play(at, f"ask one; {look}; sed -i s/-.b/+b/ add.py", task="fix-add")
    assert "Add is wrong.\n" in printed(played)
    assert "add.py" in printed(played)
    assert not any(each in printed(played) for each in ("test.sh", "test_add.py", "solve.sh"))
    assert at.verdict is not None
    assert at.verdict.success, at.verdict.failures
    forge = "mkdir -p /logs/verifier $HOME/logs/verifier; echo 1 | tee {/,$HOME/}logs/verifier/reward.txt"
    await play(at, f"bash -c '{forge}' || true; ask one", task="fix-add", rollout=1)
    assert at.verdict.failures == ("the tests' reward is 0, expected 1",)


async def test_a_container_has_the_tests_where_they_look(tmp_path: Path) -> None:
    harbor_task(tmp_path / "harbor", test="cd /app && grep -q expected add.py && " + TEST.partition("\n")[2])
    at = workspaces(tmp_path)
    container = f"{STAND_IN} {MOUNTS} -v {{workspace}}:/app"
    script = "ask one; ls /tests; cat; pwd; echo '# expected' >> add.py; sed -i s/-.b/+b/ add.py"
    played = await play_contained(at, script, container, task="fix-add")
    assert "Add is wrong.\n" in printed(played)
    assert "test.sh" not in printed(played)
    assert at.verdict is not None
    assert at.verdict.success, at.verdict.failures


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("echo '{\"reward\": 0.5}' > /logs/verifier/reward.json", 'reward is {"reward": 0.5}, expected 1'),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', "expected 1"),
        ("echo broken >&2; exit 3", "the tests wrote no reward: they ended with exit code 1; its last output: broken"),
        ("echo NaN > /logs/verifier/reward.txt", "expected 1"),
        ('echo \'{"a": 1, "b": 1.0}\' > /logs/verifier/reward.json', ""),
    ],
)
async def test_rewards_of_tests(tmp_path: Path, test: str, said: str) -> None:
    harbor_task(tmp_path / "harbor", test=test)
    at = workspaces(tmp_path)
    await play(at, "ask one", task="fix-add")
    assert at.verdict is not None
    assert at.verdict.success == (not said)
    assert said in "".join(at.verdict.failures)


def test_what_is_read_of_a_folder(tmp_path: Path) -> None:
    harbor_task(tmp_path, "one")
    harbor_task(tmp_path / "deeper", "two", split="dev")
    rows = read_rows(str(tmp_path))
    assert (rows.of_split("train"), rows.of_split("dev")) == (["one"], ["two"])
    task = rows.row("one").task("")
    assert dict(task.fields) == {"repository": str(tmp_path / "one" / "environment"), "image": "python:3.12"}
    assert "tests" not in json.dumps(rows.row("one").told(ground_truth=False))
    (tmp_path / "one" / "task.toml").write_text("[metadata")
    with pytest.raises(ConfigError, match="one/task.toml: not a Harbor task"):
        read_rows(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no tasks"):
        read_rows(str(tmp_path / "empty"))
