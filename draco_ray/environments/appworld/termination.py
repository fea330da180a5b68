"""The termination modes of Figure "terminations", derived from a trajectory."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from draco_ray.records import EpisodeEnd, Termination, Trajectory

FAILED = "Execution failed."
"""Beginning of the output of a cell that raised, did not parse or timed out."""


def termination(ended: EpisodeEnd, steps: Iterable[tuple[str | None, str | None]]) -> Termination:
    """How a rollout ended, from its last successful ``complete_task`` call or else from ``ended``.

    A call is found in the cell's code and counts as successful if the cell did not fail, even in a branch that may not
    have been executed. A rollout that submitted and was stopped by a limit afterwards counts as submitted.

    Args:
        ended: why the agent loop stopped.
        steps: (code, output) of the turns that emitted code, in order.
    """
    if ended is EpisodeEnd.SERVER_ERROR:
        return Termination.SERVER_ERROR
    if ended is EpisodeEnd.CRASHED:
        return Termination.CRASHED
    cells = list(steps)
    for code, output in reversed(cells):
        status = _completion(code or "")
        if status is not None and not (output or "").lstrip().startswith(FAILED):
            return Termination.GAVE_UP if status == "fail" else Termination.SUBMITTED
    if ended is EpisodeEnd.RESPONSE_LIMIT:
        return Termination.RESPONSE_LIMIT
    if ended is EpisodeEnd.TURN_LIMIT:
        return Termination.TURN_LIMIT
    return Termination.GAVE_UP if cells else Termination.NO_ACTION


def termination_of(trajectory: Trajectory) -> Termination:
    """`termination` of a whole trajectory."""
    return termination(
        trajectory.ended, ((turn.action, turn.observation) for turn in trajectory.turns if turn.action is not None)
    )


def _completion(code: str) -> str | None:
    """The status of the last ``complete_task`` call in a cell, "success" by default; None: no call.

    >>> _completion("apis.supervisor.complete_task(answer=None, status='fail')")
    'fail'
    """
    if "complete_task" not in code:
        return None
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "complete_task"
    ]
    if not calls:
        return None
    last = max(calls, key=lambda call: (call.lineno, call.col_offset))
    given = [keyword.value for keyword in last.keywords if keyword.arg == "status"]
    fails = bool(given) and isinstance(given[0], ast.Constant) and given[0].value == "fail"
    return "fail" if fails else "success"
