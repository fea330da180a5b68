"""The Ray shell of one policy engine, and the sampler a rollout worker holds to reach it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import ray

from draco_ray.config import EngineConfig, ModelConfig
from draco_ray.engine.sampler import Sample
from draco_ray.observability.logs import start_run_log
from draco_ray.records import Adapter


class PolicyEngineActor:
    """One vLLM engine (`draco_ray.engine.vllm_engine.VllmEngine`)."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        max_model_len: int,
        lora_rank: int,
        seed: int,
        name: str,
        run_name: str,
    ) -> None:
        from draco_ray.engine.vllm_engine import VllmEngine

        start_run_log()
        self._engine = VllmEngine(
            config, model, max_model_len=max_model_len, lora_rank=lora_rank, seed=seed, name=name, run_name=run_name
        )

    async def start(self) -> None:
        """Load the model; raises EngineError."""
        await self._engine.start()

    async def sample(
        self, token_ids: list[int], max_tokens: int, seed: int | None, temperature: float | None
    ) -> Sample:
        """See `draco_ray.engine.vllm_engine.VllmEngine.sample`."""
        return await self._engine.sample(token_ids, max_tokens=max_tokens, seed=seed, temperature=temperature)

    async def load_adapter(self, adapter: Adapter) -> float:
        """Switch new requests to ``adapter``; returns seconds."""
        return await self._engine.load_adapter(adapter)

    async def logprobs(self, token_ids: list[int], adapter: bool) -> list[float]:
        """Log-probs of ``token_ids[1:]``, with or without the adapter."""
        return await self._engine.logprobs(token_ids, adapter=adapter)

    async def stop(self) -> None:
        """End the engine's processes."""
        await self._engine.stop()


def start_policy_engines(
    config: EngineConfig, model: ModelConfig, *, max_model_len: int, lora_rank: int, seed: int, run_name: str
) -> list[Any]:
    """One actor handle per engine of the configuration, not started yet."""
    remote = ray.remote(PolicyEngineActor)
    return [
        remote.options(
            name=_actor_name(index, run_name),
            num_gpus=config.gpus_per_engine,
            num_cpus=config.cpus_per_engine,
            max_concurrency=4 * config.max_num_seqs,
        ).remote(
            config,
            model,
            max_model_len=max_model_len,
            lora_rank=lora_rank,
            seed=seed + index,
            name=f"engine-{index}",
            run_name=run_name,
        )
        for index in range(config.engines)
    ]


class EngineClient:
    """A `draco_ray.engine.sampler.Sampler` and `draco_ray.engine.canary.Scorer` that reaches a `PolicyEngineActor`.

    It carries the actor's name rather than its handle, so that a rollout worker holding it can be restarted by Ray.
    """

    def __init__(self, index: int, run_name: str) -> None:
        self._actor_name = _actor_name(index, run_name)
        self.name = f"engine-{index}"

    @cached_property
    def _handle(self) -> Any:
        return ray.get_actor(self._actor_name)

    async def sample(
        self, token_ids: list[int], *, max_tokens: int, seed: int | None = None, temperature: float | None = None
    ) -> Sample:
        """See `draco_ray.engine.vllm_engine.VllmEngine.sample`."""
        sample: Sample = await self._handle.sample.remote(token_ids, max_tokens, seed, temperature)
        return sample

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """See `draco_ray.engine.canary.Scorer.logprobs`."""
        logprobs: list[float] = await self._handle.logprobs.remote(token_ids, adapter)
        return logprobs


def _actor_name(index: int, run_name: str) -> str:
    return f"PolicyEngine-{index}@{run_name}"
