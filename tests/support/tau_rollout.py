"""A τ-bench training rollout with a scripted policy: the real environment and agent program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.benchmarks.tau.environment import TauEnvironment
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.environments.base import GuardedWorld, make_environment
from draco_ray.records import Trajectory
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.program_agent import ProgramAgent
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.worker import Evaluated, evaluate
from tests.support.endpoint_episode import CHAT, ScriptedSampler

USER_KEY = "sk-customer-0123456789"


@dataclass
class Played:
    """One rollout, and the folder with its kept files."""

    trajectory: Trajectory
    evaluated: Evaluated | None
    kept: Path


def tau_config(user_base: str, *overrides: str) -> DracoConfig:
    """The preset with the user simulator and the judge at ``user_base``."""
    user = f"environment.options.user={{model: openai/SCRIPTED, api_base: '{user_base}'}}"
    judge = f"environment.options.judge={{model: openai/SCRIPTED, api_base: '{user_base}'}}"
    return load_config("tau:retail", [user, judge, "agent.thinking=false", *overrides])


def tau_environment(config: DracoConfig, *, ground_truth: bool = False) -> TauEnvironment:
    made = make_environment(config.environment, config.data, ground_truth=ground_truth)
    assert isinstance(made, TauEnvironment)
    return made


async def play_tau(
    config: DracoConfig, task_id: str, lines: list[str], kept: Path, *, ground_truth: bool = False
) -> Played:
    """Play one episode as a rollout worker does; the policy says ``lines``."""
    environment = tau_environment(config, ground_truth=ground_truth)
    sampler: Any = ScriptedSampler(lines)
    agent = ProgramAgent(TokenPolicy(sampler, CHAT, config.agent), config.agent, "{task_description}")
    world = GuardedWorld(await environment.open(task_id), "tau", 60)
    request = RolloutRequest(task_id=task_id, group="step1/g", rollout=0, attempt=0, seed=1)
    try:
        trajectory = await agent.run(world, request)
        evaluated = await evaluate(world, trajectory) if ground_truth else None
        await world.keep(kept)
    finally:
        await world.close()
    return Played(trajectory, evaluated, kept)
