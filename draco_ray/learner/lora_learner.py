"""The learner: gradients of training samples into a LoRA adapter, one optimizer update at a time. No Ray in here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import LearnerError
from draco_ray.learner.base import UpdateMetrics
from draco_ray.learner.checkpoint import Snapshot, read_checkpoint
from draco_ray.learner.context import Context
from draco_ray.learner.loss import (
    LOG_RATIO_BOUND,
    SPREAD_BINS,
    correction,
    grpo_loss,
    k3_estimates,
    ratio_quantile,
    spread,
)
from draco_ray.learner.model import AdaptedModel
from draco_ray.learner.packing import Packable, Row, lay_out, pack
from draco_ray.records import Adapter, FloatArray, IntArray, TrainingSample

SUMS = (
    "samples",
    "valid_tokens",
    "computed_tokens",
    "policy_loss",
    "kl",
    "entropy",
    "clipped",
    "dual_clipped",
    "engine_gap",
    "importance",
    "truncated",
    "masked",
    "engine_k1",
    "engine_k3",
)
"""What `accumulate` adds up, over samples or over valid tokens."""


class Batch(NamedTuple):
    """One micro-batch: a row of sequences, V valid tokens of which are on the device, sequence after sequence."""

    row: Row
    tokens_S: list[int]
    """Valid tokens of each sequence."""
    advantage_V: Tensor
    engine_logprob_V: Tensor
    old_logprob_V: Tensor | None
    sample_V: Tensor
    """The sequence that a token is of."""


class LoraLearner:
    """GRPO on a LoRA adapter, as in verl (docs/method.md).

    A training step is: for each minibatch, `accumulate` its samples in any number of calls, then `step`. Samples of a
    later minibatch need their `old_logprobs` taken before the first `step`. Gradients are sums over tokens until `step`
    divides them by the minibatch's valid tokens, so the update depends neither on the calls nor on the micro-batches
    they were cut into, nor on which worker saw which sample.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: LearnerConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        reduce: Callable[[Tensor], object] | None = None,
        mesh: DeviceMesh | None = None,
        context: Context | None = None,
    ) -> None:
        """Load the model and start with an untrained adapter.

        Args:
            model: the frozen base.
            config: hyperparameters.
            seed: of the adapter's initial values; equal on all workers.
            device: where to compute.
            reduce: adds a tensor up over all workers, in place; None when there is one worker.
            mesh: the workers that each keep a part of the base; None: it is whole on each. With a mesh all of them must
                call `accumulate`, `old_logprobs` and `token_logprobs` together, with equal `passes`.
            context: the workers that share every row with this one; None: it has its own. They must call these
                together as well, with the same samples, and the first of them counts.
        Raises: ConfigError if the model cannot be used.
        """
        self.sharded = mesh is not None
        """Whether the base is spread over the workers."""
        self.sharing = context.size if context is not None else 1
        """Workers that share a row."""
        self.counts = context is None or context.is_first
        """Whether this worker's sums are those of its rows; otherwise another one that shares them says them."""
        self._config = config
        self._device = torch.device(device)
        self._reduce = reduce
        self.policy = AdaptedModel(model, config, seed=seed, device=self._device, mesh=mesh, context=context)
        self._parameters = self.policy.parameters
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )
        self.updates = 0
        """Optimizer updates applied since the untrained adapter."""
        self._log_ratio_range = (0.0, 0.0)
        self._forget_sums()

    def micro_batches(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        """Indices of `samples` per forward pass; a sample without a valid token is in none."""
        trained = [index for index, sample in enumerate(samples) if trained_length(sample)]
        sequences = [_packable(samples[index]) for index in trained]
        shapes = [(len(one.token_ids_T), one.prompt, one.family) for one in sequences]
        batches = pack(shapes, self._config.micro_batch_tokens if self.policy.packs else 1)
        return [[trained[index] for index in batch] for batch in batches]

    def accumulate(
        self,
        samples: Sequence[TrainingSample],
        old_logprobs: Sequence[FloatArray] | None = None,
        *,
        passes: int = 0,
    ) -> dict[str, float]:
        """Add the gradient of these samples' summed loss to what waits for the next `step`.

        Args:
            samples: any number of them; one without a valid token adds nothing.
            old_logprobs: what `old_logprobs` returned for them. None: the current policy is the old one and the
                importance ratio is 1, which holds for the first minibatch of a training step.
            passes: micro-batches of the worker that has most; missing ones are made up by passes that add zero.
        Returns: the sums named in `SUMS`, over these samples alone; zeros where another worker counts them.
        Raises: ValueError if a sample's first token is marked valid, or there are not as many old log-probs.
        """
        added = dict.fromkeys(SUMS, 0.0) | {"samples": float(len(samples))}
        batches = self.micro_batches(samples)
        for rows in batches:
            batch = self._collate(samples, rows, old_logprobs)
            with torch.no_grad(), self.policy.adapter_off() if self._config.kl_coefficient > 0 else nullcontext():
                reference_V = self.policy.logprobs(batch.row)[0] if self._config.kl_coefficient > 0 else None
            logprob_V, entropy_V = self.policy.logprobs(batch.row)
            old_V = logprob_V.detach() if batch.old_logprob_V is None else batch.old_logprob_V
            weight_V, truncated, masked = correction(old_V, batch.engine_logprob_V, batch.sample_V, self._config)
            loss = grpo_loss(logprob_V, old_V, reference_V, batch.advantage_V, entropy_V, self._config, weight_V)
            loss.total.backward()
            added["valid_tokens"] += len(old_V)
            added["computed_tokens"] += len(batch.row.token_ids_T)
            added["policy_loss"] += loss.policy.item()
            added["kl"] += loss.kl.item()
            added["entropy"] += entropy_V.detach().sum().item()
            added["clipped"] += loss.clipped.item()
            added["dual_clipped"] += loss.dual_clipped.item()
            added["importance"] += float(len(old_V)) if weight_V is None else weight_V.sum().item()
            added["truncated"] += truncated.item()
            added["masked"] += masked.item()
            self._measure_mismatch(old_V - batch.engine_logprob_V, added)
        for _ in range(len(batches), passes):
            if self._config.kl_coefficient > 0:
                with torch.no_grad():
                    self._empty_pass()
            logprob_V = self._empty_pass()
            logprob_V.backward(torch.zeros_like(logprob_V))
        if not self.counts:
            return dict.fromkeys(SUMS, 0.0)
        for name in SUMS:
            self._sums[name] += added[name]
        return added

    @torch.no_grad()
    def old_logprobs(self, samples: Sequence[TrainingSample], *, passes: int = 0) -> list[FloatArray]:
        """Log-probs of each sample's valid tokens at the current weights, for `accumulate` once these have changed.

        `passes` is as there.
        """
        logprobs: list[FloatArray] = [np.zeros(0, dtype=np.float32) for _ in samples]
        batches = self.micro_batches(samples)
        for rows in batches:
            batch = self._collate(samples, rows, None)
            logprob_V = self.policy.logprobs(batch.row)[0]
            for row, logprob in zip(rows, logprob_V.split(batch.tokens_S), strict=True):
                logprobs[row] = logprob.cpu().numpy()
        for _ in range(len(batches), passes):
            self._empty_pass()
        return logprobs

    def step(self) -> UpdateMetrics:
        """One AdamW update from everything accumulated on all workers since the last one.

        The weights stay as they are, and the metrics say why, when there was no valid token or the gradient norm is not
        finite. Either way what was accumulated is gone.
        """
        flat_sums, spread_B, flat = self._summed_over_workers().split_with_sizes(
            [len(SUMS), SPREAD_BINS, sum(parameter.numel() for parameter in self._parameters)]
        )
        sums = dict(zip(SUMS, flat_sums.tolist(), strict=True))
        tokens = max(sums["valid_tokens"], 1.0)
        gradients = flat.to(torch.float32) / tokens
        norm = float(torch.linalg.vector_norm(gradients))
        skipped = None
        if sums["valid_tokens"] == 0:
            skipped = "no valid tokens"
        elif not np.isfinite(norm):
            skipped = f"gradient norm is {norm}"
        else:
            gradients *= min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            parts = gradients.split([parameter.numel() for parameter in self._parameters])
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        lowest, highest = self._log_ratio_range
        self._forget_sums()
        return UpdateMetrics(
            update=self.updates,
            skipped=skipped,
            grad_norm=norm,
            samples=int(sums["samples"]),
            valid_tokens=int(sums["valid_tokens"]),
            computed_tokens=int(sums["computed_tokens"]),
            policy_loss=sums["policy_loss"] / tokens,
            kl=sums["kl"] / tokens,
            entropy=sums["entropy"] / tokens,
            clip_fraction=sums["clipped"] / tokens,
            dual_clip_fraction=sums["dual_clipped"] / tokens,
            engine_gap=sums["engine_gap"] / tokens,
            learning_rate=self._config.learning_rate,
            importance_weight=sums["importance"] / tokens,
            truncated_fraction=sums["truncated"] / tokens,
            masked_fraction=sums["masked"] / tokens,
            engine_k1=sums["engine_k1"] / tokens,
            engine_k3=sums["engine_k3"] / tokens,
            engine_ratio_p01=ratio_quantile(spread_B, 0.01),
            engine_ratio_p50=ratio_quantile(spread_B, 0.5),
            engine_ratio_p99=ratio_quantile(spread_B, 0.99),
            engine_ratio_min=math.exp(lowest),
            engine_ratio_max=math.exp(highest),
        )

    def release_memory(self) -> None:
        """Give back, where the GPU is shared, what PyTorch keeps for the next pass, for an engine to wake up into."""
        if 0 < self._config.gpus_per_worker < 1:
            torch.cuda.empty_cache()

    def adapter(self, version: int) -> Adapter:
        """The current adapter, on its way to the engines."""
        return self.policy.adapter(version)

    @torch.no_grad()
    def token_logprobs(self, token_ids_T: IntArray | Sequence[int], *, adapter: bool = True) -> FloatArray:
        """Log-prob of every token given those before it, 0.0 for the first; without `adapter`, of the base model."""
        row = _whole(np.asarray(token_ids_T, dtype=np.int64))
        with nullcontext() if adapter else self.policy.adapter_off():
            logprob_V = self.policy.logprobs(row)[0]
        return np.concatenate([np.zeros(1, dtype=np.float32), logprob_V.cpu().numpy()])

    def snapshot(self) -> Snapshot:
        """What a checkpoint holds, copied: the adapter as PEFT loads it, the optimizer, the counters.

        There is no random state to keep: nothing here draws random numbers after the adapter is initialised.

        Raises: LearnerError in the middle of a minibatch: gradients that wait for `step` are not kept.
        """
        if self._sums["samples"]:
            raise LearnerError(
                f"checkpoint: {self._sums['samples']:.0f} samples are accumulated, not stepped; step first"
            )
        return Snapshot(
            adapter=self.policy.saved_tensors(),
            adapter_config=self.adapter(self.updates).config,
            optimizer=self._optimizer_tensors(),
            updates=self.updates,
        )

    def save(self, directory: Path) -> None:
        """Write a complete checkpoint.

        Raises:
            LearnerError: as of `snapshot`.
            OSError: it cannot be written.
        """
        self.snapshot().write(directory)

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint written by `save`, exactly; rates and the like are the configuration's.

        Raises: LearnerError if it is damaged, or belongs to another model or rank.
        """
        tensors, moments, updates = read_checkpoint(directory)
        self.policy.load_adapter(tensors, str(directory))
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self._optimizer.zero_grad(set_to_none=True)
        self._forget_sums()
        self.updates = updates

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """Copies of AdamW's moments and step counts, as ``<parameter's index>.<name>``; nothing before an update."""
        state = self._optimizer.state_dict()["state"]
        return {
            f"{index}.{name}": value.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for index, mine in state.items()
            for name, value in mine.items()
        }

    def _summed_over_workers(self) -> Tensor:
        """The sums, the spread of ratios, then all gradients, as one vector: one collective an update."""
        gradients = [
            torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
            for parameter in self._parameters
        ]
        sums = torch.tensor([self._sums[name] for name in SUMS], dtype=torch.float32, device=self._device)
        flat = torch.cat([sums, self._spread_B, *gradients])
        if self._reduce is not None:
            self._reduce(flat)
        return flat

    def _measure_mismatch(self, log_ratio_V: Tensor, added: dict[str, float]) -> None:
        """Count what engine and learner differ by, `log_ratio_V`, on tokens that are accumulated."""
        added["engine_gap"] += log_ratio_V.abs().sum().item()
        added["engine_k1"] -= log_ratio_V.sum().item()
        added["engine_k3"] += k3_estimates(log_ratio_V).sum().item()
        if self.counts:
            self._spread_B += spread(log_ratio_V)
        bounded_V = log_ratio_V.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        lowest, highest = self._log_ratio_range
        self._log_ratio_range = (min(lowest, bounded_V.min().item()), max(highest, bounded_V.max().item()))

    def _forget_sums(self) -> None:
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._spread_B = torch.zeros(SPREAD_BINS, device=self._device)
        self._log_ratio_range = (0.0, 0.0)

    def _empty_pass(self) -> Tensor:
        """A forward pass over two tokens that count for nothing: other workers need this one's part of the base."""
        return self.policy.logprobs(_whole(np.zeros(2, dtype=np.int64)))[0]

    def _collate(
        self, samples: Sequence[TrainingSample], rows: Sequence[int], old_logprobs: Sequence[FloatArray] | None
    ) -> Batch:
        if old_logprobs is not None and len(old_logprobs) != len(samples):
            raise ValueError(f"{len(samples)} samples with old log-probs for {len(old_logprobs)}")
        masks = [samples[row].loss_mask_T for row in rows]
        tokens_S = [int(mask.sum()) for mask in masks]

        def of_valid_tokens(arrays: Sequence[FloatArray]) -> Tensor:
            valid = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
            return torch.from_numpy(np.concatenate(valid).astype(np.float32)).to(self._device)

        old_V = None
        if old_logprobs is not None:
            old_V = torch.from_numpy(np.concatenate([old_logprobs[row] for row in rows])).to(self._device)
            if len(old_V) != sum(tokens_S):
                raise ValueError("old log-probs are not one per valid token of their sample")
        return Batch(
            row=lay_out([_packable(samples[row]) for row in rows]),
            tokens_S=tokens_S,
            advantage_V=of_valid_tokens([samples[row].advantage_T for row in rows]),
            engine_logprob_V=of_valid_tokens([samples[row].logprob_T for row in rows]),
            old_logprob_V=old_V,
            sample_V=torch.from_numpy(np.repeat(np.arange(len(rows)), tokens_S)).to(self._device),
        )


def _packable(sample: TrainingSample) -> Packable:
    """A sample up to its last valid token."""
    kept = trained_length(sample)
    prompt = min(sample.prompt_length, int(np.argmax(sample.loss_mask_T)))
    return Packable(sample.token_ids_T[:kept], sample.loss_mask_T[:kept], prompt)


def _whole(token_ids_T: IntArray) -> Row:
    """A row of one sequence, every token of which but the first is wanted."""
    return lay_out([Packable(token_ids_T, np.arange(len(token_ids_T)) > 0, 0)])


def trained_length(sample: TrainingSample) -> int:
    """Tokens of a sample that the forward pass needs: all up to the last valid one; 0 if none is valid.

    Raises: ValueError if its first token is marked valid.
    """
    valid = np.flatnonzero(sample.loss_mask_T)
    if not len(valid):
        return 0
    if valid[0] == 0:
        raise ValueError(f"sample {sample.group}/{sample.rollout}: its first token is valid, nothing predicts it")
    return int(valid[-1]) + 1
