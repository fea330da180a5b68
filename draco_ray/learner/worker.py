"""One worker's part in the commands of a run: which samples are its own, and which old log-probs belong to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draco_ray.learner.learner import Learner, trained_length
from draco_ray.learner.messages import (
    Accumulate,
    Command,
    Publish,
    Remember,
    SaveCheckpoint,
    Stop,
    TokenLogprobs,
    Update,
)
from draco_ray.learner.packing import deal
from draco_ray.records import Adapter, FloatArray, TrainingSample

SampleKey = tuple[str, int]
"""A sample's group and rollout."""


class LearnerWorker:
    """Carries out commands on one of `workers` replicas of the learner.

    Every worker sees every command and deals its samples in the same way without asking the others: the next sample
    goes to the worker with the fewest tokens since the last update. Only `Update` makes workers wait for each other;
    where the base is sharded every pass through the model does, so all run as many as the one with most.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        rank: int,
        workers: int,
        fetch: Callable[[Sequence[Any]], Sequence[Sequence[TrainingSample]]],
        publish: Callable[[Adapter], Any],
    ) -> None:
        """
        Args:
            learner: this worker's replica.
            rank: of this worker.
            workers: how many there are.
            fetch: resolves references to groups of samples.
            publish: puts the adapter where a reference can reach it, and returns the reference.
        """
        self._learner = learner
        self._rank = rank
        self._workers = workers
        self._fetch = fetch
        self._publish = publish
        self._remembered: dict[SampleKey, tuple[int, FloatArray | None]] = {}
        """The worker that has a sample, and its old log-probs if that is this one."""
        self._updated = False
        """Whether the weights have changed since the training step began."""
        self._forget_loads()

    def execute(self, command: Command) -> Any:
        """Carry out one command and return this worker's answer.

        Raises: ValueError if samples whose old log-probs are needed were not remembered.
        """
        match command:
            case Accumulate(groups=groups):
                return self._accumulate([sample for group in self._fetch(groups) for sample in group])
            case Remember(groups=groups):
                return self._remember([sample for group in self._fetch(groups) for sample in group])
            case Update():
                self._forget_loads()
                self._updated = True
                return self._learner.step()
            case Publish(version=version):
                self._updated = False
                return self._publish(self._learner.adapter(version)) if self._rank == 0 else None
            case SaveCheckpoint(directory=directory):
                if self._remembered:
                    raise ValueError(f"checkpoint {directory} in the middle of a training step; finish its minibatches")
                self._updated = False
                return self._learner.save(Path(directory)) if self._rank == 0 else None
            case TokenLogprobs(token_ids=token_ids, adapter=adapter):
                if self._rank > 0 and not self._learner.sharded:
                    return None
                return self._learner.token_logprobs(token_ids, adapter=adapter)
            case Stop():
                return None
        raise ValueError(f"unknown learner command {command!r}")

    def _accumulate(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        remembered = [sample for sample in samples if _key(sample) in self._remembered]
        fresh = [sample for sample in samples if _key(sample) not in self._remembered]
        if fresh and self._updated:
            raise ValueError(
                f"{len(fresh)} samples, first {_key(fresh[0])}, follow an update but were not remembered before it; "
                "their importance ratio is unknown"
            )
        old: list[list[TrainingSample]] = [[] for _ in range(self._workers)]
        old_logprobs = []
        for sample in remembered:
            owner, logprobs = self._remembered.pop(_key(sample))
            old[owner].append(sample)
            if logprobs is not None:
                old_logprobs.append(logprobs)
        new = self._dealt(fresh, self._load_W)
        with_old = self._learner.accumulate(old[self._rank], old_logprobs, passes=self._passes(old))
        on_policy = self._learner.accumulate(new[self._rank], passes=self._passes(new))
        return {name: on_policy[name] + with_old[name] for name in on_policy}

    def _remember(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        shares = self._dealt(samples, self._remembered_load_W)
        mine = self._learner.old_logprobs(shares[self._rank], passes=self._passes(shares))
        for owner, share in enumerate(shares):
            self._remembered.update((_key(sample), (owner, None)) for sample in share)
        for sample, logprobs in zip(shares[self._rank], mine, strict=True):
            self._remembered[_key(sample)] = (self._rank, logprobs)
        return {"samples": float(len(mine))}

    def _dealt(self, samples: Sequence[TrainingSample], load_W: list[int]) -> list[list[TrainingSample]]:
        """Every worker's share; `load_W` is brought up to date."""
        lengths = [trained_length(sample) for sample in samples]
        shares: list[list[TrainingSample]] = [[] for _ in range(self._workers)]
        for sample, length, owner in zip(samples, lengths, deal(lengths, load_W), strict=True):
            shares[owner].append(sample)
            load_W[owner] += length
        return shares

    def _passes(self, shares: Sequence[Sequence[TrainingSample]]) -> int:
        """Passes through the model that this worker takes part in for the sake of the others."""
        return max(map(self._learner.passes, shares)) if self._learner.sharded else 0

    def _forget_loads(self) -> None:
        self._load_W = [0] * self._workers
        self._remembered_load_W = [0] * self._workers


def _key(sample: TrainingSample) -> SampleKey:
    return sample.group, sample.rollout
