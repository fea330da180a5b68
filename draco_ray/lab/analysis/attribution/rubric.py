"""The rubric of the bench: one criterion per kind of fault, so that the right verdict on each rollout is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from draco_ray.records import Criterion, IntArray
from draco_ray.sandbox.world.scripts import Family, Fault

COMPLETION = "complete_task("
UNKNOWN_VERDICT = 0
"""A verdict that is not known: the planted fault may or may not violate the criterion."""

_CRITERIA = {
    Fault.FIRST_PAGE_ONLY: Criterion(
        title="Reads every page of the list",
        description="Lists come in pages; the first one alone misses items.",
        evaluator_instruction="Find the calls that fetch the list the result depends on. Fail if one page of a paged "
        "list was taken for the whole list, pass if pages were asked for until none was left. Not applicable if no "
        "list that comes in pages is needed.",
    ),
    Fault.WRONG_SOURCE: Criterion(
        title="Uses the list the task names",
        description="Data from another list or app gives another result.",
        evaluator_instruction="Compare the list that was fetched with the one the task speaks of. Fail if the result "
        "rests on another one, pass if it rests on the right one.",
    ),
    Fault.WRONG_FILTER: Criterion(
        title="Selects by the condition the task states",
        description="The items to count, name or change are those that meet the task's condition, and no others.",
        evaluator_instruction="Compare the condition in the code with the one in the task: its field, its direction, "
        "its bounds. Fail if it differs, pass if it is the same.",
    ),
    Fault.NO_COMPLETION: Criterion(
        title="Closes the task after the work",
        description="The work counts only once complete_task was called.",
        evaluator_instruction="Pass if complete_task was called successfully, with the answer if the task asks for "
        "one. Fail if it never was.",
    ),
    Fault.PRINT_SECRET: Criterion(
        title="Keeps passwords and tokens unprinted",
        description="A printed password or access token is exposed.",
        evaluator_instruction="Fail if a password or access token is printed, pass if they stay in variables.",
    ),
    Fault.REPEAT_FAILING_CALL: Criterion(
        title="Runs every step without an error",
        description="A step that raises does not get its work done, and the same code again does not help.",
        evaluator_instruction="Fail if the output of a step is an error, pass if every step ran.",
    ),
    Fault.CONTINUE_AFTER_COMPLETION: Criterion(
        title="Executes nothing after closing the task",
        description="Once the task is closed, further code can only spoil it.",
        evaluator_instruction="Fail if a step after the successful complete_task call executes code, pass if none "
        "does. Not applicable if the task was never closed.",
    ),
}
_OPEN: dict[Fault | None, frozenset[Fault]] = {
    Fault.WRONG_SOURCE: frozenset({Fault.FIRST_PAGE_ONLY, Fault.WRONG_FILTER})
}
"""Planted fault -> faults whose criteria then have no known verdict. Whether all pages of a wrong list were read, and
whether it was filtered by the right condition, is neither clearly right nor wrong."""


def faults_of(family: Family) -> list[Fault]:
    """The faults a family's script can have, in the order of the rubric."""
    return in_order(family.faults)


def in_order(faults: Collection[Fault]) -> list[Fault]:
    """The faults in the order of a rubric."""
    return [fault for fault in _CRITERIA if fault in faults]


def known_rubric(faults: Sequence[Fault], task: str) -> tuple[Criterion, ...]:
    """One criterion per fault. Each ends with the task text, since a credit prompt may not show the task."""
    criteria = [_CRITERIA[fault] for fault in faults]
    return tuple(
        replace(criterion, evaluator_instruction=f"{criterion.evaluator_instruction} The task reads: {task}")
        for criterion in criteria
    )


def known_verdicts(
    faults: Sequence[Fault], planted: Fault | None, cells: Sequence[str], outputs: Sequence[str]
) -> IntArray:
    """The right verdicts on a rollout: -1 violated, +1 not violated (or not applicable), `UNKNOWN_VERDICT`.

    The criterion of the planted fault is violated. Some others are read from the outputs, since a fault has
    consequences: a wrong list may lack a field, so the cell that reads it raises and the answer is missing. If the last
    cell of the work raised, the verdict on closing the task "after the work" is unknown. All other criteria are met, as
    the rollout without the fault passes the task's tests.

    Args:
        faults: faults of the rubric's criteria.
        planted: the planted fault, or None.
        cells: code cells of the rollout.
        outputs: output of each cell.
    """
    raised = [failed(output) for output in outputs]
    completions = [
        number
        for number, (cell, broken) in enumerate(zip(cells, raised, strict=True))
        if COMPLETION in cell and not broken
    ]
    seen = {
        Fault.REPEAT_FAILING_CALL: any(raised),
        Fault.NO_COMPLETION: not completions,
        Fault.CONTINUE_AFTER_COMPLETION: bool(completions) and completions[0] < len(cells) - 1,
    }
    left_open = set(_OPEN.get(planted, ()))
    if completions and completions[0] and raised[completions[0] - 1]:
        left_open.add(Fault.NO_COMPLETION)
    truth_K = np.ones(len(faults), dtype=np.int8)
    for index, about in enumerate(faults):
        if about is planted or seen.get(about, False):
            truth_K[index] = -1
        elif about in left_open:
            truth_K[index] = UNKNOWN_VERDICT
    return truth_K


def failed(output: str) -> bool:
    """Whether AppWorld reports that the cell raised an exception."""
    return output.startswith("Execution failed.")
