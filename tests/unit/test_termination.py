"""Termination modes: read off what a rollout's cells called, and what stopped it."""

from __future__ import annotations

import pytest

from draco_ray.environments.appworld.environment import termination
from draco_ray.records import EpisodeEnd, Termination

LOOK = ("print(apis.api_docs.show_app_descriptions())", "[...]")
DONE = ("apis.supervisor.complete_task(answer=3)", "Execution successful.")
FAIL = ('apis.supervisor.complete_task(answer=None, status="fail")', "Execution successful.")
RAISED = ("x = 1\napis.supervisor.complete_task(answer=x)", "Execution failed. Traceback:\n...")
Cells = list[tuple[str | None, str | None]]


@pytest.mark.parametrize(
    ("ended", "steps", "expected"),
    [
        (EpisodeEnd.FINISHED, [LOOK, DONE], Termination.SUBMITTED),
        (EpisodeEnd.FINISHED, [LOOK, FAIL], Termination.GAVE_UP),
        (EpisodeEnd.FINISHED, [LOOK], Termination.GAVE_UP),
        (EpisodeEnd.FINISHED, [], Termination.NO_ACTION),
        (EpisodeEnd.FINISHED, [LOOK, RAISED], Termination.GAVE_UP),
        # The last call counts, also where a limit stopped what came after it.
        (EpisodeEnd.FINISHED, [FAIL, DONE], Termination.SUBMITTED),
        (EpisodeEnd.FINISHED, [DONE, RAISED], Termination.SUBMITTED),
        (EpisodeEnd.TURN_LIMIT, [LOOK, DONE, LOOK], Termination.SUBMITTED),
        (EpisodeEnd.TURN_LIMIT, [LOOK], Termination.TURN_LIMIT),
        (EpisodeEnd.TURN_LIMIT, [RAISED], Termination.TURN_LIMIT),
        (EpisodeEnd.RESPONSE_LIMIT, [LOOK], Termination.RESPONSE_LIMIT),
        # Its only turn was cut: the length stopped it.
        (EpisodeEnd.RESPONSE_LIMIT, [], Termination.RESPONSE_LIMIT),
        (EpisodeEnd.SERVER_ERROR, [LOOK, DONE], Termination.SERVER_ERROR),
        (EpisodeEnd.CRASHED, [DONE, (LOOK[0], None)], Termination.CRASHED),
        (EpisodeEnd.SERVER_ERROR, [(DONE[0], None)], Termination.SERVER_ERROR),
    ],
)
def test_modes(ended: EpisodeEnd, steps: Cells, expected: Termination) -> None:
    assert termination(ended, steps) is expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("# apis.supervisor.complete_task() comes later", Termination.GAVE_UP),
        ("print('apis.supervisor.complete_task()')", Termination.GAVE_UP),
        ("done = apis.supervisor.complete_task", Termination.GAVE_UP),
        ("apis.supervisor.complete_task(", Termination.GAVE_UP),
        ("apis.supervisor.complete_task()\x00", Termination.GAVE_UP),
        ("(" * 5000 + "apis.supervisor.complete_task()" + ")" * 5000, Termination.GAVE_UP),
        ("print(apis.supervisor.complete_task())", Termination.SUBMITTED),
        ("r = apis.supervisor.complete_task(status=state, answer=1)", Termination.SUBMITTED),
        ("c = apis.supervisor\nc.complete_task(status='success')", Termination.SUBMITTED),
        (f"{DONE[0]}\n{FAIL[0]}", Termination.GAVE_UP),
        (f"{FAIL[0]}; {DONE[0]}", Termination.SUBMITTED),
    ],
)
def test_a_call_is_code_that_runs_not_a_mention(code: str, expected: Termination) -> None:
    assert termination(EpisodeEnd.FINISHED, [(code, "Execution successful.")]) is expected
