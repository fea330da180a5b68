"""A stand-in for an MCP server over HTTP, in this process, that answers one method as bad servers and proxies do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

DROP = b""
"""The connection is closed without an answer."""


def reply(content: bytes, status: int = 200, kind: str = "application/json", headers: str = "") -> bytes:
    """An HTTP response."""
    head = f"HTTP/1.1 {status} Odd\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


def error(code: int, message: str, status: int) -> bytes:
    """A JSON-RPC error with its own HTTP status, and so without an id."""
    return reply(
        json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}).encode(), status
    )


def result(asked: Any, result: Any) -> bytes:
    """A valid answer of the protocol."""
    return reply(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode())


@contextlib.asynccontextmanager
async def serving(method: str, odd: bytes | Callable[[Any], bytes] | None) -> AsyncIterator[str]:
    """The URL of a server with one tool, ``note``; ``odd`` is its answer to ``method``, or makes the answer from the
    request; None: it never answers.

    ``method``: a method of the protocol, or the HTTP method in lower case for requests without one.
    """

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
                asked = json.loads(await reader.readexactly(length) if length else b"{}")
                asked_oddly = asked.get("method", head.split()[0]) == method
                answer = (odd(asked) if callable(odd) else odd) if asked_oddly else _answer(asked)
                if answer is None:
                    continue
                writer.write(answer)
                await writer.drain()
                if answer == DROP:
                    break
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()


def _answer(asked: dict[str, Any]) -> bytes:
    results: dict[str, Any] = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "desk", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "note", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": "written"}]},
    }
    if asked.get("method") in results:
        result = {"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]}
        return reply(json.dumps(result).encode(), headers="mcp-session-id: one\r\n")
    # No stream from the server, and nothing newer than the protocol of 2025.
    return reply(b"", 405) if "id" in asked or not asked else reply(b"", 202)
