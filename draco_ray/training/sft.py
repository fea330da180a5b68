"""Supervised fine-tuning as a warm start: the learner of training, with an advantage of 1 on every token.

At a ratio of 1 the gradient of the policy loss then equals that of the mean cross-entropy of the sampled tokens, so no
other loss is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.model_directory import load_tokenizer
from draco_ray.errors import ConfigError
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import TrainingSample

OnUpdate = Callable[[int, int, float], None]
"""Called after every update with (updates done, total updates, cross-entropy before the update in nats per token)."""


def fine_tune(
    config: DracoConfig, samples: Sequence[TrainingSample], out: Path, *, epochs: int, on_update: OnUpdate
) -> float:
    """Fit an adapter on ``model.path`` to the samples and write the model with it merged in.

    Args:
        config: ``model``, ``learner`` (rank, rate, ``minibatch_prompts`` demonstrations per update) and ``seed``.
        samples: to imitate.
        out: a folder that does not exist yet, for model and tokenizer.
        epochs: number of passes over the samples.
        on_update: called after every update.
    Returns: the mean loss of the last epoch, nats per token, measured before each update.
    Raises: ConfigError when the model cannot be used.
    """
    plain = dict.fromkeys(("kl_coefficient", "entropy_coefficient"), 0.0)
    uncorrected = dict.fromkeys(("importance_cap", "mask_low", "mask_high"))
    device = "cuda" if torch.cuda.is_available() and config.learner.gpus_per_worker > 0 else "cpu"
    rate = {"learning_rate": config.learner.sft_learning_rate or config.learner.learning_rate}
    settings = config.learner.model_copy(update=plain | uncorrected | rate)
    learner = LoraLearner(config.model, settings, seed=config.seed, device=device)
    order = np.random.default_rng(config.seed)
    size = settings.minibatch_prompts
    total = epochs * -(-len(samples) // size)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        shuffled = [samples[index] for index in order.permutation(len(samples))]
        for first in range(0, len(shuffled), size):
            batch = shuffled[first : first + size]
            learner.accumulate(batch)
            metrics = learner.step()
            if metrics.skipped is not None:
                raise ConfigError(f"sft: update {metrics.update + 1} failed: {metrics.skipped}")
            # The gap to the samples' log-probs, which are 0, is the cross-entropy.
            losses.append(metrics.engine_gap)
            on_update(metrics.update, total, losses[-1])
    merged = learner.policy.peft.merge_and_unload()
    merged.save_pretrained(out)
    load_tokenizer(config.model.path, config.model.chat_template).save_pretrained(out)
    return float(np.mean(losses))
