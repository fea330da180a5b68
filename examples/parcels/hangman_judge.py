"""A rule judge for Hangman: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

COMMON = "ETAOINSR"
"""The letters that English has most often."""


def _guesses(steps: Sequence[Step]) -> list[tuple[str, int]]:
    found = [(re.search(r"\[([A-Za-z]+)\]", step.code), step.number) for step in steps]
    return [(guess[1].upper() if guess else "", number) for guess, number in found]


def new_letters(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No letter is guessed twice."""
    seen: set[str] = set()
    again = []
    for guess, number in _guesses(steps):
        if guess in seen:
            again.append(number)
        seen.add(guess)
    return (Verdict.FAIL, again) if again else (Verdict.PASS, [number for _, number in _guesses(steps)])


def well_formed(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Every turn guesses one letter in brackets."""
    wrong = [number for guess, number in _guesses(steps) if len(guess) != 1]
    return (Verdict.FAIL, wrong) if wrong else (Verdict.PASS, [number for _, number in _guesses(steps)])


def common_first(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No rare letter is tried while a frequent one is left."""
    left, rare, common = set(COMMON), [], []
    for guess, number in _guesses(steps):
        if guess in COMMON:
            common.append(number)
            left.discard(guess)
        elif left:
            rare.append(number)
    if rare:
        return Verdict.FAIL, rare
    return (Verdict.PASS, common) if common else (Verdict.NOT_APPLICABLE, [])


answer = rule_judge(
    [
        SimpleRule(title="New letters", instruction="No letter is guessed twice.", check=new_letters),
        SimpleRule(title="One letter", instruction="Every turn guesses one letter in brackets.", check=well_formed),
        SimpleRule(
            title="Common first",
            instruction=f"The letters {', '.join(COMMON)} are tried before any other.",
            check=common_first,
        ),
    ]
)
