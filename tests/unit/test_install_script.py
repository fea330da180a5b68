"""Which build of torch `requirements/install.sh` installs, with a stand-in for the environment's Python.

`make install-check` runs the script for real; it downloads several GB.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

STAND_IN = """#!/bin/bash
# Answers for pip and for what is installed; folder/NAME says what there is.
folder=$(cd "$(dirname "$0")" && pwd)
case "$*" in
    *--dry-run*) [ -e "$folder/pip-finds-cpu" ] ;;
    *--target*uv) while [ "$1" != --target ]; do shift; done; mkdir -p "$2/bin"; cp "$folder/uv" "$2/bin/uv" ;;
    *"-m pip install"*)
        echo "pip ${*: -1}" >> "$folder/calls"
        if [[ "$*" == *cpu.lock ]] && [ ! -e "$folder/torch" ]; then
            if [ -e "$folder/pip-finds-cpu" ]; then echo cpu; else echo cuda; fi > "$folder/torch"
        fi ;;
    *" any") [ -e "$folder/torch" ] ;;
    *" cuda") [ "$(cat "$folder/torch")" = cuda ] ;;
esac
"""
UV = """#!/bin/bash
echo "uv $*" >> "{folder}/calls"
[ -e "{folder}/uv-finds-cpu" ] || {{ echo "cause: no route to the index" >&2; exit 1; }}
echo cpu > "{folder}/torch"
"""


def install(folder: Path, *there: str) -> tuple[list[str], str]:
    """Run the script; returns the installs it asked for, and what it said."""
    for name, text in (("python", STAND_IN), ("uv", UV.format(folder=folder))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in there:
        (folder / name).touch()
    (folder / "calls").write_text("")
    script = REPOSITORY / "requirements" / "install.sh"
    done = subprocess.run([script, folder / "python"], capture_output=True, text=True, check=True)
    calls = [Path(line.split()[-1]).name for line in (folder / "calls").read_text().splitlines()]
    return calls, done.stdout


def test_a_cpu_build_that_pip_finds_is_taken(tmp_path: Path) -> None:
    assert install(tmp_path, "pip-finds-cpu") == (["cpu.lock"], "")


def test_else_uv_is_asked_with_the_hashes_of_the_lock(tmp_path: Path) -> None:
    assert install(tmp_path, "uv-finds-cpu") == (["torch.txt", "cpu.lock"], "")
    (uv, _) = (tmp_path / "calls").read_text().splitlines()
    assert "--torch-backend cpu" in uv
    assert "--require-hashes" in uv


def test_else_the_default_build_comes_with_all_it_requires_and_its_size_is_said_first(tmp_path: Path) -> None:
    calls, said = install(tmp_path)
    assert calls == ["torch.txt", "cpu.lock", "torch-default.lock"]
    assert "uv says: cause: no route to the index" in said
    assert "2.7 GB to download" in said


@pytest.mark.parametrize(("build", "calls"), [("cpu", ["cpu.lock"]), ("cuda", ["cpu.lock", "torch-default.lock"])])
def test_a_set_up_that_was_interrupted_is_finished(tmp_path: Path, build: str, calls: list[str]) -> None:
    (tmp_path / "torch").write_text(build + "\n")
    assert install(tmp_path) == (calls, "")
