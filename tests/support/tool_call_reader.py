"""Tool calls read in the test's process, by the reader that engines use in theirs."""

from __future__ import annotations

from functools import cache

from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.tool_calls import ParsedToolCalls, ToolCallReader


class ToolCallReaderMixin:
    """Makes a stand-in for a sampler read calls as a policy engine does."""

    chat: ChatTokenizer

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ParsedToolCalls | None:
        reader = _reader(self.chat, parser)
        return reader.read(text, tools, thinking=reader.opens_thinking)


@cache
def _reader(chat: ChatTokenizer, parser: str | None) -> ToolCallReader:
    return ToolCallReader(chat, parser)
