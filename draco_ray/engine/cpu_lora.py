"""LoRA on vLLM's CPU workers: one matrix product for each run of consecutive tokens with the same adapter.

It works around four defects of vLLM 0.32 on CPUs: an adapter's matrices are copied once for every token of a batch; in
a batch with base-model and adapter requests, tokens without an adapter (index -1) get the last slot's adapter; the
engine core dies when a sequence is scored while others generate, because the LM head's adapter expects one row for each
request; and with adapters enabled, experts are computed with Triton, which does not run on CPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker


class SegmentedLora(PunicaWrapperCPU):
    """Adds the adapters' products to a batch's activations in place; tokens without an adapter are unchanged."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._runs: list[tuple[int, slice]] = []
        """Adapter slot and rows of each run of consecutive tokens with the same adapter."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Find the next batch's runs of tokens with the same adapter."""
        super().update_metadata(*args, **kwargs)
        slots, lengths = torch.unique_consecutive(self.token_lora_indices, return_counts=True)
        self._runs = []
        start = 0
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            if slot >= 0:
                self._runs.append((slot, slice(start, start + length)))
            start += length

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """``y += scale * x A^T B^T`` for each output slice of a linear layer.

        Args:
            y: (tokens, sum of output_slices).
            x: (tokens, inputs).
            lora_a_stacked: for each slice (slots, 1, rank, inputs).
            lora_b_stacked: for each slice (slots, 1, outputs, rank).
        """
        for slot, rows in self._runs:
            left = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                y[rows, left : left + width].addmm_(x[rows] @ a[slot, 0].T, b[slot, 0].T, alpha=scale)
                left += width

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y += x B^T`` for an embedding; x: (tokens, rank), already looked up."""
        for slot, rows in self._runs:
            y[rows].addmm_(x[rows], lora_b_stacked[slot, 0].T)

    def add_lora_logits(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the learner refuses adapters on the LM head, whose log-probs it computes in chunks."""


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens.

    vLLM 0.32's own function leaves its result uninitialised on CPUs, unless it is int64: draft tokens are then verified
    at an arbitrary temperature.

    Args:
        x: (requests,).
        cu_num_tokens: (requests,), cumulative numbers of draft tokens.
        num_tokens: total number of draft tokens.
        replace_from: a value that is replaced by ``replace_to``.
    Returns: (num_tokens,).
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def select_experts(moe_config: FusedMoEConfig) -> tuple[Any, Any]:
    """The kernels that vLLM selects for experts without adapters; experts are never adapted here."""
    return select_unquantized_moe_backend(dataclasses.replace(moe_config, is_lora_enabled=False))


class CpuWorker(CPUWorker):
    """vLLM's CPU worker with the corrections of this module."""

    def init_device(self) -> None:
        """Replace vLLM's functions and set up the device, before the model is loaded."""
        current_platform.get_punica_wrapper = lambda: f"{__name__}.{SegmentedLora.__qualname__}"
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        unquantized_fused_moe_method.select_unquantized_moe_backend = select_experts
        super().init_device()
