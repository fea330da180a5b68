"""The canary's probe, from a learner in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draco_ray.engine.canary import Probe
from draco_ray.learner.lora_learner import LoraLearner


def probe_of(learner: LoraLearner, token_ids: Sequence[int]) -> Probe:
    """Log-probs of all tokens but the first, with the learner's current weights."""
    on_T, off_T = (learner.token_logprobs(token_ids, adapter=adapter)[1:] for adapter in (True, False))
    return Probe(list(token_ids), np.ones(len(token_ids) - 1, dtype=bool), on_T, off_T)
