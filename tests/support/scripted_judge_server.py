"""A real HTTP server for OpenAI chat completions with scripted replies: late, rate-limited, malformed or normal."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response


@dataclass(frozen=True)
class Reply:
    """One scripted answer."""

    text: str | None = "OK"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    finish_reason: str = "stop"
    delay: float = 0.0
    """Delay of the reply, in seconds."""
    raw: str | None = None
    """Body to send instead of a chat completion."""
    error_code: str = "scripted"
    input_tokens: int = 100
    cached_tokens: int = 0
    output_tokens: int = 10
    message: dict[str, Any] = field(default_factory=dict)
    """Additional fields of the message: a refusal, tool calls, reasoning."""
    usage: dict[str, Any] | None = None
    """Usage to report instead of these counts; if empty, the reply reports no usage."""


class ScriptedJudgeServer:
    """Answers requests with the replies of a script, in order; the last one repeats. Use as a context manager."""

    def __init__(self, *script: Reply, answer: Callable[[str], str | Reply] | None = None) -> None:
        """
        Args:
            script: the replies, in order.
            answer: makes the text of a reply, or the whole reply, from the first message instead.
        """
        self.answer = answer
        self.script = list(script) or [Reply()]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.asked = threading.Event()
        """Event that the first request sets."""
        self.fails_on: str | None = None
        """Prompts that contain this text are answered with status 500, independently of the script."""
        self.held = threading.Event()
        """While this event is set, no reply is sent."""
        self.in_flight = 0
        self.most_in_flight = 0
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        app = FastAPI()
        app.post("/v1/chat/completions")(self._answer)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    async def answer_together(self, number: int) -> None:
        """End a hold once there are this many requests in flight."""
        while self.in_flight < number:  # noqa: ASYNC110 (counted by another thread)
            await asyncio.sleep(0.01)
        self.held.clear()

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        reply = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(body)
        self.asked.set()
        self.keys.append(request.headers.get("authorization", ""))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.fails_on is not None and self.fails_on in str(body["messages"]):
            reply = Reply("broken inside", 500)
        await asyncio.sleep(reply.delay)
        while self.held.is_set():  # noqa: ASYNC110 (cleared by another thread)
            await asyncio.sleep(0.01)
        self.in_flight -= 1
        if self.answer is not None and reply.status == 200:
            said = self.answer(body["messages"][0]["content"])
            reply = replace(reply, text=said) if isinstance(said, str) else said
        if reply.raw is not None:
            return Response(reply.raw, reply.status, reply.headers)
        if reply.status != 200:
            error = {"message": reply.text, "type": reply.error_code, "code": reply.error_code}
            return JSONResponse({"error": error}, reply.status, reply.headers)
        choice = {
            "index": 0,
            "finish_reason": reply.finish_reason,
            "message": {"role": "assistant", "content": reply.text, **reply.message},
        }
        usage = {
            "prompt_tokens": reply.input_tokens,
            "completion_tokens": reply.output_tokens,
            "total_tokens": reply.input_tokens + reply.output_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        }
        if reply.usage is not None:
            usage = reply.usage
        completion = {
            "id": f"scripted-{len(self.requests)}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
        }
        if usage:
            completion["usage"] = usage
        return JSONResponse(completion, 200, reply.headers)
