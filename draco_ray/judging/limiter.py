"""What the whole judge pool may ask for: requests and tokens a minute, and dollars in all; and when it has to pause.

A request takes a lease before it is sent and settles it with what it did cost.

- Dollars: a lease holds the most that its request can cost, so that the budget is never exceeded.
- Requests: in any 60 seconds no more than the limit, spread over them.
- Tokens: a request counts from the moment it is sent, with what requests of its kind have used (mean and one standard
  deviation), until enough have ended with the most that it can use; once it has ended, with what it did use. Spread
  over the minute as well, at `PACE`.
- Order: later phases of a group before new groups, otherwise first come, first served: a large request that has to
  wait for room is not overtaken by smaller ones.

`Limiter` decides on a clock that tests can set, `WaitingLine` is where callers wait for it. No Ray in here.
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
from draco_ray.judging.outage import FailureKind, NextAction, Outage, Pause

WINDOW_SECONDS = 60.0
ROUNDING = 1e-9
BURST_SECONDS, BURST_REQUESTS = 2.0, 5
"""Requests that may leave at once: those of so many seconds, and at least so many."""
BURST_SHARE = 0.2
"""Part of the minute's tokens that may leave at once; a single request always may."""
PACE = 4.0
"""Of the limit, at which tokens may leave for a while: what waited for room may be made up for."""
LEARNED_AFTER = 12
"""Ended requests of a kind after which the next ones are expected to be like them."""
MEMORY = 200
"""Number of ended requests over which means are taken."""
LOOK_AGAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A request that is to be sent: the most it can take."""

    input_tokens: float
    output_tokens: float
    dollars: float = 0.0
    kind: str = ""
    """Requests of one kind are alike in the length of their replies."""
    rank: int = 0
    """The lowest goes first."""
    call: str = ""
    """Identifies the call over all its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease."""

    number: str
    """Unique over all runs."""
    answers: int
    """Replies that the whole pool had before it."""
    alone: bool = False
    """Whether no other call has failed since the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What became of a request."""

    tokens: float = 0.0
    output_tokens: float = 0.0
    """The part of ``tokens`` that was written."""
    dollars: float = 0.0
    estimated: bool = False
    """Whether these are guesses: nothing is learned from them."""
    trouble: FailureKind | None = None
    """Why there is no reply; None where there is one."""
    reason: str = ""
    hint: float | None = None
    """Seconds that the endpoint asks us to wait."""


class Leases(Protocol):
    """Where a judge client takes its leases; `draco_ray.judging.actors.LimiterClient` in a run."""

    async def lease(self, asked: LeaseRequest) -> Grant:
        """Wait until a request may be sent.

        Raises:
            BudgetSpent: it may not be.
            JudgeUnavailable: the judge has answered nobody for too long.
        """
        ...

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        """Book the end of a lease's request; returns what becomes of its call if it has no reply."""
        ...

    async def give_back(self, number: str) -> None:
        """Take back a lease whose request was not sent."""
        ...

    def abandon(self, number: str) -> None:
        """Give up a lease whose request nobody waits for any longer; it may be billed."""
        ...


@dataclass(slots=True)
class _Use:
    """One request's share of a window."""

    at: float
    amount: float


class SlidingWindow:
    """At most ``limit`` in any `WINDOW_SECONDS`, paced; an amount above the limit passes when the window is empty."""

    def __init__(self, limit: float | None, burst: float, pace: float = 1.0) -> None:
        """
        Args:
            limit: of the window; None: there is none.
            burst: that may leave at once, or one more where it is larger.
            pace: of the limit, at which the rest may.
        """
        self._limit = limit
        self._seconds_each = 0.0 if limit is None else WINDOW_SECONDS / (pace * limit)
        self._burst = burst
        self._uses: deque[_Use] = deque()
        self._sum = 0.0
        self._due = -math.inf
        """When all that was taken would have left at an even pace."""

    def seconds_to_wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` more would fit if nothing else happened; 0 if it does."""
        self._forget(now)
        if self._limit is None:
            return 0.0
        over = self._sum + amount - self._limit
        if not self._uses:
            return 0.0
        # A burst may leave at once; what exceeds it leaves at an even pace.
        wait = max(0.0, self._due - now - self._seconds_each * max(self._burst - amount, 0.5 * self._burst))
        for use in self._uses:
            if over <= ROUNDING:
                break
            over -= use.amount
            wait = max(wait, use.at + WINDOW_SECONDS - now)
        return wait if wait > ROUNDING else 0.0

    def take(self, amount: float, now: float) -> _Use:
        """Count ``amount`` from now on."""
        use = _Use(now, amount)
        self._uses.append(use)
        self._sum += amount
        self._due = max(self._due, now) + self._seconds_each * amount
        return use

    def correct(self, use: _Use, amount: float, now: float) -> None:
        """Count ``use`` as ``amount``, which it turned out to be."""
        self._forget(now)
        if now - use.at < WINDOW_SECONDS:
            self._sum += amount - use.amount
        self._due += self._seconds_each * (amount - use.amount)
        use.amount = amount

    def _forget(self, now: float) -> None:
        while self._uses and now - self._uses[0].at >= WINDOW_SECONDS:
            self._sum -= self._uses.popleft().amount
        if not self._uses:
            self._sum = 0.0  # No rounding is carried along.


class _Sizes:
    """Expected tokens of requests, learned from those that have ended."""

    def __init__(self) -> None:
        self._tokens_per_byte: deque[float] = deque(maxlen=MEMORY)
        self._output: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY))

    def add(self, asked: LeaseRequest, input_tokens: float, output_tokens: float) -> None:
        if asked.input_tokens > 0:
            self._tokens_per_byte.append(input_tokens / asked.input_tokens)
        self._output[asked.kind].append(output_tokens)

    def expected(self, asked: LeaseRequest) -> float:
        """Expected tokens of a request, prompt and reply; no byte makes more than one token."""
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
    expires_at: float
    probe: bool = False
    """Whether it is the one request that is let through during an outage."""


class Limiter:
    """Hands out leases; the caller waits, one after the other, for as long as `lease` says."""

    def __init__(
        self,
        limits: JudgeLimits,
        *,
        spent: float = 0.0,
        under_way: Mapping[str, float] | None = None,
        lease_seconds: float = math.inf,
        outage: Outage | None = None,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            limits: of the whole pool.
            spent: dollars that earlier processes of this run have spent.
            under_way: lease number -> the most it may cost, of leases that an earlier limiter of this run has given and
                that were not settled.
            lease_seconds: after which a lease is booked at the most it may cost: whoever held it has died, and its
                request may have been billed.
            outage: what is known of the judge's health.
            name: begins every lease's number.
            clock: seconds, for tests.
        """
        self._limits = limits
        self._name = name
        self._lease_seconds = lease_seconds
        self.outage = outage or Outage()
        self._clock = clock
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = SlidingWindow(
            requests, max(BURST_REQUESTS, BURST_SECONDS * (requests or 0.0) / WINDOW_SECONDS)
        )
        self._tokens = SlidingWindow(tokens, BURST_SHARE * (tokens or 0.0), PACE)
        self._sizes = _Sizes()
        self._leases: dict[str, _Lease] = {}
        self._booked: dict[str, float] = {}
        """Leases that were booked without an answer; one may still come."""
        self._scale = 1.0
        """Largest factor by which a request exceeded the most it was expected to take."""
        self.spent = spent
        """Dollars of settled requests."""
        now = clock()
        for number, dollars in (under_way or {}).items():
            asked = LeaseRequest(input_tokens=0, output_tokens=0, dollars=dollars)
            self._leases[number] = _Lease(asked, _Use(now, 0.0), now, now + lease_seconds)

    @property
    def reserved(self) -> float:
        """Dollars that requests under way may cost at most."""
        return math.fsum(self._scale * lease.asked.dollars for lease in self._leases.values())

    def lease(self, asked: LeaseRequest) -> tuple[Grant | None, float]:
        """Ask for one request.

        Returns: the lease and 0.0, or None and the seconds after which to ask again. They are infinite while only the
            settlement of requests under way can help.
        Raises:
            BudgetSpent: with nothing under way, the request could cost more than is left.
            JudgeUnavailable: the judge has answered nobody for too long.
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
        return (None, wait) if wait > 0 else (self._grant(asked, expected, now), 0.0)

    def _grant(self, asked: LeaseRequest, expected: float, now: float) -> Grant:
        self._requests.take(1, now)
        self.outage.probing = self.outage.down
        grant = Grant(
            number=f"{self._name}{uuid.uuid4().hex}",
            answers=self.outage.answers,
            alone=self.outage.failing <= {asked.call},
        )
        use = self._tokens.take(expected, now)
        self._leases[grant.number] = _Lease(asked, use, now, now + self._lease_seconds, self.outage.down)
        return grant

    def settle(self, number: str, ended: RequestResult) -> NextAction:
        """Book the end of a lease's request. What it did cost counts even if the lease expired."""
        now = self._clock()
        self.spent += ended.dollars - self._booked.pop(number, 0.0)
        lease = self._remove(number)
        sent_at = now if lease is None else lease.at
        if lease is not None:
            if ended.trouble is None and not ended.estimated:
                self._sizes.add(lease.asked, ended.tokens - ended.output_tokens, ended.output_tokens)
            if lease.asked.dollars > 0:
                self._scale = max(self._scale, ended.dollars / lease.asked.dollars)
            self._tokens.correct(lease.use, ended.tokens, now)
        if ended.trouble is None:
            self.outage.answered(now)
            return NextAction.AGAIN
        if lease is not None:
            self.outage.failing.add(lease.asked.call)
        return self.outage.failed(ended.trouble, ended.reason, ended.hint, sent_at, now)

    def give_back(self, number: str) -> None:
        """Take back a lease whose request was not sent."""
        lease = self._remove(number)
        if lease is not None:
            self._tokens.correct(lease.use, 0.0, self._clock())

    def abandon(self, number: str) -> None:
        """Book a request whose end nobody will see: it may be billed."""
        lease = self._remove(number)
        if lease is not None:
            self._booked[number] = self._scale * lease.asked.dollars
            self.spent += self._booked[number]

    def pause(self) -> Pause | None:
        """The outage there is, if there is one."""
        return self.outage.pause(self._clock())

    def _remove(self, number: str) -> _Lease | None:
        lease = self._leases.pop(number, None)
        if lease is not None and lease.probe:
            self.outage.probing = False
        return lease

    def _affords(self, dollars: float) -> bool:
        budget = self._limits.dollars
        if budget is None or self._within_budget(dollars):
            return True
        if self._leases and self.spent + dollars <= budget:
            return False
        raise BudgetSpent(
            f"budget: ${self.spent:.4f} of judge.limits.dollars={budget:g} is spent and the next call may "
            f"cost ${dollars:.4f}; raise judge.limits.dollars"
        )

    def _within_budget(self, dollars: float) -> bool:
        return self._limits.dollars is None or self.spent + self.reserved + dollars <= self._limits.dollars

    def _expire(self, now: float) -> None:
        for number in [number for number, lease in self._leases.items() if lease.expires_at <= now]:
            self.abandon(number)


@dataclass(order=True, slots=True)
class _Waiting:
    rank: int
    arrival: int
    asked: LeaseRequest = field(compare=False)
    granted: asyncio.Future[Grant] = field(compare=False)


class WaitingLine:
    """`Leases` of a limiter in this process."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._news = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def lease(self, asked: LeaseRequest) -> Grant:
        """See `Leases.lease`."""
        granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, _Waiting(asked.rank, next(self._arrivals), asked, granted))
        self._news.set()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                # The lease was granted just before the wait was cancelled: hand it back.
                self.limiter.give_back(granted.result().number)
            raise

    async def settle(self, number: str, ended: RequestResult) -> NextAction:
        """See `Leases.settle`."""
        verdict = self.limiter.settle(number, ended)
        self._news.set()
        return verdict

    async def give_back(self, number: str) -> None:
        """See `Leases.give_back`."""
        self.limiter.give_back(number)
        self._news.set()

    def abandon(self, number: str) -> None:
        """See `Leases.abandon`."""
        self.limiter.abandon(number)
        self._news.set()

    async def pause(self) -> Pause | None:
        """The outage there is, if there is one."""
        return self.limiter.pause()

    async def _serve(self) -> None:
        """Serve the first in the line until nobody waits."""
        while self._waiting:
            first = self._waiting[0]
            if first.granted.done():
                heapq.heappop(self._waiting)
                continue
            self._news.clear()
            try:
                grant, wait = self.limiter.lease(first.asked)
            except Exception as error:
                heapq.heappop(self._waiting)
                first.granted.set_exception(error)
                continue
            if grant is not None:
                heapq.heappop(self._waiting)
                first.granted.set_result(grant)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, LOOK_AGAIN_SECONDS)):
                    await self._news.wait()
