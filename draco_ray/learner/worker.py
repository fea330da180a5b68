"""One worker of the learner, which keeps its shard of the samples and their old log-probs."""

from __future__ import annotations

from collections.abc import Sequence

from draco_ray.learner.base import UpdateMetrics
from draco_ray.learner.checkpoint import Snapshot
from draco_ray.learner.lora_learner import LoraLearner, trained_length
from draco_ray.learner.packing import balance
from draco_ray.records import Adapter, FloatArray, TrainingSample

SampleKey = tuple[str, int, int]
"""Group, rollout and branch of a sample."""


class PendingSamples:
    """The samples of every shard that wait for a forward pass.

    All workers keep the same record, so that they make the same decisions without communication. Where the base is
    sharded, every pass needs all workers, and a worker without samples wastes its pass. So only as many micro-batches
    are taken as every shard has; the rest waits for later samples.
    """

    def __init__(self, learner: LoraLearner, shard: int, shards: int) -> None:
        """``shard``: index of the shard whose samples `take` returns; ``shards``: number of shards."""
        self._learner, self._shard = learner, shard
        self._samples: list[list[TrainingSample]] = [[] for _ in range(shards)]
        """One list per shard."""

    def __bool__(self) -> bool:
        return any(self._samples)

    def add(self, samples: Sequence[TrainingSample], shards: Sequence[int]) -> None:
        """Add each sample to its shard."""
        for sample, shard in zip(samples, shards, strict=True):
            self._samples[shard].append(sample)

    def take(self, *, everything: bool) -> tuple[list[TrainingSample], int]:
        """Remove the samples to be processed now; ``everything``: all, even if some workers then run empty passes.

        Returns: this shard's samples, and the number of micro-batches of every worker; 0 if the base is not sharded.
        """
        batches = [self._learner.micro_batches(samples) for samples in self._samples]
        count = (max if everything or not self._learner.sharded else min)(map(len, batches))
        taken = []
        for index, samples in enumerate(self._samples):
            later = {position for batch in batches[index][count:] for position in batch}
            taken.append([sample for position, sample in enumerate(samples) if position not in later])
            self._samples[index] = [samples[position] for position in sorted(later)]
        return taken[self._shard], count if self._learner.sharded else 0


class LearnerWorker:
    """One of ``workers`` replicas of the learner. All replicas get the same calls in the same order.

    Every worker sees all samples, and computes the same assignment of samples to shards: each sample goes to the shard
    with the fewest tokens since the last update. Workers that share sequences (`learner.context_parallel`) have the
    same shard.

    The shards wait for each other in `step`, and if the base is sharded, in every pass. In that case a shard's
    micro-batch waits until all shards have one, at the latest until the update.
    """

    def __init__(self, learner: LoraLearner, *, rank: int, workers: int) -> None:
        """``learner``: this worker's replica; ``rank``: of this worker."""
        self._learner = learner
        self._rank = rank
        self._shard, self._shards = rank // learner.context_size, workers // learner.context_size
        """Index of this worker's shard, and the number of shards."""
        self._remembered_by: dict[SampleKey, int] = {}
        """The shard that has a sample's old log-probs."""
        self._old_logprobs: dict[SampleKey, FloatArray] = {}
        """Old log-probs of this shard's samples."""
        self._to_remember, self._on_policy, self._with_old = (
            PendingSamples(learner, self._shard, self._shards) for _ in range(3)
        )
        self._updated = False
        """Whether the weights have changed since the training step began."""
        self._reset_loads()

    def accumulate(self, *groups: Sequence[TrainingSample]) -> None:
        """Add the gradients of whole groups.

        A sample without old log-probs gets the importance ratio 1. That is right only before the first update of a
        training step, while the weights are those at the step's start. The samples of later minibatches need old
        log-probs from `remember_old_logprobs`.

        Raises: ValueError: after an update, a sample has no old log-probs.
        """
        samples = [sample for group in groups for sample in group]
        remembered = [sample for sample in samples if _key(sample) in self._remembered_by]
        fresh = [sample for sample in samples if _key(sample) not in self._remembered_by]
        if fresh and self._updated:
            raise ValueError(
                f"{len(fresh)} samples (first: {_key(fresh[0])}) arrived after an update, but have no old log-probs "
                "computed before it, so their importance ratio is unknown"
            )
        if remembered:
            self._run_remember(everything=True)
        self._on_policy.add(fresh, balance(map(trained_length, fresh), self._loads))
        self._with_old.add(remembered, [self._remembered_by.pop(_key(sample)) for sample in remembered])
        self._run_accumulate()

    def remember_old_logprobs(self, *groups: Sequence[TrainingSample]) -> None:
        """Compute and keep the old log-probs of groups of a later minibatch."""
        samples = [sample for group in groups for sample in group]
        shards = balance(map(trained_length, samples), self._remembered_loads)
        self._remembered_by.update(zip(map(_key, samples), shards, strict=True))
        self._to_remember.add(samples, shards)
        self._run_remember()

    def step(self) -> UpdateMetrics:
        """One optimizer step from the accumulated gradients; `draco_ray.learner.base.over_workers` merges results."""
        self._run_remember(everything=True)
        self._run_accumulate(everything=True)
        self._reset_loads()
        self._updated = True
        metrics = self._learner.step()
        self._learner.release_memory()
        return metrics

    def weights(self, *, version: int) -> Adapter | None:
        """End the training step. Returns: the adapter with which later groups are sampled; None except on rank 0."""
        self._updated = False
        return self._learner.adapter(version) if self._rank == 0 else None

    def snapshot(self) -> Snapshot | None:
        """End the training step. Returns: the content of a checkpoint; None except on rank 0.

        Raises: ValueError in the middle of a training step.
        """
        if self._remembered_by or self._on_policy or self._with_old:
            raise ValueError(
                "a checkpoint was requested in the middle of a training step; finish the step's minibatches first"
            )
        self._updated = False
        return self._learner.snapshot() if self._rank == 0 else None

    def token_logprobs(self, *, token_ids: Sequence[int], adapter: bool) -> FloatArray | None:
        """Each token's log-prob given the tokens before it, 0.0 for the first, with or without the adapter.

        Returns: None on workers that need not take part.
        """
        if self._shard > 0 and not self._learner.sharded:
            return None
        logprobs = self._learner.token_logprobs(token_ids, adapter=adapter)
        self._learner.release_memory()
        return logprobs

    def _run_accumulate(self, *, everything: bool = False) -> None:
        samples, count = self._with_old.take(everything=everything)
        old_logprobs = [self._old_logprobs.pop(_key(sample)) for sample in samples]
        self._learner.accumulate(samples, old_logprobs, num_micro_batches=count)
        samples, count = self._on_policy.take(everything=everything)
        self._learner.accumulate(samples, num_micro_batches=count)

    def _run_remember(self, *, everything: bool = False) -> None:
        samples, count = self._to_remember.take(everything=everything)
        old_logprobs = self._learner.old_logprobs(samples, num_micro_batches=count)
        self._old_logprobs.update(zip(map(_key, samples), old_logprobs, strict=True))

    def _reset_loads(self) -> None:
        self._loads = [0] * self._shards
        self._remembered_loads = [0] * self._shards


def _key(sample: TrainingSample) -> SampleKey:
    return sample.group, sample.rollout, sample.branch
