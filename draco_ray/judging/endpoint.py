"""The judge's endpoint through LiteLLM: arguments of a request, and messages of its errors. Nothing is retried here."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, Protocol

from draco_ray.config.schema import JudgeConfig, provider_key
from draco_ray.errors import ConfigError, JudgeUnavailable
from draco_ray.judging.completion import Request
from draco_ray.judging.file_judge import RECORDED_FILE
from draco_ray.judging.outage import headers_of, retry_after_seconds, wants_completion_tokens
from draco_ray.judging.prompts import Prompts
from draco_ray.judging.tokens import import_litellm_quietly, refused_parameters
from draco_ray.records import Message

EVIDENCE = frozenset({"agent_prompt", "task", "task_input", "agent_trajectory", "group_trajectories", "steps_summary"})
"""Placeholders in prompt templates, each of which is replaced by an evidence block."""
OF_ROLLOUT = frozenset({"agent_trajectory", "steps_summary"})
"""Placeholders for evidence about one rollout."""
LEAST_CHARACTERS = 4096
"""Minimum length of a shared prefix in characters: no provider caches less than 1024 tokens."""
MOST_MARKS = 4
"""Maximum number of cache_control markers in a request to Anthropic."""
_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")

_REFUSALS = {400, 404, 422, 501}
_NOT_THE_SCHEMAS_FAULT = ("ContextWindowExceededError", "ContentPolicyViolationError")

Mode = Literal["auto", "on", "off"]


def shared_ends(prompts: Prompts, phase: str, text: str, code: str) -> tuple[int, ...]:
    """Character offsets in a prompt where the prefixes that it shares with other prompts end, ascending.

    Args:
        prompts: the prompt set.
        phase: the prompt's phase.
        text: the filled prompt.
        code: the code of its evidence blocks; quoted text cannot contain it.
    """
    blocks = [match.end() for match in re.finditer(rf"^\[END EVIDENCE {re.escape(code)}\]$", text, re.MULTILINE)]
    names = [name for name in _PLACEHOLDER.findall(prompts.templates[phase]) if name in EVIDENCE]
    ends = []
    of_rollout = next((index for index, name in enumerate(names) if name in OF_ROLLOUT), None)
    if of_rollout:
        ends.append(of_rollout)
    if of_rollout is not None and (alike := _blocks_alike(prompts, phase)) > of_rollout:
        ends.append(alike)
    found = sorted({blocks[end - 1] for end in ends if end <= len(blocks)})
    return tuple(end for end in found if end >= LEAST_CHARACTERS)


def _blocks_alike(prompts: Prompts, phase: str) -> int:
    """Number of evidence blocks in the longest prefix that a phase's template shares with another phase's."""
    mine = prompts.templates[phase]
    most = 0
    for name, other in prompts.templates.items():
        if name != phase:
            equal = len(os.path.commonprefix([mine, other]))  # noqa: RUF071 (characters are what is meant)
            whole = [match for match in _PLACEHOLDER.finditer(mine) if match.end() <= equal and match[1] in EVIDENCE]
            most = max(most, len(whole))
    return most


def mark_cache_prefixes(messages: Sequence[Mapping[str, Any]], shared: Sequence[int]) -> list[dict[str, Any]]:
    """``messages`` with cache_control markers for Anthropic.

    Args:
        shared: ends of the prefixes that the first message shares with other prompts, as character offsets. The message
            is split at the last `MOST_MARKS` of them, and each part that ends at one of them gets a marker.
    """
    first, *rest = (dict(message) for message in messages)
    text, begin, parts = str(first["content"]), 0, []
    for end in shared[-MOST_MARKS:]:
        if begin < end <= len(text):
            parts.append({"type": "text", "text": text[begin:end], "cache_control": {"type": "ephemeral"}})
            begin = end
    if not parts:
        return [first, *rest]
    if text[begin:]:
        parts.append({"type": "text", "text": text[begin:]})
    return [{**first, "content": parts}, *rest]


def prompt_cache_method(
    litellm: Any, model: str, api_base: str | None, mode: Mode
) -> Literal["marks", "key", "nothing"]:
    """How a model's prompt cache is addressed: by cache_control markers in the prompt, by a key, or not at all.

    Args:
        mode: ``auto`` does nothing for private endpoints, which may support neither.
    """
    if mode == "off" or (mode == "auto" and api_base is not None):
        return "nothing"
    try:
        name, provider, _, _ = litellm.get_llm_provider(model, api_base=api_base)
    except litellm.BadRequestError:
        return "nothing"
    if provider == "anthropic" or "claude" in name.casefold():
        return "marks"
    known = litellm.get_supported_openai_params(model=name, custom_llm_provider=provider) or ()
    return "key" if "prompt_cache_key" in known else "nothing"


def cache_key(group: str) -> str:
    """The ``prompt_cache_key`` of a group; OpenAI takes up to 64 characters."""
    return f"draco-{hashlib.sha256(group.encode('utf-8', 'replace')).hexdigest()[:32]}"


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """The address and key for a request."""

    api_base: str | None
    """Base URL of the server; None: the provider's own."""
    key: str = field(repr=False)


@dataclass(slots=True)
class Borrowed:
    """A server, borrowed for one request."""

    server: Server
    number: int = 0
    """Number of the loan, which the lender needs when the server is given back."""
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


def _may_refuse_a_schema(error: Exception) -> bool:
    return getattr(error, "status_code", None) in _REFUSALS and type(error).__name__ not in _NOT_THE_SCHEMAS_FAULT


def endpoint_address(config: JudgeConfig) -> str:
    """The endpoint of a model, for messages; LiteLLM may also read it from the provider's environment variables."""
    provider = provider_key(config.model).removesuffix("_API_KEY")
    names = [f"{provider}_BASE_URL", f"{provider}_API_BASE"]
    return config.api_base or next(
        (f"{os.environ[name]} ({name})" for name in names if os.environ.get(name)), "its provider"
    )


def describe_judge(config: JudgeConfig) -> str:
    """Model, endpoint and key variable, which a command prints before its first request."""
    if config.files is not None:
        if (config.files / RECORDED_FILE).exists():
            return f"the replies recorded in {config.files}"
        return f"you, through files: {config.files}/NAME.prompt.txt is answered by {config.files}/NAME.reply.txt"
    return f"{config.model} at {endpoint_address(config)}, key in {config.key_variable}"


class Endpoint:
    """The configured model at its endpoint."""

    def __init__(self, config: JudgeConfig, role: str, settings: str) -> None:
        """Nothing is sent yet. ``role`` and ``settings``: see `draco_ray.judging.client.LiteLLMClient`."""
        self._config, self._role, self._settings = config, role, settings
        self.constrained = config.structured_output
        """Whether requests contain JSON schemas; false once the endpoint has refused one."""
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
        """The API key for requests; ``none`` if a private endpoint is configured without a key.

        Raises:
            JudgeUnavailable: the key's environment variable is not set, but the provider's own endpoint needs a key.
            ConfigError: neither the key nor an endpoint is set, and LiteLLM knows no provider of the model.
        """
        name = self._config.key_variable
        if key := os.environ.get(name):
            return key
        if self._config.api_base is not None:
            # A private server needs no key, but LiteLLM requires one and would take it from another variable.
            return "none"
        import openai

        try:
            import_litellm_quietly().get_llm_provider(self._config.model)
        except openai.BadRequestError:
            raise ConfigError(
                f"{self._role} {self._config.model}: LiteLLM knows no provider of this model; expected "
                "PROVIDER/MODEL, such as openai/gpt-5.4"
            ) from None
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
        litellm = import_litellm_quietly()
        arguments = self.arguments(request.messages) | self._parameters
        del arguments["max_tokens"]
        arguments |= self._told(litellm, request, arguments["messages"])
        if server.api_base is not None:
            arguments["api_base"] = server.api_base
        arguments |= {"api_key": server.key, "timeout": timeout, "num_retries": 0, "max_retries": 0}
        # Send the schema even if LiteLLM's table says that the model takes none.
        form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": request.schema}}
        constraint: dict[str, Any] = {"response_format": form, "allowed_openai_params": ["response_format"]}
        if request.schema is None or not self.constrained:
            constraint = {}
        refusal = ""
        while True:
            name = self._tokens_name
            try:
                response = await litellm.acompletion(**arguments, **{name: max_tokens}, **constraint)
            except Exception as error:
                if name == "max_tokens" and wants_completion_tokens(error):
                    self._tokens_name = "max_completion_tokens"
                elif constraint and _may_refuse_a_schema(error):
                    constraint, refusal = {}, self.one_line(error)[:200]
                else:
                    raise
                continue
            if refusal:
                log.warning("%s refuses a JSON schema: %s; replies are parsed without one", self._config.model, refusal)
                self.constrained = False
            return response

    def _told(self, litellm: Any, request: Request, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The arguments for the service tier and for the provider's prompt cache."""
        config = self._config
        extra: dict[str, Any] = {} if config.service_tier is None else {"service_tier": config.service_tier}
        how = prompt_cache_method(litellm, config.model, config.api_base, config.prompt_cache)
        if how == "marks" and request.shared:
            extra["messages"] = mark_cache_prefixes(messages, request.shared)
        elif how == "key" and request.group:
            extra["prompt_cache_key"] = cache_key(request.group)
        return extra

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        """The configured sampling parameters; without the temperature if the model refuses it, according to LiteLLM.

        Raises:
            JudgeUnavailable: according to LiteLLM, the model refuses the configured reasoning effort.
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
        return f"{self._role} {self._config.model} at {endpoint_address(self._config)}"

    def one_line(self, error: BaseException | str) -> str:
        """The error in one line, without the key that a server may echo."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._config.request_timeout_seconds:g} s"
        text = " ".join(str(error).partition("Traceback (most recent")[0].split())
        key = os.environ.get(self._config.key_variable)
        return (text.replace(key, "***") if key else text)[:400]
