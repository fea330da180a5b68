"""A rule judge for the shop: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

_CALL = re.compile(r'"name": "(\w+)", "arguments": \{"item": "(\w+)"')
_STATE = re.compile(r"\b([a-z]+) is (delivered|shipped|refunded)\b")
_DECISIONS = {"refund", "decline"}


def _calls(step: Step) -> list[tuple[str, str]]:
    return _CALL.findall(step.code)


def _verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


def looks_first(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No order is decided before it was shown."""
    shown: set[str] = set()
    early = []
    for step in steps:
        early += [step.number for name, order in _calls(step) if name in _DECISIONS and order not in shown]
        shown |= {order for name, order in _calls(step) if name == "show_order"}
    if not early and not shown:
        return Verdict.FAIL, [steps[0].number]
    return _verdict(not early), sorted(set(early)) or [steps[0].number]


def decides_all(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Every order that is asked for is refunded or declined."""
    asked = set(re.findall(r"\bthe ([a-z]+)", task))
    deciding = [step.number for step in steps if any(name in _DECISIONS for name, _ in _calls(step))]
    decided = {order for step in steps for name, order in _calls(step) if name in _DECISIONS}
    return _verdict(asked <= decided), deciding or [steps[-1].number]


def follows_policy(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Delivered orders are refunded, others declined; only orders whose state was shown count."""
    states: dict[str, str] = {}
    wrong: list[int] = []
    right: list[int] = []
    for step in steps:
        calls = _calls(step)
        if any(name == "show_order" for name, _ in calls):
            for order, state in _STATE.findall(step.output or ""):
                states.setdefault(order, state)
        for name, order in calls:
            if name in _DECISIONS and order in states:
                fits = (name == "refund") == (states[order] == "delivered")
                (right if fits else wrong).append(step.number)
    if not wrong and not right:
        return Verdict.NOT_APPLICABLE, []
    return _verdict(not wrong), sorted(set(wrong or right))


def no_refused_call(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No call ends in an error."""
    refused = [step.number for step in steps if "error:" in (step.output or "")]
    return _verdict(not refused), refused


answer = rule_judge(
    [
        SimpleRule(title="Looks first", instruction="No order is decided before it was shown.", check=looks_first),
        SimpleRule(title="Decides", instruction="Every order asked for is refunded or declined.", check=decides_all),
        SimpleRule(title="Follows the policy", instruction="Refunds what is delivered only.", check=follows_policy),
        SimpleRule(title="No refused call", instruction="No call ends in an error.", check=no_refused_call),
    ]
)
