"""Tools of MCP servers: one session per rollout, with a command in the jail or a URL."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.tools.options import ToolsOptions
from draco_ray.environments.tools.process import CommandProcess
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.extras import require_package

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 20.0
"""Time after which a session that does not end is abandoned. The client ends a command within 7 seconds and must not be
cancelled meanwhile; for a server with a URL the client would wait for ever."""
_CONNECTION_CLOSED, _TIMED_OUT, _BAD_ARGUMENTS, _UNREADABLE = -32000, -32001, -32602, -32700
_ANSWERS = ("application/json", "text/event-stream")
"""Content types of answers in the protocol."""


class McpSession:
    """A session with one server.

    The client has its own asyncio task, because it must be closed in the task that opened it.
    """

    def __init__(
        self,
        name: str,
        tools: ToolsOptions,
        config: EnvironmentConfig,
        secrets: Mapping[str, str],
        processes: dict[str, CommandProcess],
    ) -> None:
        """``tools``: the options, whose ``mcp`` has the server ``name``; ``processes``: server name -> the process that
        starts its command, which later sessions use too. The caller ends these processes."""
        self.name = name
        self._options = tools.mcp[name]
        self._tools = tools
        self._config = config
        self._secrets = secrets
        self._processes = processes
        self._jobs: asyncio.Queue[tuple[str, Mapping[str, Any], asyncio.Future[str]] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._lost: str | None = None
        self._refused: str | None = None
        """Description of the last HTTP answer if it did not follow the protocol."""

    async def start(self) -> list[dict[str, Any]]:
        """Begin the session.

        Returns: the schemas of the offered tools in OpenAI's format.
        Raises: EnvironmentCrashed: the server does not start, or lacks a tool that should be offered.
        """
        require_package("mcp")
        _read_half_characters()
        # The client logs a traceback for every line a server prints outside the protocol.
        for client in ("stdio", "streamable_http"):
            logging.getLogger(f"mcp.client.{client}").setLevel(logging.CRITICAL)
        ready: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._live(ready))
        try:
            async with asyncio.timeout(self._config.start_timeout_seconds):
                return self._offered(await asyncio.shield(ready))
        except TimeoutError:
            ready.cancel()
            self._task.cancel()
            await asyncio.wait({self._task})
            seconds = self._config.start_timeout_seconds
            raise EnvironmentCrashed(f"MCP server {self.name} was not ready within {seconds:g} s") from None

    def _offered(self, schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        wanted, there = self._options.tools, [schema["function"]["name"] for schema in schemas]
        if missing := [name for name in wanted if name not in there]:
            raise EnvironmentCrashed(
                f"MCP server {self.name} has no tool {', '.join(missing)}; expected one of {', '.join(there)}"
            )
        return [schema for schema in schemas if not wanted or schema["function"]["name"] in wanted]

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool as the policy sees it, or an error.

        Raises: EnvironmentCrashed: the server is lost.
        """
        if self._lost is not None:
            raise EnvironmentCrashed(self._lost)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait((tool, arguments, answer))
        return await answer

    async def stop(self) -> None:
        """End the session and the command."""
        if self._task is None:
            return
        self._jobs.put_nowait(None)
        done, _ = await asyncio.wait({self._task}, timeout=FAREWELL_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=FAREWELL_SECONDS)
        self._task = None

    async def _live(self, ready: asyncio.Future[list[dict[str, Any]]]) -> None:
        from mcp import Client

        waiting: asyncio.Future[Any] = ready
        try:
            async with self._transport() as transport, Client(transport) as client:
                ready.set_result(await self._listed(client))
                while (job := await self._jobs.get()) is not None:
                    tool, arguments, waiting = job
                    waiting.set_result(await self._answer(client, tool, arguments))
        except BaseException as error:
            self._lost = f"MCP server {self.name} was lost: {self._refused or _reason(error)}"
            crash = EnvironmentCrashed(self._lost)
            if not waiting.done():
                waiting.set_exception(crash)
            while not self._jobs.empty():
                if (job := self._jobs.get_nowait()) is not None:
                    job[2].set_exception(crash)
            if isinstance(error, asyncio.CancelledError):
                raise
            log.debug("%s", self._lost)

    async def _listed(self, client: Any) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        cursor, seen = None, set[str]()
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += map(_schema, page.tools)
            cursor = page.next_cursor
            if not cursor:
                return tools
            if cursor in seen:
                raise ValueError(
                    f"tools/list: the server sent the cursor {cursor[:100]!r} twice, so its pages would never end"
                )
            seen.add(cursor)

    async def _answer(self, client: Any, tool: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError

        seconds = self._config.cell_timeout_seconds
        try:
            result = await client.call_tool(tool, json.loads(_whole(arguments)), read_timeout_seconds=seconds)
        except MCPError as error:
            code = error.error.code
            # The policy can correct invalid arguments; a lost connection or a protocol error ends the session.
            if code in (_CONNECTION_CLOSED, _UNREADABLE) or (self._refused is not None and code != _BAD_ARGUMENTS):
                raise
            said = f"stopped after {seconds:g} s without an answer" if code == _TIMED_OUT else str(error)
            return f"error: {tool}: {' '.join(said.split())[:500]}"
        except (RuntimeError, ValueError) as error:
            # The server answered with something invalid, but the session continues.
            return f"error: {tool}: its answer cannot be read: {' '.join(str(error).split())[:500]}"
        text = "\n".join(map(_text, result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return f"error: {tool}: {text}" if result.is_error else text

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        from mcp.client.streamable_http import streamable_http_client

        if self._options.url is not None:
            import httpx2

            headers = {name: _filled(value, self._secrets) for name, value in self._options.headers.items()}
            hooks: dict[str, list[Callable[..., Any]]] = {"request": [self._look_away], "response": [self._look_at]}
            async with httpx2.AsyncClient(
                headers=headers, follow_redirects=True, timeout=None, event_hooks=hooks
            ) as http:
                yield streamable_http_client(self._options.url, http_client=http)
            return
        process = self._processes.get(self.name)
        if process is None or not process.alive:
            process = await CommandProcess.start(self._options, self._tools, self._config, self._secrets)
            self._processes[self.name] = process
        try:
            await process.fork()
            yield _lines(process.channel)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EnvironmentCrashed(f"{_reason(error)}; its last output: {process.complaint}") from error
        finally:
            with contextlib.suppress(EnvironmentCrashed):
                await process.end()
            if not process.alive:
                del self._processes[self.name]
                await process.kill()

    async def _look_away(self, request: Any) -> None:
        """Forget the last HTTP answer before a new request: later errors have another cause."""
        if _asks(request):
            self._refused = None

    async def _look_at(self, response: Any) -> None:
        """Remember an answer that does not follow the protocol; the client reports little about it."""
        if not _asks(response.request):
            return
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not response.is_success:
            self._refused = (
                f"the server answered with HTTP status {response.status_code} {response.reason_phrase}".rstrip()
            )
        elif response.status_code == 200 and kind not in _ANSWERS:
            self._refused = f"the server answered with {kind or 'no content type'}, expected {' or '.join(_ANSWERS)}"


@contextlib.asynccontextmanager
async def _lines(channel: socket.socket) -> AsyncIterator[tuple[Any, Any]]:
    """Transport to a process whose standard input and output are the other end of ``channel``: one message per line."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter as adapter

    reader, writer = await asyncio.open_connection(sock=channel)
    received, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, sent = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        rest = b""
        async with received:
            while part := await reader.read(1 << 16):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    try:
                        message = adapter.validate_json(line.decode("utf-8", "replace"), by_name=False)
                        await received.send(SessionMessage(message))
                    except ValueError as error:
                        await received.send(error)

    async def write() -> None:
        async for each in sent:
            writer.write(_line(each.message.model_dump_json(by_alias=True, exclude_unset=True)))
            await writer.drain()

    tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (received, incoming, outgoing, sent):
            stream.close()
        writer.transport.abort()


def _line(text: str) -> bytes:
    return text.encode("utf-8", "replace") + b"\n"


def _whole(value: Any) -> bytes:
    """``value`` as JSON without lone surrogates, which truncation may leave in a text and which cannot be sent."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


@functools.cache
def _read_half_characters() -> None:
    """Make the client accept messages with lone surrogates, which pydantic's parser refuses.

    The package ``mcp`` has no hook before that parser.
    """
    from mcp_types import jsonrpc_message_adapter as adapter
    from pydantic import ValidationError

    strict = adapter.validate_json

    def lenient(data: str | bytes, **how: Any) -> Any:
        try:
            return strict(data, **how)
        except ValidationError:
            with contextlib.suppress(ValueError, RecursionError):
                return strict(_whole(json.loads(data)), **how)
            raise

    adapter.validate_json = lenient  # type: ignore[method-assign, assignment]


def _asks(request: Any) -> bool:
    """Whether a request requires an answer; streams, notifications and the end of a session do not."""
    return request.method == "POST" and "id" in json.loads(request.content)


def _filled(template: str, secrets: Mapping[str, str]) -> str:
    for name, value in secrets.items():
        template = template.replace(f"{{{name}}}", value)
    return template


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _text(part: Any) -> str:
    """A part of a result as text; for content that is not text, its type and name."""
    if part.type == "text":
        return str(part.text)
    told = part.resource if part.type == "resource" else part
    if getattr(told, "text", None) is not None:
        return str(told.text)
    return f"[{part.type}: {getattr(told, 'mime_type', None) or getattr(told, 'uri', None) or 'no text'}]"


def _reason(error: BaseException) -> str:
    """An error as one line; of an exception group, its first cause."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EnvironmentCrashed):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def merge_tool_schemas(
    functions: list[dict[str, Any]], servers: Mapping[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The schemas of functions and servers. Raises: ConfigError: two tools have the same name."""
    owner = {each["function"]["name"]: "environment.options.tools" for each in functions}
    together = list(functions)
    for server, schemas in servers.items():
        for schema in schemas:
            name = schema["function"]["name"]
            if name in owner:
                raise ConfigError(
                    f"tool {name} exists twice, in {owner[name]} and in MCP server {server}; list the tools to offer "
                    f"in environment.options.mcp.{server}.tools"
                )
            owner[name] = f"MCP server {server}"
            together.append(schema)
    return together
