"""Where ``--out`` says, whole or not at all: one line where it cannot be, and nothing beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draco_ray.cli import main
from draco_ray.errors import ConfigError
from draco_ray.lab.files import atomic_output_file
from tests.support.small_run import small_run

FILES = {
    "page": ["report", "RUN"],
    "timeline": ["runs", "timeline", "RUN", "--step", "1"],
    "rubric": ["rubric", "author", "sandbox"],
}
FOLDERS = {
    "figures": ["report", "RUN", "--figures"],
    "tables": ["report", "RUN", "--tables"],
    "replay": ["replay", "RUN"],
    "rejudge": ["replay", "RUN", "--judge", "rules"],
    "prompts": ["prompts", "import", "PAPER"],
    "evaluated": ["tables", "RUN"],
    "attribution": ["attribution-bench", "--world", "RUN"],
}
LISTINGS = "".join(
    f"\\begin{{lstlisting}}[caption={{\\texttt{{{name}}}}}]\ntext\n\\end{{lstlisting}}\n"
    for name in ("stage1.txt", "stage2.txt", "union.txt", "score.txt", "credit.txt")
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run, a paper and nothing else."""
    small_run(tmp_path / "run")
    (tmp_path / "paper.tex").write_text(LISTINGS)
    return tmp_path


def command(place: Path, words: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code and lines on stderr."""
    given = [word.replace("RUN", str(place / "run")).replace("PAPER", str(place / "paper.tex")) for word in words]
    try:
        main([*given, "--out", str(out)])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_place_that_cannot_be_is_one_line(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (place / "file").write_text("mine")
    below = place / "file" / "below"
    code, lines = command(place, (FILES | FOLDERS)[name], below, capsys)
    assert code
    assert len(lines) == 1
    assert (place / "file").read_text() == "mine"
    assert sorted(path.name for path in place.iterdir()) == ["file", "paper.tex", "run"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_where_a_folder_is_wanted_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (place / "taken").write_text("mine")
    code, lines = command(place, FOLDERS[name], place / "taken", capsys)
    assert code
    assert len(lines) == 1
    assert (place / "taken").read_text() == "mine"
    assert sorted(path.name for path in place.iterdir()) == ["paper.tex", "run", "taken"]


@pytest.mark.parametrize("name", FILES)
def test_a_folder_where_a_file_is_wanted_keeps_its_surroundings_clean(
    place: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (place / "folder").mkdir()
    code, lines = command(place, FILES[name], place / "folder", capsys)
    assert sorted(path.name for path in place.iterdir()) == ["folder", "paper.tex", "run"]
    if name == "page":
        assert [path.name for path in (place / "folder").iterdir()] == ["report.html"]
    else:
        assert code
        assert len(lines) == 1
        assert str(place / "folder") in lines[0]


@pytest.mark.parametrize("name", ["page", "timeline", "figures", "tables", "replay", "rejudge"])
def test_what_is_written_is_only_what_was_asked_for(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = place / "new" / "out"
    assert command(place, (FILES | FOLDERS)[name], out, capsys) == (0, [])
    assert [path.name for path in (place / "new").iterdir()] == ["out"]
    assert out.is_file() == (name in FILES)


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("wrong")])
def test_a_file_that_was_not_finished_leaves_the_old_one(tmp_path: Path, problem: BaseException) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def fail() -> None:
        with atomic_output_file(path) as temporary:
            temporary.write_text("half")
            raise problem

    with pytest.raises((ConfigError, type(problem))):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]
