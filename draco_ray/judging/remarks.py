"""What a judge says behind its answer: whether it may take a verdict back.

What sounds like a correction cannot be listed ("the first one is violated", a cross, any language), so what does not
is: a remark of these words alone is about the answer as a whole. Everything else costs one more question.
"""

# ruff: noqa: SIM905 (lists of words read best as one text)

from __future__ import annotations

import json
import re
import unicodedata

NEUTRAL = frozenset(
    """
    a about above accordance according accordingly action actions against all along also an analysis analyzed
    and answer answers any anything are array as ask asked assessed assessment assessments assigned at available
    based be been below block both by can carefully checked clear code complete completed completely completes
    concludes contain containing contains could count criteria criterion d did do does done each else end ends
    entire entries entry eos evaluate evaluated evaluating evaluation evaluations evaluator every everything
    evidence exactly examined explained explanation explanations feel field fields final finished follow
    followed following follows for format formatted from full fully given glad grade graded grades grading
    guidelines had happy has have help helpful helps here hope i if in include included includes including
    independently index individually inst instruction instructions is it item items its json judged judgement
    judgements judgment judgments just justification justifications justified know let like list ll log logs m
    may me my note number numbers object of on one only or order our out output per please presented provided
    question questions quote quoted quotes rating ratings re reach reasoning refer references reflect reflects
    relevant reply requested required respectively response result results review reviewed rollout rubric
    rubrics run s schema score scored scores scoring separately shown single solely something step steps
    strictly summary supplied taken text thank thanks that the there these this title titles to total
    trajectories trajectory transcript turn turns under us used useful using valid ve verdict verdicts was we
    were whether whole will with would you your
    """.split()
)
"""None of them denies, tells one entry from another, or says how well something was done."""
_OFFER = re.compile(
    r"(?:please )?(?:let me know|feel free|do(?: not|n.t) hesitate)"
    r"|(?:i.m |i am |i.d be |i would be |i will be |i.ll be )?(?:happy|glad) to|if (?:you|anything)\b",
    re.IGNORECASE,
)
"""How a sentence begins that is an offer or a condition: those of `OFFERED` may stand in it as well."""
OFFERED = frozenset(
    """
    additional adjust adjusted adjustments agree change changed changes clarification clarifications clarify
    concerns corrections deeper detail detailed details different disagree discuss elaborate elaboration errors
    expand explain failings feedback further mine mistakes modifications more need needed needs other provide
    revise revised specific unclear want
    """.split()
)
_COUNTED = re.compile(
    r"\b(?:all|the|these|each of the) (?:[1-9]\d?|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve) "
    r"(?=(?:criteria|rubrics|rubric items|entries|items|evaluations)\b)",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"<[|\uff5c][^<>|\uff5c]{1,40}[|\uff5c]>")
"""A special token of a chat template."""
_SENTENCE_END = re.compile(r"[.!?;:\n]")
_WORD = re.compile(r"[^\W_]+")
_COUNT = re.compile(r"(?:\b|_)(?:total|count|number)(?:\b|_)", re.IGNORECASE)
_SIGNS = "`|~<>=^$\U0001f60a\U0001f642"
"""Symbols that say nothing. Others, a cross or an arrow, may."""


def taken_back(value: object) -> str | None:
    """What of a text or JSON behind a verdict may take it back: whatever is not known to be about none."""
    parts: list[tuple[str, object]] = [("", value)]
    while parts:
        name, part = parts.pop()
        if isinstance(part, dict):
            if unknown := _unknown("\n".join(part).replace("_", " ")):
                return unknown
            parts += part.items()
        elif isinstance(part, list):
            parts += [("", each) for each in part]
        elif isinstance(part, str):
            if unknown := _unknown(part):
                return unknown
        elif not (part is None or part is True or (part != -1 and _COUNT.search(name) and isinstance(part, int))):
            return json.dumps(part)[:60]
    return None


def _unknown(text: str) -> str | None:
    """The first sentence that holds more than what is known to say nothing of a verdict."""
    for sentence in _SENTENCE_END.split(_COUNTED.sub("", _TOKEN.sub("\n", text))):
        said = " ".join(sentence.split()).strip("`*_#->~\"' ")
        offer = _OFFER.match(said)
        known, rest = (NEUTRAL | OFFERED, said[offer.end() :]) if offer else (NEUTRAL, said)
        if not known.issuperset(_WORD.findall(rest.lower())) or any(
            unicodedata.category(sign)[0] == "S" and sign not in _SIGNS for sign in said
        ):
            return said[:60]
    return None
