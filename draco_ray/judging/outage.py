"""Judge outages: how errors are classified, and what happens to the call and to all further requests.

========================  =============================================================================================
answered                  the counts of failures and refusals are reset
rate limited              all requests wait, as long as the endpoint says, else with exponential backoff
not available             no connection, 5xx: all wait with exponential backoff until one request is answered; from the
                          third failure on only one request at a time is sent
timed out                 as not available, but one request at a time from the first timeout on, since a request that
                          timed out may be billed
refused (401, 402, 403,   the run stops if the judge has never answered. Otherwise the call fails, and the third
404)                      refusal in a row stops the run
quota spent               the run stops
========================  =============================================================================================

An outage starts with the first failure after the last answer. This module uses neither Ray nor a clock.
"""

from __future__ import annotations

import email.utils
import logging
import math
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 1.0
ROUNDS_TO_PROBE = 3
"""Number of failures in a row after which only one request at a time is sent, until one is answered."""
REFUSALS_TO_STOP = 3
LOGGED_SECONDS = 30.0
"""Waits longer than this number of seconds are logged when they begin."""


class FailureKind(StrEnum):
    """Why a request has no reply."""

    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    QUOTA_SPENT = "quota_spent"
    OWN = "own"
    """The request itself is the cause: too long, or flagged. The judge is available."""
    UNSENT = "unsent"
    LOST = "lost"
    """The outcome of the request is unknown, so it may be billed."""


class NextAction(StrEnum):
    """What to do with a call whose request had no reply."""

    AGAIN = "again"
    WAIT = "wait"
    """As `AGAIN`, but the judge is down, so the failure does not count against the call."""
    FAIL = "fail"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageStatus:
    """An outage, for progress displays."""

    reason: str
    lasted: float
    """Seconds since the outage began."""
    next_try: float
    """Seconds until the next try."""
    gives_up: float
    """Seconds until the run stops."""


class JudgeHealth:
    """Counts the judge's failures since its last reply, and decides when requests wait and when the run stops."""

    def __init__(self, *, max_seconds: float = 0.0, max_backoff_seconds: float = 60.0, who: str = "judge") -> None:
        """
        Args:
            max_seconds: maximum duration of an outage before the run stops; 0: a failed call does not pause the others.
            max_backoff_seconds: maximum backoff if the endpoint does not say how long to wait.
            who: name of the judge in messages.
        """
        self._max_seconds = max_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._who = who
        self._since: float | None = None
        self._rounds = 0
        self._reason = ""
        self._paused_at = -math.inf
        self._paused_until = -math.inf
        self._logged_until: float | None = None
        """The end of the latest pause of this outage that was logged."""
        self._failing: set[str] = set()
        """Calls that have failed since the last reply."""
        self.probing = False
        """Whether the single request that probes the judge during an outage is in flight."""
        self._refusals = REFUSALS_TO_STOP - 1
        """Refusals since the last reply; before the first reply one refusal stops the run."""

    @property
    def patient(self) -> bool:
        """Whether calls wait for the end of an outage."""
        return self._max_seconds > 0

    def seconds_to_wait(self, now: float) -> float:
        """Seconds until the next request may be sent; infinity while a probe is in flight."""
        if self._paused_until > now:
            return self._paused_until - now
        return math.inf if self.probing else 0.0

    @property
    def down(self) -> bool:
        """Whether the judge seems down, so that only one request at a time is sent."""
        return self._rounds >= ROUNDS_TO_PROBE

    def given_up(self, now: float) -> str | None:
        """Why calls should stop waiting; None if they should continue."""
        if self._since is None or now - self._since < self._max_seconds:
            return None
        return (
            f"{self._who}: no answer for {format_duration(now - self._since)} "
            f"(judge.max_outage_seconds={self._max_seconds:g}); last error: {self._reason}"
        )

    def pause(self, now: float) -> OutageStatus | None:
        """The current outage, once it has been logged; None before that, and without an outage."""
        if self._since is None or self._logged_until is None:
            return None
        lasted = now - self._since
        return OutageStatus(
            reason=self._reason,
            lasted=lasted,
            next_try=max(0.0, self._paused_until - now),
            gives_up=max(0.0, self._max_seconds - lasted),
        )

    def answered(self, now: float) -> None:
        """Note that a reply came."""
        self._refusals = 0
        self._well(now)

    def failed(
        self,
        trouble: FailureKind,
        reason: str,
        hint: float | None,
        sent_at: float,
        now: float,
        *,
        call: str = "",
        away: bool = False,
    ) -> NextAction:
        """Note that a request, sent at ``sent_at``, had no reply.

        Args:
            trouble: kind of failure.
            reason: the error, in one line.
            hint: seconds that the endpoint asks us to wait.
            sent_at: time of sending, on the clock of ``now``.
            now: seconds.
            call: id of the judge call; equal for all requests of the call.
            away: whether the request cannot be the cause of the failure.
        """
        if trouble in (FailureKind.UNSENT, FailureKind.LOST):
            return NextAction.FAIL
        if trouble is FailureKind.OWN:
            self._well(now)
            return NextAction.FAIL
        if trouble is FailureKind.QUOTA_SPENT:
            return NextAction.STOP
        # A call fails once per outage, however often it is sent. If no other call fails, this one may be the cause.
        own = call not in self._failing or (self._failing == {call} and not away)
        self._failing.add(call)
        if trouble is FailureKind.REFUSED:
            self._refusals += 1
            return NextAction.FAIL if self._refusals < REFUSALS_TO_STOP else NextAction.STOP
        if self.patient:
            self._wait(trouble, reason, hint, sent_at, now)
        return NextAction.AGAIN if own else NextAction.WAIT

    def _wait(self, trouble: FailureKind, reason: str, hint: float | None, sent_at: float, now: float) -> None:
        self._reason = reason
        if self._since is None:
            self._since = now
        # A failed request that was sent before the pause began tells nothing new.
        new = sent_at >= self._paused_at and now >= self._paused_until
        if new:
            self._rounds = max(self._rounds + 1, ROUNDS_TO_PROBE if trouble is FailureKind.TIMED_OUT else 0)
            self._paused_at = now
        if new or hint is not None:
            seconds = seconds_to_pause(self._rounds, hint, self._max_backoff_seconds)
            self._paused_until = max(self._paused_until, now + seconds)
        # The pause ends at the outage's limit, however long the endpoint asks to wait.
        ends = self._since + self._max_seconds
        self._paused_until = min(self._paused_until, max(now, ends))
        pause = self._paused_until - now
        long = self._paused_until - max(now, self._logged_until or now) > LOGGED_SECONDS
        if long or (self._logged_until is None and self._rounds > ROUNDS_TO_PROBE):
            self._logged_until = self._paused_until
            asked = f"; it asks to wait {format_duration(hint)}" if hint is not None and hint > pause else ""
            log.warning(
                "%s does not answer (%s%s): judging is paused until it does; next try in %s, the run stops "
                "in %s (judge.max_outage_seconds=%g)",
                *(
                    self._who,
                    reason,
                    asked,
                    format_duration(pause),
                    format_duration(max(0.0, ends - now)),
                    self._max_seconds,
                ),
            )

    def _well(self, now: float) -> None:
        self._failing.clear()
        if self._since is not None and self._logged_until is not None:
            log.warning("%s answers again after %s: judging continues", self._who, format_duration(now - self._since))
        self._logged_until = None
        # Only the backoff of an outage ends; a wait that a rate limit asked for continues.
        if self._rounds >= ROUNDS_TO_PROBE:
            self._paused_until = min(self._paused_until, now)
        self._since, self._rounds = None, 0


def seconds_to_pause(failures: int, hint: float | None, most: float) -> float:
    """Seconds to wait before the next request: what the endpoint asks, or exponential backoff.

    Args:
        failures: failures in a row.
        hint: seconds that the endpoint asks us to wait, if it does.
        most: maximum without a hint.
    """
    if hint is not None:
        # Wait slightly longer than asked, because an early request is refused again.
        return hint + random.uniform(0, min(1.0, 0.1 * hint))
    ceiling = min(most, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 30))
    return random.uniform(ceiling / 2, ceiling)


def format_duration(seconds: float) -> str:
    """A duration in words.

    >>> format_duration(59.6), format_duration(125), format_duration(3 * 3600 + 59)
    ('60 s', '2 min 5 s', '3 h 0 min')
    """
    whole = math.ceil(seconds)
    if whole <= 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


_REFUSED = {401, 402, 403, 404}
_TIMED_OUT = {408, 504, 522, 524}
_AGAIN = {425, 429}
_FLAGGED = re.compile(
    r"flagged|moderat|content[ _-]?(policy|filter|management)|safety|prohibited|inappropriate|guardrail|harmful"
    r"|sensitive|data[ _-]?inspection|policy violation|\b(request|prompt|input|content|message)\w*\W(\w+\W){0,3}violat",
    re.I,
)
_TOO_LARGE = re.compile(r"request too large|too large for|reduce (the|your) (length|prompt|message)", re.I)
_UNPAID = re.compile(r"billing_hard_limit|credit balance is too low to access")
"""Errors of an account without credit. The pattern is narrow: an error may quote a rollout that is about money."""
_UNPAID_CODES = {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"}
_UNREADABLE = re.compile(r"Error converting to valid response block|Error in response object")
"""LiteLLM's words for an answer that is neither an error nor a completion, which it reports as a bad request."""
_ADVICE = (
    (re.compile(r"\btemperature\b", re.I), "to leave it out set judge.temperature=null"),
    (re.compile(r"max_(completion_)?tokens", re.I), "change it with judge.max_tokens"),
    (re.compile(r"reasoning[_.]effort", re.I), "to leave it out set judge.reasoning_effort=null"),
    (re.compile(r"response_format|json_schema", re.I), "to leave it out set judge.structured_output=false"),
)
"""Pattern of a parameter's name in an error, and advice with the configuration key for it."""


def classify(error: BaseException) -> FailureKind:
    """The kind of a failure."""
    status, text = _status(error), str(error)
    if _quota_spent(error):
        return FailureKind.QUOTA_SPENT
    if status == 403 and _FLAGGED.search(text):
        return FailureKind.OWN
    if status in _REFUSED or (status == 400 and "LLM Provider NOT provided" in text):
        return FailureKind.REFUSED
    if status in (400, 422) and _UNREADABLE.search(text):
        return FailureKind.UNAVAILABLE
    if status == 429 and _TOO_LARGE.search(text):
        # The request is larger than the limit per minute: a retry never helps.
        return FailureKind.OWN
    if isinstance(error, TimeoutError) or status in _TIMED_OUT:
        return FailureKind.TIMED_OUT
    if status in _AGAIN:
        return FailureKind.RATE_LIMITED
    if status is None or status >= 500 or 200 <= status < 300:
        return FailureKind.UNAVAILABLE
    return FailureKind.OWN


def possibly_billed(error: BaseException) -> bool:
    """Whether a reply may have been billed: the request was sent, and the endpoint did not answer with an error."""
    import httpx

    if is_connect_failure(error):
        return False
    for cause in _causes(error):
        if isinstance(cause, httpx.HTTPStatusError):
            # A gateway has timed out; the server behind it may still make the reply.
            return cause.response.status_code in _TIMED_OUT
    return classify(error) in (FailureKind.TIMED_OUT, FailureKind.UNAVAILABLE)


def is_endpoint_unavailable(error: BaseException) -> bool:
    """Whether the endpoint is busy, or cannot be reached: the request is not the cause."""
    return is_busy(error) or is_connect_failure(error)


def is_busy(error: BaseException) -> bool:
    """Whether the endpoint is up and asks to retry later."""
    return _status(error) in (429, 503, 529)


def is_connect_failure(error: BaseException) -> bool:
    """Whether no connection was made; LiteLLM reports that as a 500 with the cause chained."""
    import httpx

    connecting = (httpx.ConnectError, httpx.ConnectTimeout, ConnectionRefusedError)
    return any(isinstance(cause, connecting) for cause in _causes(error))


def is_connection_broken(error: BaseException) -> bool:
    """Whether there was no connection, or it broke: any request to that server would fail."""
    import httpx

    broken = (httpx.NetworkError, httpx.RemoteProtocolError, ConnectionError)
    return any(isinstance(cause, broken) for cause in _causes(error))


def is_malformed_response(error: BaseException) -> bool:
    """Whether the answer was no completion; LiteLLM reports that as a 500 without an HTTP error in the chain."""
    of_http = ("httpx", "httpcore", "aiohttp", "openai")
    causes = list(_causes(error))
    if classify(error) is not FailureKind.UNAVAILABLE or any(
        isinstance(cause, OSError | TimeoutError) for cause in causes
    ):
        return False
    return len(causes) > 1 and not any(type(cause).__module__.partition(".")[0] in of_http for cause in causes)


def error_hint(error: BaseException) -> str:
    """Advice to append to a message about the error: configuration keys to check or change; empty without advice."""
    if is_malformed_response(error):
        return (
            "; the reply has another format than the provider in judge.model uses; check judge.model and judge.api_base"
        )
    if _status(error) not in (400, 422):
        return ""
    return "".join(f"; {key}" for pattern, key in _ADVICE if pattern.search(str(error)))


def wants_completion_tokens(error: BaseException) -> bool:
    """Whether the endpoint refuses ``max_tokens`` and expects its newer name ``max_completion_tokens``."""
    return _status(error) == 400 and "max_completion_tokens" in str(error) and "max_tokens" in str(error)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """The server's ``retry-after-ms``, or ``retry-after`` (seconds or a date), in seconds; None without either."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        elif "retry-after" in headers:
            value = headers["retry-after"]
            try:
                seconds = float(value)
            except ValueError:
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        else:
            return None
    except (TypeError, ValueError, OverflowError):
        return None
    # Infinity and NaN give None: a NaN compares false with everything.
    return max(seconds, 0.0) if seconds < float("inf") else None


def headers_of(error: BaseException) -> Mapping[str, str]:
    """Headers of the response that caused an error, names in lower case."""
    response = getattr(error, "response", None)
    found = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in found.items()}


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _quota_spent(error: BaseException) -> bool:
    body = getattr(error, "body", None)
    named = (body.get("code"), body.get("type")) if isinstance(body, dict) else ()
    if not _UNPAID_CODES.isdisjoint(name for name in named if isinstance(name, str)):
        return True
    status, text = _status(error), str(error)
    return (status == 429 and "insufficient_quota" in text) or (status == 400 and _UNPAID.search(text) is not None)
