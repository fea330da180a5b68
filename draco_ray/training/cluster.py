"""Finding or starting Ray, and refusing a cluster that cannot run the configuration."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from draco_ray.config import DracoConfig
from draco_ray.errors import ConfigError

LOCAL_JUDGE_SLOTS = 64
"""``judge`` resource of a Ray started here, where judge workers share one machine anyway."""


def connect(config: DracoConfig) -> dict[str, Any]:
    """Join the cluster of ``ray.address`` or RAY_ADDRESS, or start Ray on this machine.

    Returns: the cluster's resources.
    Raises:
        ConfigError: if the cluster lacks the ``judge`` resource, or GPUs that the configuration asks for.
    """
    # Read by the processes Ray starts as well: no price map is fetched, no model hub is asked.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            # A run has a dozen actors on however few cores; Ray warns of more than four times this number.
            os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "8")
            ray.init(
                num_cpus=max(os.cpu_count() or 1, 2),
                resources={"judge": LOCAL_JUDGE_SLOTS},
                object_store_memory=None if config.ray.object_store_mib is None else config.ray.object_store_mib << 20,
                include_dashboard=config.ray.dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except ConnectionError as error:
        raise ConfigError(f"ray.address {address}: no Ray cluster answers there: {error}") from None
    resources: dict[str, Any] = ray.cluster_resources()
    _check(config, resources)
    return resources


def _check(config: DracoConfig, resources: dict[str, Any]) -> None:
    if resources.get("judge", 0) < config.judge.workers + 1:
        raise ConfigError(
            f"the Ray cluster offers {resources.get('judge', 0):g} of the custom resource 'judge'; judge.workers="
            f"{config.judge.workers} and the union need {config.judge.workers + 1}: start a node with "
            """--resources='{"judge": 16}'"""
        )
    gpus = (
        config.engine.engines * config.engine.gpus_per_engine + config.learner.workers * config.learner.gpus_per_worker
    )
    if gpus > resources.get("GPU", 0):
        raise ConfigError(
            f"engines and learner need {gpus:g} GPUs, the Ray cluster has {resources.get('GPU', 0):g}: lower "
            "engine.engines, engine.gpus_per_engine or learner.gpus_per_worker (0 runs on the CPU)"
        )
