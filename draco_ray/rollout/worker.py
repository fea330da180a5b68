"""The Ray actor that holds environment slots: it plays a task and returns a trajectory."""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from draco_ray.config.file_names import validate_file_name
from draco_ray.config.schema import AgentConfig, DataConfig, EnvironmentConfig
from draco_ray.environments.base import (
    Environment,
    GuardedWorld,
    World,
    WorldVerdict,
    make_environment,
    to_environment_crash,
)
from draco_ray.errors import ConfigError, EnvironmentCrashed, IsolationUnavailable, WorldBroken, WorldError
from draco_ray.observability.logs import set_log_context, start_run_log
from draco_ray.records import EpisodeEnd, Evaluation, Termination, Trajectory
from draco_ray.rollout.agent import Policy, RolloutRequest, agent_template, find_agent
from draco_ray.rollout.finished import summarise
from draco_ray.summaries import RolloutSummary
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.workers.monitor import pin_argument

log = logging.getLogger(__name__)

EPISODES = "episodes"
"""Folder in the directory of a run or an evaluation, for files that worlds keep."""
Policies = Callable[[AgentConfig], list[Policy]]
"""Called in each rollout worker to create its policies, which sample from engines of this run or from an API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The environment's verdict on a rollout."""

    evaluation: Evaluation
    saved: Mapping[str, str] = field(default_factory=dict)
    """See `WorldVerdict.saved`."""


class RolloutWorkerActor:
    """Environment slots and the agent that plays in them.

    With ``ground_truth``, the environment evaluates finished worlds; in outcome-blind training, workers lack it.
    """

    def __init__(
        self,
        name: str,
        policies: Policies,
        *,
        agent: AgentConfig,
        environment: EnvironmentConfig,
        data: DataConfig,
        ground_truth: bool,
        slots: int,
        template: str | None = None,
        kept: Path | None = None,
    ) -> None:
        start_run_log()
        _open_as_many_files_as_may_be()
        self._kept = kept
        self._slots = [
            make_environment(environment, data, ground_truth=ground_truth, name=f"{name}.{index}")
            for index in range(slots)
        ]
        for slot in self._slots:
            slot.container = agent.container
        # The driver passes the template's text, because the file may not exist on this host.
        template = template or agent_template(agent.prompt, self._slots[0].agent_prompt)
        kind = find_agent(agent.use)
        self._agents = [kind(policy, agent, template) for policy in policies(agent)]
        self._ground_truth = ground_truth
        self._timeout_seconds = environment.cell_timeout_seconds
        self._free: asyncio.Queue[Environment] = asyncio.Queue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    @ray.method(num_returns=3)
    async def rollout(
        self, request: RolloutRequest, policy: int
    ) -> tuple[Trajectory | None, RolloutSummary, Evaluated | None]:
        """Play one episode with the policy of this index.

        Returns: the trajectory (for the object store), its summary, and the environment's verdict if it evaluates.
        """
        set_log_context(request.group, request.rollout)
        slot = await self._free.get()
        started = time.time()
        try:
            world = GuardedWorld(await _opened(slot, request.task_id), slot.name, self._timeout_seconds)
            try:
                trajectory = await self._agents[policy].run(world, request)
                trajectory = replace(trajectory, termination=slot.termination(trajectory), scenario=world.task.scenario)
                evaluated = None
                if self._ground_truth and trajectory.ended is not EpisodeEnd.SERVER_ERROR:
                    evaluated = await evaluate(world, trajectory)
            finally:
                await self._keep(world, request)
                await world.close()
        except IsolationUnavailable:
            raise
        except EnvironmentCrashed as error:
            return None, _crashed(request, str(error), started), None
        finally:
            self._free.put_nowait(slot)
        # The summary covers the whole time the slot was held, including opening and closing the world.
        return trajectory, replace(summarise(trajectory), started_at=started, ended_at=time.time()), evaluated

    async def _keep(self, world: GuardedWorld, request: RolloutRequest) -> None:
        """Store the files of an episode; a failure is only logged."""
        if self._kept is None:
            return
        try:
            parts = [
                validate_file_name(part) for part in (*request.group.split("/"), f"{request.rollout}.{request.attempt}")
            ]
            folder = self._kept.joinpath(*parts)
            # Ray or a resumed run repeats an attempt after a crash: remove the files that the attempt had kept before.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if self._kept.parent.is_dir():
                await world.keep(folder)
                return
            with PrivateTempDir() as aside:
                await world.keep(aside / EPISODES)
                if (aside / EPISODES).exists():
                    raise FileNotFoundError(f"the run directory {self._kept.parent} does not exist on this node")
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            log.warning("files of rollout %s/%s cannot be kept: %s", request.group, request.rollout, said)

    async def up(self) -> None:
        """Return once this worker has started."""

    async def stop(self) -> None:
        """Stop all slots."""
        await asyncio.gather(*(slot.stop() for slot in self._slots))


def _open_as_many_files_as_may_be() -> None:
    """Raise the limit on open files: each agent program needs about ten, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _opened(slot: Environment, task_id: str) -> World:
    try:
        return await slot.open(task_id)
    except WorldError as error:
        # Name the host, because this error ends the run and maybe only this node lacks the data.
        raise WorldError(f"on host {platform.node()}: {error}") from None
    except ConfigError:
        raise
    except Exception as error:
        raise to_environment_crash(slot.name, task_id, error) from error


async def evaluate(world: World, trajectory: Trajectory) -> Evaluated:
    """Evaluate a finished rollout; if its agent crashed the world, it counts as failed.

    Raises: as `World.evaluate`, except WorldBroken; EnvironmentCrashed for a reward that is not finite.
    """
    if trajectory.ended is EpisodeEnd.CRASHED:
        verdict = WorldVerdict(success=False, failures=(f"the world crashed: {trajectory.error}",))
    else:
        try:
            verdict = await world.evaluate()
        except WorldBroken as error:
            verdict = WorldVerdict(success=False, failures=(f"the world crashed: {error}",))
    if verdict.reward is not None and not math.isfinite(verdict.reward):
        raise EnvironmentCrashed(
            f"task {trajectory.task_id}: the evaluator's reward is {verdict.reward}, expected a number"
        )
    evaluation = Evaluation(
        task_id=trajectory.task_id,
        run=trajectory.rollout,
        turns=len(trajectory.turns),
        ended=trajectory.ended,
        success=verdict.success,
        passed_tests=verdict.passed_tests,
        total_tests=verdict.total_tests,
        difficulty=verdict.difficulty,
        failures=verdict.failures,
        termination=trajectory.termination,
        scenario=world.task.scenario,
        reward=verdict.reward,
    )
    return Evaluated(evaluation=evaluation, saved=verdict.saved)


def rollout_starter(
    policies: Policies,
    *,
    agent: AgentConfig,
    environment: EnvironmentConfig,
    data: DataConfig,
    ground_truth: bool,
    run_name: str,
    kind: str = "RolloutWorker",
    kept: Path | None = None,
) -> Callable[[int], Any]:
    """Returns a function that starts the rollout worker with a given number.

    Args:
        kind: prefix of the workers' names, unique in a run.
        kept: a folder of the run directory, for files that worlds keep.

    Raises:
        ConfigError: the agent cannot use these policies.
    """
    if (check := getattr(find_agent(agent.use), "check", None)) is not None:
        # Check in the driver, because a worker that cannot start would be retried without an error.
        check(agent, policies)
    remote = ray.remote(RolloutWorkerActor)
    # Workers may have another working directory.
    data = data.model_copy(update={"root": data.root.resolve()})
    agent = agent.model_copy(update={"folder": agent.folder.resolve()})
    template = agent_template(agent.prompt, make_environment(environment, data).agent_prompt)
    slots = environment.slots_of_worker
    kept_policies = pin_argument(policies)

    def start(number: int) -> Any:
        return remote.options(
            name=f"{kind}-{number}@{run_name}",
            num_cpus=environment.cpus_per_worker,
            max_concurrency=2 * slots + 2,
            max_restarts=-1,
            # If a worker dies, Ray repeats the same attempt once before it counts as lost.
            max_task_retries=1,
        ).remote(
            f"{kind}-{number}",
            kept_policies,
            agent=agent,
            environment=environment,
            data=data,
            ground_truth=ground_truth,
            slots=slots,
            template=template,
            kept=kept,
        )

    return start


def _crashed(request: RolloutRequest, error: str, started: float) -> RolloutSummary:
    """The summary of a rollout that never began, or whose world crashed while closing."""
    return RolloutSummary(
        task_id=request.task_id,
        rollout=request.rollout,
        attempt=request.attempt,
        ended=EpisodeEnd.SERVER_ERROR,
        termination=Termination.SERVER_ERROR,
        error=error,
        turns=0,
        sampled_tokens=0,
        started_at=started,
        ended_at=time.time(),
    )
