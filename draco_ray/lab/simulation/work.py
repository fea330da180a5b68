"""What a simulated step has to do, how fast each part is, and how many there are of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from draco_ray.judging.phases import PHASES

WAITS = {
    "slots": "waiting for a slot",
    "engines": "slowed by other rollouts",
    "judge workers": "waiting for a judge worker",
    "judge limits": "waiting for the judge's limits",
    "learner": "waiting for the learner",
}
"""Resource -> the part of a step's path that more of it would shorten."""
PARTS = (
    *("between steps", WAITS["slots"], "opening worlds", "generating", WAITS["engines"], "environment", "hand-over"),
    *(WAITS["judge workers"], WAITS["judge limits"], *PHASES),
    *(WAITS["learner"], "learning", "sync and checkpoint"),
)
"""What a step's longest path is made of, in the order of the data flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWork:
    """A judge call as it was recorded."""

    seconds: float
    """From the moment it is sent until its reply; of all its requests together."""
    requests: int = 1
    """0 where the reply came from the cache."""
    input_tokens: int = 0
    output_tokens: int = 0
    dollars: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """A judge phase."""

    rounds: tuple[tuple[CallWork, ...], ...] = ()
    """One after the other; the calls of a round side by side."""
    overhead: float = 0.0
    """Seconds at the worker beside its calls."""
    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWork:
    """A turn of a rollout."""

    generating: float
    """Seconds on an engine of its own."""
    executing: float = 0.0
    """Seconds in the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWork:
    """A rollout."""

    number: int
    turns: tuple[TurnWork, ...] = ()
    opening: float = 0.0
    """Seconds for which it holds its slot without a turn."""
    tokens: int = 0
    """That the learner computes."""
    sampled: int = 0
    """Of them, those that it takes log-probs of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """A task's rollouts and what the judge is asked about them."""

    rollouts: tuple[RolloutWork, ...]
    phases: Mapping[tuple[str, int | None], PhaseWork] = field(default_factory=dict)
    """(phase, rollout) -> its work; the rollout is None for what is about the whole group."""

    @property
    def calls(self) -> list[CallWork]:
        """Every judge call of it."""
        return [call for phase in self.phases.values() for calls in phase.rounds for call in calls]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """How long a turn takes on an engine: what it takes alone, times `slowdown`."""

    seconds_per_turn: float = 0.0
    seconds_per_sampled_token: float = 0.0
    seconds_per_read_token: float = 0.0
    """Of a prompt, of an observation."""
    slowdown_per_sequence: float = 0.0
    """By how much one more sequence beside it lengthens a turn, as a share of what it takes alone."""

    def alone(self, sampled: int, read: int) -> float:
        """Seconds of a turn with the engine to itself."""
        tokens = sampled * self.seconds_per_sampled_token + read * self.seconds_per_read_token
        return self.seconds_per_turn + tokens

    def slowdown(self, running: int) -> float:
        """Factor on a turn's seconds while so many sequences run; 1 for one."""
        return 1.0 + self.slowdown_per_sequence * max(0, running - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpeed:
    """How long the learner takes."""

    seconds_per_token: float = 0.0
    """Of gradients."""
    seconds_per_sampled_token: float = 0.0
    """The same, beyond what every token takes."""
    remember_share: float = 0.25
    """Time of old log-probs in units of the gradients' of the same tokens."""
    update_seconds: float = 0.0

    def gradients(self, rollouts: Iterable[RolloutWork]) -> float:
        """Seconds of a group's gradients."""
        return sum(
            rollout.tokens * self.seconds_per_token + rollout.sampled * self.seconds_per_sampled_token
            for rollout in rollouts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Everything of a run that is the same in every step."""

    engine: EngineSpeed = EngineSpeed()
    learner: LearnerSpeed = LearnerSpeed()
    handover: Mapping[str, float] = field(default_factory=dict)
    """Stage -> seconds from the end of what it waits for to its start: calls between processes."""
    head: float = 0.0
    """Seconds from a step's beginning to its first rollout's."""
    tail: float = 0.0
    """Seconds from the last update to the step's end: sync, canary, checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How many there are of each thing."""

    slots: int
    engines: int = 1
    sequences: int = 64
    """That an engine decodes at one time."""
    judge_workers: int = 1
    calls_per_worker: int = 32
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    learners: float = 1.0
    """Learner workers, in units of those of the recorded run."""
    minibatch: int = 0
    """Groups an update; 0: all of the step's."""
    staleness: int = 0
    colocate: bool = False
    group_size: int = 6
    reward: str = "rubric"
    rubric: str = "dynamic"
