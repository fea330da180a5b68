"""What an error of the endpoint means for its request: the branches that decide about money and about stopping."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.completion import Request
from draco_ray.judging.endpoint import Borrowed, Endpoint, Server, cache_key, mark_cache_prefixes
from draco_ray.judging.outage import (
    FailureKind,
    classify,
    error_hint,
    headers_of,
    is_connect_failure,
    is_connection_broken,
    possibly_billed,
    wants_completion_tokens,
)
from draco_ray.records import Message

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
        (Refused(422, "Error converting to valid response block='usageMetadata'"), True),
    ],
)
def test_what_may_have_been_billed(error: Exception, billed: bool) -> None:
    assert possibly_billed(error) is billed


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (Refused(429, body={"code": "insufficient_quota"}), FailureKind.QUOTA_SPENT),
        (Refused(429, body={"type": "insufficient_quota"}), FailureKind.QUOTA_SPENT),
        (Refused(429, "insufficient_quota"), FailureKind.QUOTA_SPENT),
        (Refused(400, "Your credit balance is too low to access the API"), FailureKind.QUOTA_SPENT),
        (Refused(400, body={"code": "billing_hard_limit_reached"}), FailureKind.QUOTA_SPENT),
        (Refused(400, "input_value='your credit balance is too low to pay Ann'"), FailureKind.OWN),
        (Refused(400, body={"code": ["insufficient_quota"], "type": None}), FailureKind.OWN),
        (Refused(429, body={"code": "slow_down"}), FailureKind.RATE_LIMITED),
        (Refused(400, "insufficient_quota"), FailureKind.OWN),
        (Refused(429, body=["insufficient_quota"]), FailureKind.RATE_LIMITED),
        (Refused(403, body={"message": "insufficient_quota"}), FailureKind.REFUSED),
        (Refused(403, "Your prompt was flagged"), FailureKind.OWN),
        (Refused(403, "Request blocked by our guardrails"), FailureKind.OWN),
        (Refused(403, "The input may contain sensitive content"), FailureKind.OWN),
        (Refused(403, "data_inspection_failed"), FailureKind.OWN),
        (Refused(403, "Your request may have violated our usage policies"), FailureKind.OWN),
        (Refused(403, "Your account was suspended for violating our usage policies"), FailureKind.REFUSED),
        (Refused(403, "no identity-based policy allows bedrock:InvokeModel"), FailureKind.REFUSED),
        (Refused(401, "Your prompt was flagged"), FailureKind.REFUSED),
        *((Refused(status), FailureKind.REFUSED) for status in (401, 402, 403, 404)),
        (Refused(400), FailureKind.OWN),
        (Refused(400, "LLM Provider NOT provided. Pass in the model"), FailureKind.REFUSED),
        (Refused(422, "LLM Provider NOT provided. Pass in the model"), FailureKind.OWN),
        (Refused(429, "Request too large for gpt-5.4"), FailureKind.OWN),
        (Refused(503, "Request too large for gpt-5.4"), FailureKind.UNAVAILABLE),
        (TimeoutError(), FailureKind.TIMED_OUT),
        *((Refused(status), FailureKind.TIMED_OUT) for status in (408, 504, 522, 524)),
        *((Refused(status), FailureKind.RATE_LIMITED) for status in (425, 429)),
        (ValueError("no status"), FailureKind.UNAVAILABLE),
        (Refused("500"), FailureKind.UNAVAILABLE),  # type: ignore[arg-type]
        *((Refused(status), FailureKind.OWN) for status in (199, 300, 409, 499)),
        *((Refused(status), FailureKind.UNAVAILABLE) for status in (200, 299, 500, 503)),
        (Refused(400, "Error in response object"), FailureKind.UNAVAILABLE),
        (Refused(422, "Error converting to valid response block=usageMetadata not found"), FailureKind.UNAVAILABLE),
    ],
)
def test_what_an_error_means(error: Exception, trouble: FailureKind) -> None:
    assert classify(error) is trouble


def context(cause: BaseException) -> Exception:
    error = Refused(500)
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "connected", "broken"),
    [
        (caused(httpx.ConnectError("no")), False, True),
        (caused(httpx.ConnectTimeout("no")), False, False),
        (context(caused(ConnectionRefusedError())), False, True),
        (caused(ConnectionResetError()), True, True),
        (caused(httpx.ReadError("broke")), True, True),
        (caused(httpx.RemoteProtocolError("broke")), True, True),
        (caused(httpx.ReadTimeout("slow")), True, False),
        (caused(answered(500)), True, False),
        (TimeoutError(), True, False),
    ],
)
def test_whether_there_was_a_connection_and_whether_it_broke(error: Exception, connected: bool, broken: bool) -> None:
    assert is_connect_failure(error) is not connected
    assert is_connection_broken(error) is broken


def test_headers_are_those_of_the_answer() -> None:
    error = Refused(429, headers={"Retry-After": "3"})
    assert headers_of(error)["retry-after"] == "3"
    error.litellm_response_headers = {"X-Wait": 4}  # type: ignore[attr-defined]
    assert headers_of(error) == {"x-wait": "4"}
    assert headers_of(ValueError("no")) == {}


TEMPERATURE = "; to leave it out set judge.temperature=null"
EFFORT = "; to leave it out set judge.reasoning_effort=null"


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (400, "unsupported value", ""),
        (500, "unsupported parameter: temperature", ""),
        (400, "the temperatures of Rome", ""),
        (400, "`temperature` is deprecated for this model.", TEMPERATURE),
        (422, "{'loc': ('body', 'temperature'), 'msg': 'Input should be less than or equal to 1'}", TEMPERATURE),
        (400, "temperature: 0.2 is refused", TEMPERATURE),
        (400, "Unsupported parameter: temperature", TEMPERATURE),
        (422, "temperature does NOT SUPPORT 0.3", TEMPERATURE),
        (400, "invalid temperature and reasoning_effort", f"{TEMPERATURE}{EFFORT}"),
        (400, "unknown max_completion_tokens", "; change it with judge.max_tokens"),
        (400, "unrecognized json_schema", "; to leave it out set judge.structured_output=false"),
    ],
)
def test_a_refused_parameter_is_named_with_the_key_that_mends_it(status: int, text: str, said: str) -> None:
    assert error_hint(Refused(status, text)) == said


@pytest.mark.parametrize(
    ("status", "text", "wants"),
    [
        (400, "use 'max_completion_tokens' instead of 'max_tokens'", True),
        (422, "use 'max_completion_tokens' instead of 'max_tokens'", False),
        (400, "'max_tokens' is too large", False),
        (400, "'max_completion_tokens' is too large", False),
    ],
)
def test_the_newer_name_of_the_limit_is_wanted_where_both_are_named(status: int, text: str, wants: bool) -> None:
    assert wants_completion_tokens(Refused(status, text)) is wants


# --- what the endpoint's messages say ---------------------------------------------------------------------------------

KEY = "DRACO_TEST_KEY"


def endpoint(**changes: object) -> Endpoint:
    values = {"model": "openai/m", "api_key_env": KEY, "request_timeout_seconds": 30.0} | changes
    return Endpoint(JudgeConfig.model_validate(values), "judge", "judge.api_base")


def test_a_refusal_says_where_the_key_is_looked_for_and_not_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    problem = endpoint().refused(Refused(401, "wrong\n key  secret"))
    says = "the endpoint refused a request"
    assert str(problem) == (
        f"judge openai/m at its provider: {says}: wrong key ***; check judge.api_base and the key in environment "
        f"variable {KEY}"
    )
    monkeypatch.delenv(KEY)
    problem = endpoint(api_base="http://own/v1").refused(Refused(401, "no key"))
    assert str(problem) == (
        f"judge openai/m at http://own/v1: {says}: no key; check judge.api_base and the key in environment variable "
        f"{KEY}, which is not set"
    )


def test_an_error_is_one_line_of_bounded_length() -> None:
    made = endpoint()
    assert made.one_line("x" * 500) == "x" * 400
    assert made.one_line("a\n\tb") == "a b"
    assert made.one_line(TimeoutError()) == "no answer within 30 s"


def test_a_wait_that_is_asked_for_is_kept_up_to_the_time_of_a_request() -> None:
    waits = [endpoint().hint(Refused(429, headers={"Retry-After": each})) for each in ("7", "30", "31", "soon")]
    assert waits == [7.0, 30.0, 30.0, None]
    assert endpoint().hint(Refused(429)) is None


async def test_a_key_is_that_of_its_variable_and_a_server_of_ones_own_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, "secret")
    async with endpoint().borrow(Request(messages=())) as borrowed:
        assert borrowed == Borrowed(Server(None, "secret"))
    own = endpoint(api_base="http://own/v1")
    async with own.borrow(Request(messages=())) as borrowed:
        assert borrowed == Borrowed(Server("http://own/v1", "secret"))
    monkeypatch.setenv(KEY, "")
    assert own.api_key() == "none"
    with pytest.raises(JudgeUnavailable) as problem:
        endpoint().api_key()
    assert str(problem.value) == (
        f"judge openai/m: no API key found; set environment variable {KEY}, or set the endpoint (judge.api_base)"
    )


def test_what_identifies_a_reply_is_the_model_its_messages_and_what_else_is_configured() -> None:
    messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    plain = {
        "model": "openai/m",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "max_tokens": 777,
    }
    assert endpoint(max_tokens=777).arguments(messages) == plain
    own = endpoint(max_tokens=777, api_base="http://own/v1", extra_body={"x": 1}).arguments(messages)
    assert own == plain | {"api_base": "http://own/v1", "extra_body": {"x": 1}}


class LiteLLM:
    """LiteLLM as far as an endpoint uses it: it refuses some parameters, and remembers what it was asked to send."""

    class BadRequestError(Exception):
        status_code = 400

    class UnsupportedParamsError(BadRequestError):
        pass

    def __init__(self, *refuses: str, provider: str = "openai", only_newer: bool = False, fault: str = "") -> None:
        self.refuses, self.provider, self.only_newer, self.fault = refuses, provider, only_newer, fault
        self.utils = self
        self.sent: list[dict[str, Any]] = []

    def get_llm_provider(self, model: str, api_base: str | None) -> tuple[str, str, None, None]:
        if model.startswith("nobody/"):
            raise self.BadRequestError(f"no provider of {model}")
        return model.rpartition("/")[2], "own" if api_base else self.provider, None, None

    def get_supported_openai_params(self, model: str, custom_llm_provider: str) -> list[str]:
        return ["prompt_cache_key"] if (model, custom_llm_provider) == ("m", "openai") else []

    def get_optional_params(self, model: str, custom_llm_provider: str, **parameters: object) -> None:
        if wrong := [name for name in self.refuses if name in parameters]:
            raise self.UnsupportedParamsError(f"{model} of {custom_llm_provider}\n takes no {wrong[0]}")

    def supports_response_schema(self, model: str) -> bool:
        return False

    async def acompletion(self, **arguments: Any) -> str:
        self.sent.append(arguments)
        assert len(self.sent) < 50, "sent without end"
        if self.fault:
            raise self.BadRequestError(self.fault)
        if self.only_newer and "max_tokens" in arguments:
            raise self.BadRequestError("use 'max_completion_tokens' and not 'max_tokens'")
        return "reply"


async def sent(litellm: LiteLLM, made: Endpoint, request: Request, server: Server) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draco_ray.judging.endpoint.import_litellm_quietly", lambda: litellm)
        patch.setattr("draco_ray.judging.tokens.import_litellm_quietly", lambda: litellm)
        assert await made.complete(request, server, 99, 12.5) == "reply"
    return litellm.sent[-1]


LONG = Message(role="user", content="x" * 10_000)
ASK = Request(messages=(LONG,), group="g", shared=(9_000,))
PLAIN = {
    "model": "openai/m",
    "messages": [{"role": "user", "content": LONG.content}],
    "max_tokens": 99,
    "api_key": "secret",
    "timeout": 12.5,
    "num_retries": 0,
    "max_retries": 0,
}


async def test_what_is_sent_says_everything_once_and_retries_nothing() -> None:
    made = endpoint(temperature=0.5, reasoning_effort="low", service_tier="flex", extra_body={"x": 1})
    assert await sent(LiteLLM(), made, ASK, Server(None, "secret")) == PLAIN | {
        "temperature": 0.5,
        "reasoning_effort": "low",
        "service_tier": "flex",
        "extra_body": {"x": 1},
        "prompt_cache_key": cache_key("g"),
    }
    # A server of one's own is told nothing of caches, and where it is lent its address is that of the loan.
    made = endpoint(temperature=None, api_base="http://own/v1")
    assert await sent(LiteLLM(), made, ASK, Server("http://lent/v1", "secret")) == PLAIN | {
        "api_base": "http://lent/v1"
    }


async def test_how_a_provider_is_told_of_shared_beginnings() -> None:
    server, bare = Server(None, "secret"), Request(messages=(LONG,))
    made = endpoint(model="anthropic/m", temperature=None)
    litellm = LiteLLM(provider="anthropic")
    marks = mark_cache_prefixes(PLAIN["messages"], (9_000,))  # type: ignore[arg-type]
    assert await sent(litellm, made, ASK, server) == PLAIN | {"model": "anthropic/m", "messages": marks}
    assert await sent(litellm, made, bare, server) == PLAIN | {"model": "anthropic/m"}
    assert await sent(LiteLLM(), endpoint(temperature=None), bare, server) == PLAIN
    assert await sent(LiteLLM(), endpoint(temperature=None, prompt_cache="off"), ASK, server) == PLAIN


async def test_the_newer_name_of_the_limit_is_learned_once() -> None:
    litellm, made = LiteLLM(only_newer=True), endpoint(temperature=None, prompt_cache="off")
    for _ in range(2):
        await sent(litellm, made, ASK, Server(None, "secret"))
    newer = {name: value for name, value in PLAIN.items() if name != "max_tokens"} | {"max_completion_tokens": 99}
    assert litellm.sent == [PLAIN, newer, newer]


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("'messages' is too long", ["max_tokens", "max_tokens"]),
        (
            "use 'max_completion_tokens' and not 'max_tokens'",
            ["max_tokens", "max_completion_tokens", "max_completion_tokens"],
        ),
    ],
)
async def test_a_request_with_another_fault_is_not_sent_again(fault: str, names: list[str]) -> None:
    litellm, made = LiteLLM(fault=fault), endpoint(temperature=None)
    for _ in range(2):
        with pytest.raises(LiteLLM.BadRequestError, match=fault):
            await sent(litellm, made, ASK, Server(None, "secret"))
    assert [next(name for name in each if name.endswith("_tokens")) for each in litellm.sent] == names


async def test_a_temperature_that_a_model_refuses_is_left_out_and_an_effort_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet = {"prompt_cache": "off", "temperature": 0.5}
    made = endpoint(**quiet)
    for _ in range(2):
        assert await sent(LiteLLM("temperature"), made, ASK, Server(None, "secret")) == PLAIN
    assert [record.getMessage() for record in caplog.records] == [
        "judge openai/m at its provider accepts no temperature: judge.temperature=0.5 is not sent; set "
        "judge.temperature=null to avoid this warning"
    ]
    for refuses in (("reasoning_effort",), ("reasoning_effort", "temperature")):
        with pytest.raises(JudgeUnavailable) as problem:
            await sent(LiteLLM(*refuses), endpoint(**quiet, reasoning_effort="low"), ASK, Server(None, "secret"))
        assert str(problem.value) == (
            "judge openai/m at its provider: judge.reasoning_effort=low is refused: m of openai takes no "
            "reasoning_effort; set it to null or to a value that the model supports"
        )
    # Of a provider that LiteLLM does not know the request will say so itself.
    unknown = endpoint(**quiet, model="nobody/m")
    found = await sent(LiteLLM("temperature"), unknown, ASK, Server(None, "secret"))
    assert found == PLAIN | {"model": "nobody/m", "temperature": 0.5}
