"""The rule judge's server inside the test: counts replies by request, and can hold back scoring replies."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

import uvicorn
from starlette.responses import Response

from draco_ray.sandbox.judge_server import JudgeApp, JudgeServerOptions
from draco_ray.sandbox.rule_judge.answering import answer


class HoldingJudge(JudgeApp):
    """Use as a context manager; ``base`` is the value for ``judge.api_base``."""

    def __init__(self) -> None:
        super().__init__(JudgeServerOptions())
        self.answered: Counter[str] = Counter()
        """Request -> number of replies to it."""
        self.answers_before_holding: int | None = None
        """Number of scoring replies after which all others are held back; None: none is."""
        self.held = 0
        self._scored = 0
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(uvicorn.Config(self.asgi, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> HoldingJudge:
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

    async def _reply(self, number: int, asked: Any) -> tuple[Response, str | None]:
        phase, _ = await asyncio.to_thread(answer, asked.messages[0].text)
        if phase == "score":
            limit = self.answers_before_holding
            if limit is not None and self._scored >= limit:
                self.held += 1
                # The client is killed meanwhile: no reply was sent, so nothing was paid.
                await asyncio.Event().wait()
            self._scored += 1
        response = await super()._reply(number, asked)
        if phase is not None:
            self.answered[asked.model_dump_json()] += 1
        return response
