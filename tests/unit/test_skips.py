"""A skip that nobody allowed fails CI's session, in one process and in several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skips import allowed_skips

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason="no GPU here")
def test_with_a_gpu():
    pass

@pytest.fixture
def browser():
    pytest.skip("no browser here")

def test_the_page(browser):
    pass

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""
CONFTEST = """
from pathlib import Path
from tests.support import skips

def pytest_configure(config):
    skips.register(config, Path(__file__).with_name("skips.txt"))
"""


def session(folder: Path, allowed: str, *options: str, ci: str = "true") -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "skips.txt").write_text(allowed)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    # Of the plugins that are installed it needs one, and only for several processes.
    environment |= {"CI": ci, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *options, "."]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["one process", "xdist"])
def test_only_what_is_listed_may_be_skipped(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = session(tmp_path, "# comment\ntest_some.py::test_with_a_gpu  no GPU\n", *options)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "llowed: " in line.lower()]
    assert lines == [
        "NOT ALLOWED: test_some.py::test_the_page: no browser here",
        "allowed: test_some.py::test_with_a_gpu: no GPU here",
    ]


def test_the_reason_counts_too(tmp_path: Path) -> None:
    both = "test_some.py::test_with_a_gpu  no GPU\ntest_some.py  no browser\n"
    assert session(tmp_path, both).returncode == 0
    assert session(tmp_path, both.replace("no GPU", "no driver")).returncode == 1


def test_outside_ci_a_skip_is_the_users_business(tmp_path: Path) -> None:
    assert session(tmp_path, "", ci="").returncode == 0


def test_every_allowed_skip_names_a_test_file_and_a_reason() -> None:
    allowed = allowed_skips()
    assert allowed
    for test, reason in allowed:
        path, _, name = test.partition("::")
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        assert name in text
        assert reason
