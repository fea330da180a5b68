"""The lock files pin every package to files that are known, and whoever installs from them checks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = sorted((REPOSITORY / "requirements").glob("*.lock"))
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(lock: Path) -> list[str]:
    """A package and its hashes on one line, as pip reads it."""
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_package_is_one_version_with_hashes(lock: Path) -> None:
    read = [entry.split() for entry in entries(lock)]
    assert read
    assert [name for name, *_ in read if not re.fullmatch(r"[A-Za-z0-9._-]+==[^=*]+", name)] == []
    assert [name for name, *hashes in read if not hashes or not all(map(HASH.fullmatch, hashes))] == []
    assert len({name.split("==")[0] for name, *_ in read}) == len(read)


def test_pytorch_may_come_from_pypi_or_from_its_own_index() -> None:
    (torch,) = [entry for entry in entries(REPOSITORY / "requirements" / "cpu.lock") if entry.startswith("torch==")]
    version = torch.split()[0].removeprefix("torch==")
    own = HASH.findall((REPOSITORY / "requirements" / f"torch-{version}-cpu.hashes").read_text(encoding="utf-8"))
    assert own
    assert set(own) < set(HASH.findall(torch))


def test_every_install_from_a_lock_file_checks_the_hashes() -> None:
    text = "\n".join(
        (REPOSITORY / name).read_text(encoding="utf-8")
        for name in ("Makefile", "cluster/Dockerfile", "docs/cluster.md")
    )
    installs = [line for line in text.splitlines() if re.search(r"pip install.* -r ", line)]
    assert len(installs) == len(LOCKS) + 2
    assert [line for line in installs if "--require-hashes" not in line] == []
    assert all("--generate-hashes" in line for line in text.splitlines() if line.startswith("uv pip compile"))
