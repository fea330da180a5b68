"""What an entry says beside its verdict, if that is another one."""

# ruff: noqa: SIM905 (lists of words read best as one text)

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from draco_ray.judging.escaping import ascii_like
from draco_ray.judging.reply_json import MAX_COMPARED_CHARACTERS, ascii_minus, integer
from draco_ray.records import Verdict

_NAMED = r"PASS|FAIL|NOT[ _-]APPLICABLE"
"""As the judge was told to name it: a world of its own says FAILED of orders and requests."""
_VERDICT = r"(?P<{}>(?i:pass(?:ed)?|fail(?:ed)?|not[ _-]applicable|n/a)|[-+]?[01])(?![\w/%]|\.\d{{0,6}}[1-9])"
_BEGINS = re.compile(
    r"[\W_]{0,5}?(pass(?:ed|es)?|fail(?:ed|s)?|not[ _-]applicable|n/a(?=\W{1,5}\w)|-1|\+?1(?=:))\b[^\w\s]{0,3}?"
    r"(?:[:.,;\u2013\u2014(\])]|\s[-(\u2013\u2014]|\s(?:because|since|due)\b|$)",
    re.IGNORECASE,
)
"""A text that begins with a verdict, perhaps in bold. "N/A" on its own also stands where there is nothing to say."""
_MODAL = r"(?:must|should|would|ought to|has to|needs to)"
_OF_IT = r"(?:\s(?:it|this|that|is|was|to|as|with|an?|the|criterion|rubric|clear)){0,4}\s[*_(]{0,3}"
_SAYS = (
    # "score: -1", "the verdict should be FAIL"
    r"\b(?i:score|verdict|rating|grade|bewertung|\u8bc4\u5206|\u5f97\u5206|\u5224\u5b9a)"
    rf"(?: (?i:is|was|of|remains|equals|{_MODAL} be)\b)?"
    rf"(?:[\s:=>\u2192*_(\uff1a]|[-\u2013\u2014](?=\s)){{1,5}}{_VERDICT.format('a')}",
    # "hence FAIL", at the end
    r"(?:\b(?i:therefore|hence|thus|conclusion)|=>|->|\u2192)[\s:,*_]{1,5}"
    rf"{_VERDICT.format('b')}[\s.!*_)]{{0,5}}\Z",
    # "Overall: FAIL."
    rf"\b[^\W\d_]{{2,20}}+\s?[:\uff1a=][\s*_]{{0,4}}(?P<c>{_NAMED}|-1)\b(?=[\s*_)]{{0,4}}(?:[.!,;(]|\Z))",
    # "It skips one. FAIL.", at the end
    rf"(?<=[.!;\u3002])\s{{1,5}}[*_(]{{0,3}}(?P<f>{_NAMED})\b[\s.!*_)]{{0,5}}\Z",
    # "it is marked as FAIL", "so this is a FAIL"
    r"\b(?i:rate[sd]?|mark(?:ed|s)?|grade[sd]?|give[ns]?|gave|assign(?:ed|s)?|award(?:ed|s)?|deserve[sd]?|revise[sd]?"
    rf"|changed?|actually|therefore|hence|thus|so){_OF_IT}(?P<d>{_NAMED})\b",
    # "I give it a -1", "this must be a -1"
    r"(?:\b(?i:rated?|marked|graded?|deserves?|awarded)|\bI (?:\w{1,12} )?(?i:give|assign|set|revise|change|rate)"
    rf"|\b{_MODAL} be(?= an? )){_OF_IT}(?P<e>[-+]?1)\b(?=[\s*_)]{{0,4}}(?:[.!,;(]|\Z))",
)
_STATES = re.compile("|".join(_SAYS))
"""A text that says what the verdict is. That a criterion "is met" or "fails" is left alone: it stands as often in what
is weighed ("nothing shows that the criterion is met", "the first half is met")."""
_SHORT_NOT = re.compile(r"n['\u2019]t\b")
_UNSAID = re.compile(
    r"\b(?i:not|never|no|cannot|can.t|without|whether|if|unless|until|when|claim(?:s|ed|ing)?|to)\b[^.,:!?;]{0,12}\Z"
)
"""In front of it: it does not say so."""
_QUOTED = re.compile(r"\"[^\"]{0,500}+\"|`[^`]{0,500}+`|'[^']{0,500}+'(?!\w)|\u201c[^\u201d]{0,500}+\u201d")
"""What a justification repeats, perhaps of a rollout that grades itself."""

_GOOD = frozenset(
    """
    pass passed passes satisfied satisfies satisfy met meets meet success successful succeeded fulfilled fulfills
    fulfill compliant
    """.split()
)
_BAD = frozenset(
    """
    fail failed fails failure violated violation violates violate unsatisfied unmet unfulfilled noncompliant
    """.split()
)
_NEITHER = (frozenset(("not", "applicable")), frozenset(("n", "a")), frozenset(("na",)))
_NOT = frozenset(("not", "non", "never"))
_FILLERS = frozenset("is was has had did does criterion rubric requirement condition overall it the this".split())
_FLAGS = frozenset(("final", "corrected", "revised", "new", "should", "actual"))
_DECISIONS = _FLAGS | frozenset(
    """
    result outcome label value rating grade mark points correction decision conclusion judgement judgment assessment
    evaluation answer status state compliance
    """.split()
)
"""Words in the names of fields that hold a verdict rather than something beside it."""
_REASONS = frozenset(("justification", "explanation", "rationale"))
"""Words in the names of fields that justify a verdict."""
_CORRECTIONS = frozenset(("correction", "revision", "erratum"))
_MARKS = str.maketrans(
    {**dict.fromkeys("\u2705\u2713\u2714", " pass "), **dict.fromkeys("\u274c\u2717\u2718\u2716", " fail ")}
)
_TRUE, _FALSE = frozenset(("true", "yes", "y", "1")), frozenset(("false", "no", "n", "0", "-1"))
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def other_verdict(score: Verdict, justification: str, further: Mapping[str, object]) -> str | None:
    """What says another verdict than ``score``; None where nothing does.

    Args:
        score: the one that is read.
        justification: its own.
        further: fields that nobody asked for. One of whatever name may hold a verdict (``"result": "FAIL"``), and one
            whose name is a verdict may say whether it is that (``"passed": false``, ``"violated": "yes"``).
    """
    for name, value in _leaves(further):
        if not _agrees(score, name, value):
            return f"{name[:60]} {str(value)[:60]}"
    named = [value for name, value in _leaves(further) if _words(name) & _REASONS and isinstance(value, str)]
    for text in map(ascii_minus, [justification, *named]):
        begins = _BEGINS.match(text)
        if begins is not None and _said(begins[1]) != score:
            return f"a justification that begins with {begins[1]}"
        if (stated := _stated(text)) is not None and _said(stated[1]) != score:
            return f"a justification that says {stated[0]!r}"
    return None


def _stated(text: str) -> tuple[str, str] | None:
    """The last place at which a text says what the verdict is, and the verdict there: what is weighed comes before."""
    found = None
    plain = _SHORT_NOT.sub(" not", _QUOTED.sub(" ", text))
    for match in _STATES.finditer(plain):
        verdict = match[match.lastgroup or 0]
        if not _UNSAID.search(plain, max(0, match.start() - 24), match.start()) and _said(verdict) is not None:
            found = " ".join(match[0].split()), verdict
    return found


def _leaves(further: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Every value that holds no others, under the nearest name."""
    waiting = [*reversed([*further.items()])]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += reversed(value.items())
        elif isinstance(value, list):
            waiting += [(name, each) for each in reversed(value)]
        else:
            yield name, value


def _agrees(score: Verdict, name: str, value: object) -> bool:
    """Whether a field of that name and value says nothing of the verdict, or the same."""
    words = _words(name)
    if (named := _named(words)) is not None and (yes := _yes(value)) is not None:
        return (named == score) is yes
    if words == {"applicable"} and (yes := _yes(value)) is not None:
        return (score != Verdict.NOT_APPLICABLE) is yes
    decides = words & _DECISIONS
    if not isinstance(value, str | int):
        return True
    text = ascii_minus(str(value))
    if (yes := _yes(text)) is not None and not isinstance(integer(text), int):
        return not decides or bool(words & _FLAGS) or (score == Verdict.PASS) is yes
    said = _said(text)
    if words & _CORRECTIONS and text and said is not Verdict.NOT_APPLICABLE and not text.lower().startswith("none"):
        return said == score
    # A number stands under many names; under one that cannot be read it may be the verdict.
    if not decides and words and integer(text) != text:
        return True
    if said is None and decides:
        begins, stated = _BEGINS.match(text), _stated(text)
        said = _said(begins[1]) if begins else _said(stated[1]) if stated else None
        return said in (None, score)
    return said in (None, Verdict.NOT_APPLICABLE, score)


@lru_cache(maxsize=64)
def _words(name: str) -> frozenset[str]:
    found = _WORD.findall(ascii_like(name[:MAX_COMPARED_CHARACTERS].translate(_MARKS)))
    return frozenset(word.lower() for word in found) - _FILLERS


def _named(words: frozenset[str]) -> Verdict | None:
    """The verdict that words are the name of."""
    if words in _NEITHER:
        return Verdict.NOT_APPLICABLE
    rest, denied = words - _NOT, bool(words & _NOT)
    if len(rest) != 1:
        return None
    (word,) = rest
    if word in _GOOD:
        return Verdict.FAIL if denied else Verdict.PASS
    return Verdict.FAIL if word in _BAD and not denied else None


def _yes(value: object) -> bool | None:
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _said(text: str) -> Verdict | None:
    """The verdict that a text is, if it is one and nothing else."""
    number = integer(text)
    if isinstance(number, int) and number in (-1, 0, 1):
        return Verdict(number)
    return _named(_words(text))
