"""What a trace is once its format is forgotten."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draco_ray.records import EpisodeEnd, Message

CHARACTERS_PER_TOKEN = 4
"""Where a trace does not say how many tokens a turn took."""
MAX_ID_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTurn:
    """One turn: a *step* or a gap (`draco_ray.records.is_step`)."""

    role: str
    """``assistant`` for the agent's own turns; anybody else's (``user``, ``tool``, a sub-agent's name) are gaps."""
    text: str
    """Everything said in it, the action included."""
    action: str | None = None
    """The tool calls, one after the other, or the code; None in a message or a gap."""
    observation: str | None = None
    """What came back; None where nothing did, or nothing is recorded."""
    tokens: int | None = None
    """Sampled tokens, where the trace says so."""
    message: bool = False
    """Whether it is a step without an action: a message that somebody received."""

    @property
    def is_step(self) -> bool:
        """Whether it acted, or is a message that somebody received."""
        return self.action is not None or self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run of an agent."""

    trace_id: str
    task_id: str
    """Traces of one task are judged together; empty: those with the same `task`."""
    prompt: tuple[Message, ...]
    """What the agent was told before its first turn, its tools included (role ``tools``)."""
    turns: tuple[TraceTurn, ...]
    format: str
    """One of `draco_ray.traces.readers.FORMATS`."""
    source: str
    """File, and line or place in it."""
    task: str = ""
    """What the agent was asked, in words; empty where the trace does not say."""
    ended: EpisodeEnd = EpisodeEnd.UNSTATED
    outcome: float | None = None
    """A reward or score that the trace itself carries. No judge is ever shown it."""
    notes: tuple[str, ...] = ()
    """What was out of the ordinary in it, and what was made of that."""
    training_step: int | None = None
    """Of a trace from a run directory."""

    @property
    def steps(self) -> tuple[TraceTurn, ...]:
        """The turns that act, with code or tool calls, in order."""
        return tuple(turn for turn in self.turns if turn.action is not None)

    @property
    def judged_steps(self) -> tuple[TraceTurn, ...]:
        """The steps that a judge may cite: turns that act, and messages that somebody received."""
        return tuple(turn for turn in self.turns if turn.is_step)

    @property
    def tokens_counted(self) -> bool:
        """Whether the trace says how many tokens each of its agent's turns took."""
        own = [turn for turn in self.turns if turn.role == "assistant"]
        return bool(own) and all(turn.tokens for turn in own)

    def tokens(self, turn: TraceTurn) -> int:
        """Sampled tokens of a turn: as the trace counts them if it counts all, else by its length; 0 for others'."""
        if turn.role != "assistant":
            return 0
        if self.tokens_counted:
            return turn.tokens or 0
        return max(1, -(-len(turn.text) // CHARACTERS_PER_TOKEN))

    @property
    def characters(self) -> int:
        """The number of characters that a judge reads of it."""
        turns = sum(len(turn.text) + len(turn.observation or "") for turn in self.turns)
        return turns + sum(len(message.content) for message in self.prompt)

    @property
    def task_digest(self) -> str:
        """8 hexadecimal digits that are equal for equal tasks; empty where the trace states none."""
        return hashlib.sha256(self.task.encode("utf-8", "backslashreplace")).hexdigest()[:8] if self.task else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is kept in memory of a trace."""

    trace_id: str
    format: str
    source: str
    steps: int
    turns: int
    characters: int
    prompt_characters: int
    outcome: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGroup:
    """The traces of one task. They are read when asked for, so that thousands of groups fit in memory."""

    task_id: str
    summaries: tuple[Summary, ...]
    """One a trace, in the order of `traces`."""
    read: Callable[[], Sequence[Trace]] = field(repr=False, compare=False)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces, read anew each time."""
        return tuple(self.read())

    def __len__(self) -> int:
        return len(self.summaries)


def identifier(value: object) -> str:
    """A task's or trace's id as text that can be printed and is not endless."""
    text = clean(str(value)).strip()
    text = "".join(character if character.isprintable() else " " for character in text)
    if len(text) <= MAX_ID_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: MAX_ID_CHARACTERS - 9]}-{digest}"


def clean(text: str) -> str:
    """``text`` without halves of surrogate pairs, which JSON may hold and no file can."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
