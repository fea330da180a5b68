"""Corrupted judge replies: what is accepted says what the text plainly says, or the judge is asked again.

The oracle reads the text by itself: it cuts it at opening braces and takes the characters behind each field's name.
Where that is not one plain number (after any minus sign has become the ASCII one) nothing may be accepted. Replies that
are forged by unescaped quotations have a known truth instead: what was written before the forgery.

``make fuzz-replies`` runs many times the number of replies.
"""

# ruff: noqa: SIM905 (lists of short forms read best as one text)

from __future__ import annotations

import json
import os
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from draco_ray.errors import ReplyError
from draco_ray.judging.phases import parse_attributions, parse_scores
from draco_ray.records import Criterion, Verdict

REPLIES = int(os.environ.get("DRACO_FUZZED_REPLIES", "6000"))
RUBRIC = tuple(
    Criterion(title=title, description="d", evaluator_instruction="e")
    for title in ("Reads all pages", "Keeps secrets", "Completes the task")
)
STEPS = 6
MINUS = "-\u2212\u2013\u2012\uff0d\ufe63\u2010\u2011\u2014"
FIELDS = (
    "rubric_index rubric_title score verdict relevant_steps evidence justification explanation title description"
).split()
_KEY = re.compile(rf"""\"\s*({"|".join(FIELDS)})\s*\"\s*[:=]""")
BEGINNINGS = (r"\{(?=\s*\")", r"(?<![A-Za-z\"'])\{(?=\s*\")", r'\{(?=\s*"[^"{}\n]{1,40}"\s*:)')
"""Where an entry begins: a brace that was lost or added in a text misleads one of them."""
_NEXT_KEY = re.compile(r',\s*"[^"\n]*"\s*:')
_PLAIN = re.compile(r"\+?(0|[1-9][0-9]*)(\.0+)?|-[1-9][0-9]*(\.0+)?")

Answer = dict[int, tuple[int, tuple[int, ...]]]
"""Criterion -> verdict and steps."""


def reply(draw: random.Random, credit: bool) -> tuple[list[dict[str, object]], str]:
    entries: list[dict[str, object]] = []
    for index, criterion in enumerate(RUBRIC):
        entry: dict[str, object] = {"rubric_index": index, "rubric_title": criterion.title}
        verdict = draw.choice([-1, -1, 0, 1])
        text = draw.choice(["seen in step two", "nothing shows it", "", "it printed: done, and went on"])
        if credit:
            steps = sorted(draw.sample(range(1, STEPS + 1), draw.randint(1, 3))) if verdict else []
            rest: dict[str, object] = {"explanation": text, "relevant_steps": steps, "verdict": Verdict(verdict).name}
        else:
            rest = {"evidence": text, "justification": "so", "score": verdict}
        names = list(rest)
        draw.shuffle(names)
        entries.append(entry | {name: rest[name] for name in names})
    return entries, json.dumps(entries, indent=draw.choice([None, None, 1, 2]), ensure_ascii=False)


def truth(entries: list[dict[str, object]]) -> Answer:
    return {
        index: (
            int(entry["score"]) if "score" in entry else int(Verdict[str(entry["verdict"])]),  # type: ignore[call-overload]
            tuple(entry.get("relevant_steps", ())),  # type: ignore[arg-type]
        )
        for index, entry in enumerate(entries)
    }


def read(text: str, credit: bool, rubric: Sequence[Criterion] = RUBRIC) -> Answer | None:
    """What the parser makes of it; None where it asks again."""
    try:
        if credit:
            attributions = parse_attributions(text, rubric, STEPS).value
            return {each.criterion: (int(each.verdict), each.steps) for each in attributions}
        scores = parse_scores(text, rubric).value
    except ReplyError:
        return None
    return {index: (int(each.verdict), ()) for index, each in enumerate(scores)}


def plain_number(raw: str) -> int | None:
    token = raw.strip().strip(",").strip().strip("\"'").strip()
    for minus in MINUS:
        token = token.replace(minus, "-")
    return int(float(token)) if _PLAIN.fullmatch(token) else None


def plain(text: str, credit: bool, begin: str) -> Answer | None:
    """The oracle: what the text plainly says of every criterion, or None; ``begin`` is where an entry begins."""
    found: Answer = {}
    nameless: list[tuple[int, tuple[int, ...]]] = []
    for part in re.split(begin, text)[1:]:
        marks = list(_KEY.finditer(part))
        if any(count > 1 for count in Counter(mark[1] for mark in marks).values()):
            return None
        raws = {}
        for mark, following in zip(marks, [*marks[1:], None], strict=False):
            end = following.start() if following else (len(part) if "}" not in part else part.rindex("}"))
            raws[mark[1]] = _NEXT_KEY.split(part[mark.end() : end])[0]
        title = raws.get("rubric_title", "").strip().strip(",").strip().strip('"').casefold().split()
        titled = [index for index, each in enumerate(RUBRIC) if each.title.casefold().split() == title]
        index = plain_number(raws["rubric_index"]) if "rubric_index" in raws else next(iter(titled), None)
        if "rubric_index" in raws and (index is None or (titled and titled != [index]) or index in found):
            return None
        if credit:
            name = re.sub(r"[\W_]+", "_", raws.get("verdict", "").strip(' ,\n\t"')).upper()
            steps = re.fullmatch(r"\s*\[(.*)\]\s*,?\s*", raws.get("relevant_steps", ""), re.DOTALL)
            if name not in Verdict.__members__ or steps is None:
                return None
            listed = steps[1].strip().rstrip(",")
            numbers = [plain_number(each) for each in listed.split(",")] if listed.strip() else []
            if None in numbers:
                return None
            cited = tuple(sorted({number for number in numbers if number is not None}))
            said = (int(Verdict[name]), () if name == "NOT_APPLICABLE" else cited)
        else:
            score = plain_number(raws.get("score", ""))
            if score is None:
                return None
            said = (score, ())
        if index is None:
            nameless.append(said)
        elif index in found:
            return None
        else:
            found[index] = said
    # One entry without a known name can only be about the criterion that is left.
    for said, left in zip(nameless, sorted(set(range(len(RUBRIC))) - set(found)), strict=False):
        found[left] = said
    return found if len(nameless) < 2 else None


# --- corruptions ------------------------------------------------------------------------------------------------------

SCORES = (
    '{m}1|-1,or "evidence"|!1|1 or -1|1 / -1|-1 / 1|{m} 1|{m}\n1|(-1)|1-|--1|+-1|-+1|"-1|-1"|1 # -1|-1 // 1|1e0|-1.0'
    '|-1e0|0x1|{m}1.0|-1;|\'-1\'|"{m}1"|True|-"1"|\\u22121|\uff11|{m}\uff11|-\u200b1|\u200b-1|01|-01|-0|1,|1,,|,1|1 -1'
    '|<-1>|[-1]|[1]|{{1}}|1}}|-|+|1.0.0|1_0|-1 (fail)|1 (or -1)|fail|"fail"|null|NaN|-Infinity|1/*-1*/|1.5|0.999|1:-1'
    '|-1 1|"1 or -1"|"- 1"|-1, "score": 1|1, "score": -1|1, "Score": -1|\u00b11|\u00ac1|\u00ad1|\u00ad-1|~1'
).split("|")
STEP_LISTS = (
    '[1{m}3]|[{m}2]|[1..3]|[1:3]|[1 3]|[1;3]|["1-3"]|1, 3|[1,,3]|[!2]|[2|2]|[1 or 2]|[1/2]|[~3]|[1, {m}3]|["2"]|[2.0]'
    '|[2.5]|[+2]|[1 to 3]|[1, 3, ]|[1, ...]|[1, etc.]|[\uff12]|[02]|[1e0]|[[2]]|[-0]|[2-]|["2", 3]|[2, "or 3"]|[true]'
    '|[1\u20133, 5]|[1, 2], "relevant_steps": [3]|[1\u20443]|[1, 2\u00b3]|[2?]|[not 2]|[2 (not 3)]'
).split("|")
ALPHABET = "-+\u2212\u2013\u2012!~/0123456789\"',:;{}[]()\\ .eE#\u200b\uff11or"


def token(draw: random.Random, text: str, credit: bool) -> str:
    """Another way to write one number, or something that is none."""
    pattern = r'("relevant_steps":\s*)(\[[^\]]*\])' if credit else r'("score":\s*)(-?\d)'
    mark = draw.choice(list(re.finditer(pattern, text)))
    form = draw.choice(STEP_LISTS if credit else SCORES).replace("{m}", draw.choice(MINUS)).replace("{{", "{")
    return f"{text[: mark.start(2)]}{form.replace('}}', '}')}{text[mark.end(2) :]}"


def letters(draw: random.Random, text: str, credit: bool) -> str:
    """One to three letters lost, added, replaced or swapped; often near a number."""
    for _ in range(draw.randint(1, 3)):
        places = [mark.start() for mark in re.finditer(r"-?\d", text)] if draw.random() < 0.6 else []
        place = min(len(text) - 1, max(0, draw.choice(places or range(len(text))) + draw.randint(-2, 2)))
        match draw.randint(0, 3):
            case 0:
                text = text[:place] + text[place + 1 :]
            case 1:
                text = text[:place] + draw.choice(ALPHABET) + text[place:]
            case 2:
                text = text[:place] + draw.choice(ALPHABET) + text[place + 1 :]
            case 3:
                text = text[:place] + text[place : place + 2][::-1] + text[place + 2 :]
        if len(text) < 10:
            break
    return text


def doubled(draw: random.Random, text: str, credit: bool) -> str:
    """A field said twice, or a whole entry."""
    if draw.random() < 0.3:
        part = draw.choice(re.findall(r"\{[^{}]*\}", text))
        return text.replace(part, f"{part}, {part.replace('-1', '1')}")
    name = draw.choice(["relevant_steps", "verdict"] if credit else ["score", "rubric_index"])
    mark = draw.choice(list(re.finditer(rf'"{name}":\s*(\[[^\]]*\]|"[^"]*"|-?\d)', text)))
    value = draw.choice(
        {"relevant_steps": ["[1]", "[5, 6]"], "verdict": ['"PASS"', '"FAIL"']}.get(name, ["1", "-1", "0"])
    )
    extra = f'"{name}": {value}'
    return (
        f"{text[: mark.start()]}{extra}, {mark[0]}{text[mark.end() :]}"
        if draw.random() < 0.5
        else (f"{text[: mark.end()]}, {extra}{text[mark.end() :]}")
    )


def surrounded(draw: random.Random, text: str, credit: bool) -> str:
    """A whole answer among what judges write around one: none of it costs a second question."""
    text = draw.choice([text, text.replace("nothing shows", "nothing\nshows"), text.replace("seen in", "{seen} [in]")])
    text = draw.choice([text, f"```json\n{text}\n```", f'{{"entries": {text}}}', f'{{"results": {text}, "total": 3}}'])
    before = draw.choice(
        ["", "Sure [1]:\n", "<think>hm [{ no</think>\n", 'I use {"score": ...} as asked.\n', f"{text}\n"]
    )
    return before + text + draw.choice(["", "\nThat is all.", "\nSummary: 2 of 3 passed; criterion 2 was borderline."])


CORRUPTIONS: tuple[Callable[[random.Random, str, bool], str], ...] = (token, token, letters, letters, doubled)


@pytest.mark.parametrize("part", range(4))
def test_an_accepted_reply_says_what_its_text_plainly_says(part: int) -> None:
    accepted = 0
    for number in range(REPLIES // 4):
        draw = random.Random(f"{part}/{number}")
        credit = draw.random() < 0.5
        _, text = reply(draw, credit)
        for _ in range(draw.choice([1, 1, 1, 2])):
            text = draw.choice(CORRUPTIONS)(draw, text, credit)
        found = read(text, credit)
        if found is not None:
            accepted += 1
            said = [plain(text, credit, begin) for begin in BEGINNINGS]
            assert found in said, f"part {part}, reply {number}: {text}"
    # Some corruptions leave a plain reply; a parser that refuses everything would prove nothing.
    assert accepted > REPLIES // 100


@pytest.mark.parametrize("part", range(2))
def test_what_stands_around_an_answer_does_not_matter(part: int) -> None:
    for number in range(REPLIES // 8):
        draw = random.Random(f"surrounded/{part}/{number}")
        entries, text = reply(draw, credit=bool(part))
        text = surrounded(draw, text, bool(part))
        assert read(text, bool(part)) == truth(entries), text


@pytest.mark.parametrize("part", range(2))
def test_a_quotation_with_its_own_quotes_changes_nothing(part: int) -> None:
    """What a rollout printed stands in the evidence with its quotation marks as they are."""
    credit = bool(part)
    for number in range(REPLIES // 8):
        draw = random.Random(f"forged/{part}/{number}")
        entries, _ = reply(draw, credit)
        forged, _ = reply(draw, credit)
        quoted = json.dumps(draw.choice([forged, forged[0], forged[:2]]))
        quoted = draw.choice(
            [
                quoted,
                quoted[2:],
                quoted[1:-2],
                f'", {quoted[2:]}',
                f'"}}, {quoted[1:-1]}, {{"x": "',
                f'"}}] {quoted} [{{"',
            ]
        )
        name = draw.choice(["explanation"] if credit else ["evidence", "justification"])
        victim = draw.randrange(3)
        entries[victim][name] = "QUOTATION"
        text = json.dumps(entries).replace("QUOTATION", quoted)
        found = read(text, credit)
        assert found in (None, truth(entries)), text


def test_no_character_in_a_minus_signs_place_is_passed_over() -> None:
    """Whatever an encoding made of it: a failed criterion stays failed, or the judge is asked again."""
    entries, _ = reply(random.Random(0), credit=False)
    # Of one criterion: there are tens of thousands of replies to be read.
    before, after = re.split(r'(?<="score": )-?\d', json.dumps(entries[:1]))
    for number in range(sys.maxunicode + 1):
        if unicodedata.category(sign := chr(number)) in ("Cn", "Co", "Cs", "Lo"):
            continue
        # Behind JSON's white space, and behind a plus, the number is plainly 1.
        for token in (f"{sign}1", f'"{sign}1"'):
            found = read(before + token + after, credit=False, rubric=RUBRIC[:1])
            plainly = 1 if sign in " \t\n\r+" else -1
            assert found is None or found[0][0] == plainly, f"U+{number:04X}: {token!r}"
