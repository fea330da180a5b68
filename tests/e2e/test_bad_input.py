"""What a user gets wrong is one line on stderr that says what to do, a non-zero exit, and nothing lost.

What is refused before anything is started is refused in the test's process (`refused`); that a process of its own
prints nothing else, what it imports included, is seen where one starts (`refusal`).
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from draco_ray.cli import main
from tests.support.command import draco
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.slow

Refused = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that a run accepts."""
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def refusal(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and the one line on stderr of a command that must fail."""
    result = draco(*arguments, environment=environment)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    return result.returncode, lines[0]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """As `refusal`, by the entry point in this process."""

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        lines = [line for line in printed.err.splitlines() if line.strip()]
        assert len(lines) == 1, printed.err
        assert "Traceback" not in printed.out + printed.err
        assert isinstance(ended.value.code, int)
        return ended.value.code, lines[0]

    return run


def test_unknown_key_names_the_nearest() -> None:
    code, line = refusal("train", "sandbox", "learner.learning_rat=1e-4")
    assert code == 2
    assert "learner.learning_rat" in line
    assert "learner.learning_rate" in line


def test_value_out_of_range(refused: Refused) -> None:
    code, line = refused("train", "sandbox", "algorithm.group_size=1")
    assert code == 2
    assert "algorithm.group_size" in line
    assert "2" in line


def test_unknown_preset_and_setting(refused: Refused) -> None:
    assert "sandbox" in refused("train", "sandboxx")[1]
    assert "no-credit" in refused("train", "sandbox", "--setting", "nocredit")[1]


def test_data_root_without_tasks(refused: Refused, tmp_path: Path, sandbox_root: Path, model: Path) -> None:
    root = tmp_path / "world"
    for name in ("tasks", "base_dbs", "api_docs", "datasets"):
        (root / "data" / name).mkdir(parents=True)
    shutil.copytree(sandbox_root / "data" / "datasets", root / "data" / "datasets", dirs_exist_ok=True)
    code, line = refused("train", "sandbox", f"data.root={root}", f"model.path={model}")
    assert code == 1
    assert "no tasks" in line
    assert "draco sandbox build" in line


def test_unknown_split(refused: Refused, sandbox_root: Path, model: Path) -> None:
    code, line = refused("train", "sandbox", f"data.root={sandbox_root}", "data.eval_split=tset", f"model.path={model}")
    assert code == 1
    assert "tset" in line
    assert "test_normal" in line


def test_model_directory_without_tokenizer(refused: Refused, tmp_path: Path, sandbox_root: Path, model: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    code, line = refused("train", "sandbox", f"data.root={sandbox_root}", f"model.path={broken}")
    assert code == 1
    assert str(broken) in line
    assert "tokenizer" in line


def test_more_prompts_a_step_than_tasks(refused: Refused, sandbox_root: Path, model: Path) -> None:
    code, line = refused("train", "sandbox", f"data.root={sandbox_root}", f"model.path={model}")
    assert code == 2
    assert "train.prompts_per_step" in line


def test_existing_run_directory_is_left_alone(
    refused: Refused, tmp_path: Path, sandbox_root: Path, model: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    arguments = [f"data.root={sandbox_root}", f"model.path={model}", f"run.root={tmp_path}"]
    code, line = refused("train", "sandbox", *arguments, "run.name=mine", "train.prompts_per_step=2")
    assert code == 2
    assert "run.name" in line
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


def judged_by(base: str, tmp_path: Path, sandbox_root: Path, model: Path) -> list[str]:
    """A run whose judge is at ``base``."""
    return [
        f"data.root={sandbox_root}",
        f"model.path={model}",
        f"run.root={tmp_path}",
        "judge.rule_judge.start=false",
        "judge.model=openai/some-model",
        f"judge.api_base={base}",
        "judge.api_key_env=SOME_KEY",
        "train.evaluate_before_after=false",
        "train.prompts_per_step=2",
    ]


def test_judge_that_cannot_be_reached(tmp_path: Path, sandbox_root: Path, model: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        code, line = refusal("train", "sandbox", *judged_by(base, tmp_path, sandbox_root, model), SOME_KEY="k")
    assert code == 1
    assert base in line


def test_judge_key_that_is_missing_or_refused(
    refused: Refused, tmp_path: Path, sandbox_root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedJudgeServer(Reply("bad key", status=401)) as server:
        arguments = judged_by(server.base, tmp_path, sandbox_root, model)
        code, line = refused("train", "sandbox", *arguments)
        assert code == 1
        assert "SOME_KEY" in line
        monkeypatch.setenv("SOME_KEY", "sk-secret")
        code, line = refused("train", "sandbox", *arguments, "run.name=refused")
        assert code == 1
        assert "SOME_KEY" in line
        assert "sk-secret" not in line


def test_judge_server_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = refusal("judge-server", "--port", str(port))
    assert code == 1
    assert str(port) in line
