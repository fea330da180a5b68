"""AppWorld as the processes of a slot use it: loaded once, served to one task, evaluated in a process of its own.

Runs in the jail, under AppWorld's Python.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import io
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from draco_ray.environments.appworld.saved_world import UnusableWorld, apply_changes, write_saved

EXPERIMENT = "slot"
"""AppWorld's name for the folder a task's state is saved in."""

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


class CapturedText(BoundedText):
    """`BoundedText` that can be saved, tokenized and sent: lone surrogates are spelt out (`plain_text`)."""

    def write(self, text: str) -> int:
        """See `BoundedText.write`."""
        super().write(plain_text(text[: self._limit + 1]))
        return len(text)


def plain_text(text: str) -> str:
    """``text`` as UTF-8 can carry it: a lone surrogate is spelt out, as ``\\ud800``."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


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
    gc.disable()  # all of it stays, and looking for what does not is a fifth of the time
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

    # Hundreds of descriptions of APIs are YAML; libyaml reads them in a tenth of the time.
    yaml: Any = importlib.import_module("yaml")
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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
    capture.StringIO = functools.partial(CapturedText, output_bytes)
    # IPython copies a file into the profile it makes for a task, and then its mode, which `system_calls` refuses.
    shutil.copymode = lambda source, target, **options: None
    environment: Any = importlib.import_module("appworld.environment")
    trace = environment.get_stack_trace_from_exception
    environment.get_stack_trace_from_exception = lambda *given, **options: plain_text(trace(*given, **options))
    execute = AppWorld.execute

    def execute_bounded(self: Any, code: str) -> str:
        try:
            ast.parse(code)
        except SyntaxError:
            pass  # told by AppWorld
        except (ValueError, RecursionError, MemoryError) as error:
            message = f"Execution failed. Traceback:\n{type(error).__name__}: {error or 'the code cannot be parsed'}"
            self.environment_io.append({"input": code, "output": message})
            return message
        return cut_with_mark(execute(self, code), output_bytes)

    AppWorld.execute = execute_bounded

    async def describe(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"[:2000]}, status_code=500)

    app.add_exception_handler(Exception, describe)
    # What is loaded stays: the collector need not touch (and so copy) its pages in every fork. What nobody holds any
    # more is a fiftieth of it, and stays too: to find it takes a second.
    gc.freeze()
    gc.enable()


def serve(listener: socket.socket) -> None:
    """Answer AppWorld's HTTP protocol on ``listener`` until killed."""
    import uvicorn
    from appworld.serve.environment import app

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    config = uvicorn.Config(app, http="h11", loop="asyncio", lifespan="off", access_log=False, log_config=None)
    uvicorn.Server(config).run(sockets=[listener])


def saved_folder(task_id: str) -> str:
    """Where AppWorld saves what a task's process did."""
    from appworld.common.path_store import path_store

    return os.path.join(path_store.experiment_outputs, EXPERIMENT, "tasks", task_id)


def judge(task_id: str, files: Mapping[str, str], tell: Callable[[dict[str, Any]], None]) -> None:
    """Have AppWorld evaluate a saved world, in a process that has never run its code.

    Args:
        task_id: the task it is of; its ground truth can be read, and nothing of the world is in the file system yet.
        files: the saved world by name (`saved_world.read_saved`).
        tell: is given ``{"tests", "difficulty"}`` once all that is not the world's is in order, and then either
            ``{"verdict"}``, AppWorld's report, or ``{"unusable"}``, why this world cannot have one. Where the task or
            its ground truth cannot be used it is given ``{"error"}`` alone.
    """
    from appworld import evaluator
    from appworld.apps import model_lib
    from appworld.common.path_store import path_store

    load, began = evaluator.Task.load, False

    def load_task(**arguments: Any) -> Any:
        nonlocal began
        task = load(**arguments)
        task.ground_truth.evaluation_module()
        tell({"tests": len(task.ground_truth.test_data), "difficulty": task.ground_truth.metadata["difficulty"]})
        began = True
        write_saved(files, saved_folder(task_id))
        return task

    evaluator.Task = SimpleNamespace(load=load_task)
    begins = os.path.join(path_store.data, "tasks", task_id)
    model_lib.apply_db_changes = functools.partial(_apply_checked, model_lib.read_jsonl, begins)
    try:
        tracker = evaluator.evaluate_task(task_id, EXPERIMENT, suppress_errors=True, save_report=False)
        report = tracker.to_dict(stats_only=False)
        for failure in report["failures"]:
            del failure["trace"]
        tell({"verdict": report})
    except Exception as error:
        reason = str(error) if isinstance(error, UnusableWorld) else f"{type(error).__name__}: {error}"
        tell({"unusable" if began else "error": reason[:2000]})


def _apply_checked(read: Callable[..., list[Any]], begins: str, connection: Any, path: str | None) -> list[Any]:
    """What AppWorld's `apply_db_changes` does, of a task's own changes as they are and of saved ones once checked."""
    own = None if path is None else os.path.join(begins, "dbs", os.path.basename(path))
    changes, trusted = (
        [] if each is None or not os.path.exists(each) else read(each, use_json_plus=False) for each in (path, own)
    )
    apply_changes(connection, changes, trusted)
    return changes
