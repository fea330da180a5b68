"""A whole Ray node killed with SIGKILL in the middle of a step: the run ends with a line, and goes on on another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import load_job

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def test_a_run_outlives_the_node_it_ran_on(
    sandbox_root: Path, starter_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = load_job("chaos")
    monkeypatch.setattr(chaos, "STEPS", 1)
    monkeypatch.setattr(chaos, "GROUP", 2)
    outcome = chaos.strike(chaos.NODE, tmp_path, sandbox_root, starter_model)
    assert outcome.survived == "resumed"
    assert (outcome.steps, outcome.rollouts, outcome.lost) == (1, chaos.PROMPTS * 2, 0)
    # What had been answered before the node died was not asked again.
    assert outcome.repeated == 0
    assert outcome.last.startswith("draco: ")
