"""Whether the judge is there: what a failed request means for it, for its call, and for everybody's next request.

========================  =============================================================================================
answered                  the judge is well: every count begins anew
rate limited              everybody waits: as long as the endpoint says, else longer each time
not available             no connection, 5xx: while no request is answered everybody waits, longer each time; from the
                          third time on one request at a time is let through
timed out                 the same, from the first time on: such requests are slow, and may be billed
refused (401, 402, 403,   of a judge that has never answered: the run stops. Otherwise the call fails, and the third in
404)                      a row, without an answer between them, stops the run
quota spent               the run stops
========================  =============================================================================================

An outage has lasted since the first failure that no answer followed. No Ray, no clock of its own.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 1.0
ROUNDS_TO_PROBE = 3
"""Failures in a row after which one request at a time is let through, until one is answered."""
REFUSALS_TO_STOP = 3
LOGGED_SECONDS = 30.0
"""Waits that are longer are logged when they begin."""


class FailureKind(StrEnum):
    """Why a request has no reply."""

    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    QUOTA_SPENT = "quota_spent"
    OWN = "own"
    """The request's own: too long, flagged. The judge is well."""


class NextAction(StrEnum):
    """What becomes of a call whose request had no reply."""

    AGAIN = "again"
    FAIL = "fail"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """An outage, for whoever watches."""

    reason: str
    lasted: float
    """Seconds."""
    next_try: float
    """Seconds until it."""
    gives_up: float
    """Seconds until the run stops."""


class Outage:
    """What is known of the judge's health."""

    def __init__(self, *, max_seconds: float = 0.0, max_backoff_seconds: float = 60.0, who: str = "judge") -> None:
        """
        Args:
            max_seconds: for which an outage is waited out; 0: nobody waits for anybody else's failures.
            max_backoff_seconds: between two tries at most, where the endpoint does not say.
            who: names the judge in messages.
        """
        self._max_seconds = max_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._who = who
        self._since: float | None = None
        self._rounds = 0
        self._reason = ""
        self._paused_at = -math.inf
        self._paused_until = -math.inf
        self._logged_until = -math.inf
        self._announced = False
        self.failing: set[str] = set()
        """Calls that have failed since the last reply."""
        self.probing = False
        """Whether the one request that is let through during an outage is under way."""
        self._refusals = 0
        self.answers = 0
        """Replies so far, requests that were understood and refused included."""
        self._answered = False

    @property
    def patient(self) -> bool:
        """Whether outages are waited out."""
        return self._max_seconds > 0

    def seconds_to_wait(self, now: float) -> float:
        """Seconds until the next request may be sent; infinite while only the request under way can tell."""
        if self._paused_until > now:
            return self._paused_until - now
        return math.inf if self.probing else 0.0

    @property
    def down(self) -> bool:
        """Whether the judge seems down for everybody, so that one request at a time is let through."""
        return self._rounds >= ROUNDS_TO_PROBE

    def given_up(self, now: float) -> str | None:
        """Why nobody should wait any longer; None while they should."""
        if self._since is None or not self.patient or now - self._since < self._max_seconds:
            return None
        return (
            f"{self._who}: no answer for {span(now - self._since)} (judge.max_outage_seconds={self._max_seconds:g}), "
            f"the last: {self._reason}"
        )

    def pause(self, now: float) -> Pause | None:
        """The outage there is, if there is one."""
        if self._since is None or not self._announced:
            return None
        lasted = now - self._since
        return Pause(
            reason=self._reason,
            lasted=lasted,
            next_try=max(0.0, self._paused_until - now),
            gives_up=max(0.0, self._max_seconds - lasted),
        )

    def answered(self, now: float) -> None:
        """Note that a reply came."""
        self._answered = True
        self._refusals = 0
        self._well(now)

    def failed(self, trouble: FailureKind, reason: str, hint: float | None, sent_at: float, now: float) -> NextAction:
        """Take in that a request, sent at ``sent_at``, had no reply.

        Args:
            trouble: what kind.
            reason: one line.
            hint: seconds that the endpoint asks us to wait.
            sent_at: on the clock of ``now``.
            now: seconds.
        """
        if trouble is FailureKind.OWN:
            self._well(now)
            return NextAction.FAIL
        if trouble is FailureKind.QUOTA_SPENT:
            return NextAction.STOP
        if trouble is FailureKind.REFUSED:
            self._refusals += 1
            return NextAction.FAIL if self._answered and self._refusals < REFUSALS_TO_STOP else NextAction.STOP
        if self.patient:
            self._wait(trouble, reason, hint, sent_at, now)
        return NextAction.AGAIN

    def _wait(self, trouble: FailureKind, reason: str, hint: float | None, sent_at: float, now: float) -> None:
        self._reason = reason
        if self._since is None:
            self._since = now
        # One that was sent before the pause began says nothing new.
        new = sent_at >= self._paused_at and now >= self._paused_until
        if new:
            self._rounds = max(self._rounds + 1, ROUNDS_TO_PROBE if trouble is FailureKind.TIMED_OUT else 0)
            self._paused_at = now
        if hint is not None:
            # A little late: a request that comes early is refused again.
            self._paused_until = max(self._paused_until, now + hint + random.uniform(0, min(1.0, 0.1 * hint)))
        elif new:
            ceiling = min(self._max_backoff_seconds, FIRST_BACKOFF_SECONDS * 2.0 ** min(self._rounds - 1, 30))
            self._paused_until = now + random.uniform(ceiling / 2, ceiling)
        # However long the endpoint asks to wait, the limit holds.
        ends = self._since + self._max_seconds
        self._paused_until = min(self._paused_until, max(now, ends))
        pause = self._paused_until - now
        long = self._paused_until - max(now, self._logged_until) > LOGGED_SECONDS
        if long or (not self._announced and self._rounds > ROUNDS_TO_PROBE):
            self._announced, self._logged_until = True, self._paused_until
            asked = f", which asks to wait {span(hint)}" if hint is not None and hint > pause else ""
            log.warning(
                "%s answers nobody (%s%s): judging is paused, nothing is dropped; next try in %s, the run stops in %s "
                "(judge.max_outage_seconds=%g)",
                *(self._who, reason, asked, span(pause), span(max(0.0, ends - now)), self._max_seconds),
            )

    def _well(self, now: float) -> None:
        self.answers += 1
        self.failing.clear()
        if self._since is not None and self._announced:
            log.warning("%s answers again after %s: judging goes on", self._who, span(now - self._since))
        self._announced = False
        # A wait that a rate limit asked for holds, even though somebody was answered since.
        if self._rounds >= ROUNDS_TO_PROBE:
            self._paused_until = min(self._paused_until, now)
        self._since, self._rounds = None, 0


def span(seconds: float) -> str:
    """Words for a time.

    >>> span(59.6), span(125), span(3 * 3600 + 59)
    ('60 s', '2 min 5 s', '3 h 0 min')
    """
    whole = math.ceil(seconds)
    if whole <= 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
