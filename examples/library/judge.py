"""A rule judge for the library: it stands in for a judge model, so that the example runs without a key."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import SimpleRule, rule_judge

# The results of several calls are numbered.
_LOAN = re.compile(r"^(?:\(\d+\) list_loans: )?(.+): (overdue|on time), (\d+) holds$", re.MULTILINE)
_FINE = re.compile(r"unpaid fine ([\d.]+) dollars")
_WANTS_BOOKS = re.compile(r"\b(renew|keep|extend|longer|weeks)\b", re.IGNORECASE)
_WANTS_FINE = re.compile(r"\b(fine|charge|owe)\b", re.IGNORECASE)
LARGEST_FINE = 5.0
ACTS = ("renew", "waive_fine", "refuse")
"""Every request ends in at least one of these calls."""


def _calls(step: Step) -> list[tuple[str, str]]:
    """Name and first argument of each call, however its JSON is written."""
    found: list[tuple[str, str]] = []
    at = step.code.find("{")
    while at >= 0:
        try:
            call, at = json.JSONDecoder().raw_decode(step.code, at)
            given = call.get("arguments")
            # Arguments may be JSON within a JSON string.
            given = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            call, given, at = {}, None, at + 1
        if isinstance(given, dict):
            found.append((str(call.get("name")), str(next(iter(given.values()), ""))))
        at = step.code.find("{", at)
    return found


def _steps_with(steps: Sequence[Step], *names: str) -> list[int]:
    return [step.number for step in steps if any(name in names for name, _ in _calls(step))]


def _shown(steps: Sequence[Step], tool: str, pattern: re.Pattern[str]) -> list[tuple[int, Any]]:
    """Step and match of everything that a tool has shown; an error may repeat what the policy wrote."""
    looks = [step for step in steps if step.number in _steps_with([step], tool) and "error:" not in (step.output or "")]
    return [(step.number, match) for step in looks for match in pattern.findall(step.output or "")]


def _verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


def looks_first(task: str, steps: Sequence[Step]) -> tuple[Verdict, Sequence[int]]:
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


def _part(
    asked: bool, looks: Sequence[int], right: Sequence[int], wrong: Sequence[int], missing: bool, steps: Sequence[Step]
) -> tuple[Verdict, Sequence[int]]:
    """The verdict on a part of a request; it fails if anything is wrong or missing, not looked up, or undecided."""
    if not asked:
        return (Verdict.FAIL, wrong) if wrong else (Verdict.NOT_APPLICABLE, [])
    if wrong or missing or not looks or not _steps_with(steps, *ACTS):
        return Verdict.FAIL, wrong or _steps_with(steps, "refuse")
    return Verdict.PASS, right or looks


def renews_what_is_allowed(task: str, steps: Sequence[Step]) -> tuple[Verdict, Sequence[int]]:
    """The loan that was asked for is renewed if the list shows it on time and without holds; no other loan is."""
    shown = _shown(steps, "list_loans", _LOAN)
    loans = {book: state == "on time" and holds == "0" for _, (book, state, holds) in shown}
    may = {book for book, allowed in loans.items() if allowed and book in task}
    renewed = [(step.number, about) for step in steps for name, about in _calls(step) if name == "renew"]
    return _part(
        asked=bool(_WANTS_BOOKS.search(task)),
        looks=sorted({number for number, _ in shown}),
        right=[number for number, book in renewed if book in may],
        wrong=[number for number, book in renewed if book not in may],
        missing=not may <= {book for _, book in renewed},
        steps=steps,
    )


def waives_what_is_allowed(task: str, steps: Sequence[Step]) -> tuple[Verdict, Sequence[int]]:
    """A fine that was asked about is waived if the member's page shows that it is small enough; no other is."""
    fines = _shown(steps, "show_member", _FINE)
    asked = bool(_WANTS_FINE.search(task))
    may = asked and any(float(fine) <= LARGEST_FINE for _, fine in fines)
    waived = _steps_with(steps, "waive_fine")
    return _part(
        asked=asked,
        looks=sorted({number for number, _ in fines}),
        right=waived,
        wrong=[] if may else waived,
        missing=may and not waived,
        steps=steps,
    )


def refuses_the_rest(task: str, steps: Sequence[Step]) -> tuple[Verdict, Sequence[int]]:
    """Refuse is called if something asked for was looked up and is against the rules, and only then."""
    loans, fines = _shown(steps, "list_loans", _LOAN), _shown(steps, "show_member", _FINE)
    blocked = any(book in task and (state == "overdue" or holds != "0") for _, (book, state, holds) in loans)
    if _WANTS_FINE.search(task):
        blocked |= any(float(fine) > LARGEST_FINE for _, fine in fines)
    refused = _steps_with(steps, "refuse")
    if not blocked and not refused:
        return Verdict.NOT_APPLICABLE, []
    return _verdict(blocked == bool(refused)), refused


def no_useless_call(task: str, steps: Sequence[Step]) -> tuple[Verdict, Sequence[int]]:
    """Calls are made; none ends in an error, and none is made twice."""
    useless = [step.number for step in steps if "error:" in (step.output or "")]
    made: set[tuple[str, str]] = set()
    for step in steps:
        calls = {(name, "" if name == "refuse" else about) for name, about in _calls(step)}
        useless += [step.number] if calls & made else []
        made |= calls
    return _verdict(not useless and bool(made)), useless


def closes(task: str, steps: Sequence[Step]) -> tuple[Verdict, Sequence[int]]:
    """The run ends with a message to the member, after at least one call."""
    return _verdict(len(steps) > 1 and steps[-1].message), [steps[-1].number]


answer = rule_judge(
    [
        SimpleRule(title="Looks first", instruction="Loans and fines are looked up before acting.", check=looks_first),
        SimpleRule(title="Renews", instruction="A loan is renewed if that is allowed.", check=renews_what_is_allowed),
        SimpleRule(title="Waives", instruction="A fine is waived if that is allowed.", check=waives_what_is_allowed),
        SimpleRule(title="Refuses", instruction="Refuse is called for what is not allowed.", check=refuses_the_rest),
        SimpleRule(
            title="No useless call", instruction="No call ends in an error or is repeated.", check=no_useless_call
        ),
        SimpleRule(title="Closes", instruction="The last message says what was done.", check=closes),
    ]
)
