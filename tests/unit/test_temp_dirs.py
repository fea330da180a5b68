"""Temporary directories are removed at exit, or, after a kill, by the next process."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import draco_ray
from draco_ray.temp_dirs import TEMP_DIR_PREFIX, PrivateTempDir, lock_shared, remove_abandoned

HOLDS = """\
import os, sys
from draco_ray.temp_dirs import PrivateTempDir
folder = PrivateTempDir()
(folder.path / "left").touch()
"""
WAITS = """\
print(folder.path, flush=True)
sys.stdin.read()
"""
FORKS = """\
if os.fork() == 0:
    sys.exit()
os.wait()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"up")
    os.close(1)
    sys.stdin.read()
    os._exit(0)
os.read(reading, 2)
"""
IN_TURN = """\
for _ in range(30):
    with PrivateTempDir() as own:
        (own / "file").touch()
        assert (own / "file").exists()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def program(*parts: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", "".join(parts)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def owner(*more: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a folder, and that."""
    with program(HOLDS, *more, WAITS) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_what_a_killed_process_leaves_goes_with_the_next_one_that_is_made(temporary: Path) -> None:
    with owner() as (process, left):
        assert left.parent.parent == temporary
        first = PrivateTempDir()
        assert (left / "left").exists()
        killed(process)
    # A process looks once; what it makes meanwhile lies beside.
    second = PrivateTempDir()
    assert (left / "left").exists()
    for folder in (first, second, second):
        folder.remove()
    third = PrivateTempDir()
    assert set(temporary.iterdir()) == {third.path.parent}
    third.remove()
    assert list(temporary.iterdir()) == []


def test_a_process_that_ends_leaves_nothing(temporary: Path) -> None:
    with owner() as (process, left):
        assert left.exists()
        process.communicate("")
    assert list(temporary.iterdir()) == []


def test_a_folder_whose_place_was_cleared_is_made_anew(temporary: Path) -> None:
    with PrivateTempDir() as first:
        first.rmdir()
        first.parent.rmdir()
        with PrivateTempDir() as second:
            assert second.is_dir()
    assert list(temporary.iterdir()) == []


def test_a_folder_is_kept_while_somebody_else_holds_it(temporary: Path) -> None:
    with owner() as (process, left):
        lock = lock_shared(left.parent)
        killed(process)
    remove_abandoned(temporary)
    assert (left / "left").exists()
    os.close(lock)
    remove_abandoned(temporary)
    assert list(temporary.iterdir()) == []


def test_a_fork_neither_holds_nor_removes_a_folder(temporary: Path) -> None:
    with owner(FORKS) as (process, left):
        remove_abandoned(temporary)
        assert (left / "left").exists()
        killed(process)
        # The second child still waits for its input.
        remove_abandoned(temporary)
        assert list(temporary.iterdir()) == []
        process.communicate("")


def test_nothing_a_task_may_have_made_is_followed_or_stays(temporary: Path) -> None:
    outside = temporary / "outside"
    outside.mkdir()
    (outside / "file").touch()
    with owner() as (process, left):
        killed(process)
    (left / "link").symlink_to(outside, target_is_directory=True)
    nest(left, 1200)
    closed = left / "closed"
    closed.mkdir()
    (closed / "file").touch()
    closed.chmod(0)
    (temporary / f"{TEMP_DIR_PREFIX}link").symlink_to(outside, target_is_directory=True)
    remove_abandoned(temporary)
    assert (outside / "file").exists()
    assert set(temporary.iterdir()) == {outside, temporary / f"{TEMP_DIR_PREFIX}link"}


def nest(folder: Path, depth: int) -> None:
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("n", dir_fd=place)
        below = os.open("n", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)


def test_processes_that_start_at_once_leave_each_other_alone(temporary: Path) -> None:
    processes = [program(HOLDS, "folder.remove()\n", IN_TURN) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    for process in processes:
        process.communicate()
    assert list(temporary.iterdir()) == []


def test_what_another_host_has_made_is_left_alone(temporary: Path) -> None:
    theirs = temporary / "draco-000000-abcdefgh"
    theirs.mkdir()
    remove_abandoned(temporary)
    assert theirs.exists()


def test_where_there_are_no_locks_folders_are_made_and_nothing_is_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    left = temporary / f"{TEMP_DIR_PREFIX}left"
    left.mkdir()
    monkeypatch.setattr(fcntl, "flock", refused)
    with PrivateTempDir() as folder:
        assert folder.is_dir()
    assert list(temporary.iterdir()) == [left]


def test_the_package_makes_temporary_directories_in_no_other_way() -> None:
    package = Path(draco_ray.__file__).parent
    makers = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if re.search("mkdtemp|TemporaryDirectory", file.read_text(encoding="utf-8"))
    }
    # A slot's lies in its template's.
    assert makers == {"temp_dirs.py", "environments/appworld/server_process.py"}
