"""A scripted user simulator: a real HTTP server that says a customer's lines in turn, in any number of chats."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class ScriptedCustomer:
    """Answers OpenAI chat completions with the line after those that the chat already has. Use as a context manager.

    For a line that is a number the answer has that HTTP status, and an error that quotes the received key.
    """

    def __init__(self, lines: Sequence[str | int]) -> None:
        customer = self
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                customer.requests.append(body)
                key = self.headers["Authorization"].removeprefix("Bearer ")
                customer.keys.add(key)
                said = sum(message["role"] == "assistant" for message in body["messages"])
                self._send(lines[min(said, len(lines) - 1)], key)

            def _send(self, line: str | int, key: str) -> None:
                answer: dict[str, Any] = {"error": {"message": f"incorrect key {key}", "type": "t", "code": "c"}}
                if isinstance(line, str):
                    message = {"role": "assistant", "content": line}
                    choice = {"index": 0, "finish_reason": "stop", "message": message}
                    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
                    answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "SCRIPTED"}
                    answer |= {"choices": [choice], "usage": usage}
                content = json.dumps(answer).encode()
                self.send_response(line if isinstance(line, int) else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                """Do not log requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> ScriptedCustomer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
