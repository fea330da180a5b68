"""Which GPUs an engine sees: those that Ray gives its actor, or a share of each of several (`engine.colocate`).

Ray gives one actor a share of one GPU or several whole ones, never a share of several. A tensor-parallel engine that
takes turns with the learner therefore reserves a placement group, with a share of one GPU in each bundle, and runs in
the first.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from draco_ray.config.schema import EngineConfig

RESOLUTION = 4
"""Decimals of a resource that Ray tells apart."""


def gpu_share(config: EngineConfig) -> float:
    """Share of each of its GPUs that an engine reserves."""
    return round(config.gpus_per_engine / config.tensor_parallel, RESOLUTION)


def shared_gpus(config: EngineConfig) -> PlacementGroup | None:
    """Reserve a share of each GPU of one engine, all on one node; None where the actor can ask for its GPUs itself."""
    if not config.colocate or config.tensor_parallel == 1:
        return None
    # More than half of a GPU each, so that no two bundles share one.
    bundles = [{"GPU": gpu_share(config)} for _ in range(config.tensor_parallel)]
    bundles[0]["CPU"] = config.cpus_per_engine
    return placement_group(
        [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles], strategy="STRICT_PACK"
    )


def actor_resources(config: EngineConfig, group: PlacementGroup | None) -> dict[str, Any]:
    """Ray's options of an engine's actor."""
    if group is None:
        return {"num_gpus": config.gpus_per_engine, "num_cpus": config.cpus_per_engine}
    return {
        "num_gpus": gpu_share(config),
        "num_cpus": config.cpus_per_engine,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }


async def visible_gpus(config: EngineConfig, group: PlacementGroup) -> list[str]:
    """Ids of the GPUs of a group's bundles, in their order; they may be others once Ray has replaced a node."""
    ask = ray.remote(_gpu_ids)
    others = [
        ask.options(
            num_gpus=gpu_share(config),
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(1, config.tensor_parallel)
    ]
    return [gpu for gpus in (_gpu_ids(), *await asyncio.gather(*others)) for gpu in gpus]


def _gpu_ids() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]
