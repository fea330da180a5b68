"""An environment of verifiers that plays a task several times and judges these attempts together, in ``finalize``.

PYTHONPATH=examples/trainers/verifiers vf-eval TASKSET --env.id draco-group --env.n 4 --env.judge openai/gpt-5.4

Each attempt gets the reward ``draco``, its steps' advantages as ``info["draco"]``, and, where verifiers' train client
records tokens, an advantage for each token. Rewards of the task itself stay.
"""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.envs.best_of_n import BestOfNEnv, BestOfNEnvConfig

from draco_ray.adapters.conversations import Judging
from draco_ray.adapters.verifiers import score_group

__all__ = ["DracoGroup"]


class DracoGroupConfig(BestOfNEnvConfig):
    """The attempts of best-of-n, and their judge."""

    judge: str = "openai/gpt-5.4"
    """LiteLLM's name of the judge."""
    api_base: str | None = None
    budget: float | None = None
    """Budget in dollars, for all groups of this process."""


class DracoGroup(vf.Env[DracoGroupConfig]):
    """Best-of-n's attempts, judged as a group."""

    run = BestOfNEnv.run

    async def start(self) -> None:
        """Check the judge's settings before anything is played."""
        config = self.config
        self._judging = Judging(config.judge, api_base=config.api_base, budget=config.budget)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Judge the group; an attempt that could not be judged has no reward of this name."""
        for trace, judged in zip(episode.traces, await score_group(episode.traces, self._judging), strict=True):
            if judged is not None:
                trace.info["draco"] = {"step_advantages": [step.advantage for step in judged.steps]}
