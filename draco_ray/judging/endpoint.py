"""The judge's endpoint through LiteLLM: arguments of a request, and messages of its errors. Nothing is retried here."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

from draco_ray.config.schema import JudgeConfig, provider_key
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.completion import Request
from draco_ray.judging.outage import headers_of, retry_after_seconds, wants_completion_tokens
from draco_ray.judging.prompt_cache import cache_key, marked, told
from draco_ray.judging.structured import StructuredOutput
from draco_ray.judging.tokens import quiet_litellm, refused_parameters
from draco_ray.records import Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """The address and key for a request."""

    api_base: str | None
    """None: the provider's own."""
    key: str = field(repr=False)


@dataclass(slots=True)
class Borrowed:
    """A server, borrowed for one request."""

    server: Server
    lost: bool = False
    """Set by the borrower if the connection failed or broke."""


class Servers(Protocol):
    """Chooses the server of a request."""

    def borrow(self, request: Request) -> AbstractAsyncContextManager[Borrowed]:
        """Wait for a server with a free slot.

        Raises:
            JudgeUnavailable: there is no server.
        """
        ...


def place_of(config: JudgeConfig) -> str:
    """The endpoint of a model, for messages; LiteLLM may also read it from the provider's environment variables."""
    provider = provider_key(config.model).removesuffix("_API_KEY")
    names = [f"{provider}_BASE_URL", f"{provider}_API_BASE"]
    return config.api_base or next(
        (f"{os.environ[name]} ({name})" for name in names if os.environ.get(name)), "its provider"
    )


def introduced(config: JudgeConfig) -> str:
    """Model, endpoint and key variable, which a command prints before its first request."""
    if config.files is not None:
        return f"you, through files: {config.files}/NAME.prompt.txt is answered by {config.files}/NAME.reply.txt"
    return f"{config.model} at {place_of(config)}, key in {config.key_variable}"


class Endpoint:
    """The configured model at its endpoint."""

    def __init__(self, config: JudgeConfig, role: str, settings: str) -> None:
        """Prepare it; nothing is sent yet. ``role`` and ``settings``: see `draco_ray.judging.client.LiteLLMClient`."""
        self._config, self._role, self._settings = config, role, settings
        self.structured = StructuredOutput(config)
        self._tokens_name = "max_tokens"

    def arguments(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The configured arguments of a request, which are a part of its cache key."""
        config = self._config
        arguments: dict[str, Any] = {
            "model": config.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": config.max_tokens,
        }
        if config.api_base is not None:
            arguments["api_base"] = config.api_base
        if config.extra_body:
            arguments["extra_body"] = dict(config.extra_body)
        return arguments

    @asynccontextmanager
    async def borrow(self, request: Request) -> AsyncIterator[Borrowed]:
        """The configured server, for every request (`Servers`)."""
        yield Borrowed(Server(self._config.api_base, self.api_key()))

    def api_key(self) -> str:
        """Return the key that is sent.

        Raises:
            JudgeUnavailable: the variable is not set, and the endpoint is the provider's own.
        """
        name = self._config.key_variable
        if key := os.environ.get(name):
            return key
        if self._config.api_base is not None:
            # A private server needs no key, but LiteLLM requires one and would take it from another variable.
            return "none"
        raise JudgeUnavailable(
            f"{self._role} {self._config.model}: no API key found; set environment variable {name}, or set the "
            f"endpoint ({self._settings})"
        )

    async def complete(self, request: Request, server: Server, max_tokens: int, timeout: float) -> Any:
        """Send one request and return LiteLLM's response.

        Args:
            request: the prompt and its schema.
            server: where to send it.
            max_tokens: maximum length of the reply.
            timeout: seconds.

        Raises:
            OpenAIError: any failure, as LiteLLM classifies it.
            JudgeUnavailable: the model refuses a parameter.
        """
        litellm = quiet_litellm()
        arguments = self.arguments(request.messages) | self._parameters
        del arguments["max_tokens"]
        arguments |= self._told(litellm, request, arguments["messages"])
        if server.api_base is not None:
            arguments["api_base"] = server.api_base
        while True:
            name = self._tokens_name
            try:
                return await self.structured.complete(
                    litellm,
                    request.schema,
                    **arguments,
                    **{name: max_tokens},
                    api_key=server.key,
                    timeout=timeout,
                    num_retries=0,
                    max_retries=0,
                )
            except litellm.BadRequestError as error:
                if name != "max_tokens" or not wants_completion_tokens(error):
                    raise
                self._tokens_name = "max_completion_tokens"

    def _told(self, litellm: Any, request: Request, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The arguments for the service tier and for the provider's prompt cache."""
        config = self._config
        extra: dict[str, Any] = {} if config.service_tier is None else {"service_tier": config.service_tier}
        how = told(litellm, config.model, config.api_base, config.prompt_cache)
        if how == "marks" and request.shared:
            extra["messages"] = marked(messages, request.shared)
        elif how == "key" and request.group:
            extra["prompt_cache_key"] = cache_key(request.group)
        return extra

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        """Sampling parameters, without a temperature that LiteLLM knows the model to refuse.

        Raises:
            JudgeUnavailable: LiteLLM knows the model to refuse another parameter.
        """
        config = self._config
        sent: dict[str, Any] = {"temperature": config.temperature, "reasoning_effort": config.reasoning_effort}
        sent = {name: value for name, value in sent.items() if value is not None}
        refused = partial(refused_parameters, config.model, config.api_base)
        reason = refused(**sent)
        cooler = {name: value for name, value in sent.items() if name != "temperature"}
        if reason and cooler != sent and refused(**cooler) is None:
            log.warning(
                "%s accepts no temperature: judge.temperature=%g is not sent; set judge.temperature=null to avoid "
                "this warning",
                *(self.who(), config.temperature),
            )
            return cooler
        if reason:
            raise JudgeUnavailable(
                f"{self.who()}: judge.reasoning_effort={config.reasoning_effort} is refused: {self.one_line(reason)}; "
                "set it to null or to a value that the model supports"
            )
        return sent

    def refused(self, error: BaseException) -> JudgeUnavailable:
        """The error for an endpoint that refuses our requests."""
        name = self._config.key_variable
        return JudgeUnavailable(
            f"{self.who()}: the endpoint refused a request: {self.one_line(error)}; check {self._settings} and the "
            "key in environment "
            f"variable {name}{'' if os.environ.get(name) else ', which is not set'}"
        )

    def hint(self, error: BaseException) -> float | None:
        """Seconds that the endpoint asks us to wait, at most the request timeout."""
        hint = retry_after_seconds(headers_of(error))
        return None if hint is None else min(hint, self._config.request_timeout_seconds)

    def who(self) -> str:
        """Name of the judge in messages."""
        return f"{self._role} {self._config.model} at {place_of(self._config)}"

    def one_line(self, error: BaseException | str) -> str:
        """The error in one line, without the key that a server may echo."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._config.request_timeout_seconds:g} s"
        text = " ".join(str(error).partition("Traceback (most recent")[0].split())
        key = os.environ.get(self._config.key_variable)
        return (text.replace(key, "***") if key else text)[:400]
