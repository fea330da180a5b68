"""The endpoint of a rollout worker: one HTTP server on loopback for the episodes of all its slots.

Each episode has its own URL and key, which become invalid when it ends. The server offers OpenAI's
``/v1/chat/completions`` and ``/v1/responses`` and Anthropic's ``/v1/messages``, all with ``stream`` too, and vLLM's
``/inference/v1/generate`` for clients that tokenize messages themselves. ``/v1/tools`` lists and calls the tools of the
episode's world, if any.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from draco_ray.config.schema import AgentConfig
from draco_ray.environments.base import World
from draco_ray.environments.program import unix_server
from draco_ray.errors import EnvironmentCrashed
from draco_ray.rollout.code_block import cut_output
from draco_ray.rollout.endpoint import anthropic_messages, chat_completions, generate, responses
from draco_ray.rollout.endpoint.asking import AskingEpisode
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.fields import clean, finite
from draco_ray.rollout.endpoint.token_episode import TokenEpisode
from draco_ray.rollout.endpoint.turns import Conversations, Json, Refused, TurnReply, TurnRequest
from draco_ray.temp_dirs import PrivateTempDir


class WorldTools:
    """Executes calls one at a time in a world whose task lists tools (`draco_ray.records.Task.tools`)."""

    def __init__(self, world: World, config: AgentConfig) -> None:
        self.schemas: list[Any] = json.loads(world.task.tools)
        """The tools' schemas, in the format of chat completions."""
        self.crash: EnvironmentCrashed | None = None
        """The error that lost the world, if any."""
        self._world, self._config = world, config
        self._turn, self._open = asyncio.Lock(), True

    async def call(self, body: Any) -> str:
        """Make the call ``{"name": ..., "arguments": {...}}``.

        Returns: the result.
        Raises: Refused.
        """
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            raise Refused('expected {"name": "...", "arguments": {...}}')
        arguments = body.get("arguments") or {}
        if not isinstance(arguments, dict):
            raise Refused("arguments: expected an object")
        async with self._turn:
            if not self._open:
                raise Refused("this episode has ended", 410, "episode_over")
            if self.crash is None:
                try:
                    answer = await self._world.act(json.dumps({"name": body["name"], "arguments": arguments}))
                    return cut_output(answer, self._config.max_output_characters)
                except EnvironmentCrashed as crash:
                    self.crash = crash
        raise Refused(f"the world is lost: {' '.join(str(self.crash).split())}", 500, "world_lost")

    async def close(self) -> None:
        """Wait for the call in progress and refuse later ones."""
        async with self._turn:
            self._open = False


HOST = "127.0.0.1"
MOST_BYTES = 16 << 20
"""Maximum size of a request."""
_REMEMBERED = 10_000
"""Number of ended episodes to remember, so that late requests to them are answered with 410."""
AnswerT = TypeVar("AnswerT")
EpisodeT = TypeVar("EpisodeT", bound=AskingEpisode)


class _Dialect(Protocol):
    """An API through which agents request turns; each is implemented by a module."""

    def read(self, body: Any, stored: Conversations) -> TurnRequest:
        """The request of a parsed body."""

    def reply(self, request: TurnRequest, turn: TurnReply) -> Json:
        """The body of the answer."""

    def events(self, request: TurnRequest, whole: Json) -> Iterator[Json | str]:
        """The answer ``whole``, made by `reply`, as the data of server-sent events."""

    def error(self, refused: Refused) -> Json:
        """The body of a refusal."""


_DIALECTS: dict[str, _Dialect] = {
    "chat/completions": chat_completions,
    "responses": responses,
    "messages": anthropic_messages,
}


class Endpoint:
    """The server. It runs in the event loop that starts it."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._tools: dict[str, WorldTools] = {}
        self._token_episodes: dict[str, TokenEpisode] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._base = ""
        self._folder: PrivateTempDir | None = None

    @asynccontextmanager
    async def serving(self, episode: Episode, tools: WorldTools | None = None) -> AsyncIterator[str]:
        """Serve an episode while the block runs. Yields: its base URL."""
        name = secrets.token_hex(8)
        if tools is not None:
            self._tools[name] = tools
        try:
            async with self._registered(self._episodes, name, episode):
                yield f"{self._base}/{name}/v1"
        finally:
            self._tools.pop(name, None)
            if tools is not None:
                await tools.close()

    @asynccontextmanager
    async def serving_tokens(self, episode: TokenEpisode) -> AsyncIterator[str]:
        """Serve an episode of a client that tokenizes messages itself while the block runs.

        The model name in its requests, `TokenEpisode.key`, identifies the episode, because such clients share one
        connection per URL and API key.

        Yields: the base URL, the same for all episodes.
        """
        async with self._registered(self._token_episodes, episode.key, episode):
            yield f"{self._base}/v1"

    @asynccontextmanager
    async def _registered(self, episodes: dict[str, EpisodeT], name: str, episode: EpisodeT) -> AsyncIterator[None]:
        await self._start()
        episodes[name] = episode
        try:
            yield
        finally:
            episode.open = False
            del episodes[name]
            self._ended[name] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

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
            # The socket's folder is private, but jails map the socket, and their programs may run as another user.
            listening = [socket.create_server((HOST, 0), backlog=1024), unix_server(Path(self.socket_path))]
            self._base = f"http://{HOST}:{listening[0].getsockname()[1]}"
            routes = [
                *(
                    Route(f"/{{episode}}/v1/{path}", functools.partial(self._turn, dialect), methods=["POST"])
                    for path, dialect in _DIALECTS.items()
                ),
                Route("/{episode}/v1/messages/count_tokens", self._count, methods=["POST"]),
                Route("/{episode}/v1/models", self._models, methods=["GET"]),
                Route("/{episode}/v1/tools", self._world_tools, methods=["GET", "POST"]),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
            ]
            app = Starlette(routes=routes, exception_handlers={404: _unknown, 405: _unknown})
            config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=3600)
            self._server = _Server(config)
            self._serving = asyncio.create_task(self._server.serve(sockets=listening))

    async def _turn(self, dialect: _Dialect, request: Request) -> Response:
        async def reply() -> Response:
            episode = self._episode(request)
            content = await _content(request)
            # Parse in a thread: a long conversation takes a while, and must not block other episodes' requests.
            asked = await asyncio.to_thread(lambda: dialect.read(_parsed(content), episode.stored))
            answer = await _sampled(request, episode.answer(asked))
            whole = dialect.reply(asked, answer)
            if asked.conversation:
                episode.stored[whole["id"]] = (*asked.conversation, answer.message())
            if asked.stream:
                events = map(_server_sent, dialect.events(asked, whole))
                return StreamingResponse(events, media_type="text/event-stream")
            return JSONResponse(whole)

        return await self._guarded(reply, request, dialect)

    async def _count(self, request: Request) -> Response:
        async def reply() -> Response:
            episode = self._episode(request)
            content = await _content(request)
            asked = await asyncio.to_thread(lambda: anthropic_messages.read(_parsed(content), {}))
            return JSONResponse({"input_tokens": episode.count(asked)})

        return await self._guarded(reply, None, anthropic_messages)

    async def _world_tools(self, request: Request) -> Response:
        async def reply() -> Response:
            self._episode(request)
            tools = self._tools.get(request.path_params["episode"])
            if tools is None:
                raise Refused("the world of this episode has no tools", 404, "not_found")
            if request.method != "POST":
                return JSONResponse({"tools": tools.schemas})
            return JSONResponse({"result": await tools.call(_parsed(await _content(request)))})

        return await self._guarded(reply)

    async def _generate(self, request: Request) -> Response:
        async def reply() -> Response:
            body = await asyncio.to_thread(_parsed, await _content(request))
            key = str(body.get("model") if isinstance(body, dict) else None)
            episode = self._found(self._token_episodes, key, "model: names no episode")
            asked = generate.read(body)
            return JSONResponse(generate.reply(asked, await _sampled(request, episode.generate(asked))))

        return await self._guarded(reply)

    async def _models(self, request: Request) -> Response:
        async def reply() -> Response:
            self._episode(request)
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "draco-ray"}
            return JSONResponse({"object": "list", "data": [model]})

        return await self._guarded(reply)

    async def _guarded(
        self, reply: Callable[[], Awaitable[Response]], turn_of: Request | None = None, dialect: _Dialect | None = None
    ) -> Response:
        """The answer of ``reply``, or an error in the form of ``dialect``; the episode stores the error's reason."""
        try:
            return await reply()
        except Refused as error:
            refused = error
            self._note(turn_of, str(refused))
        except _Disconnected:
            self._note(turn_of, "it did not wait for one")
            return Response(status_code=499)
        except RecursionError:
            refused = Refused("the request is nested too deeply")
        except Exception as error:
            # The episode fails with this error, whatever the agent does next.
            said = " ".join(str(error).split())[:300]
            refused = Refused(f"the policy cannot be asked: {type(error).__name__}: {said}", 500, "server_error")
        return _refusal(refused, dialect)

    def _note(self, request: Request | None, why: str) -> None:
        """Note in the episode why a request got no answer."""
        if request is not None and (episode := self._episodes.get(request.path_params["episode"])) is not None:
            episode.complaint = why

    def _episode(self, request: Request) -> Episode:
        missing = "no such episode; expected the base URL as OPENAI_BASE_URL has it"
        episode = self._found(self._episodes, request.path_params["episode"], missing)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        if not hmac.compare_digest(key.encode(), episode.key.encode()):
            raise Refused("wrong key; expected this episode's, as OPENAI_API_KEY has it", 401, "invalid_api_key")
        return episode

    def _found(self, episodes: Mapping[str, EpisodeT], name: str, missing: str) -> EpisodeT:
        if name in self._ended:
            raise Refused("this episode has ended", 410, "episode_over")
        if name not in episodes:
            raise Refused(missing, 404, "not_found")
        return episodes[name]


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
        return clean(json.loads(content, parse_float=finite, parse_constant=finite))
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


def _refusal(refused: Refused, dialect: _Dialect | None = None) -> Response:
    body = (dialect or chat_completions).error(refused)
    # A retry would get the same answer, so tell clients not to retry.
    return JSONResponse(body, status_code=refused.status, headers={"x-should-retry": "false"})
