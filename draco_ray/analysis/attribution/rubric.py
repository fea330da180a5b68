"""The rubric of the bench: one criterion for each kind of fault, so that the right verdict on each rollout is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from draco_ray.environments.sandbox.scripts import Family, Fault
from draco_ray.records import Criterion, IntArray

UNKNOWN = 0
"""Stands where a fault leaves open whether another criterion is violated."""

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
_OPEN = {Fault.WRONG_SOURCE: frozenset({Fault.FIRST_PAGE_ONLY, Fault.WRONG_FILTER})}
"""Whether the pages of a wrong list were read, or the right items of it chosen, is a matter of taste."""


def faults_of(family: Family) -> list[Fault]:
    """The faults a family's script can have, in the order of the rubric."""
    return [fault for fault in _CRITERIA if fault in family.faults]


def known_rubric(family: Family, task: str) -> tuple[Criterion, ...]:
    """A criterion per fault of the family. Each ends with the task: a credit prompt need not show it."""
    criteria = [_CRITERIA[fault] for fault in faults_of(family)]
    return tuple(
        replace(criterion, evaluator_instruction=f"{criterion.evaluator_instruction} The task reads: {task}")
        for criterion in criteria
    )


def known_verdicts(family: Family, fault: Fault | None) -> IntArray:
    """What a judge should say of a rollout with one fault, or with none: -1 violated, +1 not, `UNKNOWN` left open."""
    truth_K = np.ones(len(faults_of(family)), dtype=np.int8)
    for index, about in enumerate(faults_of(family)):
        if about is fault:
            truth_K[index] = -1
        elif fault is not None and about in _OPEN.get(fault, ()):
            truth_K[index] = UNKNOWN
    return truth_K
