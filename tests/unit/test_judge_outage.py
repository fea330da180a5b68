"""What a failed request means for the judge, its call and everybody's next request, on a clock of the test's own."""

from __future__ import annotations

import logging
import math

import pytest

from draco_ray.config.schema import JudgeLimits
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.limiter import LeaseRequest, Limiter, RequestResult
from draco_ray.judging.outage import (
    FIRST_BACKOFF_SECONDS,
    REFUSALS_TO_STOP,
    ROUNDS_TO_PROBE,
    FailureKind,
    JudgeHealth,
    NextAction,
    OutageStatus,
    format_duration,
    seconds_to_pause,
)

NOBODY = math.inf


def down(
    outage: JudgeHealth, now: float, trouble: FailureKind = FailureKind.UNAVAILABLE, rounds: int = ROUNDS_TO_PROBE
) -> float:
    """Requests fail as soon as one may be sent; returns the time."""
    for _ in range(rounds):
        now += outage.seconds_to_wait(now)
        assert outage.failed(trouble, "503 overloaded", None, now, now) is NextAction.AGAIN
    return now


def test_everybody_waits_longer_each_time_until_somebody_is_answered() -> None:
    outage = JudgeHealth(max_seconds=600, max_backoff_seconds=8)
    now, waits = 0.0, []
    for _ in range(6):
        outage.failed(FailureKind.UNAVAILABLE, "503", None, now, now)
        waits.append(outage.seconds_to_wait(now))
        now += waits[-1]
    for wait, most in zip(waits, [1, 2, 4, 8, 8, 8], strict=True):
        assert most / 2 <= wait <= most
    outage.answered(now)
    assert outage.seconds_to_wait(now) == 0.0


def test_failures_of_requests_that_were_sent_before_the_pause_are_one() -> None:
    outage = JudgeHealth(max_seconds=600)
    for late in range(200):
        outage.failed(FailureKind.UNAVAILABLE, "503", None, 0.0, 0.1 + late / 1000)
    assert outage.seconds_to_wait(0.3) <= 1.0
    assert not outage.down


def test_a_pause_begins_anew_with_what_was_sent_since_the_last_one_began() -> None:
    outage = JudgeHealth(max_seconds=600)

    def fails(sent_at: float, now: float) -> float:
        outage.failed(FailureKind.UNAVAILABLE, "503", None, sent_at, now)
        return outage.seconds_to_wait(now)

    assert 0.5 <= fails(sent_at=0.0, now=10.0) <= 1.0
    # Sent before that: it says nothing new, however late it is.
    assert fails(sent_at=9.9, now=20.0) == 0.0
    again = fails(sent_at=10.0, now=20.0)
    assert 1.0 <= again <= 2.0
    assert fails(sent_at=20.0, now=20.5) == pytest.approx(again - 0.5)
    assert 2.0 <= fails(sent_at=20.0, now=20.0 + again) <= 4.0


def test_the_longest_wait_that_was_asked_for_holds() -> None:
    outage = JudgeHealth(max_seconds=600)
    for sent_at, hint in enumerate((20.0, 5.0)):
        outage.failed(FailureKind.RATE_LIMITED, "429", hint, sent_at, sent_at)
    assert 19.0 <= outage.seconds_to_wait(1.0) <= 20.0
    # Without a hint it holds as well, and a later one may ask for more.
    outage.failed(FailureKind.RATE_LIMITED, "429", None, 2.0, 2.0)
    assert outage.seconds_to_wait(2.0) >= 18.0
    outage.failed(FailureKind.RATE_LIMITED, "429", 30.0, 2.0, 2.0)
    assert outage.seconds_to_wait(2.0) >= 30.0


def test_a_rate_limit_makes_everybody_wait_as_long_as_it_says() -> None:
    outage = JudgeHealth(max_seconds=600)
    outage.failed(FailureKind.RATE_LIMITED, "429", 7.0, 0.0, 0.0)
    assert 7.0 <= outage.seconds_to_wait(0.0) <= 7.7
    # Somebody who was sent earlier is answered: the allowance is as spent as it was.
    outage.answered(1.0)
    assert outage.seconds_to_wait(1.0) >= 6.0


def test_an_outage_is_logged_with_its_long_waits_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    outage = JudgeHealth(max_seconds=3600, who="judge openai/x at http://h/v1")
    caplog.set_level(logging.WARNING)
    now = down(outage, 0.0, rounds=5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "judge openai/x at http://h/v1 does not answer (503 overloaded): judging is paused until it does"
    )
    assert "judge.max_outage_seconds=3600" in line
    # Waits of half a minute and more are logged when they begin.
    now = down(outage, now, rounds=4)
    assert [record.getMessage() == line for record in caplog.records].count(False) >= 3
    pause = outage.pause(now)
    assert pause is not None
    assert pause.lasted == pytest.approx(now)
    assert pause.gives_up == pytest.approx(3600 - now)
    assert 0 < pause.next_try <= 60
    caplog.clear()
    outage.answered(now + 200)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "answers again after" in line
    assert outage.pause(now + 200) is None


def test_the_line_of_an_outage_and_of_its_end_say_how_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without chance: every wait is as long as it may be."""
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    caplog.set_level(logging.WARNING)
    outage = JudgeHealth(max_seconds=600, max_backoff_seconds=60, who="judge m")
    # At 0, 1, 3 and 7 seconds; the last of them, the fourth in a row, is said.
    assert down(outage, 0.0, rounds=3) == 3.0
    assert not caplog.records
    assert outage.pause(3.0) is None
    assert down(outage, 3.0, rounds=1) == 7.0
    down(outage, 7.0, rounds=1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "judge m does not answer (503 overloaded): judging is paused until it does; next try in 8 s, the run "
        "stops in 9 min 53 s (judge.max_outage_seconds=600)"
    )
    assert outage.pause(20.0) == OutageStatus(reason="503 overloaded", lasted=20.0, next_try=11.0, gives_up=580.0)
    assert outage.pause(700.0) == OutageStatus(reason="503 overloaded", lasted=700.0, next_try=0.0, gives_up=0.0)
    assert outage.given_up(599.9) is None
    assert outage.given_up(600.0) == (
        "judge m: no answer for 10 min 0 s (judge.max_outage_seconds=600); last error: 503 overloaded"
    )
    caplog.clear()
    outage.answered(80.0)
    outage.answered(90.0)
    assert [record.getMessage() for record in caplog.records] == ["judge m answers again after 80 s: judging continues"]
    assert outage.pause(80.0) is None
    # Of the next one everything is said again.
    caplog.clear()
    down(outage, 100.0, rounds=4)
    assert len(caplog.records) == 1


def test_during_an_outage_nobody_else_goes_while_one_request_is_under_way() -> None:
    outage = JudgeHealth(max_seconds=600)
    now = down(outage, 0.0)
    assert outage.down
    now += outage.seconds_to_wait(now)
    assert outage.seconds_to_wait(now) == 0.0
    outage.probing = True
    assert outage.seconds_to_wait(now) == NOBODY


def test_an_answer_counts_whatever_it_says_and_ends_the_pause_but_not_what_a_rate_limit_asks_for() -> None:
    outage = JudgeHealth(max_seconds=600)
    outage.failed(FailureKind.OWN, "too long", None, 0.0, 0.0)
    outage.answered(0.0)
    now = down(outage, 0.0)
    assert outage.seconds_to_wait(now) > 0
    outage.answered(now)
    assert (outage.seconds_to_wait(now), outage.down) == (0.0, False)
    down(outage, now, rounds=1)
    assert outage.seconds_to_wait(now) <= 1.0
    # A hint beyond what others would wait, and one second later at most.
    outage.failed(FailureKind.RATE_LIMITED, "429", 100.0, now, now)
    assert 100.0 <= outage.seconds_to_wait(now) <= 101.0


def test_after_a_request_that_hangs_one_at_a_time_goes_through() -> None:
    outage = JudgeHealth(max_seconds=600)
    down(outage, 600.0, FailureKind.TIMED_OUT, rounds=1)
    assert outage.down


def test_an_outage_ends_the_run_when_it_has_lasted_too_long() -> None:
    outage = JudgeHealth(max_seconds=100, who="judge m")
    now = down(outage, 0.0)
    assert outage.given_up(now) is None
    assert "judge m: no answer for 1" in (outage.given_up(101.0) or "")
    assert "judge.max_outage_seconds=100" in (outage.given_up(101.0) or "")
    outage.answered(102.0)
    assert outage.given_up(1000.0) is None


def test_a_refusal_stops_a_run_that_was_never_answered_and_else_fails_its_call_until_it_repeats() -> None:
    outage = JudgeHealth()
    assert outage.failed(FailureKind.REFUSED, "401", None, 0, 0) is NextAction.STOP
    for _ in range(1000):
        outage.answered(1.0)
        assert outage.failed(FailureKind.REFUSED, "404", None, 1, 1) is NextAction.FAIL
    outage.answered(2.0)
    verdicts = [outage.failed(FailureKind.REFUSED, "401", None, 2, 2) for _ in range(REFUSALS_TO_STOP)]
    assert verdicts == [NextAction.FAIL] * (REFUSALS_TO_STOP - 1) + [NextAction.STOP]
    outage.answered(3.0)
    assert outage.failed(FailureKind.QUOTA_SPENT, "quota", None, 3, 3) is NextAction.STOP


def failures(outage: JudgeHealth, *calls: str, away: bool = False) -> list[bool]:
    """Which failures are the calls' own; each is tried again."""
    found = [outage.failed(FailureKind.TIMED_OUT, "late", None, 0, 0, call=call, away=away) for call in calls]
    assert set(found) <= {NextAction.AGAIN, NextAction.WAIT}
    return [action is NextAction.AGAIN for action in found]


def test_a_request_that_fails_alone_may_be_the_cause_unless_the_judge_is_away() -> None:
    assert failures(JudgeHealth(), *"aaa") == [True] * 3
    assert failures(JudgeHealth(), *"aaa", away=True) == [True, False, False]


def test_an_outage_counts_as_one_failure_of_a_call() -> None:
    outage = JudgeHealth(max_seconds=600)
    for _ in range(3):
        assert failures(outage, *"abababba") == [True, True] + [False] * 6
        outage.answered(0.0)
    # An answer to a single request is one as well.
    assert failures(outage, *"ab") == [True, True]
    outage.failed(FailureKind.OWN, "too long", None, 0, 0, call="c")
    assert failures(outage, *"ab", away=True) == [True, True]


def test_what_was_not_sent_or_has_no_known_end_says_nothing_of_the_judge() -> None:
    outage = JudgeHealth(max_seconds=600)
    assert failures(outage, *"ab") == [True, True]
    for nothing in (FailureKind.UNSENT, FailureKind.LOST):
        assert outage.failed(nothing, "", None, 0, 0, call="c") is NextAction.FAIL
    assert failures(outage, *"ab") == [False, False]
    assert JudgeHealth().failed(FailureKind.REFUSED, "401", None, 0, 0) is NextAction.STOP


def test_waits_double_up_to_the_most_and_never_end_before_the_endpoints_own_hint() -> None:
    for failed in range(1, 80):
        ceiling = min(60.0, FIRST_BACKOFF_SECONDS * 2.0 ** (failed - 1))
        assert ceiling / 2 <= seconds_to_pause(failed, None, 60.0) <= ceiling
        assert 7.0 <= seconds_to_pause(failed, 7.0, 60.0) <= 8.0


def test_a_flagged_prompt_fails_its_call_however_often() -> None:
    outage = JudgeHealth()
    assert {outage.failed(FailureKind.OWN, "403 flagged", None, 0, 0) for _ in range(100)} == {NextAction.FAIL}


def test_without_patience_nobody_waits_for_others() -> None:
    outage = JudgeHealth()
    down(outage, 0.0, rounds=50)
    assert outage.seconds_to_wait(0.0) == 0.0
    assert outage.given_up(1e9) is None


class Pool:
    """Many calls against a judge that is down for a while; each asks again until it is answered."""

    def __init__(self, *, minutes_down: float, max_outage: float) -> None:
        self.now = 0.0
        self.minutes_down = minutes_down
        outage = JudgeHealth(max_seconds=max_outage, max_backoff_seconds=60.0)
        self.limiter = Limiter(JudgeLimits(), outage=outage, clock=lambda: self.now)
        self.sent = 0

    def run(self, calls: int) -> int:
        """Calls that were answered."""
        waiting, answered = calls, 0
        while waiting:
            number, wait = self.limiter.lease(LeaseRequest(input_tokens=1, output_tokens=1))
            if number is None:
                assert wait < NOBODY
                self.now += wait
                continue
            self.sent += 1
            well = self.now >= 60 * self.minutes_down
            self.limiter.settle(number, RequestResult(trouble=None if well else FailureKind.UNAVAILABLE, reason="503"))
            if well:
                waiting, answered = waiting - 1, answered + 1
        return answered


def test_an_outage_of_minutes_drops_nothing_and_one_request_a_minute_goes_through() -> None:
    pool = Pool(minutes_down=20, max_outage=3600)
    assert pool.run(500) == 500
    assert 20 <= pool.sent - 500 <= 40


def test_an_outage_beyond_the_limit_stops_the_run() -> None:
    pool = Pool(minutes_down=120, max_outage=3600)
    with pytest.raises(JudgeUnavailable, match=r"no answer for 1 h 0 min .*judge\.max_outage_seconds=3600"):
        pool.run(1)
    assert 3600 <= pool.now <= 3700


def test_times_are_counted_from_the_beginning_of_the_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the clock began."""
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    caplog.set_level(logging.WARNING)
    outage = JudgeHealth(max_seconds=600, max_backoff_seconds=60, who="judge m")
    down(outage, 1000.0, rounds=4)
    assert "next try in 8 s, the run stops in 9 min 53 s" in caplog.text
    assert outage.pause(1020.0) == OutageStatus(reason="503 overloaded", lasted=20.0, next_try=0.0, gives_up=580.0)
    caplog.clear()
    # A request that is refused for its own sake is an answer as well.
    outage.failed(FailureKind.OWN, "too long", None, 1079.0, 1080.0)
    assert [record.getMessage() for record in caplog.records] == ["judge m answers again after 80 s: judging continues"]


def test_how_much_later_than_asked_for_anybody_asks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    for hint, wait in ((2.0, 2.2), (10.0, 11.0), (100.0, 101.0)):
        outage = JudgeHealth(max_seconds=600)
        outage.failed(FailureKind.RATE_LIMITED, "429", hint, 0.0, 0.0)
        assert outage.seconds_to_wait(0.0) == pytest.approx(wait)
    outage = JudgeHealth(max_seconds=1e15, max_backoff_seconds=1e15)
    now = down(outage, 0.0, rounds=50)
    assert outage.seconds_to_wait(now) == 2.0**30
    outage = JudgeHealth(max_seconds=1e15)
    now = down(outage, 0.0, rounds=50)
    assert outage.seconds_to_wait(now) == 60.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (90, "90 s"), (90.1, "1 min 31 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (7380, "2 h 3 min")],
)
def test_words_for_a_time(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_who_gives_up_says_for_how_long_nobody_answered() -> None:
    outage = JudgeHealth(max_seconds=600)
    outage.failed(FailureKind.UNAVAILABLE, "503", None, 1000.0, 1000.0)
    assert outage.given_up(1599.0) is None
    said = outage.given_up(1700.0)
    assert said == "judge: no answer for 11 min 40 s (judge.max_outage_seconds=600); last error: 503"


def test_a_single_failure_is_no_outage_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    outage = JudgeHealth(max_seconds=600)
    outage.failed(FailureKind.UNAVAILABLE, "503", None, 0.0, 0.0)
    outage.answered(5.0)
    assert caplog.messages == []
