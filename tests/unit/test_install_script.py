"""Which build of torch `requirements/install.sh` installs: by pip itself, and with a stand-in for the Python.

`make install-check` runs the script for real; it downloads several GB.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

STAND_IN = """#!/bin/bash
# Answers for pip and for what is installed; folder/NAME says what there is.
folder=$(cd "$(dirname "$0")" && pwd)
case "$*" in
    *torch-cpu.txt)
        [ -e "$folder/pip-finds-cpu" ] && echo "pip ${*: -1}" >> "$folder/calls" && echo cpu > "$folder/torch" ;;
    *--target*uv) while [ "$1" != --target ]; do shift; done; mkdir -p "$2/bin"; cp "$folder/uv" "$2/bin/uv" ;;
    *"-m pip install"*)
        echo "pip ${*: -1}" >> "$folder/calls"
        if [[ "$*" == *cpu.lock ]] && [ ! -e "$folder/torch" ]; then
            echo cuda > "$folder/torch"
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
    assert install(tmp_path, "pip-finds-cpu") == (["torch-cpu.txt", "cpu.lock"], "")


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


@pytest.mark.deployment
def test_pip_itself_takes_the_cpu_build_of_a_folder_before_the_other_one_of_an_index(tmp_path: Path) -> None:
    folder, index = tmp_path / "wheels", tmp_path / "index" / "torch"
    folder.mkdir()
    index.mkdir(parents=True)
    builds = {wheel(folder, "2.0.0+cpu"), wheel(index, "2.0.0")}
    # An index states hashes, a folder does not.
    (name, stated) = next(each for each in builds if "cpu" not in each[0])
    (index / "index.html").write_text(f'<a href="{name}#sha256={stated}">{name}</a>')
    shutil.copy(REPOSITORY / "requirements" / "install.sh", tmp_path)
    lock = " \\\n".join(["torch==2.0.0", *(f"    --hash=sha256:{digest}" for _, digest in builds)])
    (tmp_path / "cpu.lock").write_text(lock + "\n")
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    where = {"PIP_FIND_LINKS": str(folder), "PIP_INDEX_URL": index.parent.as_uri(), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [tmp_path / "install.sh", python], env={**os.environ, **where}, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    version = [python, "-c", "from importlib import metadata; print(metadata.version('torch'))"]
    assert subprocess.check_output(version, text=True).strip() == "2.0.0+cpu"


def wheel(folder: Path, version: str) -> tuple[str, str]:
    """A wheel of an empty torch; returns its name and its SHA-256."""
    name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return name, hashlib.sha256((folder / name).read_bytes()).hexdigest()


@pytest.mark.parametrize(("build", "calls"), [("cpu", ["cpu.lock"]), ("cuda", ["cpu.lock", "torch-default.lock"])])
def test_a_set_up_that_was_interrupted_is_finished(tmp_path: Path, build: str, calls: list[str]) -> None:
    (tmp_path / "torch").write_text(build + "\n")
    assert install(tmp_path) == (calls, "")
