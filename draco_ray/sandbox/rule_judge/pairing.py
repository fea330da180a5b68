"""Which criteria of two lists are the same check: the stand-in for the third model that compares two judges' criteria.

Two criteria are a pair if their titles are equal but for case, punctuation and spacing, else if the same rule decides
both. It is blind to a likeness that neither the titles nor its rules show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from draco_ray.sandbox.rule_judge.matching import find_rule
from draco_ray.sandbox.rule_judge.reading import Rubric, read_pairing, reply


def answer_pairing(prompt: str) -> str | None:
    """The reply to a prompt that shows two lists of criteria; None for any other prompt."""
    lists = read_pairing(prompt)
    if lists is None:
        return None
    first, second = lists
    pairs: list[dict[str, Any]] = []
    for key_of in (_title_key, _rule_key):
        pairs += _pairs(first, second, key_of, pairs)
    return reply(sorted(pairs, key=lambda pair: int(pair["first"])))


def _pairs(
    first: tuple[Rubric, ...], second: tuple[Rubric, ...], key_of: Callable[[Rubric], str], taken: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Pairs of equal keys, in the order of the lists, among the criteria that have no partner yet."""
    free: dict[str, list[int]] = {}
    used = {pair["second"] for pair in taken}
    for rubric in second:
        if rubric.index not in used and (key := key_of(rubric)):
            free.setdefault(key, []).append(rubric.index)
    used = {pair["first"] for pair in taken}
    return [
        {"shared_check": rubric.title, "first": rubric.index, "second": partners.pop(0)}
        for rubric in first
        if rubric.index not in used and (partners := free.get(key_of(rubric)))
    ]


def _rule_key(rubric: Rubric) -> str:
    rule = find_rule(rubric.title, rubric.description, rubric.instruction)
    return rule.key if rule else ""


def _title_key(rubric: Rubric) -> str:
    return " ".join(re.findall(r"\w+", rubric.title.casefold()))
