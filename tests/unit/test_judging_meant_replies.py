"""Replies of which it is known what they mean are read as that, or the judge is asked again.

`tests/support/meant_replies.py` writes them, honest ones and such as contradict themselves. Beside it
test_judging_reply_fuzz.py corrupts replies, and reads from the text what they say.

``make fuzz-replies`` runs many times the number of replies, and prints how many were accepted.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from draco_ray.errors import ReplyError
from draco_ray.judging.phases import parse_attributions, parse_criteria, parse_scores
from draco_ray.records import Criterion
from tests.support.meant_replies import ADVERSARIES, HONEST, STEPS, Meaning, drawn

REPLIES = int(os.environ.get("DRACO_FUZZED_REPLIES", "6000")) // 3
"""Of each phase."""


def read(text: str, phase: str, titles: list[str]) -> Meaning | None:
    """What is made of a reply; None where the judge is asked again."""
    rubric = [Criterion(title=title, description="d", evaluator_instruction="e") for title in titles]
    try:
        match phase:
            case "score":
                return [(int(each.verdict),) for each in parse_scores(text, rubric).value]
            case "credit":
                return [(int(each.verdict), *each.steps) for each in parse_attributions(text, rubric, STEPS).value]
        criteria = parse_criteria(text, limit=24, source="s", least=1).value
    except ReplyError:
        return None
    return sorted(((each.title, each.evaluator_instruction) for each in criteria), key=str)


@pytest.mark.parametrize("phase", ADVERSARIES)
def test_a_reply_is_read_as_it_was_meant_or_asked_again(phase: str) -> None:
    plain = [style for style in HONEST if not style.endswith("?")]
    wrong: dict[str, list[str]] = {}
    kinds, accepted = Counter[str](), Counter[str]()
    for number in range(REPLIES):
        draw = random.Random(f"{phase}/{number}")
        # Every plain style by itself, styles together, an adversary, and an adversary among styles.
        kind = ("plain style", "styles", "adversary", "adversary")[number % 4]
        styles = [plain[number // 4 % len(plain)]] if kind == "plain style" else []
        if kind != "plain style":
            styles = draw.sample(list(HONEST), draw.choice([1, 2, 3] if kind == "styles" else [0, 0, 1, 2]))
        adversary = draw.choice(list(ADVERSARIES[phase])) if kind == "adversary" else None
        text, titles, meant = drawn(draw, phase, styles, adversary)
        found = read(text, phase, titles)
        kinds[kind] += 1
        accepted[kind] += found is not None
        if found != meant and (found is not None or kind == "plain style"):
            wrong.setdefault(adversary or " + ".join(styles), []).append(f"reply {number}, {styles}: {found}\n{text}")
    print(phase, *(f"{kind}: {accepted[kind]} of {count} accepted" for kind, count in kinds.items()), sep="; ")
    assert not wrong, "\n\n".join(f"{len(texts)} of {name!r}, as {texts[0]}" for name, texts in wrong.items())


def test_every_style_and_adversary_changes_a_reply() -> None:
    """One that does nothing would prove nothing."""
    for name in [*HONEST, *ADVERSARIES["credit"]]:
        how: tuple[list[str], str | None] = ([name], None) if name in HONEST else ([], name)
        seen = (
            drawn(random.Random(number), phase, *how)[0] != drawn(random.Random(number), phase, [], None)[0]
            for phase in ADVERSARIES
            if name in HONEST or name in ADVERSARIES[phase]
            for number in range(20)
        )
        assert any(seen) is (name != "plain"), name
