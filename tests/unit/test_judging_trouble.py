"""What an error of the endpoint means for its request: the branches that decide about money and about stopping."""

from __future__ import annotations

import httpx
import pytest

from draco_ray.judging.outage import Trouble
from draco_ray.judging.trouble import advice, classify, headers_of, possibly_billed

REQUEST = httpx.Request("POST", "http://judge/")


class Refused(Exception):
    """An error with a status, a body and an answer, as clients have them."""

    def __init__(
        self, status: int, text: str = "no", body: object = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(text)
        self.status_code = status
        self.body = body
        self.response = httpx.Response(status, headers=headers, request=REQUEST)


def caused(cause: BaseException) -> Exception:
    error = Refused(500)
    error.__cause__ = cause
    return error


def answered(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(status, request=REQUEST))


@pytest.mark.parametrize(
    ("error", "billed"),
    [
        (caused(httpx.ConnectError("no")), False),
        (caused(httpx.ConnectTimeout("no")), False),
        (caused(ConnectionRefusedError()), False),
        (caused(httpx.ReadError("broke")), True),
        (caused(answered(500)), False),
        (caused(answered(504)), True),
        (Refused(400), False),
        (Refused(429), False),
        (Refused(503), True),
    ],
)
def test_what_may_have_been_billed(error: Exception, billed: bool) -> None:
    assert possibly_billed(error) is billed


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (Refused(429, body={"code": "insufficient_quota"}), Trouble.QUOTA_SPENT),
        (Refused(429, body={"type": "insufficient_quota"}), Trouble.QUOTA_SPENT),
        (Refused(429, "insufficient_quota"), Trouble.QUOTA_SPENT),
        (Refused(429, body={"code": "slow_down"}), Trouble.RATE_LIMITED),
        (Refused(299), Trouble.UNAVAILABLE),
        (Refused(300), Trouble.OWN),
        (Refused(500), Trouble.UNAVAILABLE),
    ],
)
def test_what_an_error_means(error: Exception, trouble: Trouble) -> None:
    assert classify(error) is trouble


def test_headers_are_those_of_the_answer() -> None:
    assert headers_of(Refused(429, headers={"Retry-After": "3"}))["retry-after"] == "3"
    assert headers_of(ValueError("no")) == {}


def test_no_advice_where_none_helps() -> None:
    assert advice(Refused(400, "unsupported value")) == ""
    assert advice(Refused(500, "unsupported parameter: temperature")) == ""
    assert "temperature" in advice(Refused(400, "unsupported parameter: temperature"))
    assert advice(Refused(400, "temperature is high")) == ""
