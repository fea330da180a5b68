"""What several test files share: a small generated world, built once by AppWorld's own Python."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from draco_ray.environments.appworld.interpreter import appworld_python
from tests.support import skips

REPOSITORY = Path(__file__).resolve().parents[1]
# A background job of a script is started with SIGINT ignored, and what it starts inherits that; some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)
# For code that is broken on purpose (`make mutate`): that a test fails is enough, and always on the same examples.
settings.register_profile(
    "broken", derandomize=True, database=None, max_examples=30, phases=(Phase.explicit, Phase.generate)
)


def pytest_configure(config: pytest.Config) -> None:
    """Make skips count where CI is set."""
    skips.register(config)


SANDBOX_WORLD = ("--seed", "7", "--scenarios", "2", "--users", "20")


@pytest.fixture(scope="session")
def sandbox_root() -> Path:
    """Data root of a sandbox world: two scenarios a split, seed 7. Kept between runs until its generator changes."""
    root = REPOSITORY / ".cache" / "test-world"
    root.parent.mkdir(exist_ok=True)
    build = ["-m", "draco_ray.sandbox.world", "build", "--out", str(root)]
    with open(root.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [appworld_python(None), *build, *SANDBOX_WORLD],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="session")
def starter_model(sandbox_root: Path) -> Path:
    """A starter policy trained briefly on the small world: it acts, if badly. Kept until its recipe changes."""
    from draco_ray.sandbox.starter import StarterSettings, build_starter

    out = REPOSITORY / ".cache" / "test-starter"
    settings = StarterSettings(variants=6, epochs=6)
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_starter(out, sandbox_root, settings=settings)
