"""The kernels of a gated delta net (Qwen3.5 and 3.6): the rule's and the convolution's.

Transformers takes the rule from flash-linear-attention where that is installed, for tensors on any device, and the
convolution from causal-conv1d alone, which has no wheels. Here flash-linear-attention computes both on a GPU, and
transformers' own code elsewhere.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from importlib import import_module, util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

KERNEL_DEVICES: tuple[str, ...] = ("cuda",)
"""Where the kernels run."""
RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Transformers' names, in the module of a model."""


def use_kernels(decoder: torch.nn.Module, device: torch.device) -> None:
    """Let a decoder's delta nets be computed by flash-linear-attention where it is installed.

    It is put into transformers' module, for every model of its kind in this process.

    Args:
        decoder: anything; one without delta nets is left alone.
        device: where it will compute; a GPU without the kernels is worth a warning.
    """
    mixers = [mixer for module in decoder.modules() if (mixer := getattr(module, "linear_attn", None)) is not None]
    modules = {sys.modules[type(mixer).__module__] for mixer in mixers}
    if util.find_spec("fla") is not None:
        for module in modules:
            _put_kernels(module)
    elif modules and device.type in KERNEL_DEVICES:
        log.warning(
            "flash-linear-attention is not installed: gated delta nets are computed by transformers' own code, many "
            "times as slow and with twice the memory that `draco plan` counts for a layer; install the 'gpu' extra"
        )


def _put_kernels(module: ModuleType) -> None:
    rule, convolution = getattr(module, RULE), getattr(module, CONVOLUTION)
    if not hasattr(rule, "elsewhere"):
        # Transformers' own code is what its wrapper, whichever kernel it calls, is named after.
        setattr(module, RULE, _on_device(rule, inspect.unwrap(rule)))
        kernel = convolution if util.find_spec("causal_conv1d") is not None else _convolution
        setattr(module, CONVOLUTION, _on_device(kernel, inspect.unwrap(convolution)))


def _on_device(kernel: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    def computed(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (kernel if first.device.type in KERNEL_DEVICES else elsewhere)(first, *args, **kwargs)

    computed.elsewhere = elsewhere  # type: ignore[attr-defined]
    return computed


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """As transformers calls it: arrays are 1 x channels x tokens, the weight channels x width."""
    kernel = import_module("fla.modules.causal_conv1d").causal_conv1d
    output: Tensor = kernel(hidden_states.transpose(1, 2), weight, bias, activation=activation)[0]
    return output.transpose(1, 2)
