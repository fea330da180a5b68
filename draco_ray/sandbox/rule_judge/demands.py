"""Finds in the text of a task what it asks for: lists to read, conditions, changes, and whether it wants an answer.

The tables (``rules.yaml``) are the judge's knowledge of English and of AppWorld's APIs. Words that match no table are
ignored. A rule does not apply if the task asks for nothing that the rule is about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

MAX_CHARACTERS = 2000
"""Longer tasks are truncated, because the patterns look far ahead."""
RULE_TABLES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "rules.yaml").read_text("utf-8"))
"""The tables of ``rules.yaml``, which explains them."""


def _compiled(words: str) -> re.Pattern[str]:
    return re.compile(words.format(**RULE_TABLES["parts"]), re.IGNORECASE)


_PHRASES = {name: _compiled(words) for name, words in RULE_TABLES["phrases"].items()}
_COMPARISONS = [(operator, _compiled(words)) for words, operator in RULE_TABLES["comparisons"].items()]


@dataclass(frozen=True, slots=True)
class NamedList:
    """A list named in task instructions, such as the liked songs, and the APIs of its app that read it."""

    name: str
    words: re.Pattern[str]
    app: str
    apis: list[str]
    paged: bool = True
    directed: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """A change that tasks ask for."""

    name: str
    words: re.Pattern[str]
    apis: str
    setting: tuple[str, str] | None = None


LISTS = tuple(NamedList(**row | {"words": _compiled(row["words"])}) for row in RULE_TABLES["lists"])
ACTIONS = tuple(Action(**row | {"words": _compiled(row["words"])}) for row in RULE_TABLES["actions"])
PAGED = frozenset(api for entry in LISTS if entry.paged for api in entry.apis)
"""APIs that return their list page by page."""
DONE_LISTS = {"follow_artist": "show_following_artists", "like_song": "show_liked_songs"}
"""API of an action -> API that lists the items on which the action was already done; repeating it on them fails."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A comparison with a date, a time of day or a number that the task names."""

    operator: str
    value: str
    """The value as code compares it, without a currency sign."""
    words: str


class Demands:
    """What a task asks for, as its instruction says; at most the first `MAX_CHARACTERS` are read."""

    def __init__(self, text: str) -> None:
        self.text = text[:MAX_CHARACTERS]
        plain = _PHRASES["quoted"].sub('""', self.text)
        said = {name: phrase.search(plain) for name, phrase in _PHRASES.items()}
        actions = tuple(action for action in ACTIONS if action.words.search(plain))
        # "I need the tasks completed" matches the pattern of questions, too, but asks for a change.
        self.question = bool(said["question"]) and (not actions or "?" in plain or bool(said["asks"]))
        """Whether an answer is wanted."""
        self.actions = () if self.question else actions
        self.lists = _lists(plain)
        self.direction = "received" if said["received"] else "sent" if said["sent"] else None
        """Whether items that were ``received`` or ``sent`` are meant, if the task says so."""
        self.limits = _limits(plain)
        quoted = _PHRASES["quoted"].finditer(self.text)
        self.names = tuple(match[1] for match in quoted if _selects(self.text[: match.start()]))
        """Texts that select something that exists: a playlist's title, a tag, a relationship."""
        if relation := said["relation"]:
            self.names += ((relation[1] or relation[2]).lower(),)
        self.excludes_done = said["excludes_done"] is not None
        """Whether items on which the action was already done must be left out."""
        self.extreme = "max" if said["max"] else "min" if said["min"] else None
        """``max`` or ``min`` if the task asks for the item with the largest or smallest value; else None."""

    @property
    def conditions(self) -> list[str]:
        """The conditions of the selection in words; empty if the task is about everything in the list."""
        found = [*(limit.words for limit in self.limits), *(f'"{name}"' for name in self.names)]
        found += ["leave out what is done already"] if self.excludes_done else []
        return found + ([f"the {self.extreme} of the list"] if self.extreme else [])

    def mentions(self, text: str) -> bool:
        """Whether the task's text contains ``text``, ignoring case."""
        return text.strip().lower() in self.text.lower()


read_demands = lru_cache(maxsize=512)(Demands)
"""The demands of a task's instruction."""


def _selects(before: str) -> bool:
    """Whether a quoted text names something that exists, rather than a new title or message.

    ``before``: the task's text up to the quoted text.
    """
    existing = _PHRASES["existing"].search(before) and not _PHRASES["named"].search(before)
    return bool(existing) or _PHRASES["new"].search(before) is None


def _lists(plain: str) -> tuple[NamedList, ...]:
    left = _PHRASES["made"].sub(" ", plain)
    found: list[NamedList] = []
    for entry in LISTS:
        if entry.words.search(left):
            left = entry.words.sub(" ", left)
            # "Playlist" or "transaction" adds no list if the task already names another list of the same app.
            if entry.name not in {"the playlists", "the transactions"} or all(e.app != entry.app for e in found):
                found.append(entry)
    return tuple(found)


def _limits(plain: str) -> tuple[Limit, ...]:
    limits: dict[str, Limit] = {}
    for operator, words in _COMPARISONS:
        for match in words.finditer(plain):
            value = match["limit"].lstrip("$")
            limits.setdefault(value, Limit(operator, value, match[0]))
    return tuple(limits.values())
