"""What an entry of the scoring judge says beside its score, if that is another verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from draco_ray.judging.escaping import ascii_like
from draco_ray.judging.parsing import verdict_name
from draco_ray.judging.reply_json import MAX_COMPARED_CHARACTERS, ascii_minus, integer
from draco_ray.records import Verdict

_VERDICT = r"(pass(?:ed)?|fail(?:ed)?|not[ _-]applicable|n/a|[-+]?[01])"
_BEGINS = re.compile(
    r"[\W_]{0,5}?(pass(?:ed)?|fail(?:ed)?|not[ _-]applicable|n/a(?=\W{1,5}\w)|-1)\b[^\w\s]{0,3}?"
    r"(?:[:.,;\u2013\u2014(]|\s[-(]|$)",
    re.IGNORECASE,
)
"""A text that begins with a verdict, perhaps in bold. "N/A" on its own also stands where there is nothing to say."""
_STATES = re.compile(
    rf"(?:\b(?:score|verdict)(?: (?:is|of|remains|must be|should be)\b)?[\s:=>\u2192*_(]{{1,5}}{_VERDICT}"
    r"(?![\w/%]|\.\d{0,6}[1-9])"
    rf"|(?:\b(?:therefore|hence|thus|conclusion)|=>|->|\u2192)[\s:,*_]{{1,5}}{_VERDICT}[\s.!*_)]{{0,5}}\Z)",
    re.IGNORECASE,
)
"""A text that says what the score is."""
_QUOTED = re.compile(r"\"[^\"]{0,500}+\"|`[^`]{0,500}+`|'[^']{0,500}+'(?!\w)|\u201c[^\u201d]{0,500}+\u201d")
"""What a justification repeats, perhaps of a rollout that grades itself."""

_GOOD = frozenset(
    ("pass", "passed", "passes", "satisfied", "met", "success", "successful", "succeeded", "fulfilled", "compliant")
)
_BAD = frozenset(
    ("fail", "failed", "fails", "failure", "violated", "violation", "violates", "unsatisfied", "unmet", "unfulfilled")
)
_FILLERS = frozenset(("is", "was", "criterion", "rubric", "overall", "it"))
_FLAGS = frozenset(("final", "corrected", "revised"))
_DECISIONS = _FLAGS | {
    *("result", "outcome", "label", "value", "rating", "grade", "mark", "correction", "decision", "conclusion"),
    *("judgement", "judgment", "assessment"),
}
"""Words in the names of fields that hold a verdict rather than something beside it."""
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
    text = ascii_minus(justification)
    begins = _BEGINS.match(text)
    if begins is not None and _said(begins[1]) != score:
        return f"a justification that begins with {begins[1]}"
    # The last one counts: what is weighed comes before it.
    stated = [*_STATES.finditer(_QUOTED.sub(" ", text))][-1:]
    if any(_said(match[1] or match[2]) != score for match in stated):
        return f"a justification that says {' '.join(stated[0][0].split())!r}"
    return None


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
    if isinstance(value, bool):
        of_it = words & _DECISIONS and not words & _FLAGS
        return not of_it or (score == Verdict.PASS) is value
    if isinstance(value, str) and integer(value) == value and _said(value) not in (None, Verdict.NOT_APPLICABLE, score):
        return False
    if not words & _DECISIONS or not isinstance(value, str | int):
        return True
    text = ascii_minus(str(value))
    begins = _BEGINS.match(text)
    verdict = _named(_words(text)) if begins is None else _said(begins[1])
    return verdict in (None, score) and (_said(text) in (None, Verdict.NOT_APPLICABLE, score))


@lru_cache(maxsize=64)
def _words(name: str) -> frozenset[str]:
    found = _WORD.findall(ascii_like(name[:MAX_COMPARED_CHARACTERS]))
    return frozenset(word.lower() for word in found) - _FILLERS


def _named(words: frozenset[str]) -> Verdict | None:
    """The verdict that words are the name of."""
    if words == {"not", "applicable"}:
        return Verdict.NOT_APPLICABLE
    rest = words - {"not"}
    if len(rest) == 1 and rest <= _GOOD:
        return Verdict.FAIL if "not" in words else Verdict.PASS
    return Verdict.FAIL if len(rest) == 1 and rest <= _BAD and "not" not in words else None


def _yes(value: object) -> bool | None:
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _said(text: str) -> Verdict | None:
    """The verdict that a text is, if it is one and nothing else."""
    number = integer(text)
    if isinstance(number, int) and number in (-1, 0, 1):
        return Verdict(number)
    return Verdict.__members__.get(str(verdict_name(text[:60].strip(" .!*"))).removesuffix("ED"))
