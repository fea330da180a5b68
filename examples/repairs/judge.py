"""A rule judge for repairs: it stands in for a judge model, so that the example runs without a key.

It does not judge repairs: the rules were written so that rollouts of a 135M-parameter model, which repairs nothing,
differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

LONGEST = 300
"""Characters of a concise turn; a small model that makes no call at all still differs in this and in shell blocks."""


def _some(right: list[int], steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Passes if any step is right, which is then cited; otherwise all are."""
    return (Verdict.PASS, right) if right else (Verdict.FAIL, [step.number for step in steps])


def acts(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Some turn runs a command."""
    return _some([step.number for step in steps if "<tool_call>" in step.code], steps)


def writes_shell(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Some turn has a block of shell."""
    return _some([step.number for step in steps if re.search(r"```(ba)?sh\b", step.code)], steps)


def is_concise(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Some turn is short."""
    return _some([step.number for step in steps if len(step.code) <= LONGEST], steps)


def looks(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Some turn names the file that is to be repaired."""
    file = re.search(r"\b\w+\.py\b", task)
    return _some([step.number for step in steps if file and file[0] in step.code], steps)


answer = rule_judge(
    [
        SimpleRule(title="Acts", instruction="Some turn runs a command.", check=acts),
        SimpleRule(title="Shell", instruction="Some turn has a block of shell.", check=writes_shell),
        SimpleRule(title="Concise", instruction="Some turn has at most 300 characters.", check=is_concise),
        SimpleRule(title="Looks", instruction="Some turn names the file to repair.", check=looks),
    ]
)
