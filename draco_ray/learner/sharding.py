"""The frozen base model in parts over the learner's workers: FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each decoder layer, the token embedding and the LM head are a group of their own, of which every worker keeps one part
and which is whole on a worker only while it is computed with. What is small stays whole everywhere: the adapter, so
that its gradients, optimizer, checkpoints and publication are those of the unsharded learner, and the last norm. A tied
embedding stays whole as well: FSDP2 cannot share one parameter between two groups.

A pass through the model is a collective then: every worker must take part in each, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from draco_ray.errors import ConfigError


def shard_base(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Spread the base of a causal language model with an adapter over the mesh, group by group, onto `device`.

    Args:
        model: transformers' model, on the CPU, its PEFT layers in place; only the adapter requires gradients.
        mesh: one dimension, the workers.
        device: this worker's; a group is whole there only while it is cut.
    Raises: ConfigError if the decoder's layers are not found.
    """
    decoder, head, embedding = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigError(
            f"learner.sharding=full: {type(decoder).__name__} has no list of layers to shard; set learner.sharding=none"
        )
    groups = [*layers] if head.weight is embedding.weight else [embedding, *layers, head]
    sharded = {parameter for group in groups for parameter in group.parameters() if not parameter.requires_grad}
    whole = {parameter for parameter in model.parameters() if parameter not in sharded}
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    if isinstance(embedding, FSDPModule):
        # Frozen, and nothing below it: its backward needs no weight.
        embedding.set_unshard_in_backward(False)
    # The root, without parameters of its own, makes one pass of all groups: each fetches the next while it computes.
    fully_shard(decoder, mesh=mesh, ignored_params=whole)


@contextmanager
def gathered(module: torch.nn.Module) -> Iterator[None]:
    """Make the parameters of a sharded module whole on every worker inside the block; others are whole already."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
