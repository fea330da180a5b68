"""AppWorld as the processes of a slot use it: loaded once, served to one task, evaluated in a process of its own.

Runs in the jail, under AppWorld's Python.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import os
import socket
from typing import Any

EXPERIMENT = "slot"
"""AppWorld's name for the folder a task's state is saved in."""

MAX_SAVED_BYTES = 16 << 20
"""Of the files AppWorld saved of a task; what goes beyond is left out."""
_SAVED = ("dbs", "logs", "misc", "version")

_CUT = "\n[output cut at {limit} bytes]\n"


class BoundedText(io.StringIO):
    """Captured standard output that keeps the first ``limit`` bytes and forgets the rest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._left = limit
        self._is_cut = False

    def write(self, text: str) -> int:
        """Take what still fits. Returns the length of ``text``: the writer does not notice."""
        if not self._is_cut:
            # At most `left` characters can fit, so a huge text is cut before it is encoded.
            kept = cut_to_bytes(text[: self._left + 1], self._left)
            self._left -= len(kept.encode("utf-8", "surrogatepass"))
            super().write(kept)
            if len(kept) < len(text):
                self._is_cut = True
                super().write(_CUT.format(limit=self._limit))
        return len(text)


def cut_to_bytes(text: str, limit: int) -> str:
    """The longest prefix of ``text`` of at most ``limit`` bytes in UTF-8."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= limit:
        return text
    while data[limit] & 0xC0 == 0x80:  # inside a character
        limit -= 1
    return data[:limit].decode("utf-8", "surrogatepass")


def cut_with_mark(text: str, limit: int) -> str:
    """``text``, or where it is longer than ``limit`` bytes and a mark its beginning and a mark."""
    mark = _CUT.format(limit=limit)
    allowed = limit + len(mark)
    if len(text) <= allowed // 4:  # no character takes more than four bytes
        return text
    kept = cut_to_bytes(text[: allowed + 1], allowed)
    return text if len(kept) == len(text) else cut_to_bytes(kept, limit) + mark


def prepare(output_bytes: int) -> None:
    """Import what a task needs and bound what it can print, so that forks share it."""
    import uvicorn.lifespan.off
    import uvicorn.loops.asyncio
    import uvicorn.protocols.http.h11_impl  # noqa: F401
    from appworld.api_docs import prepare_api_docs
    from appworld.apps import build_main_app, get_all_apps
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.environment import AppWorld
    from appworld.serve.environment import app
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from freezegun import freeze_time
    from sqlalchemy.orm import configure_mappers

    for name in get_all_apps():
        importlib.import_module(f"appworld.apps.{name}.models")
    build_main_app(get_all_apps())
    # What the first requests of a task would otherwise work out, 0.2 s in all: every app's API schema, the models'
    # relations, and where modules keep the functions that freezing the clock replaces.
    for name in get_all_apps():
        prepare_api_docs(name, include_private_apis=True)
    configure_mappers()
    with freeze_time():
        pass
    # AppWorld caches both by their arguments; these are the ones it loads a task with.
    ApiDocCollection.load(load_apps=tuple(get_all_apps(skip_admin=True)), include_response_schemas=True)

    capture: Any = importlib.import_module("IPython.utils.capture")
    capture.StringIO = functools.partial(BoundedText, output_bytes)
    execute = AppWorld.execute

    def execute_bounded(self: Any, code: str) -> str:
        return cut_with_mark(execute(self, code), output_bytes)

    AppWorld.execute = execute_bounded

    async def describe(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"[:2000]}, status_code=500)

    app.add_exception_handler(Exception, describe)
    # What is loaded stays: the collector need not touch (and so copy) its pages in every fork.
    gc.collect()
    gc.freeze()


def serve(listener: socket.socket) -> None:
    """Answer AppWorld's HTTP protocol on ``listener`` until killed."""
    import uvicorn
    from appworld.serve.environment import app

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    config = uvicorn.Config(app, http="h11", loop="asyncio", lifespan="off", access_log=False, log_config=None)
    uvicorn.Server(config).run(sockets=[listener])


def verdict(task_id: str) -> dict[str, Any]:
    """AppWorld's evaluation of what a task's process saved: its report under ``verdict``, or why there is none.

    With a verdict come the saved files, by name, under ``saved``.
    """
    from appworld.evaluator import evaluate_task

    try:
        tracker = evaluate_task(task_id, EXPERIMENT, suppress_errors=True, save_report=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"verdict": tracker.to_dict(stats_only=False), "saved": saved_files(task_id)}


def saved_files(task_id: str) -> dict[str, str]:
    """What AppWorld saved of a task: name relative to the task's output folder -> content.

    The task's process could write there: only plain files where AppWorld puts them are read, up to a size.
    """
    from appworld.common.path_store import path_store

    root = os.path.join(path_store.experiment_outputs, EXPERIMENT, "tasks", task_id)
    found: dict[str, str] = {}
    left = MAX_SAVED_BYTES
    for folder in _SAVED:
        path = os.path.join(root, folder)
        if os.path.islink(path) or not os.path.isdir(path):
            continue
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if not entry.is_file(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_size > left:
                continue
            with open(entry.path, encoding="utf-8", errors="surrogateescape", newline="") as file:
                text = file.read(left)
            left -= len(text)
            found[f"{folder}/{entry.name}"] = text
    return found
