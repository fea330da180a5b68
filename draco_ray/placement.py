"""The node for actors that ask for no resource."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def beside_the_driver() -> NodeAffinitySchedulingStrategy:
    """The node of this process: it lives as long as the run, where one that an autoscaler added may go at any time."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
