"""A rule judge for repairs: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

LONGEST = 400
"""Characters; a small model that makes no call at all still differs in this."""


def _judged(right: list[int], wrong: list[int]) -> tuple[Verdict, list[int]]:
    """Passes if any step is right, which is then cited."""
    return (Verdict.PASS, right) if right else (Verdict.FAIL, wrong)


def acts(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Every turn runs a command."""
    idle = [step.number for step in steps if "<tool_call>" not in step.code]
    return _judged([] if idle else [step.number for step in steps], idle)


def is_concise(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No turn is longer than it may be."""
    long = [step.number for step in steps if len(step.code) > LONGEST]
    return _judged([] if long else [step.number for step in steps], long)


def looks(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Some turn names the file that is to be repaired."""
    file = re.search(r"\b\w+\.py\b", task)
    right = [step.number for step in steps if file and file[0] in step.code]
    return _judged(right, [step.number for step in steps if step.number not in right])


answer = rule_judge(
    [
        SimpleRule(title="Acts", instruction="Every turn runs a command.", check=acts),
        SimpleRule(title="Concise", instruction="No turn is longer than 400 characters.", check=is_concise),
        SimpleRule(title="Looks", instruction="Some turn names the file to repair.", check=looks),
    ]
)
