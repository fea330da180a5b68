"""The endpoint of a rollout worker: one HTTP server on loopback for the episodes of all its slots.

Each episode has its own URL and key, which become invalid when it ends. The server offers OpenAI's
``/v1/chat/completions`` and ``/v1/responses`` and Anthropic's ``/v1/messages``, all with ``stream`` too. ``/v1/tools``
lists and calls the tools of the episode's world, if any. A client that plays several episodes may use one URL for all
of them, and name the episode as the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from draco_ray.environments.program import unix_server
from draco_ray.rollout.endpoint import anthropic_messages, chat_completions, responses
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.fields import finite, replace_surrogates
from draco_ray.rollout.endpoint.turns import Conversations, Json, Refused, TurnReply, TurnRequest
from draco_ray.temp_dirs import PrivateTempDir

HOST = "127.0.0.1"
MOST_BYTES = 16 << 20
"""Maximum size of a request, in bytes."""
_REMEMBERED = 10_000
"""Number of ended episodes to remember, so that late requests to them are answered with 410."""
AnswerT = TypeVar("AnswerT")


class _Dialect(Protocol):
    """An API through which agents request turns; each is implemented by a module."""

    def read(self, body: Any, stored: Conversations) -> TurnRequest:
        """Convert the parsed body of a request. Raises: Refused."""

    def reply(self, request: TurnRequest, turn: TurnReply) -> Json:
        """The body of the response."""

    def events(self, request: TurnRequest, whole: Json) -> Iterator[Json | str]:
        """The answer ``whole``, made by `reply`, as the data of server-sent events."""

    def error(self, refused: Refused) -> Json:
        """The body of the response to a refused request."""


_DIALECTS: dict[str, _Dialect] = {
    "chat/completions": chat_completions,
    "responses": responses,
    "messages": anthropic_messages,
}


_PREFIXES = ("/{episode}", "")
"""Prefixes of URL paths; if the path names no episode, the request's ``model`` does."""


class Endpoint:
    """The server. It runs in the event loop that starts it."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._base = ""
        self._folder: PrivateTempDir | None = None

    @asynccontextmanager
    async def serving(self, episode: Episode) -> AsyncIterator[str]:
        """Serve an episode while the block runs.

        Yields: its base URL.
        """
        await self._start()
        self._episodes[episode.name] = episode
        try:
            yield f"{self._base}/{episode.name}/v1"
        finally:
            episode.open = False
            del self._episodes[episode.name]
            self._ended.append(episode.name)
            if episode.tools is not None:
                await episode.tools.close()

    @property
    def shared_url(self) -> str:
        """The running server's base URL for clients that name their episode as the model (`Episode.model`)."""
        return f"{self._base}/v1"

    @property
    def socket_path(self) -> str:
        """Path of a Unix socket on which the running server also listens, for programs that have no network."""
        assert self._folder is not None
        return str(self._folder.path / "socket")

    async def stop(self) -> None:
        """End the server. Safe to call again."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self._server = self._serving = None
        if self._folder is not None:
            self._folder.remove()

    async def _start(self) -> None:
        async with self._starting:
            if self._serving is not None and not self._serving.done():
                return
            self._folder = PrivateTempDir()
            # The folder is private, but jails map the socket for programs of other users, so any user may connect.
            listening = [socket.create_server((HOST, 0), backlog=1024), unix_server(Path(self.socket_path))]
            self._base = f"http://{HOST}:{listening[0].getsockname()[1]}"
            routes = [
                Route(path, functools.partial(self._answer, handle), methods=methods)
                for path, handle, methods in (
                    *((f"{of}/v1/{dialect}", self._turn, ["POST"]) for of in _PREFIXES for dialect in _DIALECTS),
                    *((f"{of}/v1/messages/count_tokens", self._count, ["POST"]) for of in _PREFIXES),
                    ("/{episode}/v1/models", self._models, ["GET"]),
                    ("/{episode}/v1/tools", self._world_tools, ["GET", "POST"]),
                )
            ]
            app = Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})
            config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=3600)
            self._server = _Server(config)
            self._serving = asyncio.create_task(self._server.serve(sockets=listening))

    async def _answer(self, handle: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        """The answer of ``handle``, or an error in the request's dialect; the episode stores the error's reason."""
        try:
            return await handle(request)
        except Refused as error:
            refused = error
            self._note(request, str(refused))
        except _Disconnected:
            self._note(request, "it did not wait for one")
            return Response(status_code=499)
        except RecursionError:
            refused = Refused("the request is nested too deeply")
        except Exception as error:
            # The episode fails with this error, whatever the agent does next.
            said = " ".join(str(error).split())[:300]
            refused = Refused(f"the policy cannot be asked: {type(error).__name__}: {said}", 500, "server_error")
        return _refusal(refused, _dialect(request))

    def _note(self, request: Request, why: str) -> None:
        """Note in the episode why a request for a turn got no answer."""
        episode = self._episodes.get(request.path_params.get("episode", ""))
        if episode is not None and _path(request) in _DIALECTS:
            episode.complaint = why

    async def _turn(self, request: Request) -> Response:
        dialect = _dialect(request)
        episode, asked = await self._asked(request)
        answer = await _sampled(request, episode.answer(asked))
        whole = dialect.reply(asked, answer)
        if asked.conversation:
            episode.stored[whole["id"]] = (*asked.conversation, answer.message())
        if asked.stream:
            return StreamingResponse(map(_server_sent, dialect.events(asked, whole)), media_type="text/event-stream")
        return JSONResponse(whole)

    async def _count(self, request: Request) -> Response:
        episode, asked = await self._asked(request)
        return JSONResponse({"input_tokens": episode.count(asked)})

    async def _asked(self, request: Request) -> tuple[Episode, TurnRequest]:
        """The episode that a request names, and the parsed request. Raises: Refused."""
        content = await _content(request)
        # Parse in a thread: a long conversation takes a while, and must not block other episodes' requests.
        body = await asyncio.to_thread(_parsed, content)
        episode = self._episode(request, body)
        asked = await asyncio.to_thread(_dialect(request).read, body, episode.stored)
        if "episode" in request.path_params:
            return episode, asked
        return episode, replace(asked, session=request.headers.get("x-session-id", ""))

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "draco-ray"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _world_tools(self, request: Request) -> Response:
        tools = self._episode(request).tools
        if tools is None:
            raise Refused("the world of this episode has no tools", 404, "not_found")
        if request.method != "POST":
            return JSONResponse({"tools": tools.schemas})
        return JSONResponse({"result": await tools.call(_parsed(await _content(request)))})

    def _episode(self, request: Request, body: Any = None) -> Episode:
        """The episode that a request names by its URL and key, or by its model. Raises: Refused."""
        if "episode" in request.path_params:
            missing = "no such episode; expected the base URL from OPENAI_BASE_URL"
            name = request.path_params["episode"]
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                key = request.headers.get("x-api-key", "")
        else:
            missing = "model: names no episode"
            name, _, key = str(body.get("model") if isinstance(body, dict) else "").partition(".")
        episode = self._episodes.get(name)
        if episode is None and name in self._ended:
            raise Refused("this episode has ended", 410, "episode_over")
        if episode is None:
            raise Refused(missing, 404, "not_found")
        if not hmac.compare_digest(key.encode(), episode.key.encode()):
            raise Refused("wrong key; expected this episode's key from OPENAI_API_KEY", 401, "invalid_api_key")
        return episode


@functools.cache
def _endpoint_of(loop: asyncio.AbstractEventLoop) -> Endpoint:
    return Endpoint()


def shared_endpoint() -> Endpoint:
    """The server that all agents of this process share."""
    return _endpoint_of(asyncio.get_running_loop())


class _Server(uvicorn.Server):
    """A server that does not install signal handlers; its process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Disconnected(Exception):
    """The client has closed the connection before the answer."""


async def _sampled(request: Request, turn: Coroutine[Any, Any, AnswerT]) -> AnswerT:
    """The policy's turn, cancelled if the client disconnects.

    Raises: _Disconnected, Refused, and what the policy raises.
    """
    sampling = asyncio.create_task(turn)
    closing = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({sampling, closing}, return_when=asyncio.FIRST_COMPLETED)
        if not sampling.done():
            raise _Disconnected
        return sampling.result()
    finally:
        for task in (sampling, closing):
            task.cancel()
        await asyncio.gather(sampling, closing, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _content(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
            raise Refused(f"the request is larger than {MOST_BYTES >> 20} MiB", 413, "too_large")
    return bytes(content)


def _parsed(content: bytes) -> Any:
    try:
        return replace_surrogates(json.loads(content, parse_float=finite, parse_constant=finite))
    except ValueError as error:
        raise Refused(f"the request is not JSON: {' '.join(str(error).split())[:200]}") from None


def _server_sent(event: Json | str) -> str:
    if isinstance(event, str):
        return f"data: {event}\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


async def _unknown(request: Request, error: Exception) -> Response:
    served = f"{', '.join(f'POST /v1/{path}' for path in _DIALECTS)}, GET /v1/models"
    return _refusal(
        Refused(f"{request.method} {request.url.path}: not served here; expected {served}", 404, "not_found")
    )


def _path(request: Request) -> str:
    return request.url.path.partition("/v1/")[2]


def _dialect(request: Request) -> _Dialect:
    """The dialect of a request's path; chat completions if the path belongs to none."""
    return _DIALECTS.get(_path(request).removesuffix("/count_tokens"), chat_completions)


def _refusal(refused: Refused, dialect: _Dialect = chat_completions) -> Response:
    body = dialect.error(refused)
    # A retry would get the same answer, so tell clients not to retry.
    return JSONResponse(body, status_code=refused.status, headers={"x-should-retry": "false"})
