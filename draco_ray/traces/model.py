"""Traces, independent of the format they were read from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draco_ray.records import EpisodeEnd, Message, Turn

CHARACTERS_PER_TOKEN = 4
"""Characters per token, to estimate the tokens of turns without a token count."""
MAX_ID_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run of an agent."""

    trace_id: str
    task_id: str
    """Traces with the same task id are judged together; if empty, those with the same `task`."""
    prompt: tuple[Message, ...]
    """Messages before the agent's first turn, and its tools (role ``tools``)."""
    turns: tuple[Turn, ...]
    format: str
    """One of `draco_ray.traces.readers.FORMATS`."""
    source: str
    """File, and line or position in it."""
    task: str = ""
    """The agent's task in words; empty if the trace does not state it."""
    ended: EpisodeEnd = EpisodeEnd.UNSTATED
    outcome: float | None = None
    """A reward or score in the trace itself. It is never shown to a judge."""
    notes: tuple[str, ...] = ()
    """Irregularities in the trace, and how they were handled."""
    training_step: int | None = None
    """Training step, for a trace from a run directory."""

    @property
    def steps(self) -> tuple[Turn, ...]:
        """The turns that are steps, in order: those that act, and messages that somebody received."""
        return tuple(turn for turn in self.turns if turn.is_step)

    @property
    def tokens_counted(self) -> bool:
        """Whether the trace states the tokens of every turn of its agent."""
        own = [turn for turn in self.turns if turn.role == "assistant"]
        return bool(own) and all(turn.tokens for turn in own)

    def tokens(self, turn: Turn) -> int:
        """Sampled tokens of a turn: counted if the trace counts all turns, else estimated; 0 for other speakers."""
        if turn.role != "assistant":
            return 0
        if self.tokens_counted:
            return turn.tokens or 0
        return max(1, -(-len(turn.text) // CHARACTERS_PER_TOKEN))

    @property
    def characters(self) -> int:
        """Number of characters of the trace that a judge reads."""
        turns = sum(len(turn.text) + len(turn.observation or "") for turn in self.turns)
        return turns + sum(len(message.content) for message in self.prompt)

    @property
    def task_digest(self) -> str:
        """8 hexadecimal digits that are equal for equal tasks; empty if the trace states no task."""
        return hashlib.sha256(self.task.encode("utf-8", "backslashreplace")).hexdigest()[:8] if self.task else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """The part of a trace that stays in memory."""

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
    """The traces of one task. They are read on demand, so that thousands of groups fit in memory."""

    task_id: str
    summaries: tuple[TraceSummary, ...]
    """One summary per trace, in the order of `traces`."""
    read: Callable[[], Sequence[Trace]] = field(repr=False, compare=False)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces, read from disk at each call."""
        return tuple(self.read())

    def __len__(self) -> int:
        return len(self.summaries)


def printable_id(value: object) -> str:
    """The id of a task or trace as printable text of limited length."""
    text = escape_surrogates(str(value)).strip()
    text = "".join(character if character.isprintable() else " " for character in text)
    if len(text) <= MAX_ID_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: MAX_ID_CHARACTERS - 9]}-{digest}"


def escape_surrogates(text: str) -> str:
    """``text`` without lone surrogates, which JSON may contain but UTF-8 files cannot."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
