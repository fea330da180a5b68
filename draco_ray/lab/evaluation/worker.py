"""The Ray shell of evaluation: task in, AppWorld's verdict, costs and saved files out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from draco_ray.config.schema import AgentConfig, EnvironmentConfig, JudgeConfig, Price
from draco_ray.engine.sampler import Sampler
from draco_ray.errors import EnvironmentCrashed, IsolationUnavailable
from draco_ray.judging.limiter import Leases
from draco_ray.lab.evaluation.results import Usage
from draco_ray.records import EpisodeEnd, Evaluation
from draco_ray.rollout.termination import termination_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPolicy:
    """A policy behind engines of this run."""

    samplers: Sequence[Sampler]
    model_path: str
    price: Price | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPolicy:
    """A policy behind an API: LiteLLM model, endpoint, limits, retries and prices."""

    client: JudgeConfig
    priced: bool
    leases: Leases | None = None
    """Asked before every request; None: nothing is limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequest:
    """One attempt at one (task, run)."""

    task_id: str
    run: int
    attempt: int
    seed: int
    player: int
    """Which engine; 0 for an API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of an attempt."""

    evaluation: Evaluation | None
    """None where the world was lost."""
    usage: Usage
    seconds: float
    error: str | None = None
    saved: dict[str, str] = field(default_factory=dict)
    """See `AppWorldSlot.saved_files`."""


class EvaluationWorkerActor:
    """Environment slots that load ground truth, and the players that act in them."""

    def __init__(
        self,
        name: str,
        policy: LocalPolicy | ApiPolicy,
        *,
        data_root: Path,
        agent: AgentConfig,
        environment: EnvironmentConfig,
        slots: int,
    ) -> None:
        from draco_ray.environments.appworld.slot import AppWorldSlot

        self._players = _players(policy, agent)
        self._slots = [
            AppWorldSlot(environment, data_root, load_ground_truth=True, name=f"{name}.{index}")
            for index in range(slots)
        ]
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def play(self, request: PlayRequest) -> Played:
        """Play one episode and have AppWorld evaluate what it left."""
        slot = await self._free.get()
        began = time.monotonic()
        usage = Usage()
        try:
            await slot.open(request.task_id)
            trajectory, usage = await self._players[request.player].play(
                slot, run=request.run, attempt=request.attempt, seed=request.seed
            )
            if trajectory.ended is EpisodeEnd.SERVER_ERROR:
                await slot.close_task()
                return Played(evaluation=None, usage=usage, seconds=time.monotonic() - began, error=trajectory.error)
            verdict = await slot.evaluate_rollout(trajectory, run=request.run)
            evaluation = replace(verdict, termination=termination_of(trajectory))
            saved = slot.saved_files
            await slot.close_task()
            return Played(evaluation=evaluation, usage=usage, seconds=time.monotonic() - began, saved=saved)
        except IsolationUnavailable:
            raise
        except EnvironmentCrashed as error:
            return Played(evaluation=None, usage=usage, seconds=time.monotonic() - began, error=str(error))
        finally:
            self._free.put_nowait(slot)

    async def stop(self) -> None:
        """End the AppWorld servers."""
        await asyncio.gather(*(slot.stop() for slot in self._slots))


def start_evaluation_workers(
    policy: LocalPolicy | ApiPolicy,
    *,
    data_root: Path,
    agent: AgentConfig,
    environment: EnvironmentConfig,
    run_name: str,
) -> list[tuple[Any, int]]:
    """Workers for the configured slots, each with its number of slots."""
    remote = ray.remote(EvaluationWorkerActor)
    workers = []
    for index, first in enumerate(range(0, environment.slots, environment.slots_per_worker)):
        slots = min(environment.slots_per_worker, environment.slots - first)
        options = remote.options(
            name=f"EvaluationWorker-{index}@{run_name}",
            num_cpus=environment.cpus_per_worker,
            max_concurrency=2 * slots + 2,
            max_restarts=-1,
        )
        worker = options.remote(
            f"EvaluationWorker-{index}",
            policy,
            data_root=data_root,
            agent=agent,
            environment=environment,
            slots=slots,
        )
        workers.append((worker, slots))
    return workers


def _players(policy: LocalPolicy | ApiPolicy, agent: AgentConfig) -> list[Any]:
    from draco_ray.lab.evaluation.players import ChatPlayer, TokenPlayer

    if isinstance(policy, ApiPolicy):
        from draco_ray.judging.client import LiteLLMClient

        client = LiteLLMClient(
            policy.client, leases=policy.leases, role="evaluated model", settings="--policy, --api-base, --api-key-env"
        )
        return [ChatPlayer(client, agent, priced=policy.priced)]
    from transformers import AutoTokenizer

    from draco_ray.engine.chat import ChatTokens
    from draco_ray.rollout.code_agent import CodeAgent

    chat = ChatTokens(AutoTokenizer.from_pretrained(policy.model_path), thinking=agent.thinking)
    return [TokenPlayer(CodeAgent(sampler, chat, agent), policy.price) for sampler in policy.samplers]
