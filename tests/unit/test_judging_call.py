"""When a judge call gives up, and how long it waits: decided from what the pool has seen, without a request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from draco_ray.judging.client import Call
from draco_ray.judging.completion import Request
from draco_ray.judging.limiter import Grant, LeaseRequest
from draco_ray.judging.outage import FIRST_BACKOFF_SECONDS


def a_call(**changes: Any) -> Call:
    values: dict[str, Any] = {
        "request": Request(messages=()),
        "asked": LeaseRequest(input_tokens=1, output_tokens=1),
        "key": None,
        "attempts": 3,
        "patient": True,
        "started_at": 0.0,
        "clock": 0.0,
    }
    return Call(**(values | changes))


def seen(answers: int, *, alone: bool = False) -> Grant:
    """What the pool has seen by the time of a lease."""
    return Grant(number="1", answers=answers, alone=alone)


def test_alone_every_failure_counts() -> None:
    call = a_call(patient=False)
    for _ in range(2):
        call.note_failure(TimeoutError(), 0.0)
        call.note_grant(seen(0))
    assert not call.spent
    call.note_failure(TimeoutError(), 0.0)
    assert call.spent


def test_while_nobody_is_answered_no_failure_counts() -> None:
    call = a_call()
    for _ in range(50):
        call.note_failure(TimeoutError(), 0.0)
        call.note_grant(seen(0))
    assert not call.spent


def test_failures_in_a_row_count_as_one_once_somebody_was_answered() -> None:
    call = a_call()
    for answered in range(1, 4):
        assert not call.spent
        for _ in range(4):
            call.note_failure(TimeoutError(), 0.0)
        call.note_grant(seen(answered))
    assert call.spent


def test_a_call_that_fails_alone_is_told_from_a_judge_that_is_not_there() -> None:
    call, unanswered = a_call(), a_call()
    for _ in range(3):
        call.note_failure(TimeoutError(), 0.0)
        call.note_grant(seen(0, alone=True))
        error = TimeoutError()
        error.__cause__ = httpx.ConnectError("refused")
        unanswered.note_failure(error, 0.0)
        unanswered.note_grant(seen(0, alone=True))
    assert (call.spent, unanswered.spent) == (True, False)


def test_what_failed_requests_may_have_cost_adds_up() -> None:
    call = a_call()
    for billed in (0.5, 0.0, 0.25):
        call.note_failure(TimeoutError(), billed)
    assert call.guessed == pytest.approx(0.75)


def test_waits_double_up_to_the_most_and_never_end_before_the_endpoints_own_hint() -> None:
    call = a_call()
    for failures in range(1, 80):
        call.note_failure(TimeoutError(), 0.0)
        ceiling = min(60.0, FIRST_BACKOFF_SECONDS * 2.0 ** (failures - 1))
        assert ceiling / 2 <= call.pause_seconds(None, 60.0) <= ceiling
        assert 7.0 <= call.pause_seconds(7.0, 60.0) <= 8.0


def test_how_much_later_than_asked_for_a_request_comes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    call = a_call(own=1)
    # A tenth of the endpoint's hint, and no more than a second; the hint counts up to a minute.
    assert [call.pause_seconds(hint, 60.0) for hint in (0.0, 2.0, 10.0, 100.0)] == [0.0, 2.2, 11.0, 61.0]
    # Without one it doubles, and not without end, however often it failed.
    call.own = 5000
    assert call.pause_seconds(None, 1e12) == FIRST_BACKOFF_SECONDS * 2.0**30
