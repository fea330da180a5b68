"""Judge calls of a run that is killed wherever a reply, a bill or a row is kept: all that was paid is booked, once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.deployment]
CALLS = 4
"""Of an undisturbed run: three tasks, one of them asked twice."""


def test_no_kill_loses_a_paid_reply_and_none_is_paid_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.kill_points", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared, *points = map(json.loads, done.stdout.splitlines())

    assert sorted([*shared["paid"][0], *shared["paid"][1]]) == shared["settled"]
    assert (shared["paid"][2], shared["under_way"]) == ([], 0)

    assert sum(point["killed"] for point in points) > 50
    for point in points:
        booked = math.fsum([*point["settled"], *point["under_way"]])
        assert booked >= math.fsum(point["paid"]) - 1e-9, point
        # Paid again is only what was under way: its reply had not come to be kept.
        assert len(point["paid"]) - CALLS <= len(point["under_way"]), point
        assert math.fsum(point["archived"]) == pytest.approx(math.fsum(point["settled"])), point
