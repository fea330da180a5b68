"""A stand-in for the batch APIs of OpenAI and Anthropic: a real HTTP server, whose batches end after some polls."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response


class BatchServer:
    """Answers with ``answer`` of a request's first message; use as a context manager."""

    def __init__(
        self,
        answer: Callable[[str], str],
        looks: int = 2,
        fails: str | None = None,
        refuses: str | None = None,
        invalid: str | None = None,
    ) -> None:
        """
        Args:
            answer: writes the replies.
            looks: number of polls until a batch has ended.
            fails: requests that contain this text fail.
            refuses: requests that contain this text are refused as invalid.
            invalid: code of the error with which OpenAI's batches fail before any request runs; None: they do not.
        """
        self.answer, self.looks, self.fails, self.refuses = answer, looks, fails, refuses
        self.invalid = invalid
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        """Files whose content was requested, in order."""
        self.batches: dict[str, dict[str, Any]] = {}
        self.held = threading.Event()
        """While this event is set, no batch ends."""
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.base = f"{self.root}/v1"
        app = FastAPI()
        app.post("/v1/files")(self._upload)
        app.get("/v1/files/{file}/content")(self._content)
        app.post("/v1/batches")(self._create)
        app.get("/v1/batches/{batch}")(self._look)
        app.post("/v1/messages/batches")(self._create_messages)
        app.get("/v1/messages/batches/{batch}")(self._look_messages)
        app.get("/v1/messages/batches/{batch}/results")(self._results)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> BatchServer:
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

    @property
    def requests(self) -> list[dict[str, Any]]:
        """All batches that were submitted."""
        return [request for batch in self.batches.values() for request in batch["requests"]]

    async def _upload(self, request: Request) -> Response:
        form = await request.form()
        file = f"file-{len(self.files)}"
        self.files[file] = await form["file"].read()  # type: ignore[union-attr]
        about = {"id": file, "object": "file", "bytes": 1, "created_at": 0, "filename": "r", "purpose": "batch"}
        return JSONResponse(about | {"status": "processed"})

    async def _content(self, file: str) -> Response:
        self.fetched.append(file)
        return Response(self.files[file])

    async def _create(self, request: Request) -> Response:
        file = (await request.json())["input_file_id"]
        requests = [json.loads(line) for line in self.files[file].decode().splitlines()]
        return JSONResponse(self._state(self._begin(requests, file)))

    async def _look(self, batch: str) -> Response:
        if not self._ended(batch):
            return JSONResponse(self._state(batch))
        if not self.batches[batch].get("ended"):
            # Like OpenAI's server, report that a batch has ended before naming the file of replies.
            self.batches[batch]["ended"] = True
        elif "output" not in self.batches[batch]:
            output = f"file-{len(self.files)}"
            lines = [self._openai(request) for request in self.batches[batch]["requests"]]
            self.files[output] = _json_lines(lines)
            self.batches[batch]["output"] = output
        return JSONResponse(self._state(batch))

    async def _create_messages(self, request: Request) -> Response:
        batch = self._begin((await request.json())["requests"], "")
        return JSONResponse({"id": batch, "type": "message_batch", "processing_status": "in_progress"})

    async def _look_messages(self, batch: str) -> Response:
        status = "ended" if self._ended(batch) else "in_progress"
        return JSONResponse({"id": batch, "type": "message_batch", "processing_status": status})

    async def _results(self, batch: str) -> Response:
        lines = [self._anthropic(request) for request in self.batches[batch]["requests"]]
        return PlainTextResponse(_json_lines(lines))

    def _begin(self, requests: list[dict[str, Any]], file: str) -> str:
        batch = f"batch_{len(self.batches)}"
        self.batches[batch] = {"requests": requests, "looks": 0, "file": file}
        return batch

    def _ended(self, batch: str) -> bool:
        self.batches[batch]["looks"] += 1
        return self.batches[batch]["looks"] > self.looks and not self.held.is_set()

    def _state(self, batch: str) -> dict[str, Any]:
        about = self.batches[batch]
        failed = {
            "status": "failed",
            "errors": {"object": "list", "data": [{"code": self.invalid, "message": f"about {self.invalid}"}]},
        }
        return {
            "id": batch,
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "input_file_id": about["file"],
            "completion_window": "24h",
            "status": "completed" if about.get("ended") else "in_progress",
            "output_file_id": about.get("output"),
            "error_file_id": None,
            "created_at": 0,
            **(failed if self.invalid else {}),
        }

    def _openai(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["body"]["messages"][0]["content"]
        if self.fails and self.fails in prompt:
            return {
                "id": "r",
                "custom_id": request["custom_id"],
                "response": None,
                "error": {"message": "broken inside"},
            }
        if self.refuses and self.refuses in prompt:
            response = {"status_code": 400, "request_id": "r", "body": {"error": {"message": "prompt was flagged"}}}
            return {"id": "r", "custom_id": request["custom_id"], "response": response, "error": None}
        message = {"role": "assistant", "content": self.answer(prompt)}
        body = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": request["body"]["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
        }
        response = {"status_code": 200, "request_id": "r", "body": body}
        return {"id": "r", "custom_id": request["custom_id"], "response": response, "error": None}

    def _anthropic(self, request: dict[str, Any]) -> dict[str, Any]:
        content = request["params"]["messages"][0]["content"]
        prompt = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if self.fails and self.fails in prompt:
            return {"custom_id": request["custom_id"], "result": {"type": "errored", "error": {"message": "broken"}}}
        if self.refuses and self.refuses in prompt:
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt was flagged"}}
            return {"custom_id": request["custom_id"], "result": {"type": "errored", "error": error}}
        message = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "model": request["params"]["model"],
            "content": [{"type": "text", "text": self.answer(prompt)}],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": 1000, "output_tokens": 100},
        }
        return {"custom_id": request["custom_id"], "result": {"type": "succeeded", "message": message}}


def _json_lines(values: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(value, ensure_ascii=False) for value in values).encode()
