"""The real rollout workers on Ray's real autoscaler: nodes come with the rollouts that wait, and go with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.autoscaling import autoscaling_cluster, run_driver
from tests.support.rollout_autoscaling import ROLLOUTS, SLOTS

# Longer than all that is waited for below on a machine that does other things: a test that hangs has a limit still.
pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def test_slots_and_their_nodes_come_with_the_rollouts_and_go(tmp_path: Path) -> None:
    """A head with room for one worker, and up to two nodes with room for one each."""
    (folder := tmp_path / "rollouts").mkdir()
    with autoscaling_cluster(tmp_path, head={"CPU": 1}, node={"CPU": 1}, most=2) as environment:
        seen = run_driver("tests.support.rollout_autoscaling", environment, str(folder))
    assert (seen["up_at_first"], seen["nodes_at_first"]) == (1, 0)
    assert (seen["most_up"], seen["waiting"], seen["nodes"]) == (SLOTS, ROLLOUTS - SLOTS, 2)
    # A node was lost under a rollout: another has come, and every rollout was played.
    assert seen["another_node"] == 1
    assert seen["rollouts"] == list(range(ROLLOUTS))
    assert seen["most_attempts"] <= 2
    assert (seen["up_at_last"], seen["nodes_at_last"]) == (1, 0)
    assert seen["up_again"] == 1
