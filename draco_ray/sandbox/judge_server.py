"""The rule judge behind OpenAI's chat-completions protocol: a real HTTP server, on this machine only.

If configured so, it is as slow as a provider, and makes a judge's errors. `serve` runs it in this process;
`JudgeServer` runs it as a child process for the duration of a ``with`` block.

=========================  =====================================================
POST /v1/chat/completions  one reply; 404 for another model
GET /stats                 requests by phase and by outcome, and how many wait
=========================  =====================================================

Token numbers are estimates (four characters a token). Cached tokens follow the rule that providers publish: the longest
prefix seen before, in blocks of 128 tokens, from 1024 tokens on.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draco_ray.errors import JudgeUnavailable
from draco_ray.registry import find_component
from draco_ray.sandbox.rule_judge.noise import ANSWER_FUNCTIONS, Noise
from draco_ray.sandbox.rule_judge.reading import format_reply

MODEL_NAME = "rule-judge"
HOST = "127.0.0.1"
CHARACTERS_PER_TOKEN = 4
CACHE_BLOCK = 128
LEAST_CACHED = 1024
CACHED_BLOCKS = 200_000
START_SECONDS = 180.0
STOP_SECONDS = 5.0


class JudgeServerOptions(BaseModel):
    """Behaviour of the server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: str = "sandbox"
    """What answers a prompt: ``sandbox`` for the sandbox's rules, or your own function as package.module:function or
    folder/file.py:function. `draco_ray.sandbox.rule_judge.simple.rule_judge` makes such functions."""
    latency: float = Field(0.0, ge=0)
    """Seconds per reply; many requests may wait at once."""
    noise: Noise = Noise()
    """Errors in well-formed replies."""
    answered: Path | None = None
    """File for the digests of answered requests, so that a server that replaces a killed one still counts repeats."""


class _Completion(BaseModel):
    """The fields of a request that the server reads."""

    class _Message(BaseModel):
        role: str
        content: str | list[dict[str, Any]] | None = None

        @property
        def text(self) -> str:
            if isinstance(self.content, list):
                return "".join(str(part.get("text", "")) for part in self.content)
            return self.content or ""

    model: str
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    response_format: dict[str, Any] | None = Field(None, exclude=True)


class JudgeApp:
    """The HTTP protocol, the delays and the configured errors; the function in ``use`` does the judging."""

    def __init__(self, behaviour: JudgeServerOptions) -> None:
        """Load the function that judges. Raises: ConfigError: ``use`` names no function."""
        self._behaviour = behaviour
        self._answer = behaviour.noise.blur(find_component("judge.rule_judge.use", behaviour.use, ANSWER_FUNCTIONS))
        self._requests = 0
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._phases: Counter[str] = Counter()
        self._book = behaviour.answered
        known = self._book.read_text(encoding="ascii").split() if self._book and self._book.exists() else ()
        self._answered = set(known)
        self._repeated = len(known) - len(self._answered)
        self._outcomes: Counter[str] = Counter()
        self._in_flight = 0
        self._most_in_flight = 0
        self.asgi = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/stats", self._stats),
            ]
        )

    async def _stats(self, request: Request) -> Response:
        return JSONResponse(
            {
                "requests": self._requests,
                "phases": dict(self._phases),
                "outcomes": dict(self._outcomes),
                "repeated": self._repeated,
                "in_flight": self._in_flight,
                "most_in_flight": self._most_in_flight,
            }
        )

    async def _complete(self, request: Request) -> Response:
        self._requests += 1
        number = self._requests
        try:
            asked = _Completion.model_validate_json(await request.body())
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            return self._refuse(400, "invalid_request_error", f"{where or 'body'}: {problem['msg']}")
        if asked.model != MODEL_NAME:
            return self._refuse(404, "model_not_found", f"no model {asked.model!r} here, only {MODEL_NAME!r}")
        if asked.stream:
            return self._refuse(400, "invalid_request_error", "stream: this server does not stream")
        question = hashlib.sha256(asked.model_dump_json().encode()).hexdigest()
        known = question in self._answered
        self._in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        try:
            reply, phase = await self._reply(number, asked)
            # Readiness probes are not counted.
            if phase is None:
                return reply
            self._repeated += known
            # Let the event loop notice a client that has disconnected before the reply counts as delivered.
            await asyncio.sleep(0.001)
            if reply.status_code == 200 and not await request.is_disconnected():
                self._answered.add(question)
                if self._book is not None:
                    with self._book.open("a", encoding="ascii") as book:
                        book.write(f"{question}\n")
            return reply
        finally:
            self._in_flight -= 1

    async def _reply(self, number: int, asked: _Completion) -> tuple[Response, str | None]:
        clock = time.monotonic()
        # A re-ask corrects the form of the first reply; the judge's prompt is still the first user message.
        prompt = next((message.text for message in asked.messages if message.role == "user"), "")
        phase, text = await asyncio.to_thread(self._answer, prompt)
        self._phases[phase or "other"] += 1
        if phase is None and asked.response_format is not None and text == "OK":
            # The probe for JSON schema support expects an object.
            text = format_reply([text])
        await asyncio.sleep(max(0.0, self._behaviour.latency - (time.monotonic() - clock)))
        finish = "stop"
        outcome = "good"
        limit = asked.max_completion_tokens or asked.max_tokens
        if limit is not None and _tokens(text) > limit:
            outcome, finish, text = "truncated", "length", text[: limit * CHARACTERS_PER_TOKEN]
        self._outcomes[outcome] += 1
        whole = "\n".join(message.text for message in asked.messages)
        usage = {
            "prompt_tokens": _tokens(whole),
            "completion_tokens": _tokens(text),
            "total_tokens": _tokens(whole) + _tokens(text),
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens(whole)},
        }
        message = {"role": "assistant", "content": text}
        completion = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL_NAME,
            "choices": [{"index": 0, "finish_reason": finish, "message": message}],
            "usage": usage,
        }
        return JSONResponse(completion), phase

    def _refuse(self, status: int, code: str, text: str) -> Response:
        self._outcomes[str(status)] += 1
        return JSONResponse({"error": {"message": text, "type": code, "code": code}}, status)

    def _cached_tokens(self, text: str) -> int:
        """Tokens of the longest prefix of ``text`` seen before; also remembers the prefixes of ``text``."""
        size = CACHE_BLOCK * CHARACTERS_PER_TOKEN
        prefix = cached = 0
        hit = True
        for start in range(0, len(text) - size + 1, size):
            prefix = hash((prefix, text[start : start + size]))
            hit = hit and prefix in self._prefixes
            cached += CACHE_BLOCK if hit else 0
            self._prefixes[prefix] = None
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > CACHED_BLOCKS:
            self._prefixes.popitem(last=False)
        return cached if cached >= LEAST_CACHED else 0


def _tokens(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def serve(*, port: int, latency: float = 0.0) -> None:
    """Serve until interrupted.

    Args:
        port: on this machine; 0 takes a free one.
        latency: seconds per reply.

    Raises:
        JudgeUnavailable: the port is in use.
    """
    app = JudgeApp(JudgeServerOptions(latency=latency))
    with _bind(port) as listener:
        url = f"http://{HOST}:{listener.getsockname()[1]}/v1"
        print(
            f"rule judge (a stand-in for a frontier judge): {url}, model {MODEL_NAME}; press Ctrl-C to stop it",
            flush=True,
        )
        try:
            _run(app, listener)
        except KeyboardInterrupt:
            return


class JudgeServer:
    """The server as a child process for the duration of a ``with`` block.

    It stops when this process ends, even if it is killed.

    >>> with JudgeServer(latency=2.0) as server:  # doctest: +SKIP
    ...     server.base_url
    'http://127.0.0.1:43127/v1'
    """

    model = MODEL_NAME
    base_url: str
    """The API base for clients, set once the server has started; ends in ``/v1``."""
    _process: subprocess.Popen[bytes]

    def __init__(self, *, port: int = 0, **behaviour: Any) -> None:
        """
        Args:
            port: on this machine; 0 takes a free one.
            behaviour: the fields of `JudgeServerOptions`.

        Raises:
            ConfigError: ``use`` names no function.
        """
        self._port, self._behaviour = port, JudgeServerOptions(**behaviour)
        find_component("judge.rule_judge.use", self._behaviour.use, ANSWER_FUNCTIONS)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def __enter__(self) -> JudgeServer:
        """Start the server and wait until it answers. Raises JudgeUnavailable if it does not, or the port is in use."""
        with _bind(self._port) as listener:
            root = f"http://{HOST}:{listener.getsockname()[1]}"
            self.base_url = f"{root}/v1"
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "draco_ray.sandbox.judge_server",
                    str(listener.fileno()),
                    self._behaviour.model_dump_json(),
                ],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                # Ctrl-C must not reach the server: the run still needs its judge while it finishes.
                start_new_session=True,
            )
        try:
            # The socket already listens, so this waits for the process, or fails when it ends.
            httpx.get(f"{root}/stats", timeout=START_SECONDS, trust_env=False)
        except BaseException as error:
            self.__exit__()
            if not isinstance(error, httpx.TransportError):
                raise
            raise JudgeUnavailable(
                f"judge server: no answer within {START_SECONDS:g} s, or the process ended; see its output above"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _bind(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise JudgeUnavailable(f"judge server: port {port} on {HOST} {reason}; choose another with --port") from None
    # Until the socket listens, another server could bind the same port.
    listener.listen(1024)
    return listener


def _run(app: JudgeApp, listener: socket.socket) -> None:
    config = uvicorn.Config(app.asgi, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run([listener])


def _end_with_parent() -> None:
    """Exit when the parent closes our standard input; if the parent is killed, the kernel closes it."""
    sys.stdin.buffer.read()
    os._exit(0)


def _main(listener: int, settings: str) -> None:
    """Run the child process of `JudgeServer`, with its socket's descriptor and its `JudgeServerOptions` in JSON."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _run(JudgeApp(JudgeServerOptions.model_validate_json(settings)), socket.socket(fileno=listener))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
