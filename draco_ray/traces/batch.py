"""The judge through its provider's batch API: half the price, with replies within a day instead of immediately.

`BatchClient` differs from `draco_ray.judging.client.LiteLLMClient` only in how requests are sent: they are submitted as
one batch when none has been added for `QUIET_SECONDS`, and each gets its reply when the batch has ended. Leases,
budget, cost records and stored replies are the same. Requests are entered in the cost ledger when their batch is
submitted, and submitted batches are recorded beside the replies, with the leases of their requests. So a process that
continues after a kill waits for these batches, under the same leases, instead of paying again.

OpenAI's API (and compatible servers) is called through OpenAI's client, Anthropic's over HTTP, with LiteLLM translating
requests and replies.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from draco_ray.config.schema import JudgeConfig, Price
from draco_ray.errors import ConfigError
from draco_ray.judging.client import Call, LiteLLMClient
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.endpoint import Endpoint, Server
from draco_ray.judging.limiter import Leases
from draco_ray.judging.outage import NextAction
from draco_ray.judging.pricing import check_budget, known_price
from draco_ray.judging.reply_cache import ReplyCache, read_cost_ledger
from draco_ray.judging.tokens import import_litellm_quietly
from draco_ray.runs.directory import as_store_errors

if TYPE_CHECKING:
    from openai import AsyncOpenAI

BATCH_PRICE_SHARE = 0.5
"""Share of the normal price that OpenAI and Anthropic charge for batches."""
QUIET_SECONDS = 3.0
POLL_SECONDS = 20.0
MOST_REQUESTS = 20_000
"""Maximum number of requests in one batch; OpenAI accepts 50,000, and 200 MB."""
DAY_SECONDS = 26 * 3600.0
BATCHES_FILE = "batches.json"
MAX_IN_FLIGHT = 10_000
"""Maximum number of requests in flight."""

BATCH_KEY = ""
"""Key of the result that applies to every request of a batch that has no result of its own."""

Result = tuple[str, Any]
"""(``ok``, the provider's reply), or one of these with a message: ``refused`` (a retry would fail, too), ``busy`` (no
request reached the model), ``error``."""


class BatchApi(Protocol):
    """A provider's batch API."""

    async def submit(self, bodies: Mapping[str, dict[str, Any]]) -> str:
        """Submit requests (id -> body); returns the id of the batch."""
        ...

    async def results(self, batch: str) -> dict[str, Result] | None:
        """Request id, or `BATCH_KEY`, -> reply; None while the batch is running."""
        ...


class BatchClient(LiteLLMClient):
    """Completes requests in batches, for uses in which a reply may take a day."""

    _endpoint: BatchEndpoint

    def __init__(
        self,
        config: JudgeConfig,
        cache: ReplyCache | None = None,
        leases: Leases | None = None,
        *,
        quiet_seconds: float = QUIET_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """
        Args:
            config: as in `LiteLLMClient`; timeout and concurrency are replaced by values for batches.
            cache: stores replies and the list of running batches.
            leases: rate limiter, asked before each request.
            quiet_seconds: submit the batch once no request has been added for this long.
            poll_seconds: seconds between two polls of a batch.

        Raises:
            ConfigError: no batch API of the provider is known.
        """
        waiting = config.model_copy(
            update={"request_timeout_seconds": DAY_SECONDS, "concurrency_per_worker": MAX_IN_FLIGHT}
        )
        super().__init__(waiting, cache, leases=leases)
        self._endpoint = BatchEndpoint(waiting, cache, quiet_seconds, poll_seconds)

    async def check(self) -> None:
        """Check for a key and, if there is a budget, a price; a test request would take hours.

        Raises:
            JudgeUnavailable: there is no key.
            ConfigError: there is a budget, but no price.
        """
        self._endpoint.api_key()
        check_budget(self._config, self._config.model)

    async def _lease(self, call: Call) -> str:
        """The lease that the request has in a running batch, or else a new lease."""
        return self._endpoint.lease_of(call) or await super()._lease(call)

    async def _begin(self, call: Call) -> None:
        """Tell the endpoint the lease: it enters the request in the cost ledger when its batch is submitted."""
        self._endpoint.leases[id(call.request)] = (call.number, call.asked.dollars)

    async def _send(self, call: Call, server: Server) -> Completion | NextAction:
        found = await super()._send(call, server)
        self._endpoint.settled(call.number)
        return found

    @cached_property
    def _price(self) -> Price | None:
        price = known_price(self._config, self._config.model)
        return None if price is None else _cheaper(price)


class BatchEndpoint(Endpoint):
    """The model behind its provider's batch API."""

    def __init__(
        self, config: JudgeConfig, cache: ReplyCache | None, quiet_seconds: float, poll_seconds: float
    ) -> None:
        """See `BatchClient`."""
        super().__init__(config, "judge", "judge.model, judge.api_base")
        self._api = _api(config, self.api_key)
        self._cache = cache
        self.quiet_seconds, self.poll_seconds = quiet_seconds, poll_seconds
        self._file = None if config.cache is None else config.cache / BATCHES_FILE
        self._batches = {} if config.cache is None else unsettled_batches(config.cache)
        """Running batches."""
        self._unsettled: dict[str, set[str]] = {}
        """Id of an ended batch -> numbers of its leases that are not settled yet. The batch stays in the file until all
        are settled, because its replies may have to be read again."""
        self.leases: dict[int, tuple[str, float]] = {}
        """``id()`` of a request object -> number of the request's lease, and its maximum cost in dollars."""
        self._leases: dict[str, tuple[str, float]] = {}
        """Request id -> number of its lease, and maximum cost in dollars, for batches that are not submitted yet."""
        self._next: dict[str, dict[str, Any]] = {}
        """Requests of the batch that is submitted next, by id."""
        self._sending: asyncio.Task[dict[str, Result]] | None = None
        self._work: dict[str, asyncio.Task[dict[str, Result]]] = {}
        """Request id -> the task that returns the results of its batch."""

    async def complete(self, request: Request, server: Server, max_tokens: int, timeout: float) -> Any:
        """Add one request to the next batch, unless a running batch contains it already, and wait for its reply.

        Raises:
            OpenAIError: the batch could not be submitted, or has no reply to this request.
        """
        litellm = import_litellm_quietly()
        number, body = self._numbered(request, max_tokens)
        lease = self.leases.pop(id(request))
        if number not in self._work:
            self._leases[number] = lease
            self._join(number, body)
        try:
            results = await asyncio.shield(self._work[number])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            said = f"batch: {type(error).__name__}: {error}"
            raise litellm.APIConnectionError(said, llm_provider="batch", model=self._config.model) from error
        finally:
            self._work.pop(number, None)
        kind, reply = results.get(number) or results.get(BATCH_KEY, ("error", "ended without a reply to this request"))
        if kind == "refused":
            raise litellm.BadRequestError(message=f"batch: {reply}", model=self._config.model, llm_provider="batch")
        if kind == "busy":
            raise litellm.RateLimitError(message=f"batch: {reply}", model=self._config.model, llm_provider="batch")
        if kind == "error":
            raise litellm.InternalServerError(message=f"batch: {reply}", model=self._config.model, llm_provider="batch")
        return reply

    def lease_of(self, call: Call) -> str | None:
        """Number of the lease of a call's request; None if no running batch contains the request."""
        if not self._batches:
            return None
        number, _ = self._numbered(call.request, call.asked.output_tokens)
        return next(filter(None, (members.get(number) for members in self._batches.values())), None)

    def settled(self, lease: str) -> None:
        """Note that a lease was settled; a batch is forgotten once all of its leases are settled."""
        for batch, left in list(self._unsettled.items()):
            left.discard(lease)
            if not left:
                del self._unsettled[batch]
                self._write({name: members for name, members in read_batches(self._file).items() if name != batch})

    def _numbered(self, request: Request, max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Id and body of a request."""
        body = _body(import_litellm_quietly(), self._config, request, max_tokens)
        text = json.dumps([body, request.vote], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:48], body

    def _join(self, number: str, body: dict[str, Any]) -> None:
        """Wait for the running batch that contains a request, or add it to the next batch."""
        if batch := next((batch for batch, members in self._batches.items() if number in members), None):
            self._work |= dict.fromkeys(self._batches[batch], asyncio.create_task(self._results(batch)))
            return
        if self._sending is None or len(self._next) == MOST_REQUESTS:
            self._next = {}
            self._sending = asyncio.create_task(self._send(self._next))
        self._next[number], self._work[number] = body, self._sending

    async def _send(self, bodies: dict[str, dict[str, Any]]) -> dict[str, Result]:
        """Submit a batch once no request has been added to it for a while, and wait for its results."""
        await self._quiet(bodies)
        if bodies is self._next:
            self._sending = None
        leases = {number: self._leases.pop(number) for number in bodies}
        if self._cache is not None:
            await asyncio.gather(*(self._cache.begin(*lease) for lease in leases.values()))
        batch = await self._api.submit(bodies)
        self._batches[batch] = {number: lease for number, (lease, _) in leases.items()}
        self._write(read_batches(self._file) | {batch: self._batches[batch]})
        return await self._results(batch)

    async def _quiet(self, bodies: Mapping[str, dict[str, Any]]) -> None:
        """Wait until no request has been added for `quiet_seconds`."""
        known = 0
        while known < len(bodies):
            known = len(bodies)
            await asyncio.sleep(self.quiet_seconds)

    async def _results(self, batch: str) -> dict[str, Result]:
        failures, results = 0, None
        while True:
            try:
                results = await self._api.results(batch)
                failures = 0
            except Exception:  # A failed poll does not mean that the batch failed.
                failures += 1
                if failures >= self._config.max_attempts:
                    # The batch's requests will be settled as failed, so waiting for it again needs new leases.
                    self._batches[batch] = dict.fromkeys(self._batches[batch], "")
                    self._write(read_batches(self._file) | {batch: self._batches[batch]})
                    raise
            if results is not None:
                self._unsettled[batch] = set(filter(None, self._batches.pop(batch, {}).values()))
                return results
            await asyncio.sleep(self.poll_seconds)

    def _write(self, batches: dict[str, dict[str, str]]) -> None:
        """Replace the batches in the file, which holds those of all judges of a panel."""
        if self._file is None:
            return
        temporary = Path(f"{self._file}.tmp")
        with as_store_errors(self._file.parent):
            temporary.write_text(json.dumps(batches), encoding="utf-8")
            os.replace(temporary, self._file)


def read_batches(file: Path | None) -> dict[str, dict[str, str]]:
    """The recorded batches: batch id -> {request id -> number of the request's lease}.

    The number is empty if the request was settled as failed after failed polls, and in files of earlier versions.
    """
    if file is None or not file.is_file():
        return {}
    known = json.loads(file.read_text(encoding="utf-8"))
    return {batch: each if isinstance(each, dict) else dict.fromkeys(each, "") for batch, each in known.items()}


def unsettled_batches(folder: Path) -> dict[str, dict[str, str]]:
    """The batches that are recorded in a folder of replies, with their requests whose cost is not known yet."""
    waiting = read_cost_ledger(folder).under_way
    return {
        batch: {number: lease for number, lease in members.items() if not lease or lease in waiting}
        for batch, members in read_batches(folder / BATCHES_FILE).items()
    }


def _json_lines(content: bytes) -> list[Any]:
    """The values of JSON lines; split at ``\\n`` only, as texts may contain other line separators unescaped."""
    return [json.loads(line) for line in content.split(b"\n") if line.strip()]


def _cheaper(price: Price) -> Price:
    def half(rate: float | None) -> float | None:
        return None if rate is None else rate * BATCH_PRICE_SHARE

    names = ("input", "cached_input", "cache_write", "output")
    tiers = tuple(tier.model_copy(update={name: half(getattr(tier, name)) for name in names}) for tier in price.tiers)
    return price.model_copy(update={name: half(getattr(price, name)) for name in names} | {"tiers": tiers})


def _body(litellm: Any, config: JudgeConfig, request: Request, max_tokens: int) -> dict[str, Any]:
    """The body of a request in its provider's format."""
    name, provider, _, _ = litellm.get_llm_provider(config.model, api_base=config.api_base)
    wanted = {
        "temperature": config.temperature,
        "reasoning_effort": config.reasoning_effort,
        "max_tokens": max_tokens,
    }
    sent = {key: value for key, value in wanted.items() if value is not None}
    given = litellm.utils.get_optional_params(model=name, custom_llm_provider=provider, drop_params=True, **sent)
    given = {key: value for key, value in given.items() if key not in ("stream", "extra_body", "json_mode")}
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    if provider == "anthropic":
        from litellm.llms.anthropic.chat.transformation import AnthropicConfig

        body: dict[str, Any] = AnthropicConfig().transform_request(
            model=name, messages=messages, optional_params=given, litellm_params={}, headers={}
        )
        return body
    return {"model": name, "messages": messages, **given, **config.extra_body}


def _api(config: JudgeConfig, key: Any) -> BatchApi:
    litellm = import_litellm_quietly()
    try:
        _, provider, _, _ = litellm.get_llm_provider(config.model, api_base=config.api_base)
    except litellm.BadRequestError:
        provider = "nobody"
    if provider == "openai":
        return OpenAIBatches(litellm, config, key)
    if provider == "anthropic":
        return AnthropicBatches(config, key)
    raise ConfigError(
        f"--batch: {config.model}: batches are supported for OpenAI and Anthropic, not for {provider}; leave out "
        "--batch"
    )


class OpenAIBatches:
    """OpenAI's batch API: upload a file of requests, download a file of replies."""

    def __init__(self, litellm: Any, config: JudgeConfig, key: Any) -> None:
        self._litellm, self._base, self._key = litellm, config.api_base, key

    async def submit(self, bodies: Mapping[str, dict[str, Any]]) -> str:
        """See `BatchApi`."""
        lines = [
            json.dumps({"custom_id": number, "method": "POST", "url": "/v1/chat/completions", "body": body})
            for number, body in bodies.items()
        ]
        content = "\n".join(lines).encode()
        async with self._client() as client:
            file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id
            )
        return batch.id

    async def results(self, batch: str) -> dict[str, Result] | None:
        """See `BatchApi`."""
        found: dict[str, Result] = {}
        async with self._client() as client:
            state = await client.batches.retrieve(batch)
            if state.status not in ("completed", "failed", "expired", "cancelled"):
                return None
            files = list(filter(None, [state.output_file_id, state.error_file_id]))
            if state.status == "completed" and not files:
                # The files appear a moment after the batch has ended; without them every request would be paid again.
                return None
            for file in files:
                for entry in _json_lines((await client.files.content(file)).content):
                    found[entry["custom_id"]] = self._result(entry)
        if state.status == "failed":
            # The provider refused the whole batch: no request was sent to the model.
            reasons = (state.errors and state.errors.data) or []
            # The limit counts the tokens of all running batches, so other batches have to end first.
            kind = "busy" if any(each.code == "token_limit_exceeded" for each in reasons) else "refused"
            found[BATCH_KEY] = kind, f"failed: {'; '.join(str(each.message) for each in reasons)[:300]}"
        return found

    def _client(self) -> AsyncOpenAI:
        # Do not use LiteLLM for these calls: it downloads the replies a second time, in the background, to price them.
        from openai import AsyncOpenAI

        return AsyncOpenAI(api_key=self._key(), base_url=self._base, max_retries=0)

    def _result(self, entry: dict[str, Any]) -> Result:
        response = entry.get("response") or {}
        if response.get("status_code") != 200:
            kind = "refused" if response.get("status_code") in (400, 422) else "error"
            return kind, " ".join(str(entry.get("error") or response.get("body")).split())[:300]
        return "ok", self._litellm.ModelResponse(**response["body"])


class AnthropicBatches:
    """Anthropic's Message Batches API."""

    def __init__(self, config: JudgeConfig, key: Any) -> None:
        self._base = (config.api_base or "https://api.anthropic.com").rstrip("/").removesuffix("/v1")
        self._key = key

    async def submit(self, bodies: Mapping[str, dict[str, Any]]) -> str:
        """See `BatchApi`."""
        requests = [{"custom_id": number, "params": body} for number, body in bodies.items()]
        reply = await self._ask("POST", f"{self._base}/v1/messages/batches", {"requests": requests})
        return str(reply.json()["id"])

    async def results(self, batch: str) -> dict[str, Result] | None:
        """See `BatchApi`."""
        state = (await self._ask("GET", f"{self._base}/v1/messages/batches/{batch}")).json()
        if state["processing_status"] != "ended":
            return None
        # Build the URL here instead of using the reply's, so that the key is sent to no other host.
        reply = await self._ask("GET", f"{self._base}/v1/messages/batches/{batch}/results")
        return {entry["custom_id"]: self._result(entry["result"]) for entry in _json_lines(reply.content)}

    async def _ask(self, method: str, url: str, body: object = None) -> httpx.Response:
        headers = {"x-api-key": self._key(), "anthropic-version": "2023-06-01"}
        async with httpx.AsyncClient(timeout=120.0) as client:
            reply = await client.request(method, url, json=body, headers=headers)
        if reply.status_code >= 400:
            litellm = import_litellm_quietly()
            raise litellm.exceptions.APIError(
                status_code=reply.status_code, message=reply.text[:300], llm_provider="anthropic", model="batch"
            )
        return reply

    def _result(self, result: dict[str, Any]) -> Result:
        from litellm.llms.anthropic.chat.transformation import AnthropicConfig

        if result["type"] != "succeeded":
            error = str(result.get("error") or "")
            kind = "refused" if "invalid_request_error" in error else "error"
            return kind, f"{result['type']}: {' '.join(error.split())[:300]}"
        litellm = import_litellm_quietly()
        message = result["message"]
        return "ok", AnthropicConfig().transform_parsed_response(
            completion_response=message,
            raw_response=httpx.Response(200, json=message),
            model_response=litellm.ModelResponse(),
        )
