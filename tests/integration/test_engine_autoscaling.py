"""The real engine fleet on Ray's real autoscaler: an engine that is lost with its node costs the run nothing but time.

In the place of vLLM is a stand-in; with vLLM itself: `test_engine_joins`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.autoscaling import autoscaling_cluster, run_driver

# Longer than all that is waited for below on a machine that does other things: a test that hangs has a limit still.
pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def test_an_engine_that_goes_with_its_node_is_replaced_on_another(tmp_path: Path) -> None:
    """A head without room for an engine, and up to two nodes with room for one each."""
    with autoscaling_cluster(tmp_path, head={"CPU": 0}, node={"CPU": 1}, most=2) as environment:
        seen = run_driver("tests.support.engine_autoscaling", environment)
    assert seen["up_at_start"] >= 1
    assert (seen["nodes"], seen["processes"], seen["proven"]) == (2, 2, [1.0, 1.0])
    assert (seen["elsewhere"], seen["synced_while_lost"]) == (True, True)
    # The engine that was there first, then the one that came in the place of the lost one, before it served.
    assert seen["canary_asked"] == ["engine-1", "engine-0"]
    assert seen["joined"] == {"new_process": True, "version": 2}
    assert (seen["another_node"], seen["replaced"]) == (1, 1)
    # Nobody's request has failed: those that were under way are under way still, at the other engine.
    assert seen["held_on"] == 2
