"""The engine on vLLM's second model runner, which GPUs use; the other tests' CPU engines run its first.

Its kernels are Triton's, run by Triton's interpreter (`tests/support/second_runner`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def test_seeds_log_probs_adapters_and_the_prefix_cache(tmp_path: Path) -> None:
    environment = {
        "PYTHONPATH": f"{REPOSITORY / 'tests' / 'support' / 'second_runner'}:{REPOSITORY}",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = [sys.executable, "-m", "tests.support.second_runner_engine", str(tmp_path)]
    done = subprocess.run(
        script, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["second"]
    first, again, other = found["draws"]
    assert first == again != other
    assert found["versions"] == [1, 1, 2, 2]
    assert max(found["gaps"]) < 1e-3
    assert found["read_from_cache"] > 0
    assert "engine-0, adapter version 3" in found["caught"]
