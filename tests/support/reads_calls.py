"""Tool calls read in the test's process, by the reader that engines use in theirs."""

from __future__ import annotations

from functools import cache

from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.tool_calls import ToolCallReader, ToolUse


class ReadsCalls:
    """Makes a stand-in for a sampler read calls as a policy engine does."""

    chat: ChatTokens

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ToolUse | None:
        reader = _reader(self.chat, parser)
        return reader.read(text, tools, thinking=reader.opens_thinking)


@cache
def _reader(chat: ChatTokens, parser: str | None) -> ToolCallReader:
    return ToolCallReader(chat, parser)
