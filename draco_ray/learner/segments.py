"""Attention and gated delta nets over packed segments, so that packed sequences do not see each other.

Attention is computed segment by segment. The queries of a segment see its own keys, and the keys of the segments that
it continues. On a GPU, each segment is one call of a Flash kernel.

Gated delta nets (Qwen3.5 and 3.6) are also called segment by segment, with the model's own code and kernels. A segment
starts with the states at the end of the segment that it continues.

Gradients flow through keys, values and states. If workers share a micro-batch, each computes some of the heads
(`draco_ray.learner.context_parallel`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from draco_ray.learner.context_parallel import PROJECTIONS, ContextParallelGroup, DeltaNetHeads
from draco_ray.learner.packing import Segment

ATTENTION = "draco_segments"
"""Name under which this attention is registered with transformers."""
UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Attention arguments that are not supported here."""
PLAIN_LAYERS = {"full_attention", "linear_attention"}
FLASH_HEAD = 256
"""Maximum head size of the kernels that support grouped-query attention."""


class UnsupportedLayer(Exception):
    """A layer needs more than causal attention."""


def install_attention(base: Any, *, shared: bool = False) -> None:
    """Make a causal language model's decoder accept packed segments (the keyword ``segments``).

    Args:
        base: transformers' model.
        shared: whether workers share micro-batches (the keyword ``context``).
    Raises: UnsupportedLayer: the model may have layers that are not supported.
    """
    text = base.config.get_text_config()
    if not set(getattr(text, "layer_types", None) or ()) <= PLAIN_LAYERS:
        raise UnsupportedLayer
    mixers = [mixer for module in base.get_decoder().modules() if (mixer := getattr(module, "linear_attn", None))]
    if shared and not all(hasattr(mixer, name) for mixer in mixers for name in PROJECTIONS):
        raise UnsupportedLayer
    AttentionInterface.register(ATTENTION, _attention)
    base.set_attn_implementation(ATTENTION)
    if base.get_decoder().config._attn_implementation != ATTENTION:
        raise UnsupportedLayer
    for mixer in mixers:
        mixer.forward = _over_tokens(mixer)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Sequence[Segment] | None = None,
    context: ContextParallelGroup | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' signature: arrays are batch x heads x tokens x head size.

    Without ``segments`` all tokens are one segment.
    """
    for name in UNSUPPORTED_ARGUMENTS:
        if asked.get(name) is not None:
            raise UnsupportedLayer(name)
    if context is not None:
        found = context.to_heads([array[0].transpose(0, 1) for array in (query, key, value)])
        query, key, value = (array.transpose(0, 1)[None] for array in found)
        output, _ = _attention(module, query, key, value, None, scaling, segments)
        return context.to_tokens(output[0])[None], None
    if segments is None:
        segments = (Segment(0, query.shape[2], None),)
    outputs = []
    for segment in segments:
        mine = slice(segment.start, segment.start + segment.length)
        seen, before = [mine], segment
        while before.after is not None:
            before = segments[before.after]
            seen.insert(0, slice(before.start, before.start + before.length))
        keys, values = (
            array[:, :, mine] if len(seen) == 1 else torch.cat([array[:, :, part] for part in seen], dim=2)
            for array in (key, value)
        )
        outputs.append(_causal(query[:, :, mine], keys, values, scaling).transpose(1, 2))
    return (outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _causal(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Causal attention of the last tokens of a sequence, over the keys of all its tokens."""
    tokens, seen = query.shape[2], keys.shape[2]
    groups = query.shape[1] // keys.shape[1]
    grouped = groups > 1 and keys.shape[3] == values.shape[3] <= FLASH_HEAD
    if groups > 1 and not grouped:
        keys, values = (array.repeat_interleave(groups, dim=1) for array in (keys, values))
    how: dict[str, Any] = {"scale": scaling, "enable_gqa": grouped}
    if tokens == seen:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, **how)
    if query.is_cuda:
        return scaled_dot_product_attention(query, keys, values, attn_mask=causal_lower_right(tokens, seen), **how)
    if seen < 2 * tokens:
        # The kernel skips masked blocks only with is_causal. So adding unused queries for the prompt costs less than
        # computing the masked half with an explicit mask.
        unused = query.new_zeros(*query.shape[:2], seen - tokens, query.shape[3])
        query = torch.cat([unused, query], dim=2)
        return scaled_dot_product_attention(query, keys, values, is_causal=True, **how)[:, :, seen - tokens :]
    mask = torch.ones(tokens, seen, dtype=torch.bool, device=query.device).tril(seen - tokens)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, **how)


class _DeltaNetCache:
    """A gated delta net's states between two segments, with the interface of transformers' cache."""

    record_past = True
    """Makes transformers keep old states unchanged: gradients, and all segments that continue from here, need them."""

    def __init__(self, before: _DeltaNetCache | None) -> None:
        self.before = before
        self.recurrent_states: list[Tensor] = before.recurrent_states if before is not None else []
        self.inputs: Tensor | None = None

    @property
    def layers(self) -> _DeltaNetCache:
        """This object, which also stands for the cache of every layer.

        A property, because an attribute that refers to its own object would keep the tensors until garbage collection.
        """
        return self

    def __getitem__(self, layer: int) -> _DeltaNetCache:
        return self

    def has_previous_state(self, layer: int, **_: Any) -> bool:
        return self.before is not None

    def update_conv_state(self, inputs: Tensor, layer: int, conv_kernel_size: int, **_: Any) -> Tensor:
        if self.before is not None and self.before.inputs is not None:
            inputs = torch.cat([self.before.inputs, inputs], dim=-1)
        self.inputs = inputs[..., -(conv_kernel_size - 1) :]
        return inputs

    def update_recurrent_state(self, state: Tensor, layer: int, **_: Any) -> Tensor:
        self.recurrent_states = [state]
        return state


def _over_tokens(mixer: Any) -> Callable[..., Tensor]:
    """The forward of a gated delta net over a micro-batch, or over this worker's part of it."""
    whole = mixer.forward

    def call(hidden_states: Tensor, *, context: ContextParallelGroup | None = None, **given: Any) -> Tensor:
        if context is None:
            return _by_segment(whole, hidden_states, **given)
        heads = DeltaNetHeads(mixer, context)
        return heads.returned(_by_segment(heads.forward, heads.exchanged(hidden_states), **given))

    return call


def _by_segment(
    forward: Callable[..., Tensor], hidden_states: Tensor, segments: Sequence[Segment] | None = None, **given: Any
) -> Tensor:
    """Call the forward of a gated delta net for each segment."""
    if segments is None or len(segments) == 1:
        return forward(hidden_states=hidden_states, **given)
    given = given | {"attention_mask": None}
    continued = {segment.after for segment in segments}
    left: dict[int, _DeltaNetCache] = {}
    outputs = []
    for index, segment in enumerate(segments):
        states = None
        if index in continued or segment.after is not None:
            states = _DeltaNetCache(left[segment.after] if segment.after is not None else None)
            left[index] = states
        mine = hidden_states[:, segment.start : segment.start + segment.length]
        outputs.append(forward(hidden_states=mine, **given | {"cache_params": states}))
    return torch.cat(outputs, dim=1)
