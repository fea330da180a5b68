"""The real judge pool on Ray's real autoscaler: nodes come with the calls that wait, and go when nothing waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import judge_autoscaling
from tests.support.autoscaling import autoscaling_cluster, run_driver

# Longer than all that is waited for below on a machine that does other things: a test that hangs has a limit still.
pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def test_judge_nodes_come_with_the_calls_and_go(tmp_path: Path) -> None:
    """A head with one judge slot, and up to two nodes with two slots each."""
    with autoscaling_cluster(tmp_path, head={"CPU": 2, "judge": 1}, node={"CPU": 0, "judge": 2}, most=2) as environment:
        seen = run_driver("tests.support.judge_autoscaling", environment, str(tmp_path))
    # The head's only slot is the worker's; the union's waits for a node and holds nobody up.
    assert (seen["judge_slots_at_first"], seen["up_at_first"]) == (1, 1)
    assert seen["merged"] == "union"
    assert (seen["calls_beside_a_value"], seen["calls_archived"], seen["same_value"]) == (0, 1, True)
    assert (seen["most_up"], seen["nodes_added"]) == (judge_autoscaling.MOST, 2)
    assert seen["nodes_that_judged"] == 3
    assert seen["errors"] == []
    # Moving calls to the workers that came asked nothing twice.
    assert seen["requests"] == seen["calls"] >= judge_autoscaling.ASKERS
    # A worker that neither answers nor dies: the two calls it held were answered by others.
    assert (seen["held_by_the_silent"], seen["answered_elsewhere"]) == (2, 2 * judge_autoscaling.MOST)
    # It was ended and started anew: it might have held what the others wait for.
    assert (seen["in_a_new_process"], seen["up_again"]) == (True, judge_autoscaling.MOST)
    # One node stays for the union.
    assert (seen["up_at_last"], seen["nodes_at_last"]) == (1, 1)
