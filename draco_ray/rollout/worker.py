"""The Ray shell of the environment slots: task in, trajectory out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from draco_ray.config.schema import AgentConfig, EnvironmentConfig
from draco_ray.engine.sampler import Sampler
from draco_ray.errors import EnvironmentCrashed, IsolationUnavailable
from draco_ray.observability.logs import start_run_log, working_on
from draco_ray.records import EpisodeEnd, Evaluation, Termination, Trajectory
from draco_ray.rollout.termination import termination_of
from draco_ray.summaries import RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout to run."""

    task_id: str
    group: str
    rollout: int
    attempt: int
    seed: int


class RolloutWorkerActor:
    """Environment slots (`AppWorldSlot`) and the agent (`CodeAgent`) that plays in them.

    With ``load_ground_truth`` the finished world is evaluated by AppWorld's own tests; workers of an outcome-blind
    training run are started without it and cannot.
    """

    def __init__(
        self,
        name: str,
        samplers: Sequence[Sampler],
        *,
        data_root: Path,
        model_path: str,
        agent: AgentConfig,
        environment: EnvironmentConfig,
        load_ground_truth: bool,
    ) -> None:
        from transformers import AutoTokenizer

        from draco_ray.engine.chat import ChatTokens
        from draco_ray.environments.appworld.slot import AppWorldSlot
        from draco_ray.rollout.code_agent import CodeAgent

        start_run_log()
        chat = ChatTokens(AutoTokenizer.from_pretrained(model_path), thinking=agent.thinking)
        self._agents = [CodeAgent(sampler, chat, agent) for sampler in samplers]
        self._load_ground_truth = load_ground_truth
        self._slots: list[Any] = [
            AppWorldSlot(environment, data_root, load_ground_truth=load_ground_truth, name=f"{name}.{index}")
            for index in range(environment.slots_per_worker)
        ]
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    @ray.method(num_returns=3)
    async def rollout(
        self, request: RolloutRequest, engine: int
    ) -> tuple[Trajectory | None, RolloutSummary, Evaluation | None]:
        """Play one episode on the engine of that index.

        Returns: the trajectory (for the object store), its summary, and AppWorld's verdict where it may be asked.
        """
        working_on(request.group, request.rollout)
        slot = await self._free.get()
        started = time.time()
        try:
            await slot.open(request.task_id)
            trajectory = await self._agents[engine].run(
                slot, group=request.group, rollout=request.rollout, attempt=request.attempt, seed=request.seed
            )
            evaluation = None
            if self._load_ground_truth:
                verdict = await slot.evaluate_rollout(trajectory, run=request.rollout)
                evaluation = replace(verdict, termination=termination_of(trajectory))
            await slot.close_task()
        except IsolationUnavailable:
            raise
        except EnvironmentCrashed as error:
            return None, _crashed(request, str(error), started), None
        finally:
            self._free.put_nowait(slot)
        # The trajectory knows when it was played; the slot was held from before its world opened until it was closed.
        return trajectory, replace(summarise(trajectory), started_at=started, ended_at=time.time()), evaluation

    async def stop(self) -> None:
        """End the AppWorld servers."""
        await asyncio.gather(*(slot.stop() for slot in self._slots))


def start_rollout_workers(
    samplers: Sequence[Sampler],
    *,
    data_root: Path,
    model_path: str,
    agent: AgentConfig,
    environment: EnvironmentConfig,
    load_ground_truth: bool,
    run_name: str,
    kind: str = "RolloutWorker",
) -> list[Any]:
    """As many workers as the configured slots need; ``kind`` begins their names, which are unique in a run."""
    remote = ray.remote(RolloutWorkerActor)
    return [
        remote.options(
            name=f"{kind}-{index}@{run_name}",
            num_cpus=environment.cpus_per_worker,
            max_concurrency=2 * environment.slots_per_worker + 2,
            max_restarts=-1,
            # The worker's death is not the rollout's fault: it is played again as it was, and then tried anew.
            max_task_retries=1,
        ).remote(
            f"{kind}-{index}",
            samplers,
            data_root=data_root,
            model_path=model_path,
            agent=agent,
            environment=environment,
            load_ground_truth=load_ground_truth,
        )
        for index in range(-(-environment.slots // environment.slots_per_worker))
    ]


def _crashed(request: RolloutRequest, error: str, started: float) -> RolloutSummary:
    """A rollout that never began, or whose world died while closing."""
    return RolloutSummary(
        task_id=request.task_id,
        rollout=request.rollout,
        attempt=request.attempt,
        ended=EpisodeEnd.SERVER_ERROR,
        termination=Termination.SERVER_ERROR,
        error=error,
        turns=0,
        steps=0,
        prompt_tokens=0,
        sampled_tokens=0,
        seconds_generating=0.0,
        seconds_executing=0.0,
        started_at=started,
        ended_at=time.time(),
    )


def summarise(trajectory: Trajectory) -> RolloutSummary:
    """The driver's view of a trajectory."""
    return RolloutSummary(
        task_id=trajectory.task_id,
        rollout=trajectory.rollout,
        attempt=trajectory.attempt,
        ended=trajectory.ended,
        termination=termination_of(trajectory),
        error=trajectory.error,
        turns=len(trajectory.turns),
        steps=len(trajectory.steps),
        prompt_tokens=trajectory.prompt_length,
        sampled_tokens=int(trajectory.sampled_T.sum()),
        seconds_generating=sum(turn.seconds_generating for turn in trajectory.turns),
        seconds_executing=sum(turn.seconds_executing for turn in trajectory.turns),
        started_at=trajectory.started_at,
        ended_at=trajectory.ended_at,
    )
