"""A whole Ray node killed with SIGKILL in the middle of a step: the run ends with a line, and goes on on another."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.forking_ray import EVERYTHING
from tests.support.jobs import load_job
from tests.support.standing_ray import joining

pytestmark = [pytest.mark.slow, pytest.mark.deployment, pytest.mark.timeout(900)]


def test_a_run_outlives_the_node_it_ran_on(
    one_ray: str, sandbox_root: Path, starter_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = load_job("chaos")
    monkeypatch.setattr(chaos, "STEPS", 1)
    monkeypatch.setattr(chaos, "GROUP", 2)
    monkeypatch.setattr(chaos, "RAY", ("-m", "tests.support.forking_ray", EVERYTHING))
    # Where it goes on: the node that dies is started by the function itself.
    other = chaos.Head(pid=0, folder=tmp_path, environment={**os.environ, **joining(one_ray)})
    monkeypatch.setattr(chaos, "ray_head", lambda root: nullcontext(other))
    outcome = chaos.strike(chaos.NODE, tmp_path, sandbox_root, starter_model)
    assert outcome.survived == "resumed"
    assert (outcome.steps, outcome.rollouts, outcome.lost) == (1, chaos.PROMPTS * 2, 0)
    # What had been answered before the node died was not asked again.
    assert outcome.repeated == 0
    assert outcome.last.startswith("draco: ")
