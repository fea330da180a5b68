"""Why a request failed, out of what LiteLLM raised: whose fault it is, and whether it may be billed all the same."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Iterator, Mapping

from draco_ray.judging.outage import FailureKind

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
"""Narrow: an error may quote the prompt, and a rollout may be about money."""
_UNPAID_CODES = {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"}
_UNREADABLE = re.compile(r"Error converting to valid response block|Error in response object")
"""How LiteLLM says that the answer was no error, and no completion either; it calls that a bad request."""
_ADVICE = (
    (re.compile(r"\btemperature\b", re.I), "judge.temperature=null leaves it out"),
    (re.compile(r"max_(completion_)?tokens", re.I), "judge.max_tokens sets it"),
    (re.compile(r"reasoning[_.]effort", re.I), "judge.reasoning_effort=null leaves it out"),
    (re.compile(r"response_format|json_schema", re.I), "judge.structured_output=false leaves it out"),
)
"""What a parameter is called where a request is refused for it, and the key that sets it."""


def classify(error: BaseException) -> FailureKind:
    """Whose fault it is."""
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
        # The request is larger than what a minute allows: asking again would never help.
        return FailureKind.OWN
    if isinstance(error, TimeoutError) or status in _TIMED_OUT:
        return FailureKind.TIMED_OUT
    if status in _AGAIN:
        return FailureKind.RATE_LIMITED
    if status is None or status >= 500 or 200 <= status < 300:
        return FailureKind.UNAVAILABLE
    return FailureKind.OWN


def possibly_billed(error: BaseException) -> bool:
    """Whether a reply may have been made: the request was sent, and the endpoint did not answer it with an error."""
    import httpx

    for cause in _causes(error):
        if isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, ConnectionRefusedError)):
            return False
        if isinstance(cause, httpx.HTTPStatusError):
            # A gateway has timed out; the server behind it may still make the reply.
            return cause.response.status_code in _TIMED_OUT
    return classify(error) in (FailureKind.TIMED_OUT, FailureKind.UNAVAILABLE)


def is_busy(error: BaseException) -> bool:
    """Whether the endpoint is there and asks to come back later."""
    return _status(error) in (429, 503, 529)


def unconnected(error: BaseException) -> bool:
    """Whether no connection was made; LiteLLM reports that as a 500 with the cause behind it."""
    import httpx

    connecting = (httpx.ConnectError, httpx.ConnectTimeout, ConnectionRefusedError)
    return any(isinstance(cause, connecting) for cause in _causes(error))


def disconnected(error: BaseException) -> bool:
    """Whether there was no connection, or it broke: what any request to that server would meet."""
    import httpx

    broken = (httpx.NetworkError, httpx.RemoteProtocolError, ConnectionError)
    return any(isinstance(cause, broken) for cause in _causes(error))


def misread(error: BaseException) -> bool:
    """Whether a reply came and was no completion; LiteLLM reports that as a 500, with no error of HTTP behind it."""
    of_http = ("httpx", "httpcore", "aiohttp", "openai")
    causes = list(_causes(error))
    if classify(error) is not FailureKind.UNAVAILABLE or any(
        isinstance(cause, OSError | TimeoutError) for cause in causes
    ):
        return False
    return len(causes) > 1 and not any(type(cause).__module__.partition(".")[0] in of_http for cause in causes)


def advice(error: BaseException) -> str:
    """What mends a refused request, as the end of a message: keys of the parameters that its error names."""
    if misread(error):
        return "; it answered, but in another format than the provider that judge.model names"
    if _status(error) not in (400, 422):
        return ""
    return "".join(f"; {key}" for pattern, key in _ADVICE if pattern.search(str(error)))


def wants_completion_tokens(error: BaseException) -> bool:
    """Whether the endpoint knows ``max_tokens`` under its newer name only."""
    return _status(error) == 400 and "max_completion_tokens" in str(error) and "max_tokens" in str(error)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """How long the server asks us to wait: ``retry-after-ms``, or ``retry-after`` in seconds or as a date."""
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
    except (TypeError, ValueError):
        return None
    # A NaN compares false with everything.
    return max(seconds, 0.0) if seconds < float("inf") else None


def headers_of(error: BaseException) -> Mapping[str, str]:
    """Headers of the answer behind an error, keys in lower case."""
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
