"""A rule judge for the order desk: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge


def _lines(step: Step) -> list[str]:
    return [line.strip().lower() for line in step.code.splitlines() if line.strip()]


def looks_first(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """The first step is a list or a show."""
    looks = any(line.startswith(("list", "show")) for line in _lines(steps[0]))
    return (Verdict.PASS if looks else Verdict.FAIL), [steps[0].number]


def no_errors(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No command is refused."""
    refused = [step.number for step in steps if "error" in (step.output or "").lower()]
    return (Verdict.FAIL, refused) if refused else (Verdict.PASS, [])


def replies(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """The customer gets a reply."""
    said = [step.number for step in steps if any(line.startswith("reply") for line in _lines(step))]
    return (Verdict.PASS, said) if said else (Verdict.FAIL, [])


def serves(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """The requested refund or shipment is tried."""
    wanted = "refund" if re.search(r"\brefund\b", task, re.IGNORECASE) else "ship"
    tried = [step.number for step in steps if any(line.startswith(wanted) for line in _lines(step))]
    return (Verdict.PASS, tried) if tried else (Verdict.FAIL, [])


answer = rule_judge(
    [
        SimpleRule(title="Looks first", instruction="The first step lists or shows orders.", check=looks_first),
        SimpleRule(title="No refused command", instruction="No command ends in an error.", check=no_errors),
        SimpleRule(title="Replies to the customer", instruction="A reply is sent.", check=replies),
        SimpleRule(title="Does what is asked", instruction="Tries the refund or shipment asked for.", check=serves),
    ]
)
