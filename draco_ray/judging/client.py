"""The judge over LiteLLM: one request in, one completion out, with retries, a concurrency limit, prices and a cache.

LiteLLM translates between providers, names the errors and knows prices. Its own retries, rate limits and cache are off:
they ignore Retry-After for some providers, reject instead of queueing, and forget ``extra_body``.

What becomes of an error, by HTTP status:

=====================================  ==========================================================================
429, 408, 5xx, timeout, no connection  asked again after Retry-After, else after a jittered exponential backoff
still so after ``max_attempts``        no connection: JudgeUnavailable; otherwise this one call fails
401, 402, 403, 404, quota spent,       JudgeUnavailable at once: no other call would fare better
provider unknown
any other 4xx                          this one call fails (a prompt beyond the context window, say)
=====================================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import tenacity

from draco_ray.config.schema import JudgeConfig, Price
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.complete import Completion, Request, reply_of
from draco_ray.judging.limiter import Leases
from draco_ray.judging.reply_cache import ReplyCache, request_key
from draco_ray.judging.structured import StructuredOutput
from draco_ray.records import Message

log = logging.getLogger(__name__)

CHECK_ATTEMPTS = 3
"""Requests `LiteLLMClient.check` makes at most: a judge that is down should be known within seconds."""
FIRST_BACKOFF_SECONDS = 1.0
CHARACTERS_PER_TOKEN = 3
"""To estimate a prompt before it is sent; fewer than English or code have, so that the estimate is high."""
_REFUSED = {401, 402, 403, 404}
_RETRIED = {408, 425, 429}

Sleep = Callable[[float], Awaitable[None]]


class LiteLLMClient:
    """Completes requests with the configured model; safe for many calls in flight on one event loop."""

    def __init__(
        self,
        config: JudgeConfig,
        cache: ReplyCache | None = None,
        sleep: Sleep = asyncio.sleep,
        leases: Leases | None = None,
        *,
        role: str = "judge",
        settings: str = "judge.model, judge.api_base",
    ) -> None:
        """Nothing is sent or imported yet.

        Args:
            config: model, endpoint, sampling, limits and prices.
            cache: where answers are kept; None keeps none.
            sleep: waits between attempts, for tests.
            leases: asked before every HTTP request; None: nothing is limited.
            role: what the model is here, for messages.
            settings: where model and endpoint were named, for messages.
        """
        self._role, self._settings = role, settings
        self._leases = leases
        self._config = config
        self._cache = cache
        self._under_way: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sleep = sleep
        self._slots = asyncio.Semaphore(config.concurrency_per_worker)
        self._price = find_price(config.model, config.prices)
        self._structured = StructuredOutput(config)

    async def __call__(self, request: Request) -> Completion:
        """Answer ``request``, from the cache if it was answered before.

        Raises:
            JudgeUnavailable: see the module's table; BudgetSpent where the run's budget does not allow the request.
        """
        if self._cache is None:
            return await self._answer(request)
        key = self._key(request)
        # Rollouts that are equal to the letter are judged at the same time: the later request finds the first's answer.
        async with self._under_way.setdefault(key, asyncio.Lock()):
            if (stored := await self._cache.get(key)) is not None:
                return _replay(stored)
            completion = await self._answer(request)
            if completion.error is None:
                await self._cache.put(key, _stored(completion))
            return completion

    async def _answer(self, request: Request) -> Completion:
        async with self._slots:
            return await self._ask(request.messages, self._config.max_tokens, self._config.max_attempts, request.schema)

    async def forget(self, request: Request) -> None:
        """Drop the stored answer to ``request``."""
        if self._cache is not None:
            await self._cache.forget(self._key(request))

    async def check(self) -> None:
        """Send a one-word prompt with the run's own parameters, so that a refused one is known before it costs.

        Raises:
            JudgeUnavailable: no answer, for whatever reason.
        """
        messages = (Message(role="user", content="Reply with the word OK."),)
        completion = await self._ask(messages, max_tokens=16, attempts=min(CHECK_ATTEMPTS, self._config.max_attempts))
        if completion.error is not None:
            raise JudgeUnavailable(f"{self._who()}: {completion.error}")

    async def _ask(
        self,
        messages: tuple[Message, ...],
        max_tokens: int,
        attempts: int,
        schema: Mapping[str, object] | None = None,
    ) -> Completion:
        litellm = _litellm()
        # The base of every error LiteLLM raises for a provider.
        import openai

        arguments = self._arguments(messages) | {"max_tokens": max_tokens}
        key = self._api_key()
        timeout = self._config.request_timeout_seconds
        started_at, clock = time.time(), time.perf_counter()
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(attempts),
            wait=self._wait,
            retry=tenacity.retry_if_exception(_worth_retrying),
            before_sleep=self._note_retry,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    lease = await self._lease(messages, max_tokens)
                    used = (0.0, 0.0)
                    try:
                        # LiteLLM's timeout is per read on some transports; this one is the wall clock.
                        async with asyncio.timeout(timeout):
                            response = await self._structured.complete(
                                litellm, schema, **arguments, api_key=key, timeout=timeout, num_retries=0, max_retries=0
                            )
                        input_tokens, _, output_tokens, dollars = self._usage(response)
                        used = (input_tokens + output_tokens, dollars)
                    finally:
                        if self._leases is not None:
                            self._leases.settle(lease, *used)
        except (openai.OpenAIError, TimeoutError) as error:
            reason = self._one_line(error)
            if _refused(error):
                name = self._config.api_key_env
                raise JudgeUnavailable(
                    f"{self._who()}: refused: {reason}; check {self._settings} and the key in environment "
                    f"variable {name}{'' if os.environ.get(name) else ', which is not set'}"
                ) from None
            if _unconnected(error):
                raise JudgeUnavailable(f"{self._who()}: unreachable after {attempts} attempts: {reason}") from None
            return Completion(
                text="",
                finish_reason="error",
                model=self._config.model,
                input_tokens=0,
                cached_tokens=0,
                output_tokens=0,
                dollars=0.0,
                started_at=started_at,
                seconds=time.perf_counter() - clock,
                requests=retrying.statistics.get("attempt_number", 1),
                error=reason,
            )
        requests = retrying.statistics.get("attempt_number", 1)
        return self._completion(response, started_at, time.perf_counter() - clock, requests)

    def _arguments(self, messages: tuple[Message, ...]) -> dict[str, Any]:
        """What identifies and shapes the answer: all that is sent but the key."""
        config = self._config
        arguments: dict[str, Any] = {
            "model": config.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": config.max_tokens,
        }
        if config.temperature is not None:
            arguments["temperature"] = config.temperature
        if config.api_base is not None:
            arguments["api_base"] = config.api_base
        if config.extra_body:
            arguments["extra_body"] = dict(config.extra_body)
        return arguments

    def _key(self, request: Request) -> str:
        arguments = self._arguments(request.messages)
        if self._config.rule_judge.start:
            # A resumed run starts its server anew, on another port: the same judge.
            arguments.pop("api_base", None)
        scope = {"scope": request.scope} if request.scope else {}
        return request_key(arguments | {"vote": request.vote} | scope)

    def _api_key(self) -> str:
        name = self._config.api_key_env
        if key := os.environ.get(name):
            return key
        if self._config.api_base is not None:
            # A server of one's own needs none, but LiteLLM insists on a value and would take another variable's.
            return "none"
        raise JudgeUnavailable(
            f"{self._role} {self._config.model}: environment variable {name} holds no key; set it, or the endpoint "
            f"({self._settings})"
        )

    async def _lease(self, messages: tuple[Message, ...], max_tokens: int) -> int:
        if self._leases is None:
            return 0
        input_tokens = sum(len(message.content) for message in messages) // CHARACTERS_PER_TOKEN
        dollars = price_of(self._price, input_tokens, 0, max_tokens) if self._price is not None else 0.0
        return await self._leases.lease(input_tokens + max_tokens, dollars)

    def _usage(self, response: Any) -> tuple[int, int, int, float]:
        """Input tokens, the cached ones among them, output tokens, and dollars of an answer."""
        usage = response.usage
        details = getattr(usage, "prompt_tokens_details", None)
        input_tokens = int(getattr(usage, "prompt_tokens", 0) or 0)
        cached_tokens = min(int(getattr(details, "cached_tokens", 0) or 0), input_tokens)
        output_tokens = int(getattr(usage, "completion_tokens", 0) or 0)
        if self._price is not None:
            dollars = price_of(self._price, input_tokens, cached_tokens, output_tokens)
        else:
            dollars = float(response._hidden_params.get("response_cost") or 0.0)
        return input_tokens, cached_tokens, output_tokens, dollars

    def _completion(self, response: Any, started_at: float, seconds: float, requests: int) -> Completion:
        choice = response.choices[0] if response.choices else None
        input_tokens, cached_tokens, output_tokens, dollars = self._usage(response)
        text, finish_reason = reply_of(choice)
        return Completion(
            text=text,
            finish_reason=finish_reason,
            model=self._config.model,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            dollars=dollars,
            started_at=started_at,
            seconds=seconds,
            requests=requests,
        )

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        hint = retry_after_seconds(_headers(error)) if error else None
        if hint is not None:
            # A little late rather than early; a provider that asks for more than a request may last is cut short.
            return min(hint, self._config.request_timeout_seconds) + random.uniform(0, min(1.0, 0.1 * hint))
        ceiling = min(self._config.max_backoff_seconds, FIRST_BACKOFF_SECONDS * 2 ** (state.attempt_number - 1))
        return random.uniform(ceiling / 2, ceiling)

    def _note_retry(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        seconds = state.upcoming_sleep
        log.info(
            "%s: attempt %d: %s; again in %.1f s", self._who(), state.attempt_number, self._one_line(error), seconds
        )

    def _who(self) -> str:
        return f"{self._role} {self._config.model} at {self._config.api_base or 'its provider'}"

    def _one_line(self, error: BaseException | None) -> str:
        """The error without line breaks and without the key, should a server echo it."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._config.request_timeout_seconds:g} s"
        text = " ".join(str(error).split())
        key = os.environ.get(self._config.api_key_env)
        return (text.replace(key, "***") if key else text)[:400]


def find_price(model: str, prices: Mapping[str, Price]) -> Price | None:
    """The configured price of ``model``: by its full name, else by its name without provider and organisation."""
    return prices.get(model) or prices.get(model.rsplit("/", 1)[-1])


def price_of(price: Price, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
    """Dollars for one answer; ``cached_tokens`` is the part of ``input_tokens`` that costs the cached price."""
    cached_price = price.input if price.cached_input is None else price.cached_input
    fresh = input_tokens - cached_tokens
    return (fresh * price.input + cached_tokens * cached_price + output_tokens * price.output) / 1e6


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


def _litellm() -> Any:
    """LiteLLM, imported on the first request: it takes seconds, and would fetch its price list unless told not to."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def _headers(error: BaseException | None) -> Mapping[str, str]:
    """Headers of the answer behind an error, keys in lower case."""
    response = getattr(error, "response", None)
    found = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in found.items()}


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _quota_spent(error: BaseException) -> bool:
    body = getattr(error, "body", None)
    return isinstance(body, dict) and "insufficient_quota" in (body.get("code"), body.get("type"))


def _refused(error: BaseException) -> bool:
    return (
        _status(error) in _REFUSED
        or _quota_spent(error)
        or (_status(error) == 400 and "LLM Provider NOT provided" in str(error))
    )


def _worth_retrying(error: BaseException) -> bool:
    if isinstance(error, TimeoutError):
        return True
    status = _status(error)
    return status is not None and (status in _RETRIED or status >= 500) and not _refused(error)


def _unconnected(error: BaseException) -> bool:
    """Whether no connection was made; LiteLLM reports that as a 500 with the cause behind it."""
    import httpx

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, ConnectionRefusedError)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _stored(completion: Completion) -> dict[str, object]:
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "model": completion.model,
        "input_tokens": completion.input_tokens,
        "cached_tokens": completion.cached_tokens,
        "output_tokens": completion.output_tokens,
    }


def _replay(stored: dict[str, Any]) -> Completion:
    return Completion(**stored, dollars=0.0, started_at=time.time(), seconds=0.0, requests=0)
