"""Samples dealt to the workers and not worked off yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draco_ray.records import TrainingSample


class Shares:
    """Every worker's waiting samples. All workers keep the same account, and so decide alike without asking each other.

    Where the base is sharded a pass through the model takes all workers, and one that has nothing to do wastes its
    turn. So only as many micro-batches are taken as every worker has; the others wait for samples that come later.
    """

    def __init__(self, workers: int) -> None:
        """
        Args:
            workers: W, how many share the samples.
        """
        self._samples_W: list[list[TrainingSample]] = [[] for _ in range(workers)]

    def __bool__(self) -> bool:
        return any(self._samples_W)

    def add(self, samples: Sequence[TrainingSample], workers: Sequence[int]) -> None:
        """Hand each sample to a worker."""
        for sample, worker in zip(samples, workers, strict=True):
            self._samples_W[worker].append(sample)

    def take(
        self,
        micro_batches: Callable[[Sequence[TrainingSample]], list[list[int]]],
        rank: int,
        *,
        everything: bool,
    ) -> tuple[list[TrainingSample], int]:
        """Take out what is worked off now.

        Args:
            micro_batches: `LoraLearner.micro_batches`.
            rank: whose samples are returned.
            everything: leave none behind.
        Returns: the samples of `rank`, and the most micro-batches that any worker's now make.
        """
        batches_W = [micro_batches(samples) for samples in self._samples_W]
        passes = (max if everything else min)(map(len, batches_W))
        mine: list[TrainingSample] = []
        for worker, batches in enumerate(batches_W):
            samples = self._samples_W[worker]
            later = {row for batch in batches[passes:] for row in batch}
            if worker == rank:
                mine = [sample for row, sample in enumerate(samples) if row not in later]
            self._samples_W[worker] = [samples[row] for row in sorted(later)]
        return mine, passes
