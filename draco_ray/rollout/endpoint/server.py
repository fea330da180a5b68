"""The endpoint of a rollout worker: one HTTP server on loopback for the episodes of all its slots.

An episode has a URL and a key of its own; both end with it. ``/v1/chat/completions``, ``/v1/responses`` (with
``stream`` too) and ``/v1/models`` are served, as OpenAI's clients ask for them, and vLLM's ``/inference/v1/generate``
for clients that put messages into tokens themselves. Beside them ``/v1/tools`` lists and calls the tools of the
episode's world, where it has any.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.replies import chat_completion, chat_events, generated, response, response_events
from draco_ray.rollout.endpoint.requests import clean, finite, read_chat, read_generate, read_responses
from draco_ray.rollout.endpoint.token_episode import TokenEpisode
from draco_ray.rollout.endpoint.turns import Refused
from draco_ray.rollout.endpoint.world_tools import WorldTools

HOST = "127.0.0.1"
MOST_BYTES = 64 << 20
"""Of one request."""
_REMEMBERED = 10_000
"""Ended episodes whose late requests are told so."""
AnswerT = TypeVar("AnswerT")


class Endpoint:
    """The server. It lives in the event loop that starts it."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._tools: dict[str, WorldTools] = {}
        self._token_episodes: dict[str, TokenEpisode] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._base = ""

    @asynccontextmanager
    async def serving(self, episode: Episode, tools: WorldTools | None = None) -> AsyncIterator[str]:
        """Answer the requests of an episode while the block runs, and none after it. Yields: its base URL."""
        await self._start()
        name = secrets.token_hex(8)
        self._episodes[name] = episode
        if tools is not None:
            self._tools[name] = tools
        try:
            yield f"{self._base}/{name}/v1"
        finally:
            episode.open = False
            del self._episodes[name]
            self._tools.pop(name, None)
            self._remember(name)
            if tools is not None:
                await tools.close()

    @asynccontextmanager
    async def serving_tokens(self, episode: TokenEpisode) -> AsyncIterator[str]:
        """Answer an episode's requests for tokens while the block runs.

        Such an episode is known by the model's name that it asks for, `TokenEpisode.key`: clients that put messages
        into tokens themselves keep a connection for each URL and key.

        Yields: the base URL, the same for all.
        """
        await self._start()
        self._token_episodes[episode.key] = episode
        try:
            yield f"{self._base}/v1"
        finally:
            episode.open = False
            del self._token_episodes[episode.key]
            self._remember(episode.key)

    async def stop(self) -> None:
        """End the server. Safe to call again."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self._server = self._serving = None

    def _remember(self, name: str) -> None:
        self._ended[name] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    async def _start(self) -> None:
        async with self._starting:
            if self._serving is not None and not self._serving.done():
                return
            listening = socket.create_server((HOST, 0), backlog=1024)
            self._base = f"http://{HOST}:{listening.getsockname()[1]}"
            routes = [
                Route("/{episode}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/{episode}/v1/responses", self._responses, methods=["POST"]),
                Route("/{episode}/v1/models", self._models, methods=["GET"]),
                Route("/{episode}/v1/tools", self._world_tools, methods=["GET", "POST"]),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
            ]
            app = Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})
            config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=3600)
            self._server = _Server(config)
            self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def _chat(self, request: Request) -> Response:
        async def reply() -> Response:
            episode = self._episode(request)
            ask = read_chat(await _body(request))
            answer = await _sampled(request, episode.answer(ask))
            if ask.stream:
                return StreamingResponse(chat_events(ask, answer), media_type="text/event-stream")
            return JSONResponse(chat_completion(ask, answer))

        return await self._guarded(reply, request)

    async def _responses(self, request: Request) -> Response:
        async def reply() -> Response:
            episode = self._episode(request)
            ask = read_responses(await _body(request), episode.stored)
            answer = await _sampled(request, episode.answer(ask))
            whole = response(ask, answer)
            said = {**answer.message(), "tool_calls": answer.message()["tool_calls"]}
            episode.stored[whole["id"]] = (*ask.messages[ask.instructed :], said)
            if ask.stream:
                return StreamingResponse(response_events(whole), media_type="text/event-stream")
            return JSONResponse(whole)

        return await self._guarded(reply, request)

    async def _world_tools(self, request: Request) -> Response:
        async def reply() -> Response:
            self._episode(request)
            tools = self._tools.get(request.path_params["episode"])
            if tools is None:
                raise Refused("the world of this episode has no tools", 404, "not_found")
            if request.method != "POST":
                return JSONResponse({"tools": tools.schemas})
            return JSONResponse({"result": await tools.call(await _body(request))})

        return await self._guarded(reply)

    async def _generate(self, request: Request) -> Response:
        async def reply() -> Response:
            body = await _body(request)
            episode = self._token_episode(body.get("model") if isinstance(body, dict) else None)
            ask = read_generate(body)
            return JSONResponse(generated(ask, await _sampled(request, episode.generate(ask))))

        return await self._guarded(reply)

    async def _models(self, request: Request) -> Response:
        try:
            self._episode(request)
        except Refused as refused:
            return _refusal(refused)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "draco-ray"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _guarded(self, reply: Callable[[], Awaitable[Response]], asks_policy: Request | None = None) -> Response:
        """What ``reply`` answers, or why there is nothing, which the episode of ``asks_policy`` is to remember."""
        try:
            return await reply()
        except Refused as refused:
            self._note(asks_policy, str(refused))
            return _refusal(refused)
        except _Gone:
            self._note(asks_policy, "it did not wait for one")
            return Response(status_code=499)
        except RecursionError:
            return _refusal(Refused("the request is nested too deeply"))
        except Exception as error:
            # The episode remembers it; what the agent makes of it decides nothing.
            said = " ".join(str(error).split())[:300]
            return _refusal(Refused(f"the policy cannot be asked: {type(error).__name__}: {said}", 500, "server_error"))

    def _note(self, request: Request | None, why: str) -> None:
        """Remember why an agent got no answer."""
        if request is not None and (episode := self._episodes.get(request.path_params["episode"])) is not None:
            episode.complaint = why

    def _episode(self, request: Request) -> Episode:
        name = request.path_params["episode"]
        episode = self._episodes.get(name)
        if episode is None and name in self._ended:
            raise Refused("this episode has ended", 410, "episode_over")
        if episode is None:
            raise Refused("no such episode; expected the base URL as OPENAI_BASE_URL has it", 404, "not_found")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), episode.key.encode()):
            raise Refused("wrong key; expected this episode's, as OPENAI_API_KEY has it", 401, "invalid_api_key")
        return episode

    def _token_episode(self, key: Any) -> TokenEpisode:
        episode = self._token_episodes.get(key) if isinstance(key, str) else None
        if episode is None and isinstance(key, str) and key in self._ended:
            raise Refused("this episode has ended", 410, "episode_over")
        if episode is None:
            raise Refused("model: names no episode", 404, "not_found")
        return episode


@functools.cache
def _endpoint_of(loop: asyncio.AbstractEventLoop) -> Endpoint:
    return Endpoint()


def shared_endpoint() -> Endpoint:
    """The one server of this process, for the agents of all its policies."""
    return _endpoint_of(asyncio.get_running_loop())


class _Server(uvicorn.Server):
    """Leaves signals to the process it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Gone(Exception):
    """Who asked does not wait for the answer any more."""


async def _sampled(request: Request, turn: Coroutine[Any, Any, AnswerT]) -> AnswerT:
    """The policy's turn; it stops where nobody waits for it. Raises: _Gone, Refused, and what the policy raises."""
    sampling = asyncio.create_task(turn)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({sampling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            raise _Gone
        return sampling.result()
    finally:
        for task in (sampling, leaving):
            task.cancel()
        await asyncio.gather(sampling, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Any:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
            raise Refused(f"the request is larger than {MOST_BYTES >> 20} MiB", 413, "too_large")
    try:
        return clean(json.loads(content, parse_float=finite, parse_constant=finite))
    except ValueError as error:
        raise Refused(f"the request is no JSON: {' '.join(str(error).split())[:200]}") from None


async def _unknown(request: Request, error: Exception) -> Response:
    served = "POST /v1/chat/completions, POST /v1/responses, GET /v1/models"
    return _refusal(
        Refused(f"{request.method} {request.url.path}: not served here; expected {served}", 404, "not_found")
    )


def _refusal(refused: Refused) -> Response:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
    # Nothing would be another time what it is now: clients need not ask again.
    return JSONResponse({"error": error}, status_code=refused.status, headers={"x-should-retry": "false"})
