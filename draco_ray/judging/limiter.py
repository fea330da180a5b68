"""What the whole judge pool may ask for: requests and tokens a minute, and dollars in all; and when it has to pause.

A request takes a lease before it is sent and settles it with what it did cost.

- Dollars: a lease holds the most that its request can cost, so that the budget is never exceeded.
- Requests: in any 60 seconds no more than the limit, spread over them.
- Tokens: what was used counts, and for those under way a bound of their sum that is learned from what others have used
  (`draco_ray.judging.reply_sizes`); until enough have ended, the most that they can use. Spread as well, at `PACE`. A
  request counts from the moment it is sent.
- Who waits: later phases of a group before new groups, otherwise in the order of asking. Who waits for room lets
  smaller ones pass, but for `PATIENCE_SECONDS` only, so that a large request is not passed for ever.

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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draco_ray.config.schema import JudgeLimits
from draco_ray.errors import BudgetSpent, JudgeUnavailable
from draco_ray.judging.outage import Next, Outage, Pause, Trouble
from draco_ray.judging.reply_sizes import Size, Sizes, UnderWay

WINDOW_SECONDS = 60.0
ROUNDING = 1e-9
BURST_SECONDS, BURST_REQUESTS = 2.0, 5
"""Requests that may leave at once: those of so many seconds, and at least so many."""
BURST_SHARE = 0.2
"""Part of the minute's tokens that may leave at once; a single request always may."""
PACE = 4.0
"""Of the limit, at which tokens may leave for a while: what waited for room may be made up for."""
PATIENCE_SECONDS = 180.0
"""For which a request that waits for room lets smaller ones pass."""
PASSING = 50
"""Requests behind it that may."""
LOOK_AGAIN_SECONDS = 5.0
QUESTION_SECONDS = 120.0
"""After which a small question whose sender has died is asked by another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that is to be sent: the most it can take."""

    input_tokens: float
    output_tokens: float
    dollars: float = 0.0
    kind: str = ""
    """Requests of one kind are alike in the length of their replies."""
    group: str = ""
    """Requests of one group are alike in how many tokens a byte is."""
    rank: int = 0
    """The lowest goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease."""

    number: str
    """Unique over all runs."""
    answers: int
    """Replies that the whole pool had before it."""
    outages: int = 0
    """Small questions that nobody answered before it."""
    question: bool = False
    """Nobody was answered lately: only a small question may be sent with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a request."""

    tokens: float = 0.0
    output_tokens: float = 0.0
    """The part of ``tokens`` that was written."""
    dollars: float = 0.0
    estimated: bool = False
    """Whether these are guesses: nothing is learned from them."""
    trouble: Trouble | None = None
    """Why there is no reply; None where there is one."""
    reason: str = ""
    hint: float | None = None
    """Seconds that the endpoint asks us to wait."""


class Leases(Protocol):
    """Where a judge client takes its leases; `draco_ray.judging.limiter_actor.LimiterClient` in a run."""

    async def lease(self, asked: Asked) -> Grant:
        """Wait until a request may be sent.

        Raises:
            BudgetSpent: it may not be.
            JudgeUnavailable: the judge has answered nobody for too long.
        """
        ...

    async def settle(self, number: str, ended: Ended) -> Next:
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

    def seconds_to_wait(self, amount: float, now: float, held: float = 0.0) -> float:
        """Seconds until ``amount`` more would fit beside ``held`` if nothing else happened; 0 if it does."""
        self._forget(now)
        if self._limit is None:
            return 0.0
        over = self._sum + held + amount - self._limit
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


@dataclass(slots=True)
class _Lease:
    asked: Asked
    use: _Use
    at: float
    expires_at: float
    question: bool


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
        self._sizes = None if tokens is None else Sizes(tokens)
        self._leases: dict[str, _Lease] = {}
        self._booked: dict[str, float] = {}
        """Leases that were booked without an answer; one may still come."""
        self._scale = 1.0
        """Largest factor by which a request exceeded the most it was expected to take."""
        self.spent = spent
        """Dollars of settled requests."""
        now = clock()
        for number, dollars in (under_way or {}).items():
            asked = Asked(input_tokens=0, output_tokens=0, dollars=dollars)
            self._leases[number] = _Lease(asked, _Use(now, 0.0), now, now + lease_seconds, False)

    @property
    def reserved(self) -> float:
        """Dollars that requests under way may cost at most."""
        return math.fsum(self._scale * lease.asked.dollars for lease in self._leases.values())

    def lease(self, asked: Asked) -> tuple[Grant | None, float]:
        """Ask for one request.

        Returns: the lease and 0.0, or None and the seconds after which to ask again. They are infinite while only the
            settlement of requests under way can help.
        Raises:
            BudgetSpent: with nothing under way, the request could cost more than is left.
            JudgeUnavailable: the judge has answered nobody for too long.
        """
        _, grant, wait = self.lease_one([asked])
        return grant, wait

    def lease_one(self, waiting: Sequence[Asked]) -> tuple[int, Grant | None, float]:
        """Ask for the first request, or where there is no room for its tokens for the first other that fits.

        Returns: which it is, and as `lease`.
        Raises: as `lease`, for the first.
        """
        now = self._clock()
        self._expire(now)
        if reason := self.outage.given_up(now):
            raise JudgeUnavailable(reason)
        wait = self.outage.seconds_to_wait(now)
        if wait > 0:
            return 0, None, wait
        if not self._affords(self._scale * waiting[0].dollars):
            return 0, None, math.inf
        wait = self._requests.seconds_to_wait(1, now)
        if wait > 0:
            return 0, None, wait
        under_way = self._under_way(now)
        # Whatever is sent, this much is held beside it; to find out how much more takes longer.
        least = self._beyond(None, 0.0, under_way)
        wait = math.inf
        for number, asked in enumerate(waiting):
            if number and not self._within_budget(self._scale * asked.dollars):
                continue
            expected = 0.0 if self._sizes is None else self._sizes.expect(_size_of(asked))
            until = self._tokens.seconds_to_wait(expected, now, held=least)
            if until <= 0:
                held = self._beyond(asked, expected, under_way)
                until = self._tokens.seconds_to_wait(expected, now, held=held)
            if until <= 0:
                return number, self._grant(asked, expected, now), 0.0
            wait = min(wait, until)
        return 0, None, wait

    def _grant(self, asked: Asked, expected: float, now: float) -> Grant:
        self._requests.take(1, now)
        question = self.outage.must_ask()
        if question:
            self.outage.ask()
        grant = Grant(
            number=f"{self._name}{uuid.uuid4().hex}",
            answers=self.outage.answers,
            outages=self.outage.unanswered,
            question=question,
        )
        expires_at = now + (min(QUESTION_SECONDS, self._lease_seconds) if question else self._lease_seconds)
        use = self._tokens.take(expected, now)
        self._leases[grant.number] = _Lease(asked, use, now, expires_at, question)
        return grant

    def settle(self, number: str, ended: Ended) -> Next:
        """Book the end of a lease's request. What it did cost counts even if the lease expired."""
        now = self._clock()
        self.spent += ended.dollars - self._booked.pop(number, 0.0)
        lease = self._leases.pop(number, None)
        sent_at = now if lease is None else lease.at
        if lease is not None:
            if lease.question:
                self.outage.asked(ended.trouble)
            if self._sizes and ended.trouble is None and not ended.estimated and not lease.question:
                written = ended.output_tokens
                self._sizes.add(_size(lease, now), input_tokens=ended.tokens - written, output_tokens=written)
            if lease.asked.dollars > 0:
                self._scale = max(self._scale, ended.dollars / lease.asked.dollars)
            self._tokens.correct(lease.use, ended.tokens, now)
        if ended.trouble is None:
            self.outage.answered(now)
            return Next.AGAIN
        return self.outage.failed(ended.trouble, ended.reason, ended.hint, sent_at, now)

    def give_back(self, number: str) -> None:
        """Take back a lease whose request was not sent."""
        lease = self._leases.pop(number, None)
        if lease is not None:
            self._tokens.correct(lease.use, 0.0, self._clock())
            if lease.question:
                self.outage.asked()

    def abandon(self, number: str) -> None:
        """Book a request whose end nobody will see: it may be billed."""
        lease = self._leases.pop(number, None)
        if lease is not None:
            self._booked[number] = self._scale * lease.asked.dollars
            self.spent += self._booked[number]
            if lease.question:
                self.outage.asked()

    def pause(self) -> Pause | None:
        """The outage there is, if there is one."""
        return self.outage.pause(self._clock())

    def now(self) -> float:
        """Seconds on its clock."""
        return self._clock()

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

    def _under_way(self, now: float) -> tuple[float, UnderWay] | None:
        """What requests under way count with in the minute, and what is known of them; None without a limit."""
        if self._sizes is None:
            return None
        leases = self._leases.values()
        counted = math.fsum(lease.use.amount for lease in leases if now - lease.at < WINDOW_SECONDS)
        return counted, self._sizes.under_way([_size(lease, now) for lease in leases], WINDOW_SECONDS)

    def _beyond(self, asked: Asked | None, expected: float, under_way: tuple[float, UnderWay] | None) -> float:
        """Tokens that those under way and a request may use beyond what is counted for them and ``expected`` of it."""
        if self._sizes is None or under_way is None:
            return 0.0
        counted, sizes = under_way
        return max(0.0, self._sizes.bound(sizes, None if asked is None else _size_of(asked)) - counted - expected)

    def _expire(self, now: float) -> None:
        for number in [number for number, lease in self._leases.items() if lease.expires_at <= now]:
            self.abandon(number)


def _size(lease: _Lease, now: float) -> Size:
    return _size_of(lease.asked, now - lease.at)


def _size_of(asked: Asked, seconds: float = 0.0) -> Size:
    return Size(
        kind=asked.kind,
        group=asked.group,
        input_bytes=asked.input_tokens,
        most_output=asked.output_tokens,
        seconds=seconds,
    )


@dataclass(order=True, slots=True)
class _Waiting:
    rank: int
    arrival: int
    asked: Asked = field(compare=False)
    granted: asyncio.Future[Grant] = field(compare=False)
    passed_at: float | None = field(default=None, compare=False)
    """When the first other one went before it although it was its turn."""


class WaitingLine:
    """`Leases` of a limiter in this process."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()
        self._news = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def lease(self, asked: Asked) -> Grant:
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

    async def settle(self, number: str, ended: Ended) -> Next:
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
            served = self._who_may(first)
            try:
                number, grant, wait = self.limiter.lease_one([each.asked for each in served])
            except Exception as error:
                heapq.heappop(self._waiting)
                first.granted.set_exception(error)
                continue
            if grant is not None:
                if number and first.passed_at is None:
                    first.passed_at = self.limiter.now()
                served[number].granted.set_result(grant)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, LOOK_AGAIN_SECONDS)):
                    await self._news.wait()

    def _who_may(self, first: _Waiting) -> list[_Waiting]:
        """The first, and who may go if there is no room for it."""
        if first.passed_at is not None and self.limiter.now() - first.passed_at >= PATIENCE_SECONDS:
            return [first]
        return heapq.nsmallest(PASSING, (each for each in self._waiting if not each.granted.done()))
