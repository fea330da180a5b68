"""The starter policies of the examples come about: their agents' own episodes, and a model trained on them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ONCE = """
import sys
from pathlib import Path
import starter
starter.VARIANTS = 1
starter.SETTINGS = starter.SETTINGS.model_copy(update={"epochs": 1})
starter.main(Path(sys.argv[1]))
"""
"""The starter's program with the least of everything."""


def test_the_desk_agents_starter_is_trained_on_its_own_episodes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONCE, str(tmp_path / "policy")],
        cwd=EXAMPLES / "desk_agent",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # At least one sequence of each of its 24 training tasks.
    assert int(done.stdout.split(" sequences")[0].split()[-1]) >= 24
    assert (tmp_path / "policy" / "model.safetensors").is_file()
