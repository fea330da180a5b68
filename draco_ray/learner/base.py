"""The interface of learners (``learner.use``), without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import ConfigError
from draco_ray.records import FloatArray
from draco_ray.registry import find_component

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """One optimizer update, over all workers. Means are over the minibatch's valid tokens."""

    update: int
    """Updates applied so far, including this one unless it was skipped."""
    skipped: str | None
    """Why the update was skipped; None if it was applied."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    samples: int
    valid_tokens: int
    computed_tokens: int
    """Tokens of the forward passes; a prompt that several sequences of a micro-batch share counts once."""
    policy_loss: float
    kl: float
    """k3 estimate against the base model, nats per token; 0 if its coefficient is 0."""
    entropy: float
    """Entropy of the policy, nats per token."""
    clip_fraction: float
    dual_clip_fraction: float
    engine_gap: float
    """Mean |engine's log-prob at sampling - learner's log-prob at the start of the training step|, nats. It is larger
    for rollouts that an older adapter sampled (`train.staleness`)."""
    learning_rate: float
    importance_weight: float = 1.0
    """Mean importance weight of the tokens: p(weights of the step's start) / p(at sampling), at most
    `learner.importance_cap`. The weight is 1 if no cap is set, and 0 for a masked token."""
    truncated_fraction: float = 0.0
    """Share of tokens whose weight was truncated at `learner.importance_cap`."""
    masked_fraction: float = 0.0
    """Share of tokens that `learner.mask_low` and `learner.mask_high` left out of the policy loss."""
    engine_k1: float = 0.0
    """Mean of -log r, with r = p(weights of the step's start) / p(at sampling): an estimate, which may be negative, of
    KL(sampling policy || learner), nats per token."""
    engine_k3: float = 0.0
    """Mean of r - 1 - log r: an estimate of the same KL that is never negative."""
    engine_ratio_p01: float = 1.0
    """1 % quantile of r over tokens, accurate to half a percent between e^-2 and e^2; ``p50`` and ``p99`` likewise."""
    engine_ratio_p50: float = 1.0
    engine_ratio_p99: float = 1.0
    engine_ratio_min: float = 1.0
    """Smallest r of a token, at most 1."""
    engine_ratio_max: float = 1.0
    """Largest r of a token, at least 1."""


def over_workers(results: Sequence[UpdateMetrics]) -> UpdateMetrics:
    """The metrics of one update from those of all workers, which are equal except for the extremes.

    Quantiles are midpoints of histogram bins, so they are clipped to the extremes.
    """
    first = results[0]
    low = min(result.engine_ratio_min for result in results)
    high = max(result.engine_ratio_max for result in results)
    return replace(
        first,
        engine_ratio_p01=min(max(first.engine_ratio_p01, low), high),
        engine_ratio_p50=min(max(first.engine_ratio_p50, low), high),
        engine_ratio_p99=min(max(first.engine_ratio_p99, low), high),
        engine_ratio_min=low,
        engine_ratio_max=high,
    )


LEARNERS = {"ray_lora": "draco_ray.learner.ray_lora:RayLoraLearner"}
"""Built-in learners, by name."""


class GroupLearner(Protocol):
    """The part of a `Learner` that processes a step's groups."""

    async def accumulate(self, group: Any) -> object:
        """Add the gradients of one group's samples to those for the next `step`."""
        ...

    async def remember_old_logprobs(self, group: Any) -> object:
        """Store log-probs of a later minibatch's group, computed with the weights at the step's start."""
        ...

    async def step(self) -> UpdateMetrics:
        """Make one optimizer update from everything accumulated."""
        ...


class Learner(GroupLearner, Protocol):
    """The interface that the training loop needs from a learner.

    A training step, groups in any order and each as soon as its advantages exist::

        await learner.accumulate(group)              # of the first minibatch
        await learner.remember_old_logprobs(group)   # of the later ones, before the first update
        metrics = await learner.step()               # then: accumulate the next minibatch, step, ...
        update = await learner.weights(version)      # a reference, for the engines
        await learner.checkpoint(directory)

    A group is a reference to its `draco_ray.records.TrainingSample` list. Calls may overlap; they take effect in the
    order in which they were made. Each raises `draco_ray.errors.LearnerError` once training cannot go on.
    """

    async def start(self) -> None:
        """Load the model; the other methods can be called afterwards."""
        ...

    async def weights(self, version: int) -> ray.ObjectRef[Any]:
        """Return a reference to a `draco_ray.records.WeightUpdate`: the current weights, for the engines.

        The call ends the training step: groups accumulated later count as sampled with these weights.
        """
        ...

    async def token_logprobs(self, token_ids: list[int], *, adapter: bool = True) -> FloatArray:
        """Return each token's log-prob given the tokens before it, 0.0 for the first; the canary compares them.

        Without `adapter`, the log-probs are the frozen base model's.
        """
        ...

    async def checkpoint(self, directory: Path) -> None:
        """Write a checkpoint that `start` can continue from; ``directory`` appears complete or not at all."""
        ...

    async def stop(self) -> None:
        """End the learner's processes; may be called even if `start` failed or was never called."""
        ...


class LearnerFactory(Protocol):
    """The class or function named by ``learner.use``, which makes a `Learner`."""

    def __call__(
        self, model: ModelConfig, config: LearnerConfig, *, run: Path, seed: int, resume_from: Path | None
    ) -> Learner:
        """Make the learner; nothing is started yet.

        Args:
            model: the frozen base.
            config: hyperparameters; ``config.options`` are for learners that are not built in.
            run: the run directory.
            seed: seed of the initial values.
            resume_from: checkpoint to continue from; None: untrained.
        """
        ...


def find_learner(name: str) -> LearnerFactory:
    """The learner of that name (see `draco_ray.registry.find_component`).

    Raises:
        ConfigError: there is no such learner, or it is a class that lacks methods of `Learner`.
    """
    factory: LearnerFactory = find_component("learner.use", name, LEARNERS)
    wanted = [method for method in dir(Learner) if not method.startswith("_")]
    missing = [method for method in wanted if not hasattr(factory, method)] if isinstance(factory, type) else []
    if missing or not callable(factory):
        lacks = f": methods missing: {', '.join(missing)}" if missing else ""
        raise ConfigError(
            f"learner.use={name!r} is not a learner{lacks}; expected a class with the methods of "
            "draco_ray.learner.base.Learner, or a function that makes one"
        )
    return factory
