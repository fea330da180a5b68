"""What the whole judge pool may ask for: requests and tokens a minute, and dollars in all. No Ray in here.

A request takes a lease for the most it can cost before it is sent, and settles it with what it did cost. So the limits
hold at any moment, whatever comes of the requests under way: in any 60 seconds no more than so many requests and
tokens, and never more dollars than the budget.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draco_ray.config.schema import JudgeLimits
from draco_ray.errors import BudgetSpent

WINDOW_SECONDS = 60.0
ROUNDING = 1e-9


class Leases(Protocol):
    """Where a judge client takes its leases; `draco_ray.judging.limiter_actor.LimiterClient` in a run."""

    async def lease(self, tokens: float, dollars: float) -> int:
        """Wait until a request of at most so many tokens and dollars may be sent; returns the lease's number.

        Raises:
            BudgetSpent: it may not be.
        """
        ...

    def settle(self, number: int, tokens: float, dollars: float) -> None:
        """The request has ended and cost this much."""
        ...


@dataclass(slots=True)
class _Use:
    """One request's share of a window."""

    at: float
    amount: float


class SlidingWindow:
    """At most ``limit`` in any `WINDOW_SECONDS`; a single amount above the limit passes when the window is empty."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._uses: deque[_Use] = deque()
        self._sum = 0.0

    def seconds_to_wait(self, amount: float, now: float) -> float:
        """Until ``amount`` more would fit if nothing else happened; 0 if it does."""
        self._forget(now)
        if self._limit is None:
            return 0.0
        over = self._sum + amount - self._limit
        wait = 0.0
        for use in self._uses:
            if over <= ROUNDING:
                break
            over -= use.amount
            wait = use.at + WINDOW_SECONDS - now
        return wait

    def take(self, amount: float, now: float) -> _Use:
        """Count ``amount`` from now on."""
        use = _Use(now, amount)
        self._uses.append(use)
        self._sum += amount
        return use

    def correct(self, use: _Use, amount: float, now: float) -> None:
        """``use`` turned out to be ``amount``."""
        self._forget(now)
        if now - use.at < WINDOW_SECONDS:
            self._sum += amount - use.amount
        use.amount = amount

    def _forget(self, now: float) -> None:
        while self._uses and now - self._uses[0].at >= WINDOW_SECONDS:
            self._sum -= self._uses.popleft().amount
        if not self._uses:
            self._sum = 0.0  # No rounding is carried along.


@dataclass(slots=True)
class _Lease:
    tokens: _Use
    dollars: float
    expires_at: float


class Limiter:
    """Hands out leases; the caller waits, one after the other, for as long as `lease` says."""

    def __init__(
        self,
        limits: JudgeLimits,
        *,
        spent: float = 0.0,
        lease_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            limits: of the whole pool.
            spent: dollars that earlier processes of this run have spent.
            lease_seconds: after which a lease counts as settled at no cost: whoever held it has died.
            clock: seconds, for tests.
        """
        self._limits = limits
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._requests = SlidingWindow(limits.requests_per_minute)
        self._tokens = SlidingWindow(limits.tokens_per_minute)
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self.spent = spent
        """Dollars of settled requests."""

    @property
    def reserved(self) -> float:
        """Dollars that requests under way may cost at most."""
        return math.fsum(lease.dollars for lease in self._leases.values())

    def lease(self, tokens: float, dollars: float) -> tuple[int, float]:
        """Ask for one request of at most so many tokens and dollars.

        Returns: the lease's number and 0.0, or 0 and the seconds after which to ask again. They are infinite while only
            the settlement of requests under way can make room in the budget.
        Raises:
            BudgetSpent: with nothing under way, the request could cost more than is left.
        """
        now = self._clock()
        self._expire(now)
        budget = self._limits.dollars
        if budget is not None and self.spent + self.reserved + dollars > budget:
            if self._leases and self.spent + dollars <= budget:
                return 0, math.inf
            raise BudgetSpent(
                f"budget: ${self.spent:.4f} of judge.limits.dollars={budget:g} is spent and the next call may "
                f"cost ${dollars:.4f}; raise judge.limits.dollars"
            )
        wait = max(self._requests.seconds_to_wait(1, now), self._tokens.seconds_to_wait(tokens, now))
        if wait > 0:
            return 0, wait
        self._requests.take(1, now)
        number = next(self._numbers)
        self._leases[number] = _Lease(self._tokens.take(tokens, now), dollars, now + self._lease_seconds)
        return number, 0.0

    def settle(self, number: int, tokens: float, dollars: float) -> None:
        """The request of a lease has ended and cost this much. What it did cost counts even if the lease expired."""
        self.spent += dollars
        lease = self._leases.pop(number, None)
        if lease is not None:
            self._tokens.correct(lease.tokens, tokens, self._clock())

    def _expire(self, now: float) -> None:
        for number in [number for number, lease in self._leases.items() if lease.expires_at <= now]:
            del self._leases[number]
