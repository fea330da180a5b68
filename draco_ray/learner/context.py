"""One row over several workers (Ulysses): each has a part of its tokens, and in attention a part of its heads.

Everything in a decoder but attention and a delta net's convolution and states is of one token alone, and is computed
where the token is. Around these two the workers exchange what they have: every worker gets all tokens of its own heads,
runs the model's own code on them as if there were no others, and hands the result back. Where there are fewer heads
than workers (of keys, or of a delta net's keys), each is sent to all that need it.
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
"""What a gated delta net projects its inputs with, as Qwen3.5 and 3.6 call it."""


def rows_shared(workers: int, sharing: int, device: str) -> Context | None:
    """The workers that share their rows with this one, neighbours by rank; None where each has its own.

    Args:
        workers: all of them, in torch's default process group; every one must call this.
        sharing: N of them share a row.
        device: torch's name of the kind of device.
    """
    if sharing == 1:
        return None
    mesh = init_device_mesh(device, (workers // sharing, sharing), mesh_dim_names=("data", "context"))
    return Context(mesh.get_group("context"))


class Context:
    """The N workers that share a row of T tokens, t = T / N each, as this one sees them.

    Every method but `is_first` is a collective of all of them, and so is its backward.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    @property
    def is_first(self) -> bool:
        """Whether this worker counts what all of them know."""
        return self.rank == 0

    def by_head(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """From this worker's tokens of all heads to all tokens of its heads.

        Args:
            arrays: t x heads x width, in one type; the heads may differ.
        Returns: T x heads / N x width, one head at least: each is repeated where N asks for more.
        """
        parts_tNC = [
            array.repeat_interleave(repeats(array.shape[1], self.size), dim=1).reshape(len(array), self.size, -1)
            for array in arrays
        ]
        sent_NtC = torch.cat([part.transpose(0, 1) for part in parts_tNC], dim=2)
        widths = [part.shape[2] for part in parts_tNC]
        found = _Exchange.apply(sent_NtC, self._group).flatten(0, 1).split(widths, dim=1)
        return [one.unflatten(1, (-1, array.shape[2])) for one, array in zip(found, arrays, strict=True)]

    def by_token(self, array_THD: Tensor) -> Tensor:
        """From all tokens of this worker's heads back to its tokens of all heads: t x N heads x width."""
        sent_NtC = array_THD.flatten(1).unflatten(0, (self.size, -1))
        found_tNC = _Exchange.apply(sent_NtC, self._group).transpose(0, 1)
        return found_tNC.reshape(found_tNC.shape[0], -1, array_THD.shape[2])

    def join(self, array_V: Tensor, mine_V: IntArray, wanted: int) -> Tensor:
        """What each worker has of an array, on all of them.

        Backwards each keeps its own part: all compute one and the same loss of the whole, and the parts of its gradient
        add up.

        Args:
            array_V: this worker's entries.
            mine_V: where in the whole they are.
            wanted: entries of the whole.
        """
        joined: Tensor = _Join.apply(array_V, torch.from_numpy(mine_V).to(array_V.device), wanted, self._group)
        return joined

    def heads(self, total: int) -> list[int]:
        """Which of so many heads `by_head` brings to this worker."""
        copies = repeats(total, self.size)
        mine = total * copies // self.size
        return [head // copies for head in range(self.rank * mine, (self.rank + 1) * mine)]


def repeats(heads: int, workers: int) -> int:
    """How often each head is sent so that all workers have as many; 1 where they divide."""
    return lcm(heads, workers) // heads


class DeltaHeads:
    """A gated delta net (Qwen3.5 and 3.6) of this worker's heads alone, for the model's own forward.

    What that reads as its input is what `exchanged` returns: the projections of all tokens for these heads.
    """

    def __init__(self, mixer: Any, context: Context) -> None:
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
        """Leave the output as it is: the projection needs all heads, and follows the exchange."""
        return output

    def exchanged(self, hidden_1tH: Tensor) -> Tensor:
        """Projections of all tokens for this worker's heads: 1 x T x their widths, one behind the other."""
        mixer = self._mixer
        qkv, z, b, a = (getattr(mixer, name)(hidden_1tH)[0] for name in PROJECTIONS)
        query, key, value = qkv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        whole = [
            *(array.unflatten(1, (-1, mixer.head_k_dim)) for array in (query, key)),
            *(array.unflatten(1, (-1, mixer.head_v_dim)) for array in (value, z)),
            *(array[:, :, None] for array in (b, a)),
        ]
        return torch.cat([array.flatten(1) for array in self._context.by_head(whole)], dim=1)[None]

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """The model's own, over some of its heads."""
        output: Tensor = type(self._mixer).forward(self, hidden_states=hidden_states, **given)
        return output

    def returned(self, output_1TC: Tensor) -> Tensor:
        """The layer's output for this worker's tokens, from all tokens of its heads: 1 x t x hidden size."""
        output_THD = output_1TC[0].unflatten(1, (-1, self._mixer.head_v_dim))
        projected: Tensor = self._mixer.out_proj(self._context.by_token(output_THD).flatten(1)[None])
        return projected


def _columns(which: slice) -> Callable[[Tensor], Tensor]:
    return lambda array: array[..., which]


class _Exchange(torch.autograd.Function):
    """Entry n of the first dimension goes to worker n; what comes back is of worker n at entry n."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        found = torch.empty_like(sent, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(found, sent.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradients[0], ctx.group), None


class _Join(torch.autograd.Function):
    """V entries of W from this worker, the rest from the others."""

    @staticmethod
    def forward(ctx: Any, array_V: Tensor, mine_V: Tensor, wanted: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine_V)
        joined_W = array_V.new_zeros((wanted, *array_V.shape[1:]))
        joined_W[mine_V] = array_V
        torch.distributed.all_reduce(joined_W, group=group)
        return joined_W

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (mine_V,) = ctx.saved_tensors
        return gradients[0][mine_V], None, None, None
