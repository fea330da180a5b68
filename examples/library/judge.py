"""A rule judge for the library: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

_CALL = re.compile(r'"name": "(\w+)", "arguments": \{[^}]*?: "([^"]*)"')
_LOAN = re.compile(r"^(.+): (overdue|on time), (\d+) holds$", re.MULTILINE)
_FINE = re.compile(r"unpaid fine ([\d.]+) dollars")
LARGEST_FINE = 5.0


def _calls(step: Step) -> list[tuple[str, str]]:
    return _CALL.findall(step.code)


def _steps_with(steps: Sequence[Step], *names: str) -> list[int]:
    return [step.number for step in steps if any(name in names for name, _ in _calls(step))]


def _verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


def looks_first(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No loan is renewed before the loans were listed, no fine waived before it was shown."""
    needed = {"renew": "list_loans", "waive_fine": "show_member"}
    seen: set[str] = set()
    early: list[int] = []
    acted: list[int] = []
    for step in steps:
        for name, _ in _calls(step):
            if name in needed:
                (acted if needed[name] in seen else early).append(step.number)
            seen.add(name)
    looked = _steps_with(steps, *needed.values())
    if not early and not looked:
        return Verdict.FAIL, [steps[0].number]
    return _verdict(not early), early or looked


def keeps_the_rules(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Renewals and waivers are those that the rules allow, by what the calls before them showed."""
    allowed: dict[str, bool] = {}
    right: list[int] = []
    wrong: list[int] = []
    for step in steps:
        for name, about in _calls(step):
            act = {"renew": about, "waive_fine": "the fine"}.get(name)
            if act in allowed:
                (right if allowed[act] else wrong).append(step.number)
        output = step.output or ""
        allowed |= {book: state == "on time" and holds == "0" for book, state, holds in _LOAN.findall(output)}
        if fine := _FINE.search(output):
            allowed["the fine"] = float(fine[1]) <= LARGEST_FINE
    if not right and not wrong:
        return Verdict.NOT_APPLICABLE, []
    return _verdict(not wrong), sorted(set(wrong or right))


def refuses_the_rest(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Refuse is called where something that was shown is against the rules and was not done, and only there."""
    outputs = "\n".join(step.output or "" for step in steps)
    asked = [book for book, _, _ in _LOAN.findall(outputs) if book in task or re.search(r"\b(all|every)", task)]
    blocked = [
        book for book, state, holds in _LOAN.findall(outputs) if book in asked and (state == "overdue" or holds != "0")
    ]
    blocked += ["the fine" for fine in _FINE.findall(outputs) if float(fine) > LARGEST_FINE]
    refused = _steps_with(steps, "refuse")
    if not blocked and not refused:
        return Verdict.NOT_APPLICABLE, []
    return _verdict(bool(blocked) == bool(refused)), refused or [steps[-1].number]


def does_all(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Everything that was asked for and seen to be allowed is done."""
    outputs = "\n".join(step.output or "" for step in steps)
    everything = re.search(r"\b(all|every)", task)
    wanted = {
        book
        for book, state, holds in _LOAN.findall(outputs)
        if state == "on time" and holds == "0" and (book in task or everything)
    }
    wanted |= {"the fine" for fine in _FINE.findall(outputs) if float(fine) <= LARGEST_FINE}
    acts = _steps_with(steps, "renew", "waive_fine")
    done = {about if name == "renew" else "the fine" for step in steps for name, about in _calls(step)}
    if not wanted:
        return Verdict.NOT_APPLICABLE, []
    return _verdict(wanted <= done), acts or [steps[-1].number]


def no_failed_call(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """No call ends in an error."""
    failed = [step.number for step in steps if "error:" in (step.output or "")]
    return _verdict(not failed), failed


answer = rule_judge(
    [
        SimpleRule(title="Looks first", instruction="Loans and fines are looked up before acting.", check=looks_first),
        SimpleRule(title="Keeps the rules", instruction="Only what the rules allow is done.", check=keeps_the_rules),
        SimpleRule(title="Does all", instruction="All that is asked for and allowed is done.", check=does_all),
        SimpleRule(title="Refuses", instruction="Refuse is called for what is not allowed.", check=refuses_the_rest),
        SimpleRule(title="No failed call", instruction="No call ends in an error.", check=no_failed_call),
    ]
)
