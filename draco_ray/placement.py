"""Node placement for actors that need no resources."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def driver_node_affinity() -> NodeAffinitySchedulingStrategy:
    """Place an actor on the driver's node, which exists as long as the run; an autoscaler may remove other nodes."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
