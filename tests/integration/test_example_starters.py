"""The starter policies of the examples: their demonstrations are of training tasks alone, and policies come of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.support.command import draco

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

EXAMPLES = REPOSITORY / "examples"
TASKSETS = """
import json, sys
from pathlib import Path
from demonstrations import begun, main, tasks_of
folder, told = Path(sys.argv[1]), {}
for name in sys.argv[2:]:
    main(name, folder / f"{name}.jsonl")
    content = (lambda task: begun(task).state.game_state["target_word"]) if name == "hangman" else (
        lambda task: [parcel.rsplit(" ", 1)[0] for parcel in task.data.parcels])
    told[name] = {split: [content(task) for task in tasks_of(name, split)] for split in ("train", "dev")}
print(json.dumps(told))
"""
"""Writes the demonstrations of tasksets and says what each of their tasks is about, by split."""


def run(python: str, folder: Path, *command: str) -> str:
    environment = {**os.environ, "NLTK_DATA": str(EXAMPLES / "parcels/nltk_data")}
    done = subprocess.run([python, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def some_policy(config: Path, file: Path, folder: Path) -> Path:
    """Of a few of the demonstrations."""
    few = folder / "few.jsonl"
    few.write_text("".join(f"{json.dumps(line)}\n" for line in lines_of(file)[:6]), encoding="utf-8")
    done = draco("sft", str(config), str(few), "--new", "--epochs", "1", "--out", str(folder / "policy"))
    assert done.returncode == 0, done.stdout + done.stderr
    # In particular no report of Triton's about objects that are never freed.
    assert not done.stderr
    return folder / "policy"


def test_the_desks_demonstrations_are_of_training_tasks_and_make_a_policy(tmp_path: Path) -> None:
    desk, file = EXAMPLES / "desk_agent", tmp_path / "demonstrations.jsonl"
    run(sys.executable, desk, "demonstrations.py", str(file))
    rows = json.loads(run(sys.executable, desk, "-c", "import json, tasks; print(json.dumps(tasks.rows()))"))
    asked = {split: {row["instruction"] for row in rows if row["split"] == split} for split in ("train", "dev")}
    shown = {line["messages"][0]["content"] for line in lines_of(file) if line.get("tools")}
    assert shown == asked["train"]
    groups = {split: {row["group"] for row in rows if row["split"] == split} for split in ("train", "dev")}
    assert not groups["train"] & groups["dev"]
    assert (some_policy(desk / "desk_agent.yaml", file, tmp_path) / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def tasksets(verifiers: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, list[Any]]]]:
    """The folder with the demonstrations of both tasksets, and what their tasks are about."""
    folder = tmp_path_factory.mktemp("tasksets")
    # verifiers is imported once for all of it; `main` is what the script calls with its arguments.
    said = run(verifiers, EXAMPLES / "parcels", "-c", TASKSETS, str(folder), "parcels", "hangman")
    return folder, json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("name", ["parcels", "hangman"])
def test_a_tasksets_demonstrations_are_of_training_tasks_and_make_a_policy(
    name: str, tasksets: tuple[Path, dict[str, dict[str, list[Any]]]], tmp_path: Path
) -> None:
    file, about = tasksets[0] / f"{name}.jsonl", tasksets[1][name]
    assert len(about["dev"]) >= 20
    assert not [each for each in about["dev"] if each in about["train"]]
    told = lines_of(file)
    assert len(told) >= 100
    if name == "parcels":
        kinds = [[m["content"].rsplit(" a ", 1)[1].rsplit(" ", 1)[0] for m in line["messages"][::2]] for line in told]
        assert not [each for each in kinds if each in about["dev"]]
    assert (some_policy(EXAMPLES / "parcels" / f"{name}.yaml", file, tmp_path) / "model.safetensors").is_file()
