"""What a task asks for, as far as its words tell: lists, conditions, changes, an answer.

Only the text is read. Words that no table knows make no demand, and then the rules about them do not apply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from draco_ray.sandbox.rule_judge.vocabulary import (
    ACTIONS,
    APP_WORDS,
    FIELDS,
    LISTS,
    NUMBER_FIELDS,
    RELATION_WORDS,
    SUPERLATIVES,
    ActionWords,
    ListWords,
)

Comparison = Literal["<", "<=", ">", ">="]

MOST_CHARACTERS = 2000
"""Of a task that are read: what poses as one in a criterion can be longer, and the patterns below look far ahead."""
_QUOTED = re.compile(r'"([^"]+)"')
_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d?\d:\d\d"
_NUMBER = r"\$?\d+(?:\.\d+)?"
_LIMIT = rf"(?P<limit>{_DATE}|{_TIME}|{_NUMBER})"
_COMPARISONS: tuple[tuple[str, Comparison], ...] = (
    (rf"\b(?:on or after|since|starting (?:on|from)|from) {_LIMIT}", ">="),
    (rf"\b{_LIMIT} or (?:later|after|more|above)", ">="),
    (rf"\bat least {_LIMIT}", ">="),
    (rf"\b(?:on or before|until|up to|at most|no (?:more|later) than) {_LIMIT}", "<="),
    (rf"\b{_LIMIT} or (?:earlier|before|less|below)", "<="),
    (
        rf"\b(?:before|earlier than|prior to|(?:shorter|less|fewer|lower|cheaper|smaller) than|under|below) {_LIMIT}",
        "<",
    ),
    (rf"\b(?:after|later than|(?:longer|more|greater|higher|larger) than|over|above|exceeding) {_LIMIT}", ">"),
)
_QUESTION = re.compile(
    r"\?\s*(?:$|[A-Z])|^(?:how|what|which|who|when|where|count|tell me|name|add up|give me|find out)\b"
    r"|\bI need (?:its|the)\b",
    re.IGNORECASE,
)
_RELATION = re.compile(rf"\bmy ({RELATION_WORDS})s?\b|\b({RELATION_WORDS})s?\b(?= \(see)", re.IGNORECASE)
# What a quoted text is when these words stand before or behind it; otherwise it is content.
_NEW = re.compile(
    r"\b(?:new|create an?|make an?|save|write)\b[^.\"]{0,70}$|\btext $"
    r"|\b(?:titled|saying|message|exactly|to say)\b[^\"]{0,12}$",
    re.IGNORECASE,
)
_SORTED = re.compile(r"\balphabetical(?:ly)?\b|\bsorted\b|\bin order of\b", re.IGNORECASE)
_EXCLUSION = re.compile(r"\b(?:not|don't) follow yet\b|\balready follow\b|\bfollow already\b", re.IGNORECASE)
_RECEIVED = re.compile(
    r"\breceived?\b|\bsent (?:to )?me\b|\bhave sent me\b|\bask(?:s|ing)? me\b|\brequests? from\b|\bto me\b"
    r"|\b(?:deny|approve|accept|reject|decline)\b",
    re.IGNORECASE,
)
_SENT = re.compile(r"\bI(?: have)? (?:sent|paid|made)\b|\bsent by me\b|\bmy sent\b|\bI sent\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limit:
    """A comparison with a date, a time of day or a number that the task names."""

    comparison: Comparison
    value: str
    """As code would compare it: no currency sign."""
    words: str
    field: re.Pattern[str] | None
    """What the compared field must be called; None if the words do not tell."""


@dataclass(frozen=True, slots=True)
class Demands:
    """What a task asks for."""

    text: str
    question: bool
    """Whether an answer is wanted."""
    apps: tuple[str, ...]
    lists: tuple[ListWords, ...]
    direction: str | None
    """``received`` or ``sent``, for lists that have both sides."""
    limits: tuple[Limit, ...]
    names: tuple[str, ...]
    """Quoted texts that select something that exists: a playlist's title, a tag, an extension."""
    contents: tuple[str, ...]
    """Quoted texts that go into what is made: a message, a new title."""
    relation: str | None
    excludes_done: bool
    """Whether what is done already must be left out."""
    extreme: str | None
    """``max`` or ``min``."""
    extreme_words: str
    extreme_field: re.Pattern[str] | None
    in_order: bool
    actions: tuple[ActionWords, ...]
    computes: str | None
    """What an answer is: ``count``, ``total`` or ``name``."""

    @property
    def selects(self) -> bool:
        """Whether only some of the listed things are meant."""
        return bool(self.limits or self.names or self.relation or self.excludes_done or self.extreme)

    def conditions(self) -> list[str]:
        """The conditions in words, for instructions and justifications."""
        found = [limit.words for limit in self.limits]
        found += [f'"{name}"' for name in self.names]
        found += [self.relation] if self.relation else []
        found += ["leave out what is done already"] if self.excludes_done else []
        found += [self.extreme_words] if self.extreme else []
        return found

    def mentions(self, text: str) -> bool:
        """Whether the task says ``text``, in any case."""
        return text.strip().lower() in self.text.lower()


@lru_cache(maxsize=512)
def read_demands(text: str) -> Demands:
    """Read a task's instruction, or its beginning: none is as long as `MOST_CHARACTERS`."""
    text = text[:MOST_CHARACTERS]
    plain = _QUOTED.sub('""', text)
    names, contents = _quotes(text)
    actions = tuple(action for action in ACTIONS if action.words.search(plain))
    question = _QUESTION.search(plain) is not None and not _orders(plain, actions)
    extreme, extreme_words, extreme_field = _extreme(plain)
    relation = _RELATION.search(plain)
    return Demands(
        text=text,
        question=question,
        apps=tuple(app for app, words in APP_WORDS.items() if re.search(words, plain, re.IGNORECASE)),
        lists=_lists(text, plain, relation is not None),
        direction=_direction(plain),
        limits=_limits(plain),
        names=names,
        contents=contents,
        relation=(relation[1] or relation[2]).lower() if relation else None,
        excludes_done=_EXCLUSION.search(plain) is not None,
        extreme=extreme,
        extreme_words=extreme_words,
        extreme_field=extreme_field,
        in_order=_SORTED.search(plain) is not None,
        actions=() if question else actions,
        computes=_computes(plain) if question else None,
    )


def _orders(plain: str, actions: tuple[ActionWords, ...]) -> bool:
    """Whether a text with question words tells to do something all the same: no question mark, and a known action."""
    return bool(actions) and "?" not in plain and re.match(r"(?i)count|tell me|how|what|which|who", plain) is None


def _quotes(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names: list[str] = []
    contents: list[str] = []
    for match in _QUOTED.finditer(text):
        before = text[: match.start()]
        (contents if _NEW.search(before) and not _existing(before) else names).append(match[1])
    return tuple(names), tuple(contents)


def _existing(before: str) -> bool:
    """Whether a text names something there is, although words of making stand before it: ``content of my note "…"``."""
    return re.search(r"\bmy\b[^.\"]{0,40}$|\btag(?:ged)?\b[^.\"]{0,6}$", before) is not None and not re.search(
        r"\b(?:new|saying|text message|titled|called|named)\b[^.\"]{0,30}$", before
    )


def _lists(text: str, plain: str, relation: bool) -> tuple[ListWords, ...]:
    # What is created is not a list that has to be read.
    left = re.sub(
        r"\b(?:new|create an?|make an?|write)\b(?: new)?[^.,?!\"]{0,24}\b(?:playlist|note|file)\b",
        " ",
        plain,
        flags=re.IGNORECASE,
    )
    left = re.sub(
        r"\bsave\b(?=[^.]*\bfile\b)|\binto an? new [\w ]+\bnote\b|\bto my cart\b", " ", left, flags=re.IGNORECASE
    )
    left = re.sub(r"\btext messages?\b|\bmessage\b|\bsimple note\b", " ", left, flags=re.IGNORECASE)
    found = []
    claimed_apps = set()
    for entry in LISTS:
        if not entry.words.search(left):
            continue
        if entry.app == "todoist" and not re.search(APP_WORDS["todoist"], plain, re.IGNORECASE):
            continue
        # Once an app's specific list is named, its general words ("playlists", "notes") name no other one.
        if entry.name in {"the playlists", "the transactions", "the song queue"} and entry.app in claimed_apps:
            continue
        found.append(entry)
        claimed_apps.add(entry.app)
        left = entry.words.sub(" ", left)
    return tuple(found)


def _direction(plain: str) -> str | None:
    if _RECEIVED.search(plain):
        return "received"
    return "sent" if _SENT.search(plain) else None


def _limits(plain: str) -> tuple[Limit, ...]:
    limits: list[Limit] = []
    spans: list[tuple[int, int]] = []
    for pattern, comparison in _COMPARISONS:
        for match in re.finditer(pattern, plain, re.IGNORECASE):
            start, end = match.span("limit")
            if any(start < taken_end and taken_start < end for taken_start, taken_end in spans):
                continue
            spans.append((start, end))
            value = match["limit"].lstrip("$")
            limits.append(Limit(comparison, value, match[0], _field(plain, value)))
    # "I will not pay more than $30 at once: … above that amount" says it twice.
    unique = {limit.value: limit for limit in limits}
    return tuple(unique.values())


def _field(plain: str, value: str) -> re.Pattern[str] | None:
    if ":" in value:
        return re.compile("time")
    table = FIELDS if re.fullmatch(_DATE, value) else NUMBER_FIELDS
    return next((field for words, field in table if words.search(plain)), None)


def _extreme(plain: str) -> tuple[str | None, str, re.Pattern[str] | None]:
    for words, function, field in SUPERLATIVES:
        if match := words.search(plain):
            return function, match[0], field
    return None, "", None


def _computes(plain: str) -> str | None:
    if re.search(r"\bhow much\b|\btotal\b|\badd up\b|\bsum\b", plain, re.IGNORECASE):
        return "total"
    if re.search(r"\bhow many\b|\bcount\b|\bnumber of\b", plain, re.IGNORECASE):
        return "count"
    if re.search(r"\btitles?\b|\bnames?\b", plain, re.IGNORECASE):
        return "name"
    return None
