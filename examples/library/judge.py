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
_WANTS_BOOKS = re.compile(r"\b(renew|keep|extend|longer|weeks)\b", re.IGNORECASE)
_WANTS_FINE = re.compile(r"\b(fine|charge|owe)\b", re.IGNORECASE)
LARGEST_FINE = 5.0
ACTS = ("renew", "waive_fine", "refuse")
"""Every request ends in at least one of these calls."""


def _calls(step: Step) -> list[tuple[str, str]]:
    return _CALL.findall(step.code)


def _steps_with(steps: Sequence[Step], *names: str) -> list[int]:
    return [step.number for step in steps if any(name in names for name, _ in _calls(step))]


def _verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


def _nothing_to_show(task: str, steps: Sequence[Step]) -> bool:
    """Whether nothing was done, or what the task is about was never looked up: then no result can be right."""
    outputs = "\n".join(step.output or "" for step in steps)
    unseen = (_WANTS_BOOKS.search(task) and not _LOAN.search(outputs)) or (
        _WANTS_FINE.search(task) and not _FINE.search(outputs)
    )
    return bool(unseen) or not _steps_with(steps, *ACTS)


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
    """Renewals and waivers are those that were asked for and that the rules allow, by what calls before them showed."""
    allowed: dict[str, bool] = {}
    right: list[int] = []
    wrong: list[int] = []
    for step in steps:
        for name, about in _calls(step):
            if act := {"renew": about, "waive_fine": "the fine"}.get(name):
                asked = _WANTS_FINE.search(task) if name == "waive_fine" else act in task
                (right if asked and allowed.get(act) else wrong).append(step.number)
        output = step.output or ""
        allowed |= {book: state == "on time" and holds == "0" for book, state, holds in _LOAN.findall(output)}
        if fine := _FINE.search(output):
            allowed["the fine"] = float(fine[1]) <= LARGEST_FINE
    if wrong or _nothing_to_show(task, steps):
        return Verdict.FAIL, sorted(set(wrong))
    return (Verdict.PASS, sorted(set(right))) if right else (Verdict.NOT_APPLICABLE, [])


def refuses_the_rest(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Refuse is called where something that was shown is against the rules and was not done, and only there."""
    outputs = "\n".join(step.output or "" for step in steps)
    asked = [book for book, _, _ in _LOAN.findall(outputs) if book in task]
    blocked = [
        book for book, state, holds in _LOAN.findall(outputs) if book in asked and (state == "overdue" or holds != "0")
    ]
    if _WANTS_FINE.search(task):
        blocked += ["the fine" for fine in _FINE.findall(outputs) if float(fine) > LARGEST_FINE]
    refused = _steps_with(steps, "refuse")
    if _nothing_to_show(task, steps):
        return Verdict.FAIL, []
    if not blocked and not refused:
        return Verdict.NOT_APPLICABLE, []
    return _verdict(bool(blocked) == bool(refused)), refused or [steps[-1].number]


def does_all(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Everything that was asked for and seen to be allowed is done."""
    outputs = "\n".join(step.output or "" for step in steps)
    wanted = {
        book for book, state, holds in _LOAN.findall(outputs) if state == "on time" and holds == "0" and book in task
    }
    if _WANTS_FINE.search(task):
        wanted |= {"the fine" for fine in _FINE.findall(outputs) if float(fine) <= LARGEST_FINE}
    acts = _steps_with(steps, "renew", "waive_fine")
    done = {
        about if name == "renew" else "the fine" for step in steps for name, about in _calls(step) if name in ACTS[:2]
    }
    if _nothing_to_show(task, steps):
        return Verdict.FAIL, []
    if not wanted:
        return Verdict.NOT_APPLICABLE, []
    return _verdict(wanted <= done), acts or [steps[-1].number]


def no_failed_call(task: str, steps: Sequence[Step]) -> tuple[Verdict, list[int]]:
    """Calls are made, and none ends in an error."""
    failed = [step.number for step in steps if "error:" in (step.output or "")]
    return _verdict(not failed and any(map(_calls, steps))), failed


answer = rule_judge(
    [
        SimpleRule(title="Looks first", instruction="Loans and fines are looked up before acting.", check=looks_first),
        SimpleRule(title="Keeps the rules", instruction="Only what the rules allow is done.", check=keeps_the_rules),
        SimpleRule(title="Does all", instruction="All that is asked for and allowed is done.", check=does_all),
        SimpleRule(title="Refuses", instruction="Refuse is called for what is not allowed.", check=refuses_the_rest),
        SimpleRule(
            title="No failed call", instruction="Calls are made, and none ends in an error.", check=no_failed_call
        ),
    ]
)
