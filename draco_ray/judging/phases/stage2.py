"""Stage 2: criteria that one rollout reveals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging import render
from draco_ray.judging.phases.base import Question, Rubric, trajectory_values
from draco_ray.judging.reply import CriterionEntry, Parsed, parse_criteria
from draco_ray.judging.shortening import shortened
from draco_ray.judging.structured import JsonSchema, reply_schema
from draco_ray.records import Criterion, Trajectory


@dataclass(frozen=True, slots=True)
class Stage2(Question[Rubric]):
    """Add the criteria that a rollout reveals and ``existing`` (stage 1's) does not cover; possibly none."""

    trajectory: Trajectory
    existing: Sequence[Criterion]

    name = "stage2"
    template = "generate_rubrics_from_trajectory.txt"
    placeholders = frozenset({"agent_prompt", "task_input", "agent_trajectory", "existing_rubrics"})
    required = (frozenset({"agent_trajectory"}), frozenset({"existing_rubrics"}))
    entry = CriterionEntry

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        return replace(self, trajectory=shortened(self.trajectory, level))

    @property
    def identity(self) -> str:
        """The group, whose prompts begin alike."""
        return self.trajectory.group

    def values(self, code: str) -> Mapping[str, object]:
        """The rollout, and the criteria there are."""
        return trajectory_values(self.trajectory, code) | {"existing_rubrics": render.existing_rubrics(self.existing)}

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """Up to ``judge.max_stage2_criteria`` criteria."""
        return reply_schema(self.entry, template, most=config.max_stage2_criteria)

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Rubric]:
        """Read up to ``judge.max_stage2_criteria`` criteria whose titles are new."""
        return parse_criteria(
            text,
            limit=config.max_stage2_criteria,
            source=f"{self.name}/{self.trajectory.rollout}",
            taken=self.existing,
            last=last,
        )

    @classmethod
    def example(cls) -> Stage2:
        """A question about the example's first rollout."""
        from draco_ray.judging.example import RUBRIC, example_trajectory

        return cls(example_trajectory(), RUBRIC[:1])
