"""One worker's part in the commands of a run: which samples are its own, and which old log-probs belong to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draco_ray.learner.base import (
    Accumulate,
    Command,
    Publish,
    Remember,
    SaveCheckpoint,
    Stop,
    TokenLogprobs,
    Update,
)
from draco_ray.learner.checkpoint import Snapshot
from draco_ray.learner.feed import Shares
from draco_ray.learner.lora_learner import LoraLearner, trained_length
from draco_ray.learner.packing import deal
from draco_ray.records import Adapter, FloatArray, TrainingSample

SampleKey = tuple[str, int, int]
"""A sample's group and rollout."""


class LearnerWorker:
    """Carries out commands on one of `workers` replicas of the learner.

    Every worker sees every command and deals its samples in the same way without asking the others: the next sample
    goes to the worker with the fewest tokens since the last update. Only `Update` makes workers wait for each other;
    where the base is sharded every pass through the model does, so samples may wait until every worker has as many
    micro-batches, at the latest for the update. Workers that share their rows (`learner.context_parallel`) are dealt
    the same samples, as if they were one.
    """

    def __init__(
        self,
        learner: LoraLearner,
        *,
        rank: int,
        workers: int,
        fetch: Callable[[Sequence[Any]], Sequence[Sequence[TrainingSample]]],
        publish: Callable[[Adapter], Any],
        save: Callable[[Snapshot, Path], None] | None = None,
    ) -> None:
        """
        Args:
            learner: this worker's replica.
            rank: of this worker.
            workers: how many there are.
            fetch: resolves references to groups of samples.
            publish: puts the adapter where a reference can reach it, and returns the reference.
            save: writes a checkpoint; None: on this machine.
        """
        self._learner = learner
        self._rank = rank
        self._share, self._shares = rank // learner.sharing, workers // learner.sharing
        """Which part of the samples is this worker's, of how many."""
        self._fetch = fetch
        self._publish = publish
        self._save = save or _write
        self._owner: dict[SampleKey, int] = {}
        """The worker that remembers a sample."""
        self._old_logprobs: dict[SampleKey, FloatArray] = {}
        """Of the samples that this worker remembers."""
        self._to_remember, self._to_accumulate, self._to_accumulate_with_old = (Shares(self._shares) for _ in range(3))
        self._updated = False
        """Whether the weights have changed since the training step began."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        """Writes checkpoints one after the other, beside the commands that follow."""
        self._forget_loads()

    def execute(self, command: Command) -> Any:
        """Carry out one command and return this worker's answer, or a future of it where it comes while others run.

        Raises: ValueError if samples whose old log-probs are needed were not remembered.
        """
        match command:
            case Accumulate(groups=groups):
                return self._accumulate([sample for group in self._fetch(groups) for sample in group])
            case Remember(groups=groups):
                return self._remember([sample for group in self._fetch(groups) for sample in group])
            case Update():
                self._remember_dealt(everything=True)
                self._accumulate_dealt(everything=True)
                self._forget_loads()
                self._updated = True
                metrics = self._learner.step()
                self._learner.release_memory()
                return metrics
            case Publish(version=version):
                self._updated = False
                return self._publish(self._learner.adapter(version)) if self._rank == 0 else None
            case SaveCheckpoint(directory=directory):
                if self._owner or self._to_accumulate or self._to_accumulate_with_old:
                    raise ValueError(f"checkpoint {directory} in the middle of a training step; finish its minibatches")
                self._updated = False
                if self._rank > 0:
                    return None
                return self._writer.submit(self._save, self._learner.snapshot(), Path(directory))
            case TokenLogprobs(token_ids=token_ids, adapter=adapter):
                if self._share > 0 and not self._learner.sharded:
                    return None
                logprobs = self._learner.token_logprobs(token_ids, adapter=adapter)
                self._learner.release_memory()
                return logprobs
            case Stop():
                self._writer.shutdown()
                return None
        raise ValueError(f"unknown learner command {command!r}")

    def _accumulate(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        remembered = [sample for sample in samples if _key(sample) in self._owner]
        fresh = [sample for sample in samples if _key(sample) not in self._owner]
        if fresh and self._updated:
            raise ValueError(
                f"{len(fresh)} samples, first {_key(fresh[0])}, follow an update but were not remembered before it; "
                "their importance ratio is unknown"
            )
        if remembered:
            self._remember_dealt(everything=True)
        self._to_accumulate.add(fresh, self._dealt(fresh, self._load_W))
        owners = [self._owner.pop(_key(sample)) for sample in remembered]
        self._to_accumulate_with_old.add(remembered, owners)
        return self._accumulate_dealt(everything=not self._learner.sharded)

    def _accumulate_dealt(self, *, everything: bool) -> dict[str, float]:
        mine, passes = self._taken(self._to_accumulate_with_old, everything)
        old_logprobs = [self._old_logprobs.pop(_key(sample)) for sample in mine]
        with_old = self._learner.accumulate(mine, old_logprobs, passes=passes)
        mine, passes = self._taken(self._to_accumulate, everything)
        on_policy = self._learner.accumulate(mine, passes=passes)
        return {name: on_policy[name] + with_old[name] for name in on_policy}

    def _remember(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        owners = self._dealt(samples, self._remembered_load_W)
        self._owner.update(zip(map(_key, samples), owners, strict=True))
        self._to_remember.add(samples, owners)
        self._remember_dealt(everything=not self._learner.sharded)
        return {"samples": float(owners.count(self._share)) if self._learner.counts else 0.0}

    def _remember_dealt(self, *, everything: bool) -> None:
        mine, passes = self._taken(self._to_remember, everything)
        self._old_logprobs.update(zip(map(_key, mine), self._learner.old_logprobs(mine, passes=passes), strict=True))

    def _dealt(self, samples: Sequence[TrainingSample], load_W: list[int]) -> list[int]:
        """The worker of each sample; `load_W` is brought up to date."""
        lengths = [trained_length(sample) for sample in samples]
        owners = deal(lengths, load_W)
        for length, owner in zip(lengths, owners, strict=True):
            load_W[owner] += length
        return owners

    def _taken(self, shares: Shares, everything: bool) -> tuple[list[TrainingSample], int]:
        """This worker's samples to work off now, and the passes to make of them, with the others where they matter."""
        mine, passes = shares.take(self._learner.micro_batches, self._share, everything=everything)
        return mine, passes if self._learner.sharded else 0

    def _forget_loads(self) -> None:
        self._load_W = [0] * self._shares
        self._remembered_load_W = [0] * self._shares


def _write(snapshot: Snapshot, directory: Path) -> None:
    snapshot.write(directory)


def _key(sample: TrainingSample) -> SampleKey:
    return sample.group, sample.rollout, sample.branch
