"""Find which criteria of two judges are the same check: a third model pairs them one to one.

The model is not told which judge wrote which list, and a checksum of the texts decides which list comes first, so that
neither judge always has the same position. A reply is accepted only if every index exists and is in at most one pair.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draco_ray.config.load import project_file
from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.build import prompts_of
from draco_ray.judging.completion import Completer
from draco_ray.judging.judge import Judge
from draco_ray.judging.phases import Question
from draco_ray.judging.reply import Entry, Integer, Parsed, read_entries
from draco_ray.records import Criterion

PROMPT_FILE = Path("prompts/pair_criteria.txt")

Pairs = tuple[tuple[int, int], ...]
"""(index in the first list, index in the second), both 0-based, sorted by the first."""


class _Pair(Entry):
    decides = ("first", "second")
    if_asked = ("shared_check",)
    shared_check: str = ""
    first: Integer
    second: Integer


@dataclass(frozen=True, slots=True)
class Pairing(Question[Pairs]):
    """Which criteria of ``one`` and ``other`` are the same check; makes no call if a list is empty."""

    one: Sequence[Criterion]
    other: Sequence[Criterion]

    name = "pairing"
    template = PROMPT_FILE.name
    placeholders = frozenset({"first_criteria", "second_criteria"})
    required = (frozenset({"first_criteria"}), frozenset({"second_criteria"}))
    entry = _Pair

    @property
    def swapped(self) -> bool:
        """Whether ``other`` comes first in the prompt."""
        one, other = (zlib.crc32(render.rubrics(each).encode()) for each in (self.one, self.other))
        return one > other

    @property
    def identity(self) -> str:
        """See `Question`; the prompt quotes no evidence."""
        return self.name

    def values(self, code: str) -> Mapping[str, object]:
        """The prompt's placeholders: the two lists of criteria."""
        first, second = (self.other, self.one) if self.swapped else (self.one, self.other)
        return {"first_criteria": render.rubrics(first), "second_criteria": render.rubrics(second)}

    def settled(self) -> Pairs | None:
        """An empty tuple if one of the lists is empty, since nothing can be paired; None if the model must be asked."""
        return None if self.one and self.other else ()

    def parse(self, text: str, config: JudgeConfig, *, last: bool) -> Parsed[Pairs]:
        """Pairs of indices into ``one`` and ``other``."""
        swapped = self.swapped
        first, second = (len(self.other), len(self.one)) if swapped else (len(self.one), len(self.other))
        pairs = parse_pairs(text, first, second)
        return Parsed(value=tuple(sorted((b, a) for a, b in pairs)) if swapped else pairs)


def parse_pairs(text: str, first: int, second: int) -> Pairs:
    """Parse the pairs of two lists of ``first`` and ``second`` criteria.

    Raises:
        ReplyError: not exactly one answer, an index that does not exist, or an index in two pairs.
    """
    entries = read_entries(text, _Pair).value
    for side, count in (("first", first), ("second", second)):
        indices = [int(getattr(entry, side)) for entry in entries]
        if beyond := [index for index in indices if not 0 <= index < count]:
            raise ReplyError(f"the {side} list has no rubric_index {beyond[0]}; its indices are 0 to {count - 1}")
        if twice := sorted({index for index in indices if indices.count(index) > 1}):
            raise ReplyError(f"{side} {twice[0]} stands in two pairs; a criterion has one partner at most")
    return tuple(sorted((entry.first, entry.second) for entry in entries))


def make_pairing_judge(complete: Completer, config: JudgeConfig) -> Judge:
    """The judge that pairs criteria and scores merged sets.

    Raises:
        ConfigError: a prompt is missing.
    """
    prompts = prompts_of(config)
    templates = {**prompts.templates, Pairing.name: project_file(PROMPT_FILE).read_text(encoding="utf-8")}
    # One scoring call, as in the paper's comparison, whatever judge.score_votes is: more votes are a stricter rule.
    return Judge(complete, replace(prompts, templates=templates), config.model_copy(update={"score_votes": 1}))
