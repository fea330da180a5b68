"""A taskset for the tests of `environment.use: verifiers`; verifiers' own Python reads it.

Its episodes are of the kind that the task's name says.
"""

from __future__ import annotations

import asyncio
import os

import verifiers.v1 as vf
from talk import TalkConfig

__all__ = ["Kinds", "KindsEnv"]

KINDS = ("talk", "twice", "raise", "hang", "silent", "judged", "unrewarded", "die", "untold", "lacks")


class KindData(vf.TaskData):
    """Data of a task, with an answer that the policy must not see."""

    answer: str = "SECRET-ANSWER"


class KindTask(vf.Task[KindData]):
    """A task with a reward of half a point."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Half a point; in a task without a reward, the run fails instead."""
        if self.data.name == "unrewarded":
            raise RuntimeError("the reward function has a bug")
        return 0.5


class KindConfig(vf.EnvConfig):
    """A player, and another agent that is not trained."""

    player: vf.AgentConfig = vf.AgentConfig(harness=TalkConfig())
    other: vf.AgentConfig = vf.AgentConfig(harness=TalkConfig())


class KindsEnv(vf.Env[KindConfig]):
    """Plays the kind of episode that the task's name says."""

    async def setup(self, agents):  # type: ignore[no-untyped-def]
        """Do not train the other agent."""
        agents.other.trainable = False

    async def run(self, task, agents):  # type: ignore[no-untyped-def]
        """Run one episode."""
        kind = task.data.name
        if kind == "silent":
            raise RuntimeError("nothing begins")
        if kind == "lacks":
            import a_package_that_nobody_has  # noqa: F401
        if kind == "judged":
            await agents.other.run(task)
        async with agents.player.interaction(task) as talk:
            await talk.turn()
            if kind == "raise":
                raise ValueError("the environment cannot read that move")
            if kind == "hang":
                await asyncio.sleep(1000)
            if kind == "die":
                os._exit(3)
            if kind != "unrewarded":
                await talk.turn("Go on.")
        if kind == "twice":
            await agents.player.run(task)


class Kinds(vf.Taskset[KindTask]):
    """A task of each kind."""

    def load(self):  # type: ignore[no-untyped-def]
        """Return all tasks."""
        for kind in KINDS:
            prompt = None if kind == "untold" else f"Do {kind}."
            yield KindTask(KindData(name=kind, prompt=prompt, system_prompt="Be brief."), self.config.task)
