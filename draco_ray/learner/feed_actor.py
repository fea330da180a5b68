"""The Ray shell of `draco_ray.learner.feed.LearnerFeed`."""

from __future__ import annotations

from typing import Any

import ray

from draco_ray.learner.feed import LearnerFeed
from draco_ray.placement import beside_the_driver


def start_learner_feed(workers: int, resume_from: str | None, max_failures: int, run_name: str) -> Any:
    """An actor on this node that hands commands to the learner's workers; it holds references, not samples."""
    return (
        ray.remote(LearnerFeed)
        .options(
            name=f"LearnerFeed@{run_name}",
            num_cpus=0,
            scheduling_strategy=beside_the_driver(),
            max_concurrency=1000,
        )
        .remote(workers, resume_from, max_failures)
    )
