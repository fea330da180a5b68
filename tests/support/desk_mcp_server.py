"""An MCP server whose tools misbehave, over standard input and output, or over HTTP on a given port."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server import MCPServer

server = MCPServer("desk")
notes: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Write a note."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def leak() -> str:
    """Tell the key."""
    return f"the key is {os.environ.get('DESK_KEY')}"


@server.tool()
def reach(path: str) -> str:
    """Read a file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        return str(error)


@server.tool()
def long() -> str:
    """Return a lot."""
    return "x" * 5100


@server.tool()
def fail() -> str:
    """Fail."""
    raise LookupError("no such\norder")


@server.tool()
async def slow() -> str:
    """Take long."""
    await asyncio.sleep(600)
    return "late"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
