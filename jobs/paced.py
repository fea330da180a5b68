"""Stand-ins of a given speed for what needs GPUs: a policy engine and a learner. Benchmarks of the pipeline use them.

They compute nothing; the time they take is a wait. Everything around them is real: `PacedEngine` says scripts of the
sandbox's families in token ids to the real agent loop in real AppWorld worlds, and `PacedLearner` reads the samples
that came of them out of the object store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from critical_path import LearnerTask

from draco_ray.engine.actor import EngineProcess
from draco_ray.engine.sampler import Sample
from draco_ray.learner.base import UpdateMetrics
from draco_ray.records import TrainingSample

Script = tuple[tuple[int, ...], ...]
"""The turns of a rollout, each with its end-of-turn token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repertoire:
    """What a `PacedEngine` can say."""

    scripts: Mapping[tuple[int, ...], tuple[Script, ...]]
    """Token ids of a task's prompt -> its scripts. They differ from their first turn on, so that an episode's history
    tells which one it follows."""
    end_of_turn_id: int


class PacedEngine:
    """Says prepared scripts at a given speed, with the interface of `draco_ray.engine.actor`'s actor.

    Which of a task's scripts an episode follows is drawn with the seed of its first turn; each turn takes its number of
    tokens divided by the speed, however many are sampled side by side, as on a GPU that is not full.
    """

    def __init__(self, repertoire: Repertoire, tokens_per_second: float) -> None:
        self._repertoire = repertoire
        self._tokens_per_second = tokens_per_second

    async def look(self) -> EngineProcess:
        """Report one process that serves."""
        return EngineProcess(identity="paced", node=ray.get_runtime_context().get_node_id(), serves=True)

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""

    async def serve(self) -> None:
        """Do nothing: the engine always serves."""

    async def sample(
        self, token_ids: list[int], max_tokens: int, seed: int | None = None, temperature: float | None = None
    ) -> Sample:
        """The next turn of the episode's script, cut at ``max_tokens``.

        Raises: ValueError for an episode that follows no script.
        """
        turn = self._next_turn(tuple(token_ids), seed or 0)
        said = list(turn[:max_tokens])
        await asyncio.sleep(len(said) / self._tokens_per_second)
        return Sample(
            token_ids=said,
            logprobs=[-1.0] * len(said),
            finish_reason="stop" if len(said) == len(turn) else "length",
            policy_version=0,
        )

    async def set_speed(self, tokens_per_second: float) -> None:
        """Set the speed from the next turn on."""
        self._tokens_per_second = tokens_per_second

    async def stop(self) -> None:
        """Do nothing: there is nothing to end."""

    def _next_turn(self, history: tuple[int, ...], seed: int) -> tuple[int, ...]:
        for prompt, scripts in self._repertoire.scripts.items():
            if history[: len(prompt)] != prompt:
                continue
            said = history[len(prompt) :]
            if not said:
                return scripts[seed % len(scripts)][0]
            for script in scripts:
                if said[: len(script[0])] == script[0]:
                    # A turn and what the environment answered end with the same token.
                    return script[said.count(self._repertoire.end_of_turn_id) // 2]
        raise ValueError(f"no prepared script begins with these {len(history)} tokens")


def start_paced_engine(repertoire: Repertoire, tokens_per_second: float, run_name: str) -> Any:
    """The actor, under the name by which the run's `draco_ray.engine.actor.EngineClient` 0 looks for it."""
    remote = ray.remote(PacedEngine)
    return remote.options(name=f"PolicyEngine-0@{run_name}", num_cpus=0, max_concurrency=10_000).remote(
        repertoire, tokens_per_second
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPace:
    """How long a `PacedLearner` takes."""

    tokens_per_second: float
    """Sampled tokens whose gradients are accumulated in a second."""
    remember_share: float = 0.25
    """Time for old log-probs relative to gradients of the same samples: one forward pass, compared with two (the second
    one without the adapter) and a backward pass of twice the cost."""
    update_seconds: float = 0.1
    """Seconds of an optimizer step."""


class PacedLearnerActor:
    """Does one task at a time, in the order of the calls; each takes the time that its pace says."""

    def __init__(self, pace: LearnerPace) -> None:
        self._pace = pace
        self._turn = asyncio.Lock()
        self._done: list[LearnerTask] = []
        self._samples = 0
        self._tokens = 0

    async def accumulate(self, group: list[TrainingSample]) -> dict[str, float]:
        """Take as long as gradients would."""
        tokens = _valid_tokens(group)
        await self._wait("accumulate", _name(group), tokens / self._pace.tokens_per_second)
        self._samples += len(group)
        self._tokens += tokens
        return {"valid_tokens": float(tokens)}

    async def remember(self, group: list[TrainingSample]) -> None:
        """Take as long as old log-probs would."""
        seconds = self._pace.remember_share * _valid_tokens(group) / self._pace.tokens_per_second
        await self._wait("remember", _name(group), seconds)

    async def step(self) -> UpdateMetrics:
        """Take as long as the optimizer would."""
        await self._wait("update", "", self._pace.update_seconds)
        samples, tokens, self._samples, self._tokens = self._samples, self._tokens, 0, 0
        return UpdateMetrics(
            update=sum(task.kind == "update" for task in self._done),
            skipped=None,
            grad_norm=0.0,
            samples=samples,
            valid_tokens=tokens,
            computed_tokens=tokens,
            policy_loss=0.0,
            kl=0.0,
            entropy=0.0,
            clip_fraction=0.0,
            dual_clip_fraction=0.0,
            engine_gap=0.0,
            learning_rate=0.0,
        )

    async def set_pace(self, pace: LearnerPace) -> None:
        """Set the pace from the next task on."""
        self._pace = pace

    async def done(self) -> list[LearnerTask]:
        """The tasks done since the last call."""
        done, self._done = self._done, []
        return done

    async def _wait(self, kind: str, group: str, seconds: float) -> None:
        async with self._turn:
            started = time.time()
            await asyncio.sleep(seconds)
            self._done.append(LearnerTask(kind=kind, group=group, started_at=started, ended_at=time.time()))


class PacedLearner:
    """The driver's handle: a `draco_ray.learner.base.GroupLearner`."""

    def __init__(self, pace: LearnerPace, run_name: str) -> None:
        remote = ray.remote(PacedLearnerActor)
        self._actor: Any = remote.options(name=f"PacedLearner@{run_name}", num_cpus=0, max_concurrency=1000).remote(
            pace
        )

    async def accumulate(self, group: ray.ObjectRef[Any]) -> dict[str, float]:
        """See `PacedLearnerActor`."""
        return await self._actor.accumulate.remote(group)

    async def remember_old_logprobs(self, group: ray.ObjectRef[Any]) -> None:
        """See `PacedLearnerActor`."""
        await self._actor.remember.remote(group)

    async def step(self) -> UpdateMetrics:
        """See `PacedLearnerActor`."""
        return await self._actor.step.remote()

    async def set_pace(self, pace: LearnerPace) -> None:
        """See `PacedLearnerActor`."""
        await self._actor.set_pace.remote(pace)

    async def done(self) -> list[LearnerTask]:
        """The learner's tasks done since the last call."""
        return await self._actor.done.remote()

    def stop(self) -> None:
        """End its process."""
        ray.kill(self._actor)


def _valid_tokens(group: Sequence[TrainingSample]) -> int:
    return sum(int(sample.loss_mask_T.sum()) for sample in group)


def _name(group: Sequence[TrainingSample]) -> str:
    return group[0].group
