"""Which rule decides a criterion, whoever wrote it."""

from __future__ import annotations

import re
from functools import lru_cache

from draco_ray.sandbox.rule_judge.catalogue import RULES, Rule

_TITLE_WEIGHT = 4
_LEAST = 2
"""Below this many points a criterion is none of ours."""
_OWN = {rule.draft.title.casefold(): rule for rule in RULES if rule.draft}


@lru_cache(maxsize=4096)
def find_rule(title: str, description: str = "", instruction: str = "") -> Rule | None:
    """The rule for a criterion: by its title if it is one of ours, else by the words it shares with a rule's subject.

    A hit in the title counts more than one in the text, and a word counts once. None if nothing fits.
    """
    if own := _OWN.get(title.strip().casefold()):
        return own
    best: Rule | None = None
    most = _LEAST - 1
    for rule in RULES:
        points = _TITLE_WEIGHT * _hits(rule, title) + 2 * _hits(rule, description) + _hits(rule, instruction)
        if points > most:
            best, most = rule, points
    return best


def _hits(rule: Rule, text: str) -> int:
    return len({match.group().casefold() for match in re.finditer(rule.words, text, re.IGNORECASE)})
