"""The rule judge behind OpenAI's chat-completions protocol: a real HTTP server, on this machine only.

If configured so, it is slow, limits the rate or answers badly, as a provider would. `serve` runs it in this process;
`JudgeServer` runs it as a child process for the duration of a ``with`` block.

=========================  =======================================================================================
POST /v1/chat/completions  one reply; 429 with Retry-After over the rate, 401 without the key, 404 for another model
GET /v1/models             the one model there is
GET /health                ``{"status": "ok"}`` once it answers
GET /stats                 requests by phase and by outcome, and the most in flight
=========================  =======================================================================================

Token numbers are estimates (four characters a token). Cached tokens follow the rule that providers publish: the longest
prefix seen before, in blocks of 128 tokens, from 1024 tokens on.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draco_ray.errors import ConfigError, JudgeUnavailable
from draco_ray.registry import find
from draco_ray.sandbox.rule_judge.noise import ANSWERS, Noise
from draco_ray.sandbox.rule_judge.reading import reply

MODEL_NAME = "rule-judge"
HOST = "127.0.0.1"
KEY_VARIABLE = "DRACO_RULE_JUDGE_KEY"
"""Environment variable with the key that requests must bear if ``require_key`` is set."""
CHARACTERS_PER_TOKEN = 4
CACHE_BLOCK = 128
LEAST_CACHED = 1024
CACHED_BLOCKS = 200_000
START_SECONDS = 180.0
STOP_SECONDS = 5.0


class Behaviour(BaseModel):
    """Behaviour of the server. Shares are probabilities, drawn independently of the request's content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: str = "sandbox"
    """What answers a prompt: ``sandbox`` for the sandbox's rules, or your own function as package.module:function or
    folder/file.py:function. `draco_ray.sandbox.rule_judge.simple.rule_judge` makes such functions."""
    port: int = Field(0, ge=0, le=65535)
    """Port; 0 takes a free one."""
    latency: float = Field(0.0, ge=0)
    """Seconds per reply; many requests may wait at once."""
    rate_limit: float | None = Field(None, gt=0)
    """Requests per second; a burst may contain the requests of one second."""
    malformed: float = Field(0.0, ge=0, le=1)
    """Share of replies that are prose with a broken array in it."""
    truncated: float = Field(0.0, ge=0, le=1)
    """Share of replies cut in the middle, with finish_reason ``length``."""
    error: float = Field(0.0, ge=0, le=1)
    """Share of requests answered with status 500."""
    noise: Noise = Noise()
    """Errors in well-formed replies."""
    answered: Path | None = None
    """File for the digests of answered requests, so that a server that replaces a killed one still counts repeats."""
    require_key: bool = False
    """Answer 401 unless the request bears the key in the environment variable `KEY_VARIABLE`."""
    seed: int = 0
    """Random seed of these shares: with the same seed, the n-th request is treated the same way."""

    @model_validator(mode="after")
    def _shares(self) -> Behaviour:
        if self.malformed + self.truncated + self.error > 1:
            raise ValueError("the sum of malformed, truncated and error is more than 1; expected at most 1")
        return self


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

    def __init__(self, behaviour: Behaviour) -> None:
        """Prepare the answers. Raises: ConfigError: a required key is not set, or ``use`` names no such function."""
        self._behaviour = behaviour
        self._answer = behaviour.noise.blur(find("judge.rule_judge.use", behaviour.use, ANSWERS))
        self._key = os.environ.get(KEY_VARIABLE, "") if behaviour.require_key else ""
        if behaviour.require_key and not self._key:
            raise ConfigError(f"judge server: environment variable {KEY_VARIABLE} has no key to require; set it")
        self._requests = 0
        self._allowance = self._burst
        self._allowance_at = time.monotonic()
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
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/stats", self._stats),
            ]
        )

    @property
    def _burst(self) -> float:
        return max(1.0, self._behaviour.rate_limit or 1.0)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "draco"}
        return JSONResponse({"object": "list", "data": [model]})

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
        bearer = request.headers.get("authorization", "")
        if self._key and not hmac.compare_digest(bearer.encode(), f"Bearer {self._key}".encode()):
            return self._refuse(401, "invalid_api_key", "the key is missing or wrong")
        if (seconds := self._seconds_to_wait()) > 0:
            headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}
            return self._refuse(429, "rate_limit_exceeded", "too many requests", headers)
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
        behaviour = self._behaviour
        clock = time.monotonic()
        # A re-ask is about the first reply's form; the first user message is still the judge's prompt.
        prompt = next((message.text for message in asked.messages if message.role == "user"), "")
        phase, text = await asyncio.to_thread(self._answer, prompt)
        self._phases[phase or "other"] += 1
        if phase is None and asked.response_format is not None and text == "OK":
            # The probe for JSON schema support expects an object.
            text = reply([text])
        await asyncio.sleep(max(0.0, behaviour.latency - (time.monotonic() - clock)))
        draw = random.Random(f"{behaviour.seed}/{number}").random()
        finish = "stop"
        outcome = "good"
        if draw < behaviour.error:
            return self._refuse(500, "server_error", "an error that was asked for"), phase
        draw -= behaviour.error
        if draw < behaviour.malformed:
            outcome, text = "malformed", f"Let me think about the criteria.\n[{{{text[2 : len(text) // 2]}"
        elif draw - behaviour.malformed < behaviour.truncated:
            outcome, finish, text = "truncated", "length", text[: len(text) // 2]
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

    def _refuse(self, status: int, code: str, text: str, headers: dict[str, str] | None = None) -> Response:
        self._outcomes[str(status)] += 1
        return JSONResponse({"error": {"message": text, "type": code, "code": code}}, status, headers)

    def _seconds_to_wait(self) -> float:
        """Take one request from the rate limit's allowance. Returns: 0, or the seconds to wait if none is left."""
        rate = self._behaviour.rate_limit
        if rate is None:
            return 0.0
        now = time.monotonic()
        self._allowance = min(self._burst, self._allowance + (now - self._allowance_at) * rate)
        self._allowance_at = now
        if self._allowance >= 1.0:
            self._allowance -= 1.0
            return 0.0
        return (1.0 - self._allowance) / rate

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


def serve(*, port: int = 8011, **others: Any) -> None:
    """Serve until interrupted. The arguments are `Behaviour`'s.

    Raises:
        ConfigError: a value out of range.
        JudgeUnavailable: the port is in use.
    """
    behaviour = _behaviour(port=port, **others)
    app = JudgeApp(behaviour)
    with _bind(behaviour.port) as listener:
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
    """The server as a child process on a free port, for the duration of a ``with`` block.

    It stops when this process ends, even if it is killed. The arguments are `Behaviour`'s; ``key`` makes it require
    that key.

    >>> with JudgeServer(latency=2.0) as server:  # doctest: +SKIP
    ...     server.base_url
    'http://127.0.0.1:43127/v1'
    """

    model = MODEL_NAME

    def __init__(self, *, key: str | None = None, **behaviour: Any) -> None:
        """Check the values. Raises: ConfigError."""
        self._behaviour = _behaviour(require_key=key is not None, **behaviour)
        find("judge.rule_judge.use", self._behaviour.use, ANSWERS)
        self._key = key
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def base_url(self) -> str:
        """The API base for clients; ends in ``/v1``."""
        return f"http://{HOST}:{self._port}/v1"

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise JudgeUnavailable("judge server: the server is not started; use it in a with block")
        return self._process.pid

    def __enter__(self) -> JudgeServer:
        """Start it and wait until it answers. Raises JudgeUnavailable if it does not, or the port is in use."""
        environment = dict(os.environ)
        if self._key is not None:
            environment[KEY_VARIABLE] = self._key
        with _bind(self._behaviour.port) as listener:
            self._port = listener.getsockname()[1]
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
                env=environment,
                # Ctrl-C must not reach it: the run still needs its judge while it finishes.
                start_new_session=True,
            )
        try:
            # The socket already listens, so this waits for the process, or fails when it ends.
            httpx.get(f"http://{HOST}:{self._port}/health", timeout=START_SECONDS, trust_env=False)
        except BaseException as error:
            self._stop()
            if not isinstance(error, httpx.TransportError):
                raise
            raise JudgeUnavailable(
                f"judge server: it did not answer within {START_SECONDS:g} s, or ended; see its output above"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _behaviour(**values: Any) -> Behaviour:
    try:
        return Behaviour(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in problem["loc"]) or "options"
        raise ConfigError(f"judge server: {name}: {problem['msg']}, found {problem['input']!r}") from None


def _bind(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise JudgeUnavailable(f"judge server: port {port} on {HOST} {reason}; choose another with --port") from None
    # Until it listens, another server could bind the same port.
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
    """Run the child process of `JudgeServer`, with its socket's descriptor and its `Behaviour` in JSON."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _run(JudgeApp(Behaviour.model_validate_json(settings)), socket.socket(fileno=listener))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
