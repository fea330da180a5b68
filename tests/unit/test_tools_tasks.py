"""Tasks and options of an environment of tools: what cannot be used is one line that names the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draco_ray.config.load import load_config
from draco_ray.environments.tools.options import read_options
from draco_ray.environments.tools.rows import read_rows
from draco_ray.errors import ConfigError

GOOD = {"id": "t1", "instruction": "Do it.", "customer": "Ann", "orders": {"A": 1}, "expected": {"A": 2}, "group": "g"}


def write(folder: Path, *lines: object) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_rows_become_tasks_without_what_is_expected(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, GOOD, "", {"id": 2, "instruction": "Do that.", "split": "dev"}))
    assert [(row.task_id, row.split) for row in rows.values()] == [("t1", "train"), ("2", "dev")]
    task = rows["t1"].task("[]")
    assert (task.group, task.fields, task.tools) == ("g", {"customer": "Ann"}, "[]")
    assert "expected" not in rows["t1"].told(ground_truth=False)
    assert rows["t1"].told(ground_truth=True)["expected"] == {"A": 2}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([GOOD, {"id": "t2"}], "line 2: task 't2' has no instruction"),
        ([GOOD, {"id": "t2", "instruction": " "}], "line 2: task 't2' has no instruction"),
        ([GOOD, {"id": "t2", "instruction": 7}], "line 2: task 't2' has no instruction"),
        ([GOOD, GOOD], "two tasks have the id 't1' (line 1 and line 2)"),
        (
            [{"id": 1, "instruction": "a"}, "", {"id": "1", "instruction": "b"}],
            "two tasks have the id '1' (line 1 and line 3)",
        ),
        ([{"instruction": "a"}], "line 1: the task has no id"),
        ([{"id": None, "instruction": "a"}], "line 1: the task has no id"),
        ([GOOD, "{not json"], "line 2: not JSON"),
        ([GOOD, "[" * 100_000], "line 2: not JSON"),
        ([GOOD, "[1]"], "line 2: expected an object, found list"),
        ([], "no tasks"),
        ([{"id": "../a", "instruction": "a"}], "line 1: task '../a': id: expected a plain name"),
        ([{"id": "a\nb", "instruction": "a"}], "id: expected a plain name"),
        (
            [{"id": "a" * 129, "instruction": "a"}],
            "id: expected at most 128 bytes, because files are named after the id",
        ),
        ([{"id": True, "instruction": "a"}], "line 1: id: expected a text or a whole number, found bool"),
        ([{"id": 1.5, "instruction": "a"}], "line 1: id: expected a text or a whole number, found float"),
        ([{"id": "a", "instruction": "a", "group": ["b"]}], "task 'a': group: expected a text, found list"),
        ([{"id": "a", "instruction": "a", "split": {}}], "task 'a': split: expected a text, found dict"),
    ],
)
def test_a_task_that_cannot_be_used_is_named(tmp_path: Path, lines: list[object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_rows(write(tmp_path, *lines))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_editors_and_json_leave_in_a_file_does_no_harm(tmp_path: Path) -> None:
    row = {"id": "a", "instruction": "Half a \ud83d.", "split": None, "group": None, "sign": "\ud83d"}
    (tmp_path / "tasks.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\r\n")
    found = read_rows(str(tmp_path / "tasks.jsonl"))["a"]
    assert (found.split, found.task("").group, found.task("").instruction) == ("train", "", "Half a ?.")
    assert found.task("").fields == {"sign": "?"}


def test_tasks_may_come_from_a_function(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text(
        "def tasks():\n    yield from ({'id': i, 'instruction': f'Count to {i}.'} for i in range(3))\n"
        "def broken():\n    raise OSError('no disk')\ndef wrong():\n    return ['a']\n"
        "def leaves():\n    raise SystemExit(3)\n"
        "import datetime\ndef dated():\n    yield {'id': 'a', 'instruction': 'b', 'due': datetime.date.today()}\n"
    )
    assert [row.task("[]").instruction for row in read_rows(f"{file}:tasks").values()][2] == "Count to 2."
    for name, says in (
        ("broken", "OSError: no disk"),
        ("leaves", "SystemExit: 3"),
        ("wrong", "row 1: expected a mapping"),
        ("dated", "row 1: cannot be written as JSON: Object of type date"),
        ("none", "has no"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_rows(f"{file}:{name}")
    with pytest.raises(ConfigError, match="tasks cannot be read"):
        read_rows(str(tmp_path / "absent.jsonl"))


def test_options_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.touch()
    assert read_options({"tools": [str(file)]}).tools == (file,)
    for options, says in (
        ({}, "no tools given; list Python files in tools, or servers in mcp"),
        ({"tools": [str(tmp_path / "absent.py")]}, "does not exist"),
        ({"tools": ["tools.py"]}, "'tools.py' is a relative path; give"),
        ({"tools": [str(file)], "tasks": "here/made.py:tasks"}, "'here/made.py:tasks' is a relative path"),
        ({"tools": [str(file)], "reads": [str(tmp_path / "absent")]}, "does not exist"),
        ({"tool": [str(file)]}, "tool: Extra inputs"),
        ({"mcp": {"a": {}}}, "expected one of command and url"),
        ({"mcp": {"a": {"command": ["x"], "url": "http://localhost"}}}, "expected one of command and url"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_options(options)
    with pytest.raises(ConfigError, match=f"file {tmp_path}/a.py, {tmp_path}/b does not exist"):
        read_options({"tools": [str(tmp_path / "a.py")], "reads": [str(tmp_path / "b")]})


def test_a_path_in_a_file_may_be_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "environment.yaml"
    file.write_text(
        "environment:\n  use: tools\n  options:\n    tools: [./tools.py]\n    facts: text ./stays\n"
        "data:\n  root: ./\nagent:\n  prompt: ./prompt.txt\n"
    )
    config = load_config(str(file))
    assert config.environment.options == {"tools": [str(tmp_path / "tools.py")], "facts": "text ./stays"}
    assert (config.data.root, config.agent.prompt) == (tmp_path, tmp_path / "prompt.txt")
    # An override is typed where the user is.
    assert load_config(str(file), ["data.root=./here"]).data.root == Path("here")
