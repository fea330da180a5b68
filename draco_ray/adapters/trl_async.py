"""Step credit for TRL's AsyncGRPOTrainer (TRL 1.16); `draco_ray.adapters.trl` imports this module only if it is needed.

A child process of TRL generates and scores conversations. The trainer gets them as rows: token sequences with one
advantage each. A conversation becomes several rows if its chat template rewrote earlier messages.

So step credit works in two places. The child process stores the judge's verdict for each row (`store_rows`). The
trainer's collator looks the verdict up and spreads the row's advantage over the row's tokens.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

from draco_ray.adapters.credit import CreditJudge, trajectory_key
from draco_ray.adapters.per_token_advantages import sampled_spans
from draco_ray.adapters.verdicts import StepVerdict, TrajectoryKey, digest
from draco_ray.errors import ConfigError


def row_key(group: Any, input_ids: Any) -> TrajectoryKey:
    """The key of a row, made from TRL's number of the group and the row's tokens."""
    return TrajectoryKey("row", str(group), digest(np.asarray(input_ids).tolist()))


def store_rows(credit: CreditJudge, group: Any) -> None:
    """Store a verdict for each training row of a group that was just scored."""
    keys = [trajectory_key(*each) for each in zip(group.prompts, group.completions_ids, strict=True)]
    rows: dict[TrajectoryKey, StepVerdict] = {}
    for verdict, sequences in zip(credit.store.get(keys), group.completions_sequences, strict=True):
        if verdict is None:
            continue
        runs = [[stop - begin for begin, stop in sampled_spans(each.completion_mask)] for each in sequences]
        tokens = tuple(count for row in runs for count in row)
        for n, each in enumerate(sequences):
            rows[row_key(group.group_id, each.input_ids)] = StepVerdict(
                reward=verdict.reward,
                quality=verdict.quality,
                acted=verdict.acted,
                tokens=tokens,
                first=sum(map(len, runs[:n])),
                error=verdict.error,
            )
    credit.store.put(rows)


class StepCreditLoop(async_rollout_worker._AsyncRolloutLoop):
    """TRL's loop of generating and scoring, which also stores the verdicts of training rows."""

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        for credit in self.reward_funcs:
            if isinstance(credit, CreditJudge):
                store_rows(credit, group)
        return samples


def async_trainer(credit: CreditJudge, base: Any) -> type:
    """See `StepCredit.trainer`."""
    missing = [
        name
        for owner, name in (
            (base, "get_train_dataloader"),
            (async_rollout_worker._AsyncRolloutLoop, "_score_group"),
            (async_rollout_worker.AsyncRolloutWorker, "_loop_cls"),
            (async_grpo_trainer.DataCollatorForRollout, "torch_call"),
        )
        if not hasattr(owner, name)
    ]
    if missing:
        raise ConfigError(
            f"trl {version('trl')}: AsyncGRPOTrainer has no {missing[0]}, by which step credit reaches its loss; "
            "expected trl 1.16, or use GRPOTrainer"
        )

    class StepCreditAsyncTrainer(base):
        """Replaces the advantage of each row by per-token advantages."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if isinstance(self.rollout_worker, async_rollout_worker.AsyncRolloutWorker):
                self.rollout_worker._loop_cls = StepCreditLoop

        _spread = False

        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            # accelerate wraps the loader that collates.
            inner = getattr(loader, "base_dataloader", loader)
            inner.collate_fn = self._spread_rows(inner.collate_fn)
            return loader

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            if self.accelerator.is_main_process and not self._spread:
                raise ConfigError(
                    f"trl {version('trl')}: its data loader did not apply step credit, so each row would keep a "
                    "uniform advantage; expected trl 1.16 and accelerate 1.15, or use GRPOTrainer"
                )
            return super().compute_loss(*arguments, **options)

        def _spread_rows(self, collate: Any) -> Any:
            def collate_and_spread(examples: Any) -> Any:
                batch, self._spread = collate(examples), True
                before = credit.store.counts.copy()
                for row, packed in zip(batch["advantages"], examples[0], strict=True):
                    values = [_row_advantages(credit, each) for each in packed.samples]
                    flat = np.concatenate(values)
                    row[: len(flat)] = row.new_tensor(flat)
                for name, count in (credit.store.counts - before).items():
                    self._metrics["train"][f"draco/{name}_total"].append(float(count))
                return batch

            return collate_and_spread

    return StepCreditAsyncTrainer


def _row_advantages(credit: CreditJudge, sample: Any) -> Any:
    """Advantages of a row's trained tokens, in the order in which TRL's packing lists them."""
    mask = np.asarray(sample["completion_mask"])
    key = row_key(sample["group_id"], sample["input_ids"])
    # TRL does not train the first token, because nothing predicts it.
    return credit.store.spread([key], [sample["advantage"]], mask[None])[0][1:][mask[1:] != 0]
