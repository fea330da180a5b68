"""Small records for the driver; large ones stay in the object store and are passed by reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draco_ray.records import EpisodeEnd, Termination, Usage


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ."""
    return len(rewards) > 1 and max(rewards) > min(rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """Summary of a finished rollout."""

    task_id: str
    rollout: int
    attempt: int
    ended: EpisodeEnd
    termination: Termination
    error: str | None
    turns: int
    sampled_tokens: int
    started_at: float
    ended_at: float
    """`started_at` and `ended_at`: when the rollout took and released its environment slot, in Unix seconds."""
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSummary:
    """Summary of a finished judge phase."""

    phase: str
    task_id: str
    rollout: int | None
    error: str | None
    criteria: int
    """Number of criteria proposed, merged, scored or attributed."""
    calls: int
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    dollars: float
    started_at: float
    ended_at: float
    passed: int = 0
    applicable: int = 0
    """`passed` and `applicable`: numbers of passes and of applicable verdicts of a scored rollout."""
    prompt_cut: bool = False
    """Whether the prompt was truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSummary:
    """Rewards of a group after dropout, before credit."""

    criteria: int
    surviving: tuple[int, ...]
    """Indices of the criteria that some rollout failed."""
    unanimous: tuple[int, ...]
    """Rollouts whose applicable verdicts on surviving criteria are all equal, or that have none."""
    scored: tuple[int, ...]
    """Rollouts that have a reward."""
    rewards: tuple[float, ...]
    """Reward R_i of each scored rollout."""
    applicable: int
    passed: int
    """`applicable` and `passed`: numbers of applicable verdicts and of passes, over all criteria and rollouts."""

    @property
    def has_spread(self) -> bool:
        """Whether the rewards differ, so that advantages are not all 0."""
        return has_spread(self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSummary:
    """Summary of a group's advantages."""

    rollouts: tuple[int, ...]
    rewards: tuple[float, ...]
    """Reward R_i of each rollout."""
    inert: int
    fallbacks: dict[str, int]
    active_spreads: tuple[float, ...]
    """Standard deviation of the step qualities Q_j of each active rollout, i.e. one whose credit is not inert."""
    inert_spreads: tuple[float, ...]
    """Standard deviation of the step qualities Q_j of each inert rollout with a cited step."""
