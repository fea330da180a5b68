"""The limits of the judge pool, on a clock of the test's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.config.schema import JudgeLimits
from draco_ray.errors import BudgetSpent
from draco_ray.judging.limiter import WINDOW_SECONDS, Limiter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_limits_nobody_waits(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(), clock=clock)
    assert all(limiter.lease(1e9, 1e9)[1] == 0.0 for _ in range(100))


def test_requests_wait_until_the_oldest_leaves_the_minute(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(requests_per_minute=2), clock=clock)
    assert limiter.lease(1, 0)[0] == 1
    clock.now += 10
    assert limiter.lease(1, 0)[0] == 2
    clock.now += 5
    assert limiter.lease(1, 0) == (0, WINDOW_SECONDS - 15)
    clock.now += WINDOW_SECONDS - 15
    assert limiter.lease(1, 0)[0] == 3


def test_settling_gives_tokens_back_that_were_not_used(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(tokens_per_minute=1000), clock=clock)
    first, _ = limiter.lease(900, 0)
    assert limiter.lease(500, 0) == (0, WINDOW_SECONDS)
    limiter.settle(first, 300, 0)
    assert limiter.lease(500, 0)[1] == 0.0
    assert limiter.lease(300, 0) == (0, WINDOW_SECONDS)


def test_a_request_larger_than_the_limit_goes_alone(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(tokens_per_minute=100), clock=clock)
    limiter.lease(50, 0)
    assert limiter.lease(5000, 0) == (0, WINDOW_SECONDS)
    clock.now += WINDOW_SECONDS
    assert limiter.lease(5000, 0)[1] == 0.0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400), st.floats(0, 30)), max_size=60))
def test_in_no_minute_more_than_the_limits(requests: list[tuple[int, int, float]]) -> None:
    clock = Clock()
    limiter = Limiter(JudgeLimits(requests_per_minute=5, tokens_per_minute=1000), clock=clock)
    sent: list[tuple[float, int]] = []
    for most, used, pause in requests:
        clock.now += pause
        while True:
            number, wait = limiter.lease(most, 0)
            if number:
                break
            assert 0 < wait <= WINDOW_SECONDS
            clock.now += wait
        used = min(used, most)
        sent.append((clock.now, used))
        limiter.settle(number, used, 0)
    for start, _ in sent:
        within = [tokens for at, tokens in sent if start <= at < start + WINDOW_SECONDS]
        assert len(within) <= 5
        assert sum(within) <= 1000


def test_the_budget_is_never_exceeded_and_says_what_to_do(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), clock=clock)
    first, _ = limiter.lease(1, 0.6)
    # It might fit once the first has settled.
    assert limiter.lease(1, 0.6) == (0, math.inf)
    limiter.settle(first, 1, 0.2)
    second, wait = limiter.lease(1, 0.6)
    assert wait == 0.0
    limiter.settle(second, 1, 0.5)
    assert limiter.spent == pytest.approx(0.7)
    with pytest.raises(BudgetSpent, match=r"\$0\.7000 of judge\.limits\.dollars=1 .*raise judge\.limits\.dollars"):
        limiter.lease(1, 0.6)


def test_a_call_that_can_never_fit_does_not_wait_for_others(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), clock=clock)
    limiter.lease(1, 0.6)
    with pytest.raises(BudgetSpent):
        limiter.lease(1, 1.1)


def test_what_earlier_processes_spent_counts(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), spent=0.9, clock=clock)
    with pytest.raises(BudgetSpent):
        limiter.lease(1, 0.2)


def test_a_lease_of_a_dead_holder_expires(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), lease_seconds=600, clock=clock)
    number, _ = limiter.lease(1, 0.9)
    assert limiter.lease(1, 0.9) == (0, math.inf)
    clock.now += 600
    assert limiter.lease(1, 0.9)[1] == 0.0
    # It was alive after all: what it cost is on the books.
    limiter.settle(number, 1, 0.3)
    assert limiter.spent == pytest.approx(0.3)
