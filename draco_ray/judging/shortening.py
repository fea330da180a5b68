"""The rule by which a prompt is cut where a judge could not read it all.

First what came back is shortened, then what was said and done, then the agent's prompt: all such texts to one length,
the longest with which the prompt fits, found by bisection. Head and tail stay, and a line between them says how much is
left out. No step is ever left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from draco_ray.records import Message

LENGTHS = tuple(round(100 * 1.02**power) for power in range(582, -1, -1))
"""Characters of one text, from 10 million to 100 by 2 % each: bisection takes some ten renderings."""
LEVELS = 3 * len(LENGTHS)
"""How far `shortened` can go; at level 0 everything is whole."""


class Shown(Protocol):
    """A trajectory or a trace; a dataclass."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What the agent was told."""
        ...

    @property
    def turns(self) -> tuple[Any, ...]:
        """Each with ``text``, ``action`` and ``observation``."""
        ...


ShownT = TypeVar("ShownT", bound=Shown)


def shortened(shown: ShownT, level: int) -> ShownT:
    """A trajectory or a trace as the rule has it at ``level``, 0 .. `LEVELS`."""
    observation, said = (_length(level - stage * len(LENGTHS)) for stage in range(2))
    if observation is None:
        return shown
    turns = (replace(turn, observation=turn.observation and cut(turn.observation, observation)) for turn in shown.turns)
    if said is not None:
        turns = (_shorter_turn(turn, said) for turn in turns)
    changed: Any = replace(shown, turns=tuple(turns), prompt=shortened_prompt(shown.prompt, level))  # type: ignore[type-var]
    found: ShownT = changed
    return found


def shortened_prompt(prompt: tuple[Message, ...], level: int) -> tuple[Message, ...]:
    """What the agent was told, at ``level``."""
    length = _length(level - 2 * len(LENGTHS))
    if length is None:
        return prompt
    return tuple(Message(role=each.role, content=cut(each.content, length)) for each in prompt)


def cut(text: str, length: int) -> str:
    """Head and tail of a text that is longer than ``length``, and how much is left out between them.

    >>> cut("a" * 300, 100).count("a")
    102
    """
    if len(text) <= length + 60:
        return text
    head = length * 2 // 3
    return f"{text[:head]}\n[... {len(text) - length:,} characters left out ...]\n{text[len(text) - (length - head) :]}"


def _length(level: int) -> int | None:
    """The length of the texts of one stage; None before it begins."""
    return None if level < 1 else LENGTHS[min(level, len(LENGTHS)) - 1]


def _shorter_turn(turn: Any, length: int) -> Any:
    # An empty code block is an action too.
    if not turn.action:
        return replace(turn, text=cut(turn.text, length))
    # The last place is what was executed. Searched backwards: `rpartition` takes quadratic time.
    after, found, before = (part[::-1] for part in turn.text[::-1].partition(turn.action[::-1]))
    if not found:
        before, after = turn.text, ""
    action = cut(turn.action, length)
    return replace(turn, text=f"{cut(before, length)}{action}{cut(after, length)}", action=action)
