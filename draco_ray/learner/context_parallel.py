"""Context parallelism (Ulysses): workers share a micro-batch, each with a part of its tokens and of its heads.

Most of a decoder works on each token separately. Around attention, and around the convolution and the states of gated
delta nets, the workers exchange tokens for heads (all-to-all): each gets all tokens of its own heads, runs the model's
own code on them, and sends the result back. Where there are fewer key heads than workers, each is sent to several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from draco_ray.records import IntArray

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Names of a gated delta net's input projections in Qwen3.5 and 3.6."""


def context_group(workers: int, size: int, device: str) -> ContextParallelGroup | None:
    """The workers, of consecutive ranks, that share their micro-batches with this one; None for ``size`` 1.

    Args:
        workers: number of workers in torch's default process group; each of them must call this.
        size: number of workers that share a micro-batch.
        device: torch's device type.
    """
    if size == 1:
        return None
    mesh = init_device_mesh(device, (workers // size, size), mesh_dim_names=("data", "context"))
    return ContextParallelGroup(mesh.get_group("context"))


class ContextParallelGroup:
    """The N workers that share a micro-batch of T tokens, t = T / N each.

    `to_heads`, `to_tokens` and `gather` are collectives of all N workers, and so are their backward passes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def to_heads(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Exchange this worker's tokens of all heads for all tokens of its heads.

        Args:
            arrays: t x heads x width, of the same dtype; the numbers of heads may differ.
        Returns: T x heads / N x width; heads are repeated where N does not divide their number.
        """
        parts_tNC = [
            array.repeat_interleave(head_copies(array.shape[1], self.size), dim=1).reshape(len(array), self.size, -1)
            for array in arrays
        ]
        sent_NtC = torch.cat([part.transpose(0, 1) for part in parts_tNC], dim=2)
        widths = [part.shape[2] for part in parts_tNC]
        found = _Exchange.apply(sent_NtC, self._group).flatten(0, 1).split(widths, dim=1)
        return [one.unflatten(1, (-1, array.shape[2])) for one, array in zip(found, arrays, strict=True)]

    def to_tokens(self, array_THD: Tensor) -> Tensor:
        """The inverse of `to_heads`: t x N heads x width."""
        sent_NtC = array_THD.flatten(1).unflatten(0, (self.size, -1))
        found_tNC = _Exchange.apply(sent_NtC, self._group).transpose(0, 1)
        return found_tNC.reshape(found_tNC.shape[0], -1, array_THD.shape[2])

    def gather(self, array_V: Tensor, mine_V: IntArray, total: int) -> Tensor:
        """All-gather the entries of an array.

        In the backward pass each worker keeps the gradient of its own entries: all workers compute the same loss.

        Args:
            array_V: this worker's entries.
            mine_V: their indices in the whole array.
            total: number of entries of the whole array.
        """
        gathered: Tensor = _Gather.apply(array_V, torch.from_numpy(mine_V).to(array_V.device), total, self._group)
        return gathered

    def heads(self, total: int) -> list[int]:
        """Indices of the heads that `to_heads` sends to this worker, if there are ``total`` heads."""
        copies = head_copies(total, self.size)
        mine = total * copies // self.size
        return [head // copies for head in range(self.rank * mine, (self.rank + 1) * mine)]


def head_copies(heads: int, workers: int) -> int:
    """Number of copies of each head, so that all workers get equally many; 1 if the heads divide evenly."""
    return lcm(heads, workers) // heads


class DeltaNetHeads:
    """A gated delta net (Qwen3.5 and 3.6) with this worker's heads only; the model's own forward runs on it.

    Its input is the result of `exchanged`: the projections of all tokens for these heads.
    """

    def __init__(self, mixer: Any, context: ContextParallelGroup) -> None:
        self._mixer, self._context = mixer, context
        keys, values = context.heads(mixer.num_k_heads), context.heads(mixer.num_v_heads)
        self.num_k_heads, self.num_v_heads = len(keys), len(values)
        self.key_dim, self.value_dim = len(keys) * mixer.head_k_dim, len(values) * mixer.head_v_dim
        widths = (2 * self.key_dim + self.value_dim, self.value_dim, len(values), len(values))
        for name, end, width in zip(PROJECTIONS, np.cumsum(widths), widths, strict=True):
            setattr(self, name, _columns(slice(int(end) - width, int(end))))
        channels = [
            start + head * width + np.arange(width)
            for start, heads, width in (
                (0, keys, mixer.head_k_dim),
                (mixer.key_dim, keys, mixer.head_k_dim),
                (2 * mixer.key_dim, values, mixer.head_v_dim),
            )
            for head in heads
        ]
        weight, bias = mixer.conv1d.weight, mixer.conv1d.bias
        mine = torch.from_numpy(np.concatenate(channels)).to(weight.device)
        self.conv1d = SimpleNamespace(weight=weight[mine], bias=None if bias is None else bias[mine])
        self.dt_bias, self.A_log = mixer.dt_bias[values], mixer.A_log[values]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixer, name)

    def out_proj(self, output: Tensor) -> Tensor:
        """The identity: the projection needs all heads, so `returned` applies it after the exchange."""
        return output

    def exchanged(self, hidden_1tH: Tensor) -> Tensor:
        """Projections of all tokens for this worker's heads, concatenated: 1 x T x sum of their widths."""
        mixer = self._mixer
        qkv, z, b, a = (getattr(mixer, name)(hidden_1tH)[0] for name in PROJECTIONS)
        query, key, value = qkv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        whole = [
            *(array.unflatten(1, (-1, mixer.head_k_dim)) for array in (query, key)),
            *(array.unflatten(1, (-1, mixer.head_v_dim)) for array in (value, z)),
            *(array[:, :, None] for array in (b, a)),
        ]
        return torch.cat([array.flatten(1) for array in self._context.to_heads(whole)], dim=1)[None]

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """The model's own forward, on this worker's heads."""
        output: Tensor = type(self._mixer).forward(self, hidden_states=hidden_states, **given)
        return output

    def returned(self, output_1TC: Tensor) -> Tensor:
        """The mixer's output for this worker's tokens, 1 x t x hidden size.

        ``output_1TC``: the output of this worker's heads for all tokens.
        """
        output_THD = output_1TC[0].unflatten(1, (-1, self._mixer.head_v_dim))
        projected: Tensor = self._mixer.out_proj(self._context.to_tokens(output_THD).flatten(1)[None])
        return projected


def _columns(which: slice) -> Callable[[Tensor], Tensor]:
    return lambda array: array[..., which]


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension: entry n is sent to worker n, and replaced by an entry of worker n."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        found = torch.empty_like(sent, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(found, sent.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """Gathers W entries; V of them come from this worker, the rest from the others."""

    @staticmethod
    def forward(ctx: Any, array_V: Tensor, mine_V: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine_V)
        joined_W = array_V.new_zeros((total, *array_V.shape[1:]))
        joined_W[mine_V] = array_V
        torch.distributed.all_reduce(joined_W, group=group)
        return joined_W

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (mine_V,) = ctx.saved_tensors
        return gradients[0][mine_V], None, None, None
