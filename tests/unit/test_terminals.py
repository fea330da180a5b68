"""What is printed reaches terminals that know ASCII or Latin-1 only, as text that no terminal obeys."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.table import Table

from draco_ray.cli import app, main
from draco_ray.runs.directory import RunDirectory
from draco_ray.terminal import PlainConsole
from draco_ray.training.progress import StepProgress
from tests.support.small_run import small_run


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, groups included."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


COMMANDS = list(commands(typer.main.get_command(app)))


ENCODINGS = pytest.mark.parametrize("encoding", ["ascii", "latin-1"])


@contextlib.contextmanager
def terminal(encoding: str) -> Iterator[Callable[[], str]]:
    """Standard output and error as a terminal of that encoding gives them to a program; gives what it shows."""
    shown = io.BytesIO()
    stream = io.TextIOWrapper(shown, encoding=encoding, errors="strict", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", "dumb")
        # What click finds to be no terminal's encoding it writes as UTF-8.
        yield lambda: shown.getvalue().decode(encoding, errors="replace")
    stream.detach()


def shown(encoding: str, *words: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    with terminal(encoding) as text:
        with pytest.raises(SystemExit) as ended:
            main(words)
        return int(ended.value.code or 0), text()


@pytest.mark.parametrize("key", ["a\x1b]0;owned\x07b", "a\x9b2Jb", "a\u202eb", "a\u2028b\nc\rd"])
def test_what_was_received_tells_the_terminal_nothing(tmp_path: Path, key: str) -> None:
    received = tmp_path / "received.yaml"
    received.write_text(json.dumps({key: 1}))
    code, text = shown("utf-8", "config", str(received))
    assert (code, text.startswith("draco: unknown config key a")) == (2, True)
    assert text.rstrip("\n").isprintable()


def test_what_is_printed_is_text(tmp_path: Path) -> None:
    model = "models/[/b]a[v2] :smile: \x1b]0;owned\x07\x9b2J\u202e\r"
    RunDirectory.create(tmp_path / "try[v2]", json.dumps({"setting": "draco", "seed": 0, "model": {"path": model}}))
    code, text = shown("utf-8", "runs", "show", str(tmp_path / "try[v2]"))
    spelt = r"models/[/b]a[v2] :smile: \x1b]0;owned\x07\x9b2J\u202e\r"
    assert code == 0
    assert " ".join(text.split()).startswith(f"try[v2]: setting draco, model {spelt}, seed 0 no finished step")


def test_a_cell_and_a_title_are_text() -> None:
    said = io.StringIO()
    table = Table("a[v2]", title="[/b]\x1b[2J")
    table.add_row("[red]\x1b[1A")
    PlainConsole(file=said, force_terminal=True, width=80, _environ={"TERM": "xterm", "NO_COLOR": "1"}).print(table)
    text = said.getvalue()
    assert [word in text for word in ("a[v2]", r"[/b]\x1b[2J", r"[red]\x1b[1A")] == [True] * 3
    assert "\x1b[2J" not in text
    assert "\x1b[1A" not in text


@ENCODINGS
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_shown_whole(words: tuple[str, ...], encoding: str) -> None:
    code, text = shown(encoding, *words, "--help")
    assert code == 0
    assert "Usage: " in text
    # Nothing had to be replaced; a question of ours has a space behind it.
    assert not re.search(r"\?(?! )|(?<!\w)\?", text)


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_help_of_a_process(variables: dict[str, str]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}
    done = subprocess.run(
        [sys.executable, "-m", "draco_ray.cli", "--help"],
        env={**environment, "TERM": "dumb", **variables},
        capture_output=True,
        check=True,
    )
    assert b"Usage: draco" in done.stdout
    assert done.stderr == b""


@ENCODINGS
def test_a_run_with_other_letters_is_shown(tmp_path: Path, encoding: str) -> None:
    run = small_run(tmp_path / "Größe–σ")
    for words in (["runs", "show"], ["replay"]):
        code, text = shown(encoding, *words, str(run.path))
        assert (code, "Gr" in text) == (0, True)
    code, text = shown(encoding, "runs", "show", str(tmp_path / "σ"))
    assert code == 2
    assert "not a run directory" in text


@ENCODINGS
def test_progress_is_shown(encoding: str) -> None:
    with terminal(encoding) as text:
        with pytest.raises(SystemExit):
            main(["--help"])
        # Not a dumb one, which has no bar.
        progress = StepProgress(Console(force_terminal=True, _environ={"TERM": "xterm"}))
        progress.start("step 1/2 – σ", rollouts=2)
        progress.advance()
        progress.stop()
        assert "step 1/2" in text()
