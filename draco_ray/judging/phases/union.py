"""Union: one rubric for the group out of every proposal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging import render
from draco_ray.judging.phases.base import Question, Rubric
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.reply import CriterionEntry, Parsed, parse_criteria
from draco_ray.judging.shortening import shortened, shorter_prompt
from draco_ray.judging.structured import JsonSchema, reply_schema
from draco_ray.records import Criterion, Message, Trajectory


@dataclass(frozen=True, slots=True)
class Union(Question[Rubric]):
    """Merge every candidate into the one rubric of the group; empty when no criterion tells its rollouts apart.

    No candidates: an empty rubric, without a call.
    """

    messages: Sequence[Message]
    """The agent's prompt."""
    candidates: Sequence[Criterion]
    trajectories: Sequence[Trajectory]
    """Of the group, at least one."""
    doubtful: Sequence[int] = field(default=(), kw_only=True)
    """Rollouts whose own stage2 call failed: the first to be left out, should the judge refuse the union."""

    name = "union"
    template = "union_rubrics.txt"
    placeholders = frozenset({"agent_prompt", "task", "candidate_rubrics", "group_trajectories"})
    required = (frozenset({"candidate_rubrics"}), frozenset({"group_trajectories"}))
    entry = CriterionEntry

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        return replace(
            self,
            messages=shorter_prompt(tuple(self.messages), level),
            trajectories=[shortened(each, level) for each in self.trajectories],
        )

    @property
    def members(self) -> Sequence[int]:
        """See `Question`."""
        return [each.rollout for each in self.trajectories]

    def only(self, members: Sequence[int]) -> Self:
        """See `Question`: the other rollouts' proposals are left out with them."""
        others = {f"{Stage2.name}/{each}" for each in self.members if each not in members}
        return replace(
            self,
            candidates=[each for each in self.candidates if each.source not in others],
            trajectories=[each for each in self.trajectories if each.rollout in members],
        )

    @property
    def identity(self) -> str:
        """The group."""
        return self.trajectories[0].group

    def values(self, code: str) -> Mapping[str, object]:
        """The task, every proposal and every rollout."""
        return {
            "agent_prompt": render.agent_prompt(self.messages, code),
            "task": render.task(self.messages, code),
            "candidate_rubrics": render.candidate_rubrics(self.candidates),
            "group_trajectories": render.group_trajectories(self.trajectories, code),
        }

    def settled(self) -> Rubric | None:
        """An empty rubric where nothing was proposed."""
        return None if self.candidates else ()

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """Up to ``judge.max_union_criteria`` criteria."""
        return reply_schema(self.entry, template, most=config.max_union_criteria)

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Rubric]:
        """Read up to ``judge.max_union_criteria`` criteria."""
        return parse_criteria(text, limit=config.max_union_criteria, source=self.name, last=last)

    @classmethod
    def example(cls) -> Union:
        """A question about two rollouts of the example."""
        from draco_ray.judging.example import PROMPT, RUBRIC, example_trajectory

        return cls(PROMPT, RUBRIC, [example_trajectory(), example_trajectory(1)])
