"""What goes wrong first: a later failure that only follows from it is that step's doing, not its own."""

from __future__ import annotations

import re

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import Case
from draco_ray.sandbox.rule_judge.data_rules import judge_pages, judge_selection, judge_source

_UNDEFINED = re.compile(r"NameError: name '(\w+)'")


def wrong_data(case: Case) -> tuple[int, ...]:
    """Steps that brought in the wrong list, a part of it, or the wrong items; the earliest kind of mistake counts."""
    for judge in (judge_source, judge_pages, judge_selection):
        finding = judge(case)
        if finding.verdict is Verdict.FAIL:
            return finding.steps
    return ()


def failing_steps(case: Case) -> set[int]:
    """Steps that are to blame for errors: not one that misses a variable which a step before it failed to set, nor one
    whose call was refused over items that were wrong already."""
    failed = case.trace.failed
    codes = {step.number: step.code for step in case.run.steps}
    wrong = wrong_data(case)
    blamed: set[int] = set()
    for step, error in failed.items():
        if name := _UNDEFINED.search(error):
            sets = re.compile(rf"\b{name[1]}\b\s*(?:=|,|\+=)")
            if any(sets.search(codes[earlier]) for earlier in failed if earlier < step):
                continue
        refused = [call for call in case.trace.calls if call.step == step and call.failed and call.changes]
        before = {cause for cause in wrong if cause < step}
        if before and any(case.trace.depends(call.subject) for call in refused):
            blamed |= before
            continue
        blamed.add(step)
    return blamed


def causes(case: Case) -> tuple[int, ...]:
    """Steps behind whatever is missing in the end; empty if neither data nor errors explain it."""
    return wrong_data(case) or case.steps(failing_steps(case))
