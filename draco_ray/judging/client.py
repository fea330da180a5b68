"""The judge over LiteLLM: one request in, one completion out, with retries, a concurrency limit, prices and a cache.

LiteLLM translates between providers, classifies errors and knows prices. Its retries, rate limits and cache are off:
they ignore Retry-After for some providers, reject instead of queueing, and forget ``extra_body``.

`draco_ray.judging.endpoint` sends the requests; `draco_ray.judging.outage` classifies errors and decides about retries.
In a pool (``leases``) with ``max_outage_seconds`` an outage counts as one failure of a call, however often the call is
sent meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from draco_ray.config.schema import JudgeConfig, JudgeLimits, Price
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.completion import Completion, Request, reply_of
from draco_ray.judging.endpoint import Endpoint, Server, Servers
from draco_ray.judging.limiter import LOST, UNSENT, LeaseRequest, Leases, Limiter, LimiterQueue, RequestResult
from draco_ray.judging.outage import (
    LOGGED_SECONDS,
    FailureKind,
    NextAction,
    classify,
    error_hint,
    is_busy,
    is_connect_failure,
    is_connection_broken,
    is_endpoint_unavailable,
    possibly_billed,
    seconds_to_pause,
)
from draco_ray.judging.phases import phase_rank
from draco_ray.judging.pricing import (
    CostBound,
    TokenUsage,
    bound_request_cost,
    check_budget,
    find_price,
    known_price,
    read_usage,
    reply_cost,
    reported_cost,
)
from draco_ray.judging.reply_cache import CLAIM_SECONDS, ReplyCache, request_key
from draco_ray.records import Message, OriginalCost

LONGEST_HINT_SECONDS = 60.0
"""Longest wait that an endpoint may ask of one call; `draco_ray.judging.outage` has the limit for the whole pool."""


@dataclass(slots=True)
class Call:
    """One call and its requests so far."""

    request: Request
    asked: LeaseRequest
    key: str | None
    attempts: int
    """Number of further failures after which the call is given up."""
    started_at: float
    clock: float
    check: bool = False
    """Whether this is the startup check (`LiteLLMClient.check`). Each of its failures counts as an attempt, unless the
    endpoint is only busy and calls wait for the end of an outage."""
    requests: int = 0
    number: str = ""
    """Number of the latest request."""
    guessed: float = 0.0
    """Dollars of requests that may have been billed without a reply."""
    waited: float = 0.0
    """Seconds spent waiting for leases."""
    error: BaseException | None = None


log = logging.getLogger(__name__)

CHECK_ATTEMPTS = 3
"""Maximum number of requests of `LiteLLMClient.check`: a judge that is down should be noticed within seconds."""
PROBE_REQUEST = Request(messages=(Message(role="user", content="Reply with the word OK."),))
PROBE_TOKENS = 32

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
        servers: Servers | None = None,
        endpoint_counts: bool = True,
        role: str = "judge",
        settings: str = "judge.model, judge.api_base",
    ) -> None:
        """Prepare a client; nothing is sent or imported yet.

        Args:
            config: model, endpoint, sampling, limits and prices.
            cache: the reply store; None: none.
            sleep: sleeps between attempts; replaced by tests.
            leases: taken before every HTTP request; None: no limits, and calls do not wait for the end of an outage.
            servers: chooses the server of a request; None: the configured endpoint.
            endpoint_counts: whether the endpoint is part of the cache key, so that endpoints do not share replies.
            role: role of the model, for messages.
            settings: configuration keys of model and endpoint, for messages.
        """
        self._endpoint = Endpoint(config, role, settings)
        # A resumed run starts the rule judge's server again on another port, but it is the same judge.
        self._endpoint_counts = endpoint_counts and not config.rule_judge.start
        self._servers: Servers = servers or self._endpoint
        self._patient = leases is not None and config.max_outage_seconds > 0
        self._leases: Leases = leases or LimiterQueue(Limiter(JudgeLimits()))
        self._config = config
        self._cache = cache
        self._sleep = sleep
        self._slots = asyncio.Semaphore(config.concurrency_per_worker)
        self._warned = False

    async def __call__(self, request: Request) -> Completion:
        """Answer ``request``, from the cache if it was answered before.

        Raises:
            JudgeUnavailable: the judge is down or refuses requests.
            BudgetSpent: the run's budget does not allow the request.
        """
        if self._cache is None:
            return await self._answer(request, None)
        key = self._key(request)
        # If identical rollouts are judged at the same time, the second request waits for the first one's answer.
        async with _claimed(self._cache, key):
            if (stored := await self._cache.get(key)) is not None and (found := _replay(stored)) is not None:
                return found
            return await self._answer(request, key)

    async def _answer(self, request: Request, key: str | None) -> Completion:
        async with self._slots:
            return await self._ask(self._call(request, self._config.max_tokens, key))

    async def forget(self, request: Request) -> None:
        """Drop the stored answer to ``request``."""
        if self._cache is not None:
            await self._cache.forget(self._key(request))

    async def check(self) -> None:
        """Send a one-word prompt with the run's own parameters, so that a refused parameter is noticed early.

        Raises:
            JudgeUnavailable: no answer, or a budget is set and the answer does not state its usage.
            ConfigError: a budget is set and no price is known.
        """
        check_budget(self._config, self._config.model)
        call = self._call(PROBE_REQUEST, PROBE_TOKENS)
        call.attempts, call.check = min(CHECK_ATTEMPTS, self._config.max_attempts), True
        completion = await self._ask(call)
        if completion.error is not None:
            raise JudgeUnavailable(f"{self._endpoint.who()}: {completion.error}")
        if not completion.usage_known and self._config.limits.dollars is not None:
            raise JudgeUnavailable(
                f"{self._endpoint.who()}: replies do not report usage (prompt_tokens, completion_tokens), so "
                f"judge.limits.dollars={self._config.limits.dollars:g} cannot be enforced; make the endpoint report "
                "usage, or set judge.limits.dollars=null"
            )

    async def _ask(self, call: Call) -> Completion:
        while True:
            async with self._servers.borrow(call.request) as borrowed:
                found = await self._send(call, borrowed.server)
                if isinstance(found, Completion):
                    return found
                assert call.error is not None
                borrowed.lost = is_connection_broken(call.error)
            if found is NextAction.STOP:
                raise self._endpoint.refused(call.error)
            own = not is_busy(call.error) if call.check else found is NextAction.AGAIN
            if own or not self._patient:
                call.attempts -= 1
            if found is NextAction.FAIL or not call.attempts:
                return self._failed(call, call.error)
            await self._wait(call, call.error)

    async def _send(self, call: Call, server: Server) -> Completion | NextAction:
        """Send one request under a lease; returns its reply, or what to do with the call."""
        asked = time.perf_counter()
        call.number = await self._lease(call)
        call.waited += time.perf_counter() - asked
        completion, ended = None, UNSENT
        try:
            await self._begin(call)
            ended = LOST
            completion, result = await self._request(call, server)
            if self._cache is not None:
                # Store the reply before using it, so that a kill loses neither the reply nor its cost.
                reply = None if completion is None or call.key is None else (call.key, _stored(completion))
                await self._cache.settle(call.number, result.dollars, reply)
            ended = result
        finally:
            action = await self._leases.settle(call.number, ended)
        return completion or action

    async def _lease(self, call: Call) -> str:
        """Take a lease for a request; returns its number."""
        return await self._leases.lease(call.asked)

    async def _begin(self, call: Call) -> None:
        """Enter a request in the cost ledger before it is sent."""
        if self._cache is not None:
            await self._cache.begin(call.number, call.asked.dollars)

    async def _request(self, call: Call, server: Server) -> tuple[Completion | None, RequestResult]:
        """Send one request; returns its reply, if any, and its result."""
        import openai

        call.requests += 1
        timeout = self._config.request_timeout_seconds
        try:
            # LiteLLM's timeout is per read on some transports; this one limits the whole request.
            async with asyncio.timeout(timeout):
                response = await self._endpoint.complete(call.request, server, call.asked.output_tokens, timeout)
        # OpenAIError is the base of every error LiteLLM raises for a provider.
        except (openai.OpenAIError, TimeoutError) as error:
            ended = self._ended(call.asked, error)
            call.error, call.guessed = error, call.guessed + ended.dollars
            return None, ended
        usage, dollars, estimated = self._bill(response, call.asked)
        text, finish_reason = reply_of(response.choices[0] if response.choices else None)
        completion = Completion(
            text=text,
            finish_reason=finish_reason,
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            dollars=call.guessed + dollars,
            estimated_dollars=call.guessed + (dollars if estimated else 0.0),
            usage_known=not estimated,
            **self._about(call),
        )
        tokens = usage.input_tokens + usage.output_tokens
        return completion, RequestResult(
            tokens=tokens, output_tokens=usage.output_tokens, dollars=dollars, estimated=estimated
        )

    def _ended(self, most: CostBound, error: BaseException) -> RequestResult:
        """The result of a request without a reply; a request that may be billed counts at its maximum cost."""
        ended = RequestResult(
            estimated=True,
            trouble=classify(error),
            reason=self._endpoint.one_line(error),
            hint=self._endpoint.hint(error),
            away=is_endpoint_unavailable(error),
        )
        if not possibly_billed(error):
            return ended
        tokens = most.input_tokens + most.output_tokens
        return replace(ended, tokens=tokens, output_tokens=most.output_tokens, dollars=most.dollars)

    @cached_property
    def _price(self) -> Price | None:
        return known_price(self._config, self._config.model)

    def _key(self, request: Request) -> str:
        """The key under which the answer is stored."""
        config = self._config
        arguments = self._endpoint.arguments(request.messages)
        for name in ("temperature", "reasoning_effort"):
            if (value := getattr(config, name)) is not None:
                arguments[name] = value
        arguments["vote"] = request.vote
        if request.scope:
            arguments["scope"] = request.scope
        if not self._endpoint_counts:
            arguments.pop("api_base", None)
        if config.rule_judge.start:
            # Replies depend on rules and error rates. Defaults are not part of the key, so that it finds older replies.
            arguments |= config.rule_judge.model_dump(exclude={"start", "latency_seconds"}, exclude_defaults=True)
        return request_key(arguments)

    def _call(self, request: Request, max_tokens: int, key: str | None = None) -> Call:
        sent = {**self._config.extra_body, **({"schema": request.schema} if request.schema else {})}
        most = bound_request_cost(self._price, request.messages, max_tokens, sent)
        rank, name = phase_rank(request.phase), uuid.uuid4().hex
        return Call(
            request=request,
            asked=LeaseRequest(**asdict(most), kind=request.phase or "", rank=rank, call=name),
            key=key,
            attempts=self._config.max_attempts,
            started_at=time.time(),
            clock=time.perf_counter(),
        )

    def _bill(self, response: Any, most: CostBound) -> tuple[TokenUsage, float, bool]:
        """Usage and dollars of a reply, and whether they are estimates because the reply does not state them."""
        usage = read_usage(response, most)
        if usage is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s: a reply reports no plausible usage (%s); replies like it count with their maximum cost",
                    *(self._endpoint.who(), self._endpoint.one_line(str(getattr(response, "usage", None)))),
                )
            return TokenUsage(input_tokens=most.input_tokens, output_tokens=most.output_tokens), most.dollars, True
        configured = find_price(self._config.model, self._config.prices)
        dollars = reported_cost(response) if configured is None else None
        if dollars is None and self._price is not None:
            counts = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.written_tokens)
            dollars = reply_cost(self._price, *counts)
        return usage, dollars or 0.0, False

    def _failed(self, call: Call, error: BaseException) -> Completion:
        """The completion of a call that is given up.

        Raises:
            JudgeUnavailable: the judge cannot be reached, and calls do not wait for the end of an outage.
        """
        reason = self._endpoint.one_line(error)
        if is_connect_failure(error) and (call.check or not self._patient):
            raise JudgeUnavailable(
                f"{self._endpoint.who()}: not reachable after {call.requests} attempts: {reason}; check judge.api_base"
            )
        return Completion(
            text="",
            finish_reason="error" if classify(error) is FailureKind.OWN else "unavailable",
            dollars=call.guessed,
            estimated_dollars=call.guessed,
            error=reason + error_hint(error),
            **self._about(call),
        )

    def _about(self, call: Call) -> dict[str, Any]:
        """Fields of a completion that describe its call."""
        return {
            "model": self._config.model,
            "call_id": call.number,
            "started_at": call.started_at,
            "seconds": time.perf_counter() - call.clock,
            "waited_seconds": call.waited,
            "requests": call.requests,
        }

    async def _wait(self, call: Call, error: BaseException) -> None:
        """Back off before this call's next request; pauses of the whole pool are added."""
        hint, longest = self._endpoint.hint(error), self._config.max_backoff_seconds
        if hint is not None:
            hint = min(hint, max(longest, LONGEST_HINT_SECONDS))
        seconds = seconds_to_pause(call.requests, hint, longest)
        log.log(
            logging.WARNING if seconds > LOGGED_SECONDS else logging.INFO,
            "%s: request %d: %s; again in %.1f s",
            *(self._endpoint.who(), call.requests, self._endpoint.one_line(error), seconds),
        )
        await self._sleep(seconds)


@contextlib.asynccontextmanager
async def _claimed(cache: ReplyCache, key: str) -> AsyncIterator[None]:
    """Hold the claim on a question, so that no other judge worker asks it."""
    holder = uuid.uuid4().hex

    async def renew() -> None:
        while True:
            await asyncio.sleep(CLAIM_SECONDS / 3)
            await cache.claim(key, holder)

    await cache.claim(key, holder)
    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        # A renewal that failed needs no report: the claim expires.
        await asyncio.gather(renewing, return_exceptions=True)
        await cache.release(key, holder)


_PAID = {each.name for each in fields(OriginalCost)}
_COMPLETION = TypeAdapter(Completion)


def _stored(completion: Completion) -> dict[str, object]:
    stored = asdict(completion)
    return {name: stored[name] for name in stored if name not in ("paid", "error")}


def _replay(stored: Mapping[str, Any]) -> Completion | None:
    """Return the stored reply, at no cost; None if it is damaged and the judge must be asked again."""
    try:
        found = _COMPLETION.validate_python(stored)
    except ValidationError:
        log.warning(
            "a stored judge reply is damaged, so the request is sent again; the reply contains %s",
            str(sorted(stored))[:100],
        )
        return None
    return replace(
        found,
        error=None,
        paid=OriginalCost(**{name: getattr(found, name) for name in _PAID}),
        dollars=0.0,
        estimated_dollars=0.0,
        waited_seconds=0.0,
        call_id="",
        started_at=time.time(),
        seconds=0.0,
        requests=0,
    )
