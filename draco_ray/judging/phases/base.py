"""What a judge phase is: a template, what fills it, what a reply must hold, and where its value is recorded.

A phase is a class, one question of that phase an instance: ``judge.ask(Score(trajectory, rubric), context)``.
docs/extending/judge_phase.md adds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging import render
from draco_ray.judging.reply import Entry, Parsed
from draco_ray.judging.structured import JsonSchema, reply_schema
from draco_ray.records import Attribution, Criterion, ScoredCriterion, Trajectory


class PromptSet(Protocol):
    """Templates and the code of evidence (`draco_ray.judging.prompts.Prompts`)."""

    def code(self, identity: str) -> str:
        """The code of evidence about ``identity``."""
        ...

    def fill(self, phase: str, values: Mapping[str, object]) -> str:
        """The prompt of ``phase``."""
        ...


Rubric = tuple[Criterion, ...]
Scores = tuple[ScoredCriterion, ...]
Attributions = tuple[Attribution, ...]

ValueT = TypeVar("ValueT")


class Question(ABC, Generic[ValueT]):
    """One question to the judge; a subclass is a phase, and a frozen dataclass whose fields are what is asked about."""

    name: ClassVar[str]
    """Of the phase, in the archive, in tables and on the command line."""
    template: ClassVar[str]
    """File name of the prompt in a prompt set."""
    placeholders: ClassVar[frozenset[str]]
    """What the template may mention; `values` fills them."""
    required: ClassVar[tuple[frozenset[str], ...]]
    """What it must mention: at least one name of each group."""
    entry: ClassVar[type[Entry]]
    """What each entry of a reply holds."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """What the code of the prompt's evidence is derived from (`draco_ray.judging.render.evidence_code`)."""

    @abstractmethod
    def values(self, code: str) -> Mapping[str, object]:
        """What stands for each placeholder, with evidence marked by ``code``."""

    def shortened(self, level: int) -> Self:
        """The same question with less of what it shows (`draco_ray.judging.shortening`), 0 .. `LEVELS`."""
        return self

    def schema(self, template: str, config: JudgeConfig) -> JsonSchema:
        """The JSON schema that a reply to ``template`` is held to."""
        return reply_schema(self.entry, template)

    @property
    def members(self) -> Sequence[int]:
        """Rollouts that could be left out, where the question is about a whole group; else none."""
        return ()

    @property
    def doubtful(self) -> Sequence[int]:
        """The `members` to leave out first, should the judge refuse the question."""
        return ()

    def only(self, members: Sequence[int]) -> Self:
        """The same question about some of its `members`."""
        return self

    @abstractmethod
    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[ValueT]:
        """Read a reply.

        Args:
            text: the reply.
            config: limits.
            last: whether the judge is not asked again should the reply be refused.

        Raises:
            ReplyError: it cannot be used; the message is sent back to the judge.
        """

    @classmethod
    @abstractmethod
    def example(cls) -> Question[ValueT]:
        """A question about the group of `draco_ray.judging.example`, for ``draco prompts render``."""

    def prompt(self, prompts: PromptSet) -> str:
        """What the judge sees."""
        return prompts.fill(self.name, self.values(prompts.code(self.identity)))

    def settled(self) -> ValueT | None:
        """The answer where it takes no call; None where the judge is asked."""
        return None

    def votes(self, config: JudgeConfig) -> int:
        """Independent calls to make; if one of them fails so does the phase."""
        return 1

    def combine(self, votes: Sequence[ValueT]) -> ValueT:
        """One value out of those of all `votes`."""
        return votes[0]

    def scope(self, config: JudgeConfig, group: str) -> str:
        """What a kept reply is good for; empty: for whoever asks the same again, in this run or a resumed one."""
        return ""


def trajectory_values(trajectory: Trajectory, code: str) -> dict[str, object]:
    """What every phase may show that is about one rollout."""
    return {
        "agent_prompt": render.agent_prompt(trajectory.prompt, code),
        "task_input": render.task(trajectory.prompt, code),
        "agent_trajectory": render.agent_trajectory(trajectory, code),
    }


Phase = type[Question[Any]]
