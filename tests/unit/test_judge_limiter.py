"""The limits of the judge pool, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time

import bench_limiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.config.schema import JudgeLimits
from draco_ray.errors import BudgetSpent
from draco_ray.judging.limiter import (
    BURST_REQUESTS,
    BURST_SHARE,
    LEARNED_AFTER,
    LOOK_AGAIN_SECONDS,
    LOST,
    PACE_FACTOR,
    UNSENT,
    WINDOW_SECONDS,
    LeaseRequest,
    Limiter,
    LimiterQueue,
    RequestResult,
    SlidingWindow,
)
from draco_ray.judging.outage import FailureKind, JudgeHealth, NextAction, OutageStatus
from tests.support.turns import LoopClock, outcome, yield_turns


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def asked(tokens: float, dollars: float = 0.0, kind: str = "") -> LeaseRequest:
    """A request that may write so many tokens."""
    return LeaseRequest(input_tokens=0, output_tokens=int(tokens), dollars=dollars, kind=kind)


def ended(tokens: float, dollars: float = 0.0) -> RequestResult:
    return RequestResult(tokens=tokens, output_tokens=tokens, dollars=dollars)


def lease(limiter: Limiter, tokens: float = 1.0, dollars: float = 0.0) -> tuple[str, float]:
    number, wait = limiter.lease(asked(tokens, dollars))
    return number or "", wait


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_machine_whose_clock_is_set_neither_opens_the_limits_nor_shuts_them(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = Limiter(JudgeLimits(requests_per_minute=BURST_REQUESTS), lease_seconds=600.0)
    numbers = [lease(limiter)[0] for _ in range(BURST_REQUESTS)]
    assert all(numbers)
    jumped = time.time() + jump
    monkeypatch.setattr(time, "time", lambda: jumped)
    number, wait = lease(limiter)
    assert number == ""
    assert 0 < wait <= WINDOW_SECONDS
    assert limiter.pause() is None
    limiter.settle(numbers[0], ended(1.0, 2.0))
    # Not one of the leases has come to its end meanwhile: that would book it, and this one twice.
    assert limiter.spent == 2.0


def test_without_limits_nobody_waits(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(), clock=clock)
    assert all(lease(limiter, 1e9, 1e9)[1] == 0.0 for _ in range(100))


def test_requests_wait_until_the_oldest_leaves_the_minute(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(requests_per_minute=2), clock=clock)
    assert lease(limiter)[0]
    clock.now += 10
    assert lease(limiter)[0]
    clock.now += 5
    assert lease(limiter) == ("", WINDOW_SECONDS - 15)
    clock.now += WINDOW_SECONDS - 15
    assert lease(limiter)[0]


def test_settling_gives_tokens_back_that_were_not_used(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(tokens_per_minute=1000), clock=clock)
    first, _ = lease(limiter, 900)
    assert lease(limiter, 500) == ("", WINDOW_SECONDS)
    limiter.settle(first, ended(300))
    # There is room, and at twice the even pace it may leave when what is beyond half a burst would have left.
    pause = (300 - 0.5 * BURST_SHARE * 1000) / (PACE_FACTOR * 1000) * WINDOW_SECONDS
    assert lease(limiter, 500)[1] == pytest.approx(pause)
    clock.now += pause
    assert lease(limiter, 500)[1] == 0.0
    assert lease(limiter, 300)[1] == pytest.approx(WINDOW_SECONDS - pause)


def test_a_request_larger_than_the_limit_goes_alone(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(tokens_per_minute=100), clock=clock)
    lease(limiter, 50)
    assert lease(limiter, 5000)[1] == WINDOW_SECONDS
    clock.now += WINDOW_SECONDS
    assert lease(limiter, 5000)[1] == 0.0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400), st.floats(0, 30)), max_size=LEARNED_AFTER))
def test_in_no_minute_more_than_the_limits(requests: list[tuple[int, int, float]]) -> None:
    """While every request counts with its maximum; afterwards one may be larger than predicted."""
    clock = Clock()
    limiter = Limiter(JudgeLimits(requests_per_minute=5, tokens_per_minute=1000), clock=clock)
    sent: list[tuple[float, int]] = []
    for most, used, pause in requests:
        clock.now += pause
        while True:
            number, wait = lease(limiter, most)
            if number:
                break
            assert 0 < wait <= WINDOW_SECONDS + 1e-6
            clock.now += wait
        used = min(used, most)
        sent.append((clock.now, used))
        limiter.settle(number, ended(used))
    for start, _ in sent:
        # Less what rounding takes from a sum of times.
        within = [tokens for at, tokens in sent if start <= at < start + WINDOW_SECONDS - 1e-6]
        assert len(within) <= 5
        assert sum(within) <= 1000


def test_requests_are_spread_over_the_minute(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(requests_per_minute=500), clock=clock)
    sent: list[float] = []
    while clock.now < 1000.0 + 3 * WINDOW_SECONDS:
        number, wait = lease(limiter)
        if number:
            sent.append(clock.now - 1000.0)
        clock.now += wait
    per_second = [sum(second <= at < second + 1 for at in sent) for second in range(180)]
    # All 500 left in the first one before; at the minute's end the first ones make room again.
    assert max(per_second) < 40
    assert sorted(per_second)[170] <= 10
    assert sum(per_second[60:120]) >= 0.95 * 500
    assert all(sum(start <= at < start + WINDOW_SECONDS - 1e-6 for at in sent) <= 500 for start in sent)


def test_a_few_requests_may_leave_at_once(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(requests_per_minute=10), clock=clock)
    assert [lease(limiter)[1] == 0.0 for _ in range(BURST_REQUESTS + 1)] == [True] * BURST_REQUESTS + [False]


@pytest.mark.parametrize(("limit", "first", "last"), [(300_000, 20, 50), (1_000_000, 4, 8)])
def test_nine_tenths_of_a_token_limit_are_used(limit: float, first: float, last: float) -> None:
    """A minute may hold a little more, which the endpoint refuses and is sent again."""
    sent = bench_limiter.simulate(limit, bench_limiter.usual, minutes=last, seed=0)
    assert bench_limiter.share(sent, limit, first, last) >= 0.85
    assert bench_limiter.fullest(sent) <= 1.05 * limit


def test_the_budget_is_never_exceeded_and_says_what_to_do(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), clock=clock)
    first, _ = lease(limiter, 1, 0.6)
    # It might fit once the first has settled.
    assert lease(limiter, 1, 0.6) == ("", math.inf)
    limiter.settle(first, ended(1, 0.2))
    second, wait = lease(limiter, 1, 0.6)
    assert wait == 0.0
    limiter.settle(second, ended(1, 0.5))
    assert limiter.spent == pytest.approx(0.7)
    with pytest.raises(BudgetSpent, match=r"\$0\.7000 of judge\.limits\.dollars=1 .*raise judge\.limits\.dollars"):
        lease(limiter, 1, 0.6)


def test_a_call_that_can_never_fit_does_not_wait_for_others(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), clock=clock)
    lease(limiter, 1, 0.6)
    with pytest.raises(BudgetSpent):
        lease(limiter, 1, 1.1)


def test_a_spent_budget_is_told_when_every_reply_on_its_way_has_come(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), under_way={"of a dead process": 0.1}, clock=clock)
    (first, _), (second, _) = lease(limiter, 1, 0.5), lease(limiter, 1, 0.4)
    limiter.settle(first, ended(1, 0.5))
    assert lease(limiter, 1, 0.6) == ("", math.inf)
    limiter.settle(second, ended(1, 0.1))
    with pytest.raises(BudgetSpent, match=r"\$0\.6000 of"):
        lease(limiter, 1, 0.6)


def test_what_earlier_processes_spent_counts_and_what_they_had_under_way(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), spent=0.4, under_way={"a": 0.3}, lease_seconds=600, clock=clock)
    assert lease(limiter, 1, 0.4) == ("", math.inf)
    limiter.settle("a", ended(1, 0.1))
    assert limiter.spent == pytest.approx(0.5)
    assert lease(limiter, 1, 0.4)[1] == 0.0
    with pytest.raises(BudgetSpent):
        lease(Limiter(JudgeLimits(dollars=1.0), spent=0.9, clock=clock), 1, 0.2)


def test_a_lease_of_a_dead_holder_is_booked_as_possibly_billed(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), lease_seconds=600, clock=clock)
    number, _ = lease(limiter, 1, 0.9)
    assert lease(limiter, 1, 0.2) == ("", math.inf)
    clock.now += 600
    with pytest.raises(BudgetSpent, match=r"\$0\.9000"):
        lease(limiter, 1, 0.2)
    # It was alive after all: what it did cost is on the books.
    limiter.settle(number, ended(1, 0.3))
    assert limiter.spent == pytest.approx(0.3)
    assert lease(limiter, 1, 0.2)[1] == 0.0


def test_a_request_that_was_not_sent_costs_nothing(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0, tokens_per_minute=100), clock=clock)
    number, _ = lease(limiter, 100, 0.9)
    limiter.settle(number, UNSENT)
    assert (limiter.spent, limiter.reserved) == (0.0, 0.0)
    assert lease(limiter, 100, 0.9)[1] == 0.0


def test_where_the_most_was_too_little_the_next_leases_hold_more(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=10.0), clock=clock)
    number, _ = lease(limiter, 1, 1.0)
    # The endpoint adds a prompt of its own.
    limiter.settle(number, ended(1, 3.0))
    lease(limiter, 1, 1.0)
    lease(limiter, 1, 1.0)
    assert lease(limiter, 1, 1.0) == ("", math.inf)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["answer", "die", "cancel", "unsent"]))))
def test_whatever_happens_the_books_stay_within_the_budget(requests: list[tuple[float, float, str]]) -> None:
    clock = Clock()
    limiter = Limiter(JudgeLimits(dollars=2.0), lease_seconds=100, clock=clock)
    open_leases: list[tuple[str, float]] = []
    billed = 0.0
    for most, share, fate in requests:
        try:
            number, _ = lease(limiter, 1, most)
        except BudgetSpent:
            number = ""
        if not number:
            clock.now += 50
            continue
        if fate == "answer":
            open_leases.append((number, most * share))
        elif fate == "cancel":
            limiter.settle(number, LOST)
            billed += most * share
        elif fate == "die":
            billed += most * share
        else:
            limiter.settle(number, UNSENT)
        if len(open_leases) > 3:
            number, dollars = open_leases.pop(0)
            limiter.settle(number, ended(1, dollars))
            billed += dollars
        assert limiter.spent + limiter.reserved <= 2.0 + 1e-9
        assert billed <= 2.0 + 1e-9


async def test_later_phases_go_before_new_groups_and_equals_in_order(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), clock=clock)
    line = LimiterQueue(limiter)
    first = await outcome(line.lease(asked(1, 1.0)))
    order: list[str] = []

    async def wait(name: str, rank: int) -> None:
        number = await outcome(line.lease(LeaseRequest(input_tokens=0, output_tokens=1, dollars=1.0, rank=rank)))
        order.append(name)
        await line.settle(number, RequestResult())

    names = [("stage1 a", 0), ("stage1 b", 0), ("credit", -4), ("score", -3), ("credit late", -4)]
    tasks = [asyncio.create_task(wait(name, rank)) for name, rank in names]
    await asyncio.sleep(0)
    await line.settle(first, RequestResult())
    await outcome(asyncio.gather(*tasks))
    assert order == ["credit", "credit late", "score", "stage1 a", "stage1 b"]


async def test_nobody_passes_who_waits_for_money(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0, tokens_per_minute=1000), clock=clock))
    await outcome(line.lease(asked(1, 0.5)))
    tasks = [asyncio.create_task(line.lease(asked(1, dollars))) for dollars in (0.6, 0.1)]
    await yield_turns(5)
    assert [task.done() for task in tasks] == [False, False]
    for task in tasks:
        task.cancel()


async def test_who_gives_up_waiting_holds_no_lease(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0), clock=clock))
    first = await outcome(line.lease(asked(1, 1.0)))
    waiting = [asyncio.create_task(line.lease(asked(1, 1.0))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await line.settle(first, RequestResult())
    waiting[1].cancel()
    assert await outcome(waiting[2])
    assert line.limiter.reserved == 1.0


async def test_a_spent_budget_is_told_to_everybody_who_waits(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0), clock=clock))
    first = await outcome(line.lease(asked(1, 0.6)))
    waiting = [asyncio.create_task(line.lease(asked(1, 0.6))) for _ in range(3)]
    await asyncio.sleep(0)
    await line.settle(first, ended(1, 0.5))
    results = await outcome(asyncio.gather(*waiting, return_exceptions=True))
    assert [isinstance(result, BudgetSpent) for result in results] == [True] * 3


@pytest.mark.parametrize("final", [False, True])
async def test_where_a_refusal_ends_the_work_no_cheaper_call_is_sent_after_it(clock: Clock, final: bool) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0), clock=clock), final=final)
    first = await outcome(line.lease(asked(1, 0.6)))
    waiting = [asyncio.create_task(line.lease(asked(1, dollars))) for dollars in (0.6, 0.1)]
    await asyncio.sleep(0)
    await line.settle(first, ended(1, 0.5))
    results = await outcome(asyncio.gather(*waiting, return_exceptions=True))
    results += await outcome(asyncio.gather(line.lease(asked(1, 0.1)), return_exceptions=True))
    assert [isinstance(result, BudgetSpent) for result in results] == [True, final, final]


async def test_a_call_that_can_never_fit_ends_the_work_when_the_replies_on_their_way_have_come(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0), clock=clock), final=True)
    numbers = [await outcome(line.lease(asked(1, dollars))) for dollars in (0.0, 0.1)]
    waiting = [asyncio.create_task(line.lease(asked(1, dollars))) for dollars in (1.1, 0.1)]
    for number in numbers:
        await yield_turns(5)
        assert [task.done() for task in waiting] == [False, False]
        await line.settle(number, ended(1, 0.0))
    results = await outcome(asyncio.gather(*waiting, return_exceptions=True))
    assert [isinstance(result, BudgetSpent) for result in results] == [True, True]


@pytest.mark.parametrize("ends", ["settled", "given back", "abandoned", "expired"])
def test_one_request_at_a_time_goes_through_while_none_is_answered(clock: Clock, ends: str) -> None:
    limiter = Limiter(JudgeLimits(), outage=JudgeHealth(max_seconds=6000), lease_seconds=600.0, clock=clock)
    for _ in range(3):
        number, _ = lease(limiter)
        limiter.settle(number, RequestResult(trouble=FailureKind.UNAVAILABLE, reason="503"))
        _, wait = lease(limiter)
        assert wait > 0
        clock.now += wait
    number, _ = lease(limiter)
    assert number
    assert lease(limiter) == ("", math.inf)
    match ends:
        case "settled":
            limiter.settle(number, ended(1))
        case "given back":
            limiter.settle(number, UNSENT)
        case "abandoned":
            limiter.settle(number, LOST)
        case _:
            clock.now += 600.0
    assert lease(limiter)[0]
    # Only an answer lets more than one through.
    assert bool(lease(limiter)[0]) is (ends == "settled")


def test_a_lease_that_nobody_knows_can_be_given_back_or_up(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=1.0), clock=clock)
    limiter.settle("of an earlier limiter", UNSENT)
    limiter.settle("of an earlier limiter", LOST)
    assert (limiter.spent, limiter.reserved) == (0.0, 0.0)


async def test_who_hands_a_lease_back_lets_the_next_one_go(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0), clock=clock))
    first = await outcome(line.lease(asked(1, 1.0)))
    task = asyncio.create_task(line.lease(asked(1, 1.0)))
    await yield_turns(5)
    assert not task.done()
    await line.settle(first, UNSENT)
    assert await outcome(task) != first
    assert (line.limiter.spent, line.limiter.reserved) == (0.0, 1.0)


async def test_who_watches_is_told_of_an_outage_on_the_limiters_clock(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(), outage=JudgeHealth(max_seconds=600), clock=clock))
    assert await line.pause() is None
    for _ in range(4):
        number = await outcome(line.lease(asked(1)))
        await line.settle(number, RequestResult(trouble=FailureKind.UNAVAILABLE, reason="503"))
        clock.now += 60
    assert await line.pause() == OutageStatus(reason="503", lasted=240.0, next_try=0.0, gives_up=360.0)


@pytest.mark.parametrize("spent", [False, True])
async def test_a_lease_that_comes_as_its_caller_is_cancelled_is_handed_back(clock: Clock, spent: bool) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0), clock=clock))
    task = asyncio.create_task(line.lease(asked(1, 2.0 if spent else 1.0)))
    # It asks, and is answered, but has not gone on yet.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outcome(task)
    assert (line.limiter.spent, line.limiter.reserved) == (0.0, 0.0)


async def test_whoever_waits_for_time_alone_is_served_without_news(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, loop = LimiterQueue(Limiter(JudgeLimits(), clock=clock)), LoopClock(monkeypatch)
    take, waits = line.limiter.lease, [math.inf, 3.0]
    monkeypatch.setattr(line.limiter, "lease", lambda asked: (None, waits.pop()) if waits else take(asked))
    task = asyncio.create_task(line.lease(asked(1)))
    await yield_turns(5)
    await loop.pass_(2.9)
    assert waits == [math.inf]
    await loop.pass_(0.1)
    assert waits == []
    # Where only others can help, in case that nothing is heard of them.
    await loop.pass_(LOOK_AGAIN_SECONDS - 0.1)
    assert not task.done()
    await loop.pass_(0.1)
    assert await outcome(task)


def test_a_failure_is_its_calls_own_unless_the_judge_is_down(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(), outage=JudgeHealth(max_seconds=6000), clock=clock, name="run-")
    away = RequestResult(trouble=FailureKind.UNAVAILABLE, reason="503", away=True)

    def fails(call: str, ended: RequestResult) -> NextAction:
        clock.now += 120
        number, _ = limiter.lease(LeaseRequest(input_tokens=0, output_tokens=1, call=call))
        assert number is not None
        assert number.startswith("run-")
        return limiter.settle(number, ended)

    assert [fails("a", away) for _ in range(3)] == [NextAction.AGAIN, NextAction.WAIT, NextAction.WAIT]
    broken = RequestResult(trouble=FailureKind.UNAVAILABLE, reason="500")
    assert fails("a", broken) is NextAction.AGAIN
    assert [fails("b", broken), fails("b", broken), fails("a", broken)] == [
        NextAction.AGAIN,
        NextAction.WAIT,
        NextAction.WAIT,
    ]
    limiter.settle("another call's", ended(1))
    assert [fails("a", away), fails("b", away)] == [NextAction.AGAIN] * 2


def test_what_the_endpoint_said_becomes_of_its_call_and_of_everybodys_next_request(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(), outage=JudgeHealth(max_seconds=600), clock=clock)
    first, second, third = (lease(limiter)[0] for _ in range(3))
    assert limiter.settle(first, ended(1)) is NextAction.AGAIN
    assert limiter.settle(second, RequestResult(trouble=FailureKind.OWN, reason="too long")) is NextAction.FAIL
    assert (
        limiter.settle(third, RequestResult(trouble=FailureKind.RATE_LIMITED, reason="429", hint=30.0))
        is NextAction.AGAIN
    )
    assert 30.0 <= lease(limiter)[1] <= 31.0
    assert (
        limiter.settle("of an earlier process", RequestResult(trouble=FailureKind.QUOTA_SPENT, reason="paid up"))
        is NextAction.STOP
    )


def test_a_request_that_was_sent_before_a_pause_makes_it_no_longer(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(), outage=JudgeHealth(max_seconds=600), clock=clock)
    early, late = lease(limiter)[0], lease(limiter)[0]
    clock.now += 10
    limiter.settle(early, RequestResult(trouble=FailureKind.UNAVAILABLE, reason="503"))
    _, wait = lease(limiter)
    clock.now += wait
    limiter.settle(late, RequestResult(trouble=FailureKind.UNAVAILABLE, reason="503"))
    assert lease(limiter)[1] == 0.0


def test_what_an_earlier_limiter_had_under_way_takes_dollars_and_no_tokens(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=2.0, tokens_per_minute=1000), under_way={"old": 0.5}, clock=clock)
    assert limiter.reserved == 0.5
    assert lease(limiter, 600)[0]
    clock.now += 30
    # The whole minute's tokens are there for what is asked now.
    assert lease(limiter, 400)[0]
    limiter.settle("old", ended(400, 0.25))
    assert limiter.spent == 0.25
    # Those of the old one count with the minute in which it ended: room for 200 when the first leaves it, not for 201.
    assert lease(limiter, 201)[1] == WINDOW_SECONDS


def test_how_far_the_most_was_too_little_is_a_factor(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(dollars=10.0), clock=clock)
    limiter.settle(lease(limiter, 1, 0.5)[0], ended(1, 1.0))
    lease(limiter, 1, 0.25)
    assert limiter.reserved == 0.5


def test_what_has_left_the_minute_is_taken_off_and_nothing_else() -> None:
    window = SlidingWindow(1000.0, 1000.0)
    window.take(300.0, 0.0)
    window.take(400.0, 10.0)
    assert window.seconds_to_wait(700.0, WINDOW_SECONDS) == pytest.approx(10.0)


def test_a_wait_of_less_than_a_second_is_one(clock: Clock) -> None:
    by_requests = Limiter(JudgeLimits(requests_per_minute=2), clock=clock)
    by_tokens = Limiter(JudgeLimits(tokens_per_minute=1000), clock=clock)
    paused = Limiter(JudgeLimits(), outage=JudgeHealth(max_seconds=600), clock=clock)
    assert all([lease(by_requests)[0], lease(by_requests)[0], lease(by_tokens, 1000)[0]])
    number, _ = lease(paused)
    clock.now += WINDOW_SECONDS - 0.5
    paused.settle(number, RequestResult(trouble=FailureKind.RATE_LIMITED, reason="429", hint=0.5))
    assert lease(by_requests) == ("", pytest.approx(0.5))
    assert lease(by_tokens, 500) == ("", pytest.approx(0.5))
    assert 0.5 <= lease(paused)[1] < 1.0


def test_a_window_and_its_pace_in_numbers() -> None:
    """600 in a minute, 100 at once, the rest at twice the even pace: a twentieth of a second each."""
    window = SlidingWindow(600.0, 100.0, pace=2.0)
    assert window.seconds_to_wait(5000.0, 0.0) == 0.0
    first = window.take(100.0, 0.0)
    # All of it has left after 5 seconds; of the burst at least half may be before that.
    assert [window.seconds_to_wait(amount, 0.0) for amount in (10.0, 50.0, 80.0)] == pytest.approx([0.5, 2.5, 2.5])
    assert window.seconds_to_wait(10.0, 3.0) == 0.0
    second = window.take(100.0, 3.0)
    assert window.seconds_to_wait(10.0, 3.0) == pytest.approx(2.5)
    window.correct(second, 20.0, 3.0)
    assert window.seconds_to_wait(480.0, 3.0) == pytest.approx(0.5)
    # Beyond the limit it waits until the first leaves the minute, or both.
    assert window.seconds_to_wait(481.0, 3.0) == 57.0
    assert window.seconds_to_wait(581.0, 3.0) == 60.0
    # What has left the minute counts with whatever it comes to no more.
    window.correct(first, 300.0, 60.0)
    assert [window.seconds_to_wait(amount, 60.0) for amount in (580.0, 581.0)] == [0.0, 3.0]
    assert window.seconds_to_wait(601.0, 62.9) == pytest.approx(0.1)
    # Nothing is left of it; the pace begins with the next one.
    third = window.take(100.0, 200.0)
    assert window.seconds_to_wait(10.0, 200.0) == pytest.approx(0.5)
    window.correct(third, 140.0, 200.0)
    assert window.seconds_to_wait(10.0, 200.0) == pytest.approx(2.5)
    assert SlidingWindow(None, 1.0).seconds_to_wait(1e9, 0.0) == 0.0


async def test_a_lease_that_nobody_waits_for_is_booked_and_the_next_one_may_go(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(dollars=1.0), clock=clock))
    first = await outcome(line.lease(asked(1, 0.6)))
    await line.settle(first, LOST)
    assert (line.limiter.spent, line.limiter.reserved) == (0.6, 0.0)
    assert await outcome(line.lease(asked(1, 0.4)))


def test_a_request_counts_with_what_its_like_have_used(clock: Clock) -> None:
    limiter = Limiter(JudgeLimits(tokens_per_minute=1e6), clock=clock)
    request = LeaseRequest(input_tokens=400, output_tokens=1000, kind="score")

    def counted(request: LeaseRequest) -> float:
        number, _ = limiter.lease(request)
        assert number is not None
        amount = limiter._leases[number].use.amount
        limiter.settle(number, UNSENT)
        return amount

    for number in range(LEARNED_AFTER):
        # Until enough have ended, with the most that it can use.
        assert counted(request) == 400 + 1000
        leased, _ = limiter.lease(request)
        assert leased is not None
        clock.now += 5
        written = 10 + 4 * (number % 2)
        limiter.settle(leased, RequestResult(tokens=100 + written, output_tokens=written))
    # A quarter of a token a byte; mean 12 and standard deviation 2 of the reply.
    assert counted(request) == pytest.approx(100 + 12 + 2)
    # Of another kind of reply nothing is known yet.
    assert counted(dataclasses.replace(request, kind="credit")) == pytest.approx(100 + 1000)


async def test_nobody_overtakes_who_waits_for_room(clock: Clock) -> None:
    line = LimiterQueue(Limiter(JudgeLimits(tokens_per_minute=1000), clock=clock))
    await outcome(line.lease(asked(300)))
    clock.now += 10
    large = asyncio.create_task(line.lease(asked(950)))
    await yield_turns(20)
    small = asyncio.create_task(line.lease(asked(60)))
    await yield_turns(20)
    assert (large.done(), small.done()) == (False, False)
    clock.now += WINDOW_SECONDS
    await line.settle("wakes it", LOST)
    await outcome(large)
    small.cancel()
