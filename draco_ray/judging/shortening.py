"""How prompts are truncated to a judge's context.

First outputs are truncated, then turns, then the agent's prompt. All texts of one kind get the same length: the longest
with which the prompt fits, found by bisection. Head and tail stay, and a line between them says how much is left out.
No step is ever left out.
"""

from __future__ import annotations

from dataclasses import replace

from draco_ray.records import Message, Trajectory, Turn

LENGTHS = tuple(round(100 * 1.02**power) for power in range(582, -1, -1))
"""Lengths of one text in characters, from 10 million to 100 in steps of 2 %; bisection takes about ten renderings."""
MAX_LEVEL = 3 * len(LENGTHS)
"""Number of truncation levels; at level 0 nothing is truncated."""


def shortened(trajectory: Trajectory, level: int) -> Trajectory:
    """The trajectory truncated to ``level``, 0 .. `MAX_LEVEL`."""
    observation, said = (_length(level - stage * len(LENGTHS)) for stage in range(2))
    if observation is None:
        return trajectory
    turns = tuple(
        replace(turn, observation=turn.observation and cut(turn.observation, observation)) for turn in trajectory.turns
    )
    if said is not None:
        turns = tuple(_shorter_turn(turn, said) for turn in turns)
    return replace(trajectory, turns=turns, prompt=shortened_prompt(trajectory.prompt, level))


def shortened_prompt(prompt: tuple[Message, ...], level: int) -> tuple[Message, ...]:
    """The agent's prompt truncated to ``level``."""
    length = _length(level - 2 * len(LENGTHS))
    if length is None:
        return prompt
    return tuple(Message(role=each.role, content=cut(each.content, length)) for each in prompt)


def most_candidates(level: int) -> int | None:
    """Maximum number of candidate criteria in a union prompt that is truncated to ``level``; None: no maximum.

    A maximum applies as soon as the agent's prompt is truncated. It equals the maximum length of a text of that prompt,
    in characters.
    """
    return _length(level - 2 * len(LENGTHS))


def cut(text: str, length: int) -> str:
    """Head and tail of a text that is longer than ``length``, with a line between them that says how much is left out.

    >>> cut("a" * 300, 100).count("a")
    102
    """
    if len(text) <= length + 60:
        return text
    head = length * 2 // 3
    return f"{text[:head]}\n[... {len(text) - length:,} characters left out ...]\n{text[len(text) - (length - head) :]}"


def _length(level: int) -> int | None:
    """Maximum length of a text in one stage, in characters; None before the stage begins (``level`` below 1)."""
    return None if level < 1 else LENGTHS[min(level, len(LENGTHS)) - 1]


def _shorter_turn(turn: Turn, length: int) -> Turn:
    # There is no code to truncate: no action, or an action with an empty code block.
    if not turn.action:
        return replace(turn, text=cut(turn.text, length))
    # The last occurrence was executed. Search backwards with `partition`: `rpartition` takes quadratic time.
    after, found, before = (part[::-1] for part in turn.text[::-1].partition(turn.action[::-1]))
    if not found:
        before, after = turn.text, ""
    action = cut(turn.action, length)
    return replace(turn, text=f"{cut(before, length)}{action}{cut(after, length)}", action=action)
