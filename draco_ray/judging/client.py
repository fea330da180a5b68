"""The judge over LiteLLM: one request in, one completion out, with retries, a concurrency limit, prices and a cache.

LiteLLM translates between providers, classifies errors and knows prices. Its retries, rate limits and cache are off:
they ignore Retry-After for some providers, reject instead of queueing, and forget ``extra_body``.

`draco_ray.judging.endpoint` sends the requests; `draco_ray.judging.outage` classifies errors and decides about retries.
In a pool (``leases``) with ``max_outage_seconds`` a failed request counts towards ``max_attempts`` only if the judge
has answered another request since; otherwise the judge is down for all calls, and this one waits.
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
from draco_ray.judging.endpoint import Borrowed, Endpoint, Server, Servers
from draco_ray.judging.limiter import Grant, LeaseRequest, Leases, Limiter, RequestResult, WaitingLine
from draco_ray.judging.outage import (
    LOGGED_SECONDS,
    FailureKind,
    NextAction,
    advice,
    classify,
    disconnected,
    is_busy,
    possibly_billed,
    seconds_to_pause,
    unconnected,
)
from draco_ray.judging.phases import urgency
from draco_ray.judging.pricing import (
    CostBound,
    TokenUsage,
    check_budget,
    find_price,
    known_price,
    most_of,
    price_of,
    read_usage,
    reported_cost,
)
from draco_ray.judging.reply_cache import CLAIM_SECONDS, ReplyCache, request_key
from draco_ray.records import Message, Paid

LONGEST_HINT_SECONDS = 60.0
"""Longest wait that an endpoint may ask of one call; `draco_ray.judging.outage` has the limit for the whole pool."""


@dataclass(slots=True)
class Call:
    """One call and its requests so far."""

    request: Request
    asked: LeaseRequest
    key: str | None
    attempts: int
    patient: bool
    """If True, failures do not count as attempts while the judge answers no call at all."""
    started_at: float
    clock: float
    check: bool = False
    """Whether it is the startup check, which waits only for a busy endpoint."""
    requests: int = 0
    own: int = 0
    """Failures while the judge answered other calls."""
    unexplained: int = 0
    """Failures since the last reply to any call."""
    answers: int = 0
    """Replies of the pool at the last lease."""
    number: str = ""
    """Number of the latest request."""
    guessed: float = 0.0
    """Dollars of requests that may have been billed without a reply."""
    waited: float = 0.0
    """Seconds spent waiting for leases."""
    error: BaseException | None = None

    def note_failure(self, error: BaseException, billed: float, *, counts: bool = False) -> None:
        """Note that a request failed.

        Args:
            error: the reason.
            billed: dollars that may be charged anyway.
            counts: whether the failure counts towards `attempts` even for a patient call.
        """
        self.error, self.guessed = error, self.guessed + billed
        if self.patient and not counts:
            self.unexplained += 1
        else:
            self.own += 1

    def note_grant(self, grant: Grant) -> None:
        """Note a lease for the next request; replies to other calls show whether the call caused the last failures."""
        if grant.answers > self.answers:
            # Another call was answered since; an outage may explain all but one of the failures.
            self.own, self.unexplained = self.own + min(self.unexplained, 1), 0
        elif grant.alone and self.error is not None and not (unconnected(self.error) or is_busy(self.error)):
            # The judge is reachable and no other call fails: the prompt may be the cause.
            self.own, self.unexplained = self.own + self.unexplained, 0
        self.answers = grant.answers

    @property
    def spent(self) -> bool:
        """Whether all attempts are used up."""
        return self.own >= self.attempts

    def pause_seconds(self, hint: float | None, max_backoff: float) -> float:
        """Seconds to wait before the next request.

        Args:
            hint: seconds that the endpoint asks us to wait, if it does.
            max_backoff: maximum without a hint.
        """
        capped = None if hint is None else min(hint, max(max_backoff, LONGEST_HINT_SECONDS))
        return seconds_to_pause(self.own + self.unexplained, capped, max_backoff)


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
            endpoint_counts: whether the endpoint is part of the cache key, so that each endpoint is another judge.
            role: role of the model, for messages.
            settings: configuration keys of model and endpoint, for messages.
        """
        self._endpoint = Endpoint(config, role, settings)
        # A resumed run starts the rule judge's server again on another port, but it is the same judge.
        self._endpoint_counts = endpoint_counts and not config.rule_judge.start
        self._servers: Servers = servers or self._endpoint
        self._patient = leases is not None and config.max_outage_seconds > 0
        self._leases: Leases = leases or WaitingLine(Limiter(JudgeLimits()))
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
                result = await self._try(call, borrowed)
            if isinstance(result, Completion):
                return result
            assert call.error is not None
            if result is NextAction.STOP:
                raise self._endpoint.refused(call.error)
            if result is NextAction.FAIL or call.spent:
                if unconnected(call.error) and (call.check or not call.patient):
                    reason = self._endpoint.one_line(call.error)
                    raise JudgeUnavailable(
                        f"{self._endpoint.who()}: not reachable after {call.requests} attempts: {reason}; check "
                        "judge.api_base"
                    )
                return self._failed(call, call.error)
            await self._wait(call)

    async def _try(self, call: Call, borrowed: Borrowed) -> Completion | NextAction:
        """Take a lease and send one request."""
        asked = time.perf_counter()
        grant = await self._leases.lease(call.asked)
        call.waited += time.perf_counter() - asked
        call.note_grant(grant)
        if call.spent and call.error is not None:
            await self._leases.give_back(grant.number)
            return self._failed(call, call.error)
        result = await self._send(call, grant, borrowed.server)
        if result is NextAction.AGAIN and call.error is not None:
            borrowed.lost = disconnected(call.error)
        return result

    async def _send(self, call: Call, grant: Grant, server: Server) -> Completion | NextAction:
        """Send one request; returns its reply, or what to do with the call."""
        import openai

        call.requests, call.number = call.requests + 1, grant.number
        if self._cache is not None:
            try:
                await self._cache.begin(grant.number, call.asked.dollars)
            except BaseException:
                await self._leases.give_back(grant.number)
                raise
        timeout = self._config.request_timeout_seconds
        try:
            # LiteLLM's timeout is per read on some transports; this one limits the whole request.
            async with asyncio.timeout(timeout):
                response = await self._endpoint.complete(call.request, server, call.asked.output_tokens, timeout)
        # OpenAIError is the base of every error LiteLLM raises for a provider.
        except (openai.OpenAIError, TimeoutError) as error:
            billed = possibly_billed(error)
            ended = self._ended(call.asked, error, billed)
            call.note_failure(error, ended.dollars, counts=call.check and not is_busy(error))
            if self._cache is not None:
                await self._cache.settle(grant.number, ended.dollars)
            return await self._leases.settle(grant.number, ended)
        except BaseException:
            # The outcome is unknown, so the book keeps the request as unsettled.
            self._leases.abandon(grant.number)
            raise
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
        if self._cache is not None:
            # Store the reply before using it, so that a kill loses neither the reply nor its cost.
            reply = None if call.key is None else (call.key, _stored(completion))
            try:
                await self._cache.settle(grant.number, dollars, reply)
            except BaseException:
                self._leases.abandon(grant.number)
                raise
        tokens = usage.input_tokens + usage.output_tokens
        result = RequestResult(tokens=tokens, output_tokens=usage.output_tokens, dollars=dollars, estimated=estimated)
        await self._leases.settle(grant.number, result)
        return completion

    def _ended(self, most: CostBound, error: BaseException, billed: bool) -> RequestResult:
        """The result of a request without a reply; one that may be billed is booked at its maximum cost."""
        return RequestResult(
            tokens=most.input_tokens + most.output_tokens if billed else 0.0,
            output_tokens=most.output_tokens if billed else 0.0,
            dollars=most.dollars if billed else 0.0,
            estimated=True,
            trouble=classify(error),
            reason=self._endpoint.one_line(error),
            hint=self._endpoint.hint(error),
        )

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
            # Other rules or error rates make another judge. Defaults are left out, so that earlier replies are found.
            arguments |= config.rule_judge.model_dump(exclude={"start", "latency_seconds"}, exclude_defaults=True)
        return request_key(arguments)

    def _call(self, request: Request, max_tokens: int, key: str | None = None) -> Call:
        sent = {**self._config.extra_body, **({"schema": request.schema} if request.schema else {})}
        most = most_of(self._price, request.messages, max_tokens, sent)
        rank, name = urgency(request.phase), uuid.uuid4().hex
        return Call(
            request=request,
            asked=LeaseRequest(**asdict(most), kind=request.phase or "", rank=rank, call=name),
            key=key,
            attempts=self._config.max_attempts,
            patient=self._patient,
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
            dollars = price_of(self._price, *counts)
        return usage, dollars or 0.0, False

    def _failed(self, call: Call, error: BaseException) -> Completion:
        return Completion(
            text="",
            finish_reason="error" if classify(error) is FailureKind.OWN else "unavailable",
            dollars=call.guessed,
            estimated_dollars=call.guessed,
            error=self._endpoint.one_line(error) + advice(error),
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

    async def _wait(self, call: Call) -> None:
        """Back off before this call's next request; pauses of the whole pool are added."""
        error = call.error
        assert error is not None
        seconds = call.pause_seconds(self._endpoint.hint(error), self._config.max_backoff_seconds)
        log.log(
            logging.WARNING if seconds > LOGGED_SECONDS else logging.INFO,
            "%s: request %d: %s; again in %.1f s",
            self._endpoint.who(),
            call.requests,
            self._endpoint.one_line(error),
            seconds,
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


_PAID = {each.name for each in fields(Paid)}
_STORED = {each.name for each in fields(Completion)} - {"paid", "error"}
"""Fields of a completion that are stored."""
_COMPLETION = TypeAdapter(Completion)


def _stored(completion: Completion) -> dict[str, object]:
    return {name: getattr(completion, name) for name in _STORED}


def _replay(stored: Mapping[str, Any]) -> Completion | None:
    """Return the stored reply, at no cost; None if it is damaged and the judge must be asked again."""
    try:
        found = _COMPLETION.validate_python({name: stored[name] for name in _STORED})
    except (KeyError, ValidationError):
        log.warning(
            "a stored judge reply is damaged, so the request is sent again; the reply contains %s",
            str(sorted(stored))[:100],
        )
        return None
    return replace(
        found,
        paid=Paid(**{name: stored[name] for name in _PAID}),
        dollars=0.0,
        estimated_dollars=0.0,
        waited_seconds=0.0,
        call_id="",
        started_at=time.time(),
        seconds=0.0,
        requests=0,
    )
