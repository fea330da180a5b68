"""Rate limits and the budget of the whole judge pool, and its pauses during outages.

A client takes a lease before it sends a request. When the request has ended, the client settles the lease with the
request's actual cost.

- Dollars: a lease reserves the maximum cost of its request, so the budget is never exceeded.
- Requests: at most the limit in any 60 seconds, spread evenly after a burst.
- Tokens: at most the limit in any 60 seconds; after a burst, sent at no more than `PACE_FACTOR` times the limit. A
  request in flight counts with its expected tokens: mean plus one standard deviation of earlier requests of its kind,
  or its maximum until enough have ended. A finished request counts with its actual tokens.
- Order: later phases of a group go before new groups. Otherwise the order is first come, first served; small requests
  do not overtake a large one that waits.

`Limiter` grants leases, by a clock that tests can set. Callers wait for a lease in `LimiterQueue`. This module does not
use Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from draco_ray.config.schema import JudgeLimits
from draco_ray.errors import BudgetSpent, JudgeUnavailable
from draco_ray.judging.outage import FailureKind, JudgeHealth, NextAction, OutageStatus
from draco_ray.judging.pricing import CostBound

WINDOW_SECONDS = 60.0
ROUNDING = 1e-9
BURST_SECONDS, BURST_REQUESTS = 2.0, 5
"""Burst size: the requests of this many seconds, but at least this many requests."""
BURST_SHARE = 0.2
"""Burst size in tokens, as a fraction of the limit; a single larger request may always be sent."""
PACE_FACTOR = 4.0
"""Rate at which tokens may be sent after the burst, as a factor on the limit; above 1 to make up for waiting."""
LEARNED_AFTER = 12
"""Number of finished requests of a kind that are needed to predict the size of the next one."""
REQUEST_HISTORY = 200
"""Number of latest finished requests over which mean and standard deviation of their sizes are taken."""
LOOK_AGAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest(CostBound):
    """A request that waits to be sent."""

    kind: str = ""
    """Requests of one kind have replies of similar length."""
    rank: int = 0
    """The lowest rank is served first."""
    call: str = ""
    """Id of the judge call; equal for all requests of the call, such as retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """How a request ended: its tokens and dollars, and, if there is no reply, why."""

    tokens: float = 0.0
    output_tokens: float = 0.0
    """The output part of ``tokens``."""
    dollars: float = 0.0
    estimated: bool = False
    """Whether the numbers are estimates, which are not used to predict sizes."""
    trouble: FailureKind | None = None
    """Why there is no reply; None if there is one."""
    reason: str = ""
    hint: float | None = None
    """Seconds that the endpoint asks us to wait."""
    away: bool = False
    """Whether the endpoint is busy or cannot be reached, so that the request did not cause the failure."""


UNSENT, LOST = (RequestResult(trouble=kind) for kind in (FailureKind.UNSENT, FailureKind.LOST))
"""Results of a request that was not sent, and of one whose outcome is unknown."""


class Leases(Protocol):
    """Source of a judge client's leases; in a run, `draco_ray.judging.actors.LimiterClient`."""

    async def lease(self, asked: LeaseRequest) -> str:
        """Wait until a request may be sent; returns the lease's number, which is unique over all runs.

        Raises:
            BudgetSpent: the request could exceed the budget.
            JudgeUnavailable: the judge has not answered for too long.
        """
        ...

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        """Book the end of a lease; returns what to do with its call if there is no reply."""
        ...


@dataclass(slots=True)
class _Use:
    """One request's share of a window."""

    at: float
    amount: float


class SlidingWindow:
    """A rate limit: at most ``limit`` in any `WINDOW_SECONDS`, spread evenly after a burst.

    An amount above the limit passes when the window is empty.
    """

    def __init__(self, limit: float | None, burst: float, pace: float = 1.0) -> None:
        """
        Args:
            limit: maximum amount in the window; None: no limit.
            burst: amount that may be sent at once; a single request may be larger.
            pace: rate at which more than the burst may be sent, as a multiple of the limit.
        """
        self._limit = limit
        self._seconds_each = 0.0 if limit is None else WINDOW_SECONDS / (pace * limit)
        self._burst = burst
        self._uses: deque[_Use] = deque()
        self._sum = 0.0
        self._due = -math.inf
        """Time at which everything taken so far would have been sent at an even pace."""

    def seconds_to_wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` more fits if nothing else happens; 0 if it fits now."""
        self._forget(now)
        if self._limit is None:
            return 0.0
        over = self._sum + amount - self._limit
        if not self._uses:
            return 0.0
        # The burst may be sent at once, the rest at an even pace.
        wait = max(0.0, self._due - now - self._seconds_each * max(self._burst - amount, 0.5 * self._burst))
        for use in self._uses:
            if over <= ROUNDING:
                break
            over -= use.amount
            wait = max(wait, use.at + WINDOW_SECONDS - now)
        return wait if wait > ROUNDING else 0.0

    def take(self, amount: float, now: float) -> _Use:
        """Record that ``amount`` is sent at the time ``now``; it counts for the next `WINDOW_SECONDS`."""
        use = _Use(now, amount)
        self._uses.append(use)
        self._sum += amount
        self._due = max(self._due, now) + self._seconds_each * amount
        return use

    def correct(self, use: _Use, amount: float, now: float) -> None:
        """Correct the amount of ``use``."""
        self._forget(now)
        if now - use.at < WINDOW_SECONDS:
            self._sum += amount - use.amount
        self._due += self._seconds_each * (amount - use.amount)
        use.amount = amount

    def _forget(self, now: float) -> None:
        while self._uses and now - self._uses[0].at >= WINDOW_SECONDS:
            self._sum -= self._uses.popleft().amount
        if not self._uses:
            self._sum = 0.0  # Drop accumulated rounding errors.


def limit_windows(requests: float | None, tokens: float | None) -> tuple[SlidingWindow, SlidingWindow]:
    """The windows for a limit of requests and a limit of tokens per minute; None: no limit."""
    burst = max(BURST_REQUESTS, BURST_SECONDS * (requests or 0.0) / WINDOW_SECONDS)
    return SlidingWindow(requests, burst), SlidingWindow(tokens, BURST_SHARE * (tokens or 0.0), PACE_FACTOR)


class _Sizes:
    """Expected tokens of requests, learned from those that have ended."""

    def __init__(self) -> None:
        self._tokens_per_byte: deque[float] = deque(maxlen=REQUEST_HISTORY)
        self._output: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REQUEST_HISTORY))

    def add(self, asked: LeaseRequest, input_tokens: float, output_tokens: float) -> None:
        if asked.input_tokens > 0:
            self._tokens_per_byte.append(input_tokens / asked.input_tokens)
        self._output[asked.kind].append(output_tokens)

    def expected(self, asked: LeaseRequest) -> float:
        """Expected tokens of a request, prompt and reply. The prompt has at most one token per byte."""
        output = _expected(self._output[asked.kind], asked.output_tokens)
        return _expected(self._tokens_per_byte, 1.0) * asked.input_tokens + output


def _expected(values: deque[float], most: float) -> float:
    """One standard deviation above the mean, at most ``most``; ``most`` while too few values are known."""
    return most if len(values) < LEARNED_AFTER else min(most, float(np.mean(values) + np.std(values)))


@dataclass(slots=True)
class _Lease:
    asked: LeaseRequest
    use: _Use
    at: float
    probe: bool = False
    """Whether its request is the single one that probes the judge during an outage."""
    inherited: bool = False
    """Whether an earlier limiter granted this lease, to a process that has probably ended."""


class Limiter:
    """Grants leases; callers ask one at a time and wait as long as `lease` says."""

    def __init__(
        self,
        limits: JudgeLimits,
        *,
        spent: float = 0.0,
        booked: Mapping[str, float] | None = None,
        under_way: Mapping[str, float] | None = None,
        lease_seconds: float = math.inf,
        outage: JudgeHealth | None = None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            limits: limits of the whole pool.
            spent: dollars that earlier processes of this run have spent.
            booked: the part of ``spent`` for leases without an answer, which may still come: number -> dollars.
            under_way: unsettled leases of an earlier limiter of this run: number -> maximum cost.
            lease_seconds: age at which a lease is booked at its maximum cost: its holder has died, and the request may
                have been billed.
            outage: the health of the judge.
            name: prefix of the lease numbers.
            clock: monotonic time in seconds; replaced by tests.
        """
        self._limits = limits
        self._name = name
        self._lease_seconds = lease_seconds
        self.outage = outage or JudgeHealth()
        self._clock = clock
        self._requests, self._tokens = limit_windows(limits.requests_per_minute, limits.tokens_per_minute)
        self._sizes = _Sizes()
        self._leases: dict[str, _Lease] = {}
        self._booked = dict(booked or {})
        """Dollars booked for leases without an answer, which may still come."""
        self._scale = 1.0
        """Largest factor by which a request exceeded its maximum cost."""
        self.spent = spent
        """Dollars of settled requests."""
        now = clock()
        for number, dollars in (under_way or {}).items():
            asked = LeaseRequest(input_tokens=0, output_tokens=0, dollars=dollars)
            self._leases[number] = _Lease(asked, _Use(now, 0.0), now, inherited=True)

    @property
    def in_flight(self) -> int:
        """Number of leases that are not settled."""
        return len(self._leases)

    @property
    def reserved(self) -> float:
        """Maximum cost of the requests in flight, in dollars."""
        return math.fsum(self._scale * lease.asked.dollars for lease in self._leases.values())

    def lease(self, asked: LeaseRequest) -> tuple[str | None, float]:
        """Ask for a lease, the permission to send one request now.

        Returns: (the lease's number, 0.0) if it is granted. Otherwise (None, seconds after which to ask again); the
            seconds are infinite if the caller must first wait until requests in flight have ended.
        Raises:
            BudgetSpent: the request could cost more than is left of the budget. Unless it could exceed even the whole
                budget, this is raised only after this limiter's requests in flight have ended.
            JudgeUnavailable: the judge has not answered for too long.
        """
        now = self._clock()
        self._expire(now)
        if reason := self.outage.given_up(now):
            raise JudgeUnavailable(reason)
        wait = self.outage.seconds_to_wait(now)
        if wait > 0:
            return None, wait
        if not self._affords(self._scale * asked.dollars):
            return None, math.inf
        expected = self._sizes.expected(asked)
        wait = max(self._requests.seconds_to_wait(1, now), self._tokens.seconds_to_wait(expected, now))
        if wait > 0:
            return None, wait
        self._requests.take(1, now)
        number = f"{self._name}{uuid.uuid4().hex}"
        self._leases[number] = _Lease(asked, self._tokens.take(expected, now), now, self.outage.down)
        self.outage.probing = self.outage.down
        return number, 0.0

    def settle(self, number: str, ended: RequestResult) -> NextAction:
        """Book the end of a lease. The cost of a request counts even if its lease has expired."""
        now = self._clock()
        lease = self._leases.pop(number, None)
        if lease is not None and lease.probe:
            self.outage.probing = False
        if ended.trouble is FailureKind.LOST:
            if lease is not None:
                self._booked[number] = self._scale * lease.asked.dollars
                self.spent += self._booked[number]
            return NextAction.FAIL
        self.spent += ended.dollars - self._booked.pop(number, 0.0)
        if lease is not None:
            if ended.trouble is None and not ended.estimated:
                self._sizes.add(lease.asked, ended.tokens - ended.output_tokens, ended.output_tokens)
            if lease.asked.dollars > 0:
                self._scale = max(self._scale, ended.dollars / lease.asked.dollars)
            self._tokens.correct(lease.use, ended.tokens, now)
        if ended.trouble is None:
            self.outage.answered(now)
            return NextAction.AGAIN
        call, sent_at = ("", now) if lease is None else (lease.asked.call, lease.at)
        return self.outage.failed(ended.trouble, ended.reason, ended.hint, sent_at, now, call=call, away=ended.away)

    def pause(self) -> OutageStatus | None:
        """See `JudgeHealth.pause`."""
        return self.outage.pause(self._clock())

    def _affords(self, dollars: float) -> bool:
        budget = self._limits.dollars
        if budget is None or self.spent + self.reserved + dollars <= budget:
            return True
        if self._leases and self.spent + dollars <= budget:
            return False
        # A refusal ends the run. First wait for the requests in flight, whose replies are paid for.
        if dollars <= budget and not all(lease.inherited for lease in self._leases.values()):
            return False
        raise BudgetSpent(
            f"budget: ${self.spent:.4f} of judge.limits.dollars={budget:g} is spent, and the next call may cost up to "
            f"${dollars:.4f}; raise judge.limits.dollars"
        )

    def _expire(self, now: float) -> None:
        for number in [each for each, lease in self._leases.items() if lease.at + self._lease_seconds <= now]:
            self.settle(number, LOST)


@dataclass(order=True, slots=True)
class _Waiting:
    rank: int
    arrival: int
    asked: LeaseRequest = field(compare=False)
    granted: asyncio.Future[str] = field(compare=False)


class LimiterQueue:
    """A queue in front of a limiter in this process (`Leases`)."""

    def __init__(self, limiter: Limiter, *, final: bool = False) -> None:
        """
        Args:
            limiter: grants the leases.
            final: what happens when a request could exceed the budget. True: no further request is sent, and
                `BudgetSpent`, which cancels all other calls, is raised only after the requests in flight have ended.
                False: `BudgetSpent` is raised as in `Limiter.lease`, and smaller requests may still be sent.
        """
        self.limiter, self._final = limiter, final
        self._spent: str | None = None
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._news = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def lease(self, asked: LeaseRequest) -> str:
        """See `Leases.lease`."""
        granted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, _Waiting(asked.rank, next(self._arrivals), asked, granted))
        self._news.set()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                # The lease was granted just before the wait was cancelled: hand it back.
                self.limiter.settle(granted.result(), UNSENT)
            raise

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        """See `Leases.settle`."""
        verdict = self.limiter.settle(number, ended)
        self._news.set()
        return verdict

    async def pause(self) -> OutageStatus | None:
        """See `JudgeHealth.pause`."""
        return self.limiter.pause()

    def _lease(self, asked: LeaseRequest) -> tuple[str | None, float]:
        """See `Limiter.lease`."""
        if self._spent is None:
            try:
                return self.limiter.lease(asked)
            except BudgetSpent as error:
                if not self._final:
                    raise
                self._spent = str(error)
        if self.limiter.in_flight:
            return None, math.inf
        raise BudgetSpent(self._spent)

    async def _serve(self) -> None:
        """Serve the queue until it is empty."""
        while self._waiting:
            first = self._waiting[0]
            if first.granted.done():
                heapq.heappop(self._waiting)
                continue
            self._news.clear()
            try:
                number, wait = self._lease(first.asked)
            except Exception as error:
                heapq.heappop(self._waiting)
                first.granted.set_exception(error)
                continue
            if number is not None:
                heapq.heappop(self._waiting)
                first.granted.set_result(number)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, LOOK_AGAIN_SECONDS)):
                    await self._news.wait()
