"""A rule judge for the parcel desk: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge


def _shelved(steps: Sequence[Step]) -> Iterator[tuple[bool, bool, str, int]]:
    """Each parcel: fragile, heavy, the shelf it was put on, the step that did it."""
    for step in steps:
        parcel = re.search(r"(?:First|Next): a ((?:heavy|light)(?: fragile)?) ", step.asked)
        if parcel:
            yield "fragile" in parcel[1], "heavy" in parcel[1], step.code.strip()[-1:], step.number


def _verdict(wrong: list[int], right: list[int]) -> tuple[Verdict, list[int]]:
    if wrong:
        return Verdict.FAIL, wrong
    return (Verdict.PASS, right) if right else (Verdict.NOT_APPLICABLE, [])


def fragile(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Fragile parcels go on shelf A."""
    found = [(shelf == "A", number) for is_fragile, _, shelf, number in _shelved(steps) if is_fragile]
    return _verdict([n for right, n in found if not right], [n for right, n in found if right])


def weight(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Others go where their weight says."""
    found = [
        (shelf == ("B" if heavy else "C"), number)
        for is_fragile, heavy, shelf, number in _shelved(steps)
        if not is_fragile
    ]
    return _verdict([n for right, n in found if not right], [n for right, n in found if right])


def a_shelf(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Every answer is a shelf."""
    found = [(shelf in ("A", "B", "C"), number) for _, _, shelf, number in _shelved(steps)]
    return _verdict([n for right, n in found if not right], [n for right, n in found if right])


answer = rule_judge(
    [
        SimpleRule(title="Fragile on A", instruction="Every fragile parcel goes on shelf A.", check=fragile),
        SimpleRule(title="By weight", instruction="Other parcels: heavy on B, light on C.", check=weight),
        SimpleRule(title="A shelf", instruction="Every answer is a shelf of the house.", check=a_shelf),
    ]
)
