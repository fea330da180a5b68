"""The learner: trains a LoRA adapter on samples, one optimizer update at a time. Independent of Ray."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.errors import LearnerError
from draco_ray.learner.base import UpdateMetrics
from draco_ray.learner.checkpoint import Snapshot
from draco_ray.learner.context_parallel import ContextParallelGroup
from draco_ray.learner.loss import (
    HISTOGRAM_BINS,
    LOG_RATIO_BOUND,
    grpo_loss,
    importance_weights,
    k3_estimates,
    log_ratio_histogram,
    ratio_quantile,
)
from draco_ray.learner.model import AdaptedModel
from draco_ray.learner.packing import InputSequence, MicroBatch, common_prefix, concatenate, pack
from draco_ray.records import Adapter, FloatArray, IntArray, TrainingSample

SUMS = (
    "samples",
    "valid_tokens",
    "computed_tokens",
    "policy_loss",
    "kl",
    "entropy",
    "clip_fraction",
    "dual_clip_fraction",
    "engine_gap",
    "importance_weight",
    "truncated_fraction",
    "masked_fraction",
    "engine_k1",
    "engine_k3",
)
"""Names of the sums of `accumulate`: three counts, and sums over valid tokens of metrics whose means are reported."""


class LossInputs(NamedTuple):
    """A micro-batch and the inputs of its loss, on the device, for V valid tokens in the order of the sequences."""

    micro_batch: MicroBatch
    tokens_S: list[int]
    """Number of valid tokens of each sequence."""
    advantage_V: Tensor
    engine_logprob_V: Tensor
    old_logprob_V: Tensor | None
    sample_V: Tensor
    """Index of the sequence that a token belongs to."""


class LoraLearner:
    """GRPO on a LoRA adapter, as in verl (docs/method.md).

    A training step is: for each minibatch, `accumulate` its samples in any number of calls, then `step`. The
    `old_logprobs` of later minibatches are computed before the first `step`. Gradients are sums over tokens until
    `step` divides them by the minibatch's valid tokens, so the update does not depend on how the samples are split into
    calls, micro-batches and shards.
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
        context: ContextParallelGroup | None = None,
    ) -> None:
        """Load the model and start with an untrained adapter.

        Args:
            model: the frozen base.
            config: hyperparameters.
            seed: seed of the adapter's initial values; equal on all workers.
            device: where to compute.
            reduce: sums a tensor over all workers, in place; None for one worker.
            mesh: the workers that the base is sharded over; None: each worker has the whole base. With a mesh all
                workers must call `accumulate`, `old_logprobs` and `token_logprobs` together, with the same
                ``num_micro_batches``.
            context: the workers that share every micro-batch with this one; None: no others. They must also make these
                calls together, with the same samples; only the first of them adds to the sums.
        Raises: ConfigError if the model cannot be used.
        """
        self.sharded = mesh is not None
        """Whether the base is sharded over the workers."""
        self.context_size = context.size if context is not None else 1
        """Number of workers that share a micro-batch."""
        self._counts = context is None or context.rank == 0
        """Whether this worker adds to the sums; of workers that share micro-batches only the first does."""
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
        self._reset_sums()

    def micro_batches(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        """Indices of ``samples`` in each micro-batch; samples without a valid token are left out."""
        trained = [index for index, sample in enumerate(samples) if trained_length(sample)]
        sequences = [_sequence(samples[index]) for index in trained]
        # With a sharded base, samples are packed again without postponed ones: a longer prefix would change batches.
        common = 0 if self.sharded or not self.policy.packs else common_prefix(sequences)
        shapes = [(len(each.token_ids_T) - common, each.prompt_length - common, each.prompt_key) for each in sequences]
        batches = pack(shapes, self._config.micro_batch_tokens - common if self.policy.packs else 1)
        return [[trained[index] for index in batch] for batch in batches]

    def accumulate(
        self,
        samples: Sequence[TrainingSample],
        old_logprobs: Sequence[FloatArray] | None = None,
        *,
        num_micro_batches: int = 0,
    ) -> dict[str, float]:
        """Add the gradient of these samples' summed loss to the gradients for the next `step`.

        Args:
            samples: any number of samples; one without a valid token adds nothing.
            old_logprobs: the result of `old_logprobs` for the samples. None: the current policy is the old one and the
                importance ratio is 1, which holds for the first minibatch of a training step.
            num_micro_batches: number of micro-batches to run; missing ones are empty and add zero.
        Returns: the sums named in `SUMS`, over these samples alone; zeros if another worker counts them.
        Raises: ValueError if a sample's first token is marked valid, or there are not as many old log-probs.
        """
        added = dict.fromkeys(SUMS, 0.0) | {"samples": float(len(samples))}
        batches = self.micro_batches(samples)
        for indices in batches:
            batch = self._collate(samples, indices, old_logprobs)
            with torch.no_grad(), self.policy.adapter_off() if self._config.kl_coefficient > 0 else nullcontext():
                reference_V = self.policy.logprobs(batch.micro_batch)[0] if self._config.kl_coefficient > 0 else None
            logprob_V, entropy_V = self.policy.logprobs(batch.micro_batch)
            old_V = logprob_V.detach() if batch.old_logprob_V is None else batch.old_logprob_V
            weight_V, truncated, masked = importance_weights(
                old_V, batch.engine_logprob_V, batch.sample_V, self._config
            )
            loss = grpo_loss(logprob_V, old_V, reference_V, batch.advantage_V, entropy_V, self._config, weight_V)
            loss.total.backward()
            added["valid_tokens"] += len(old_V)
            added["computed_tokens"] += len(batch.micro_batch.token_ids_T)
            added["policy_loss"] += loss.policy.item()
            added["kl"] += loss.kl.item()
            added["entropy"] += entropy_V.detach().sum().item()
            added["clip_fraction"] += loss.clipped.item()
            added["dual_clip_fraction"] += loss.dual_clipped.item()
            added["importance_weight"] += float(len(old_V)) if weight_V is None else weight_V.sum().item()
            added["truncated_fraction"] += truncated.item()
            added["masked_fraction"] += masked.item()
            self._count_mismatch(old_V - batch.engine_logprob_V, added)
        for _ in range(len(batches), num_micro_batches):
            if self._config.kl_coefficient > 0:
                with torch.no_grad():
                    self._empty_micro_batch()
            logprob_V = self._empty_micro_batch()
            logprob_V.backward(torch.zeros_like(logprob_V))
        if not self._counts:
            return dict.fromkeys(SUMS, 0.0)
        for name in SUMS:
            self._sums[name] += added[name]
        return added

    @torch.no_grad()
    def old_logprobs(self, samples: Sequence[TrainingSample], *, num_micro_batches: int = 0) -> list[FloatArray]:
        """Log-probs of each sample's valid tokens at the current weights, for `accumulate` after an update.

        ``num_micro_batches``: see `accumulate`.
        """
        logprobs: list[FloatArray] = [np.zeros(0, dtype=np.float32) for _ in samples]
        batches = self.micro_batches(samples)
        for indices in batches:
            batch = self._collate(samples, indices, None)
            logprob_V = self.policy.logprobs(batch.micro_batch)[0]
            for index, logprob in zip(indices, logprob_V.split(batch.tokens_S), strict=True):
                logprobs[index] = logprob.cpu().numpy()
        for _ in range(len(batches), num_micro_batches):
            self._empty_micro_batch()
        return logprobs

    def step(self) -> UpdateMetrics:
        """One AdamW update from everything accumulated on all workers since the last one.

        The update is skipped, with the reason in the metrics, if there was no valid token or the gradient norm is not
        finite. The accumulated gradients are cleared in any case.
        """
        flat_sums, histogram_B, flat = self._summed_over_workers().split_with_sizes(
            [len(SUMS), HISTOGRAM_BINS, sum(parameter.numel() for parameter in self._parameters)]
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
        self._reset_sums()
        return UpdateMetrics(
            update=self.updates,
            skipped=skipped,
            grad_norm=norm,
            samples=int(sums["samples"]),
            valid_tokens=int(sums["valid_tokens"]),
            computed_tokens=int(sums["computed_tokens"]),
            learning_rate=self._config.learning_rate,
            **{name: sums[name] / tokens for name in SUMS[3:]},
            engine_ratio_p01=ratio_quantile(histogram_B, 0.01),
            engine_ratio_p50=ratio_quantile(histogram_B, 0.5),
            engine_ratio_p99=ratio_quantile(histogram_B, 0.99),
            engine_ratio_min=math.exp(lowest),
            engine_ratio_max=math.exp(highest),
        )

    def release_memory(self) -> None:
        """Free PyTorch's cached GPU memory where an engine shares the GPU."""
        if 0 < self._config.gpus_per_worker < 1:
            torch.cuda.empty_cache()

    def adapter(self, version: int) -> Adapter:
        """The current adapter, for the engines."""
        return self.policy.adapter(version)

    @torch.no_grad()
    def token_logprobs(self, token_ids_T: IntArray | Sequence[int], *, adapter: bool = True) -> FloatArray:
        """Each token's log-prob given the tokens before it, 0.0 for the first; without `adapter`, the base model's."""
        batch = _one_sequence(np.asarray(token_ids_T, dtype=np.int64))
        with nullcontext() if adapter else self.policy.adapter_off():
            logprob_V = self.policy.logprobs(batch)[0]
        return np.concatenate([np.zeros(1, dtype=np.float32), logprob_V.cpu().numpy()])

    def snapshot(self) -> Snapshot:
        """A copy of adapter, optimizer and counters.

        No random state is saved: no random numbers are drawn after the adapter is initialised.

        Raises: LearnerError in the middle of a minibatch, whose gradients a checkpoint does not contain.
        """
        if self._sums["samples"]:
            raise LearnerError(
                f"checkpoint: the gradients of {self._sums['samples']:.0f} samples are accumulated but not applied; "
                "run the optimizer step first"
            )
        return Snapshot(
            adapter=self.policy.saved_arrays(),
            adapter_config=self.adapter(self.updates).config,
            optimizer=self._optimizer_arrays(),
            updates=self.updates,
        )

    def save(self, directory: Path) -> None:
        """Write a complete checkpoint.

        Raises:
            LearnerError: see `snapshot`.
            OSError: the checkpoint cannot be written.
        """
        self.snapshot().write(directory)

    def load(self, directory: Path) -> None:
        """Load a checkpoint written by `save`.

        Raises: LearnerError if it is damaged, or belongs to another model or LoRA rank.
        """
        self.restore(Snapshot.read(directory), str(directory))

    def restore(self, snapshot: Snapshot, source: str) -> None:
        """Continue from a snapshot; hyperparameters are those of the configuration.

        Args:
            snapshot: a snapshot of this model and LoRA rank.
            source: its path, for messages.
        Raises: LearnerError if it belongs to another model or LoRA rank.
        """
        self.policy.load_adapter(_tensors(snapshot.adapter), source)
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in _tensors(snapshot.optimizer).items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self._optimizer.zero_grad(set_to_none=True)
        self._reset_sums()
        self.updates = snapshot.updates

    def _optimizer_arrays(self) -> dict[str, FloatArray]:
        """Copies of AdamW's moments and step counts, as ``<parameter's index>.<name>``; empty before an update."""
        state = self._optimizer.state_dict()["state"]
        return {
            f"{index}.{name}": value.to("cpu", copy=True, memory_format=torch.contiguous_format).numpy()
            for index, mine in state.items()
            for name, value in mine.items()
        }

    def _summed_over_workers(self) -> Tensor:
        """Sums, histogram and gradients as one vector, so that an update needs one collective."""
        gradients = [
            torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
            for parameter in self._parameters
        ]
        sums = torch.tensor([self._sums[name] for name in SUMS], dtype=torch.float32, device=self._device)
        flat = torch.cat([sums, self._histogram_B, *gradients])
        if self._reduce is not None:
            self._reduce(flat)
        return flat

    def _count_mismatch(self, log_ratio_V: Tensor, added: dict[str, float]) -> None:
        """Add the statistics of ``log_ratio_V``, the log-prob differences between learner and engine."""
        added["engine_gap"] += log_ratio_V.abs().sum().item()
        added["engine_k1"] -= log_ratio_V.sum().item()
        added["engine_k3"] += k3_estimates(log_ratio_V).sum().item()
        if self._counts:
            self._histogram_B += log_ratio_histogram(log_ratio_V)
        bounded_V = log_ratio_V.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        lowest, highest = self._log_ratio_range
        self._log_ratio_range = (min(lowest, bounded_V.min().item()), max(highest, bounded_V.max().item()))

    def _reset_sums(self) -> None:
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._histogram_B = torch.zeros(HISTOGRAM_BINS, device=self._device)
        self._log_ratio_range = (0.0, 0.0)

    def _empty_micro_batch(self) -> Tensor:
        """A forward pass over two tokens without a loss: the other workers need this one's shard of the base."""
        return self.policy.logprobs(_one_sequence(np.zeros(2, dtype=np.int64)))[0]

    def _collate(
        self, samples: Sequence[TrainingSample], indices: Sequence[int], old_logprobs: Sequence[FloatArray] | None
    ) -> LossInputs:
        if old_logprobs is not None and len(old_logprobs) != len(samples):
            raise ValueError(f"old log-probs are given for {len(old_logprobs)} of {len(samples)} samples; expected all")
        masks = [samples[index].loss_mask_T for index in indices]
        tokens_S = [int(mask.sum()) for mask in masks]

        def of_valid_tokens(arrays: Sequence[FloatArray]) -> Tensor:
            valid = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
            return torch.from_numpy(np.concatenate(valid).astype(np.float32)).to(self._device)

        old_V = None
        if old_logprobs is not None:
            old_V = torch.from_numpy(np.concatenate([old_logprobs[index] for index in indices])).to(self._device)
            if len(old_V) != sum(tokens_S):
                raise ValueError("expected one old log-prob per valid token of a sample")
        return LossInputs(
            micro_batch=concatenate([_sequence(samples[index]) for index in indices]),
            tokens_S=tokens_S,
            advantage_V=of_valid_tokens([samples[index].advantage_T for index in indices]),
            engine_logprob_V=of_valid_tokens([samples[index].logprob_T for index in indices]),
            old_logprob_V=old_V,
            sample_V=torch.from_numpy(np.repeat(np.arange(len(indices)), tokens_S)).to(self._device),
        )


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Copy arrays to tensors: arrays from Ray's object store are read-only."""
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _sequence(sample: TrainingSample) -> InputSequence:
    """A sample up to its last valid token."""
    kept = trained_length(sample)
    prompt = min(sample.prompt_length, int(np.argmax(sample.loss_mask_T)))
    return InputSequence(sample.token_ids_T[:kept], sample.loss_mask_T[:kept], prompt)


def _one_sequence(token_ids_T: IntArray) -> MicroBatch:
    """A micro-batch of one sequence; all tokens but the first are targets."""
    return concatenate([InputSequence(token_ids_T, np.arange(len(token_ids_T)) > 0, 0)])


def trained_length(sample: TrainingSample) -> int:
    """Number of tokens up to the last valid one, which is as far as the forward pass goes; 0 if none is valid.

    Raises: ValueError if its first token is marked valid.
    """
    valid = np.flatnonzero(sample.loss_mask_T)
    if not len(valid):
        return 0
    if valid[0] == 0:
        raise ValueError(
            f"sample {sample.group}/{sample.rollout}: the first token is marked valid, but no token before it "
            "predicts it"
        )
    return int(valid[-1]) + 1
