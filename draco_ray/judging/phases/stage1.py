"""Stage 1: criteria from the agent's prompt alone, before anybody acted on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging import render
from draco_ray.judging.phases.base import Question, Rubric
from draco_ray.judging.reply import CriterionEntry, Parsed, parse_criteria
from draco_ray.judging.shortening import shorter_prompt
from draco_ray.judging.structured import JsonSchema, reply_schema
from draco_ray.records import Message


@dataclass(frozen=True, slots=True)
class Stage1(Question[Rubric]):
    """Propose criteria for the task of ``messages``, the agent's prompt; at least one, or the phase has failed."""

    messages: Sequence[Message]

    name = "stage1"
    template = "generate_rubrics.txt"
    placeholders = frozenset({"agent_prompt", "task"})
    required = (frozenset({"agent_prompt"}),)
    entry = CriterionEntry

    def shortened(self, level: int) -> Self:
        """See `Question`."""
        return replace(self, messages=shorter_prompt(tuple(self.messages), level))

    @property
    def identity(self) -> str:
        """The task: the same prompt whenever it comes again."""
        return f"{self.name} {[(message.role, message.content) for message in self.messages]}"

    def values(self, code: str) -> Mapping[str, object]:
        """The agent's prompt, and its user part."""
        return {"agent_prompt": render.agent_prompt(self.messages, code), "task": render.task(self.messages, code)}

    def scope(self, config: JudgeConfig, group: str) -> str:
        """The whole run, or this group where ``judge.stage1_across_epochs`` is off."""
        return "" if config.stage1_across_epochs else group

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """One to ``judge.max_stage1_criteria`` criteria."""
        return reply_schema(self.entry, template, least=1, most=config.max_stage1_criteria)

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Rubric]:
        """Read up to ``judge.max_stage1_criteria`` criteria."""
        return parse_criteria(text, limit=config.max_stage1_criteria, source=self.name, least=1, last=last)

    @classmethod
    def example(cls) -> Stage1:
        """A question about the example's task."""
        from draco_ray.judging.example import PROMPT

        return cls(PROMPT)
