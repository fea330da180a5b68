"""A rule judge for the desk agent: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

REFUNDED = ("damaged", "late")


def _calls(steps: Sequence[Step], *names: str) -> list[Step]:
    return [step for step in steps if any(f'"{name}"' in step.code for name in names)]


def looks_first(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """An order is looked up before it is decided on."""
    looked, decided = _calls(steps, "look_up"), _calls(steps, "refund", "decline")
    if not decided:
        return (Verdict.PASS, [looked[0].number]) if looked else (Verdict.FAIL, [steps[-1].number])
    if looked and looked[0].number < decided[0].number:
        return Verdict.PASS, [looked[0].number]
    return Verdict.FAIL, [decided[0].number]


def desk_knows(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """The sub-agent's answers agree with the policy."""
    answers = [step for step in steps if "tool_call" not in step.code]
    wrong, right = [], []
    for looked, answer in zip(_calls(steps, "look_up"), answers, strict=False):
        came = re.search(r"came (\w+)", looked.output or "")
        if came:
            refunded = came[1] in REFUNDED
            (right if answer.code.strip() == ("yes" if refunded else "no") else wrong).append(answer.number)
    if not wrong and not right:
        return Verdict.NOT_APPLICABLE, []
    return (Verdict.FAIL, wrong) if wrong else (Verdict.PASS, right)


def follows_desk(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """The decision agrees with the policy desk's answer."""
    said = [re.search(r"says (yes|no)", step.output or "") for step in _calls(steps, "look_up")]
    decided = _calls(steps, "refund", "decline")
    if not said or said[-1] is None:
        return Verdict.NOT_APPLICABLE, []
    wanted = "refund" if said[-1][1] == "yes" else "decline"
    if not decided:
        return Verdict.FAIL, [steps[-1].number]
    return (Verdict.PASS if f'"{wanted}"' in decided[-1].code else Verdict.FAIL), [decided[-1].number]


def no_errors(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No call is refused."""
    refused = [step.number for step in steps if "error" in (step.output or "")]
    return (Verdict.FAIL, refused) if refused else (Verdict.PASS, [])


answer = rule_judge(
    [
        SimpleRule(title="Looks first", instruction="An order is looked up before a decision.", check=looks_first),
        SimpleRule(title="The desk knows the policy", instruction="The sub-agent answers by it.", check=desk_knows),
        SimpleRule(title="Follows the desk", instruction="The decision is what the desk said.", check=follows_desk),
        SimpleRule(title="No refused call", instruction="No call ends in an error.", check=no_errors),
    ]
)
