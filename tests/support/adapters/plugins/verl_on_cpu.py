"""Plug-ins with which verl's own trainer runs on CPUs: a platform, verl's FSDP engine for it, a scripted server.

verl imports this in each of its processes (``VERL_USE_EXTERNAL_MODULES``). Stand-ins: the server plays scripted turns
in place of sampling, and its weights are only summed. `seen` is verl's vanilla loss, which records what it is given.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import types
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoTokenizer
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform
from verl.utils import distributed

FLIGHTS = ("DL9", "UA1", "UA1", "XX0", None)
"""What each run of a group books; the last crashes."""
OUT = Path(os.environ["VERL_SEEN"])


@PlatformRegistry.register(platform="none")
class NoAccelerator(PlatformBase):
    """The CPU; Ray counts it as the GPU that verl asks for."""

    device_name, vendor_name = "cpu", "none"
    device_module = types.SimpleNamespace(
        **{name: lambda *_, **__: 0 for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated")},
        **{name: lambda *_, **__: 0 for name in ("memory_reserved", "empty_cache", "synchronize", "set_device")},
        **{name: lambda *_, **__: 0 for name in ("manual_seed", "manual_seed_all", "current_device")},
        mem_get_info=lambda *_, **__: (1, 1),
        get_device_name=lambda *_: "CPU",
        is_available=lambda: True,
        device_count=lambda: 1,
    )

    def is_available(self) -> bool:
        """True: the CPU is always there."""
        return True

    def current_device(self) -> Any:
        """The device, which verl passes to ``Tensor.to``."""
        return torch.device("cpu")

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """None."""
        return None, None

    def communication_backend_name(self) -> str:
        """PyTorch's backend for CPUs."""
        return "gloo"

    def ray_resource_name(self) -> str:
        """What verl's resource pools ask for."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def visible_devices_envvar(self) -> str:
        """A variable that nothing reads."""
        return "NO_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        """No profiler."""
        return contextlib.nullcontext()

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    device_count = lambda self: 1  # noqa: E731
    is_ipc_supported = lambda self: False  # noqa: E731
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


set_platform(NoAccelerator())
# verl names a backend for CPUs and one for its device, which PyTorch refuses where they are the same.
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)

from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.rollout import base, replica  # noqa: E402

batches: list[Any] = []


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class Engine(FSDPEngineWithLMHead):
    """verl's FSDP engine; it also records its batch in `seen`."""

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Keep the batch."""
        batches[:] = [micro_batch]
        return super().forward_step(micro_batch, loss_function, forward_only)


@core_algos.register_policy_loss("seen")
def seen(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, loss_agg_mode: str, config: Any, **rest: Any
) -> Any:
    """verl's vanilla loss; writes each row's tokens, mask, advantages, and gradients of log-probabilities."""
    loss, metrics = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **rest
    )
    (gradient,) = torch.autograd.grad(loss, log_prob, retain_graph=True)
    scale = config.global_batch_info["batch_num_tokens"] / config.global_batch_info["dp_size"]
    rank = torch.distributed.get_rank()
    with (OUT / f"rows-{rank}.jsonl").open("a") as file:
        for row, ids in enumerate(batches[0]["responses"].unbind()):
            tensors = (response_mask.int(), advantages, -gradient * scale)
            values = [each[row, : len(ids)].tolist() for each in tensors]
            record = dict(zip(("mask", "advantages", "pushed"), values, strict=True))
            file.write(json.dumps({"rank": rank, "ids": ids.tolist(), **record}) + "\n")
    return loss, metrics


class Server:
    """Plays the next turn of a scripted run; the n-th run of a prompt books the n-th of `FLIGHTS`."""

    def __init__(self, model: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        """The turn after those in the prompt."""
        text = self.tokenizer.decode(prompt_ids)
        turn = text.count("<tool_response>\n")
        flight = self._next(text) if turn == 0 else text.split("In mind: ")[1][:3]
        if flight is None:
            raise RuntimeError("this run crashes")
        calls = (("search", {"to": "SFO"}), ("book", {"flight": flight}))
        said = f"In mind: {flight}. " if turn == 0 else ""
        if turn < len(calls):
            call = {"name": calls[turn][0], "arguments": calls[turn][1]}
            said += f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        else:
            said = f"Booked {flight}."
        ids = self.tokenizer(f"{said}<|im_end|>")["input_ids"]
        return replica.TokenOutput(token_ids=ids, stop_reason="completed", extra_fields={"global_steps": 0})

    def _next(self, text: str) -> str | None:
        """The next flight for this prompt, whichever server is asked."""
        name = hashlib.sha256(text.encode()).hexdigest()
        for number, flight in enumerate(FLIGHTS):
            with contextlib.suppress(FileExistsError):
                (OUT / f"{name}-{number}").open("x").close()
                return flight
        raise AssertionError("more runs of a prompt than flights")

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = resume_generation = _nothing
    abort_all_requests = start_profile = stop_profile = _nothing


class Replica(replica.RolloutReplica):
    """One `Server`."""

    async def launch_servers(self) -> None:
        """Start it."""
        self._server_handle = ray.remote(Server).remote(self.model_config.path)
        self._server_address, self.servers = f"scripted-{self.replica_rank}", [self._server_handle]


class Rollout(base.BaseRollout):
    """A training worker's side of the server: weights are summed, to show that they move."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(self, weights: Any, **_: Any) -> None:
        """Write the sum of the weights."""
        total = sum(float(tensor.double().abs().sum()) for _, tensor in weights)
        with (OUT / f"weights-{torch.distributed.get_rank()}.jsonl").open("a") as file:
            file.write(f"{total!r}\n")


base._ROLLOUT_REGISTRY["scripted", "async"] = f"{__name__}.Rollout"
replica.RolloutReplicaRegistry.register("scripted", lambda: Replica)
