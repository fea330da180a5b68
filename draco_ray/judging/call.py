"""One judge call and its requests so far: whose failures they were, how long to wait, and when to give up."""

from __future__ import annotations

import random
from dataclasses import dataclass

from draco_ray.judging.completion import Request
from draco_ray.judging.failures import is_busy, unconnected
from draco_ray.judging.limiter import Grant, LeaseRequest
from draco_ray.judging.outage import FIRST_BACKOFF_SECONDS
from draco_ray.judging.pricing import CostBound

LONGEST_HINT_SECONDS = 60.0
"""Longest wait of one call that an endpoint may ask for; that of the whole pool is `draco_ray.judging.outage`'s."""


@dataclass(slots=True)
class Call:
    """One call and its requests so far."""

    request: Request
    asked: LeaseRequest
    most: CostBound
    max_tokens: int
    key: str | None
    attempts: int
    patient: bool
    """Whether failures are waited out while the judge answers nobody."""
    timeout: float
    """Seconds that one request may take."""
    started_at: float
    clock: float
    check: bool = False
    """Whether it is the start-up check, which waits only for an endpoint that says it is busy."""
    requests: int = 0
    own: int = 0
    """Times that it failed while the judge answered others."""
    unexplained: int = 0
    """Requests that failed, with no answer to anybody since."""
    answers: int = 0
    """Of the pool, at the last lease."""
    number: str = ""
    """Of the latest request."""
    guessed: float = 0.0
    """Dollars of requests that may have been billed without a reply."""
    waited: float = 0.0
    """Seconds for leave to send its requests."""
    error: BaseException | None = None

    def note_failure(self, error: BaseException, billed: float, *, counts: bool = False) -> None:
        """A request failed.

        Args:
            error: why.
            billed: dollars that may be owed for it all the same.
            counts: whether it counts towards `attempts` although failures are waited out.
        """
        self.error, self.guessed = error, self.guessed + billed
        if self.patient and not counts:
            self.unexplained += 1
        else:
            self.own += 1

    def note_grant(self, grant: Grant) -> None:
        """The next request may be sent; what the others have seen meanwhile says whose failures the last ones were."""
        if grant.answers > self.answers:
            # Several in a row, and then another request was answered: the judge may have been down in between.
            self.own, self.unexplained = self.own + min(self.unexplained, 1), 0
        elif grant.alone and self.error is not None and not (unconnected(self.error) or is_busy(self.error)):
            # The judge can be reached and no other call fails: the prompt may be the cause.
            self.own, self.unexplained = self.own + self.unexplained, 0
        self.answers = grant.answers

    @property
    def spent(self) -> bool:
        """Whether it has failed often enough."""
        return self.own >= self.attempts

    def pause_seconds(self, hint: float | None, max_backoff: float) -> float:
        """Seconds to wait before the next request.

        Args:
            hint: what the endpoint asks for, if it does.
            max_backoff: the most to wait without a hint.
        """
        if hint is not None:
            # A little late: a request that comes early is refused again.
            return min(hint, max(max_backoff, LONGEST_HINT_SECONDS)) + random.uniform(0, min(1.0, 0.1 * hint))
        doubled = FIRST_BACKOFF_SECONDS * 2.0 ** min(self.own + self.unexplained - 1, 30)
        ceiling = min(max_backoff, doubled)
        return random.uniform(ceiling / 2, ceiling)
