"""The seam between the loop and whatever updates the weights (``learner.use``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import ConfigError
from draco_ray.learner.messages import UpdateMetrics
from draco_ray.records import FloatArray
from draco_ray.registry import find

if TYPE_CHECKING:
    import ray

LEARNERS = {"ray_lora": "draco_ray.learner.ray_lora:RayLoraLearner"}
"""Learners that ship, by name."""


class GroupLearner(Protocol):
    """The part of a `Learner` that a step's groups go through."""

    async def accumulate(self, group: Any) -> object:
        """Add the gradients of one group's samples to what waits for `step`."""
        ...

    async def remember_old_logprobs(self, group: Any) -> object:
        """Keep the log-probs of a group of a later minibatch under the weights of the step's start."""
        ...

    async def step(self) -> UpdateMetrics:
        """Make one optimizer update from everything accumulated."""
        ...


class Learner(GroupLearner, Protocol):
    """What the loop over steps asks of a learner.

    A training step, groups in any order and each as soon as its advantages exist::

        await learner.accumulate(group)              # of the first minibatch
        await learner.remember_old_logprobs(group)   # of the later ones, before the first update
        metrics = await learner.step()               # then: accumulate the next minibatch, step, ...
        update = await learner.weights(version)      # a reference, for the engines
        await learner.checkpoint(directory)

    A group is a reference to its `draco_ray.records.TrainingSample` list. Calls may overlap; they count in the order in
    which they were made. Each raises `draco_ray.errors.LearnerError` once training cannot go on.
    """

    async def start(self) -> None:
        """Load the model; from then on the other methods answer."""
        ...

    async def weights(self, version: int) -> ray.ObjectRef[Any]:
        """Return a reference to a `draco_ray.records.WeightUpdate`: the current weights, for the engines.

        It ends the training step: groups accumulated from here on count as sampled with them.
        """
        ...

    async def token_logprobs(self, token_ids: list[int], *, adapter: bool = True) -> FloatArray:
        """Return each token's log-prob given those before it, 0.0 for the first: the learner's side of the canary.

        Without `adapter` those of the frozen base model.
        """
        ...

    async def checkpoint(self, directory: Path) -> None:
        """Write what `start` continues from; ``directory`` appears whole or not at all."""
        ...

    async def stop(self) -> None:
        """End its processes; also after a start that failed or never was."""
        ...


class LearnerFactory(Protocol):
    """What ``learner.use`` names: a class, or a function, that makes a `Learner`."""

    def __call__(
        self, model: ModelConfig, config: LearnerConfig, *, run: Path, seed: int, resume_from: Path | None
    ) -> Learner:
        """Make the learner; nothing is started yet.

        Args:
            model: the frozen base.
            config: hyperparameters; ``config.options`` are for learners that do not ship.
            run: the run directory.
            seed: of initial values.
            resume_from: checkpoint to continue from; None: untrained.
        """
        ...


def find_learner(name: str) -> LearnerFactory:
    """The learner of that name (see `draco_ray.registry.find`).

    Raises:
        ConfigError: there is none, or it is a class that lacks methods of `Learner`.
    """
    factory: LearnerFactory = find("learner.use", name, LEARNERS)
    wanted = [method for method in dir(Learner) if not method.startswith("_")]
    missing = [method for method in wanted if not hasattr(factory, method)] if isinstance(factory, type) else []
    if missing or not callable(factory):
        lacks = f": it lacks {', '.join(missing)}" if missing else ""
        raise ConfigError(
            f"learner.use={name!r} is no learner{lacks}; expected a class with the methods of "
            "draco_ray.learner.base.Learner, or a function that makes one"
        )
    return factory
