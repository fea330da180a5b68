"""Delta nets by flash-linear-attention's own kernels, of the GPU lock's version: Triton's interpreter needs no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests/support/fla_interpreted.py` found, with the files that the GPU lock names."""
    folder = tmp_path_factory.mktemp("fla")
    lock = (REPOSITORY / "requirements" / "gpu.lock").read_text(encoding="utf-8")
    pinned = re.findall(r"^(?:fla-core|flash-linear-attention)==(?:.*\\\n)*.*\n", lock, re.MULTILINE)
    assert len(pinned) == 2
    (folder / "requirements.txt").write_text("".join(pinned))
    arguments = ["--no-deps", "--require-hashes", "--target", str(folder / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *arguments, "-r", str(folder / "requirements.txt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    script = [sys.executable, "-m", "tests.support.fla_interpreted", str(folder / "site"), str(folder / "model")]
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_learner_on_a_gpu_computes_with_them_and_one_on_a_cpu_does_not(computed: dict[str, Any]) -> None:
    assert computed["asked_on_cpu"] == 0
    # The check of packing has two segments of one token, which transformers computes without the chunked rule.
    assert computed["asked"]["rule"] == computed["asked"]["convolution"] - 2 > 0


def test_a_row_of_segments_is_what_transformers_own_code_makes_of_it(computed: dict[str, Any]) -> None:
    """Log-probs and the adapter's gradient, through the states that a shared prompt leaves, in single precision."""
    assert computed["logprobs"] < 3e-4
    assert computed["gradient"] < 1e-3


def test_a_layer_keeps_what_the_plan_says(computed: dict[str, Any]) -> None:
    """And less than half of what transformers' own code keeps; states of segments are not counted."""
    assert computed["planned"] == pytest.approx(computed["kept"], rel=0.05)
    assert computed["kept"] < computed["planned_without"] / 2
