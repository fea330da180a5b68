"""What several test files share: a small generated world, built once by AppWorld's own Python."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.environments.jail import confine
from draco_ray.errors import ConfigError
from draco_ray.verifiers.options import VerifiersOptions, verifiers_python
from tests.support import skips

REPOSITORY = Path(__file__).resolve().parents[1]
# A background job of a script is started with SIGINT ignored, and what it starts inherits that; some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)
# As the Makefile has it, for whoever starts pytest alone: LiteLLM fetches its prices at import, three times in vain.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# Ray lowers the priority of its workers to 15: beside tests in other processes a run would starve.
os.environ.setdefault("RAY_worker_niceness", "0")
# Nothing is downloaded: a model of the hub that a test names is looked for in the cache only.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# How long an example takes is the machine's business.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")
# For code that is broken on purpose (`make mutate`): that a test fails is enough, and always on the same examples.
settings.register_profile(
    "broken", derandomize=True, database=None, max_examples=30, phases=(Phase.explicit, Phase.generate)
)


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Files of a test are readable as they usually are, whatever a command that ran in this process has set."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def own_interrupts() -> Iterator[None]:
    """A test that leaves a handler of Ctrl-C behind fails itself, and not a later one that sends one."""
    yield
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """It begins with warnings, whatever level a command that ran in this process has set."""
    caplog.set_level(logging.NOTSET, logger="draco_ray")
    caplog.set_level(logging.WARNING)
    return caplog


def pytest_configure(config: pytest.Config) -> None:
    """Make skips count where CI is set."""
    skips.register(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each file to one process, and the end-to-end tests to two: three runs at a time need too much memory.

    Marks of `xdist_group` would say the same, but say nothing with pytest 9.2 (pytest-xdist #1386).
    """
    from xdist.scheduler import LoadFileScheduling

    class EndToEndInTwo(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return f"end to end {zlib.crc32(file.encode()) % 2}" if file.startswith("tests/e2e/") else file

    return EndToEndInTwo(config, log)


NEEDS_BUBBLEWRAP = [pytest.mark.packages, pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap on PATH")]
LEVELS = [
    pytest.param(level, marks=NEEDS_BUBBLEWRAP if level == "bubblewrap" else ()) for level in confine.ISOLATION_LEVELS
]
"""Levels of isolation, for tests that have one as a parameter."""
SANDBOX_WORLD = {"seed": 7, "limit": 2, "users": 20}
HARD_WORLD = {"seed": 7, "limit": 9, "users": 20, "variety": "hard"}


@pytest.fixture(scope="session")
def sandbox_root() -> Path:
    """Data root of a sandbox world: two scenarios a split, seed 7. Kept between runs until its generator changes."""
    return _world(REPOSITORY / ".cache" / "test-world", SANDBOX_WORLD)


@pytest.fixture(scope="session")
def hard_sandbox_root(sandbox_root: Path) -> Path:
    """The hard variety: as many scenarios a split as training has families."""
    root = REPOSITORY / ".cache" / "test-world-hard"
    return _world(root, HARD_WORLD, seeded_from=sandbox_root)


def _world(root: Path, options: dict[str, Any], seeded_from: Path | None = None) -> Path:
    """Build a world, or leave it as it is; where it replaces a copy of another it keeps that one's API docs."""
    root.parent.mkdir(exist_ok=True)
    told = json.dumps({**options, "out": str(root)})
    with open(root.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if seeded_from is not None and not root.exists():
            shutil.copytree(seeded_from, root)
        done = subprocess.run(
            [appworld_python(None), "-m", "draco_ray.sandbox.world", told],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="session")
def verifiers() -> str:
    """Path of the Python in .venv-verifiers; a test is skipped where there is none."""
    try:
        return verifiers_python(VerifiersOptions())
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def starter_model(sandbox_root: Path) -> Path:
    """A starter policy trained briefly on the small world: it acts, if badly. Kept until its recipe changes."""
    from draco_ray.sandbox.starter import StarterSettings, build_starter

    out = REPOSITORY / ".cache" / "test-starter"
    settings = StarterSettings(variants=6, epochs=6)
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_starter(out, sandbox_root, settings=settings)
