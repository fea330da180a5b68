"""The Ray actor around `draco_ray.algorithm.computer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from draco_ray.algorithm.computer import AdvantageComputer
from draco_ray.config.schema import AlgorithmConfig
from draco_ray.placement import driver_node_affinity
from draco_ray.records import BoolArray, IntArray, TrainingSample


class AdvantageComputerActor(AdvantageComputer):
    """`AdvantageComputer`, whose samples stay in Ray's object store."""

    from_verdicts: Any = ray.method(num_returns=4)(AdvantageComputer.from_verdicts)
    from_rewards: Any = ray.method(num_returns=4)(AdvantageComputer.from_rewards)

    def probe(self, samples: Sequence[TrainingSample], sampled: int, most: int) -> tuple[list[int], BoolArray] | None:
        """The tokens of a group that the canary compares: the prefix of the sample with the most sampled tokens.

        Args:
            sampled: maximum number of sampled tokens.
            most: maximum number of tokens; the last token of a sample is never included, since an engine generates one
                more.
        Returns: at least 2 token ids, and a mask over all but the first: True where the policy sampled the token, or
            everywhere if it sampled none. None if every sample is too short.
        """
        begun = [_beginning(sample, sampled, most) for sample in samples if len(sample.token_ids_T) > 2]
        if not begun:
            return None
        token_ids_T, sampled_T = max(begun, key=lambda one: (int(one[1].sum()), -len(one[0])))
        compared_T = sampled_T[1:] if sampled_T[1:].any() else np.ones(len(token_ids_T) - 1, dtype=bool)
        return token_ids_T.tolist(), compared_T


def start_advantage_computer(config: AlgorithmConfig, run_name: str) -> Any:
    """Start the advantage actor of a run."""
    remote = ray.remote(AdvantageComputerActor)
    return remote.options(
        name=f"AdvantageComputer@{run_name}",
        num_cpus=0,
        scheduling_strategy=driver_node_affinity(),
        max_concurrency=64,
        # The actor is stateless, so restarts change nothing.
        max_restarts=-1,
        max_task_retries=3,
    ).remote(config)


def _beginning(sample: TrainingSample, sampled: int, most: int) -> tuple[IntArray, BoolArray]:
    """The beginning of a sample with at most ``sampled`` sampled tokens, and the mask of sampled tokens."""
    found = np.flatnonzero(sample.loss_mask_T)[:sampled]
    end = int(found[-1]) + 1 if len(found) else sampled
    end = min(end, most, len(sample.token_ids_T) - 1)
    return sample.token_ids_T[:end], sample.loss_mask_T[:end].astype(bool)
