"""AppWorld inside a slot's processes: load it once, play one task, read and evaluate its world in separate processes.

Runs in the jail with AppWorld's Python.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import io
import os
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from draco_ray.environments.appworld.saved_world import UnusableWorld, apply_changes, read_saved, write_saved
from draco_ray.environments.jail.fork_server import Channel

EXPERIMENT = "slot"
"""AppWorld's experiment name, part of the folder in which a task's state is saved."""

_CUT = "\n[output cut at {limit} bytes]\n"


class BoundedText(io.StringIO):
    """Captured standard output that keeps the first ``limit`` bytes and discards the rest.

    It can be saved, tokenized and sent: lone surrogates are escaped (`escape_surrogates`).
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._left = limit
        self._is_cut = False

    def write(self, text: str) -> int:
        """Keep what fits in the limit. Returns the full length of ``text``, so that the writer does not see the cut."""
        if not self._is_cut:
            # At most `left` characters fit, so a huge text is cut before encoding.
            plain = escape_surrogates(text[: self._left + 1])
            kept = cut_to_bytes(plain, self._left)
            self._left -= len(kept.encode())
            super().write(kept)
            if len(kept) < len(plain):
                self._is_cut = True
                super().write(_CUT.format(limit=self._limit))
        return len(text)


def escape_surrogates(text: str) -> str:
    """``text`` with lone surrogates escaped, as ``\\ud800``, so that it can be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def cut_to_bytes(text: str, limit: int) -> str:
    """The longest prefix of ``text`` of at most ``limit`` bytes in UTF-8."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= limit:
        return text
    while data[limit] & 0xC0 == 0x80:  # the cut would be inside a character
        limit -= 1
    return data[:limit].decode("utf-8", "surrogatepass")


def truncate(text: str, limit: int) -> str:
    """Cut a text that is longer than ``limit`` bytes plus the mark `_CUT`: keep ``limit`` bytes and append the mark."""
    mark = _CUT.format(limit=limit)
    allowed = limit + len(mark)
    if len(text) <= allowed // 4:  # no character takes more than four bytes
        return text
    kept = cut_to_bytes(text[: allowed + 1], allowed)
    return text if len(kept) == len(text) else cut_to_bytes(kept, limit) + mark


def preload_appworld(output_bytes: int) -> None:
    """Import what tasks need, so that forks share it, and limit the length of tasks' output."""
    gc.disable()  # everything imported stays; collecting would take 20 % of the time
    from appworld.api_docs import prepare_api_docs
    from appworld.apps import build_main_app, get_all_apps
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.environment import AppWorld
    from freezegun import freeze_time
    from sqlalchemy.orm import configure_mappers

    # There are hundreds of API descriptions in YAML; libyaml is ten times faster.
    yaml: Any = importlib.import_module("yaml")
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for name in get_all_apps():
        importlib.import_module(f"appworld.apps.{name}.models")
    build_main_app(get_all_apps())
    # Fill caches that the first requests of every task would otherwise compute in 0.2 s: each app's API schema, the
    # models' relations, and the functions that freezing the clock replaces.
    for name in get_all_apps():
        prepare_api_docs(name, include_private_apis=True)
    configure_mappers()
    with freeze_time():
        pass
    # AppWorld caches this call's result by its arguments; a task makes the call with the same arguments.
    ApiDocCollection.load(load_apps=tuple(get_all_apps(skip_admin=True)), include_response_schemas=True)

    capture: Any = importlib.import_module("IPython.utils.capture")
    capture.StringIO = functools.partial(BoundedText, output_bytes)
    # IPython copies a file with its mode into each task's profile; `system_calls` refuses changing modes.
    shutil.copymode = lambda source, target, **options: None
    environment: Any = importlib.import_module("appworld.environment")
    trace = environment.get_stack_trace_from_exception
    environment.get_stack_trace_from_exception = lambda *given, **options: escape_surrogates(trace(*given, **options))
    execute = AppWorld.execute

    def execute_bounded(self: Any, code: str) -> str:
        try:
            ast.parse(code)
        except SyntaxError:
            pass  # AppWorld reports a syntax error
        except (ValueError, RecursionError, MemoryError) as error:
            message = f"Execution failed. Traceback:\n{type(error).__name__}: {error or 'the code cannot be parsed'}"
            self.environment_io.append({"input": code, "output": message})
            return message
        return truncate(execute(self, code), output_bytes)

    AppWorld.execute = execute_bounded

    # Freeze all objects: otherwise a collection in a fork writes to the shared pages and thereby copies them. Skipping
    # a collection before this leaves 2 % garbage and saves a second.
    gc.freeze()
    gc.enable()


def play(task_id: str, channel: Channel) -> None:
    """Open a task, and run the cells of model-written code that the host sends."""
    from appworld.environment import AppWorld

    settings = channel.receive() or {}
    try:
        # Only the evaluator, a separate process, loads ground truth.
        world = AppWorld(task_id=task_id, experiment_name=EXPERIMENT, load_ground_truth=False, **settings)
    except Exception as error:
        channel.answer({"error": _said(error)})
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    channel.answer({"instruction": world.task.instruction})
    while (order := channel.receive()) is not None:
        try:
            answer = {"output": world.execute(order["code"])}
        except BaseException as error:
            answer = {"error": _said(error)}
        channel.answer(answer)


def saved_folder(task_id: str) -> str:
    """Folder in which AppWorld saves the state of a task."""
    from appworld.common.path_store import path_store

    return os.path.join(path_store.experiment_outputs, EXPERIMENT, "tasks", task_id)


def send_saved_world(task_id: str, channel: Channel) -> None:
    """Read the world that AppWorld saved, after the process that ran its code has ended."""
    channel.receive()
    channel.answer({})
    channel.receive()
    try:
        channel.answer({"saved": read_saved(saved_folder(task_id))})
    except UnusableWorld as error:
        channel.answer({"unusable": str(error)})


def evaluate_saved_world(task_id: str, channel: Channel) -> None:
    """Have AppWorld evaluate a saved world. This process has never run model-written code.

    The host sends two orders. The first is empty. It is answered with ``{"tests", "difficulty"}`` as soon as the task
    and its ground truth are loaded, or with ``{"error"}`` if they cannot be loaded.

    The second order has the saved world in ``files``, as `saved_world.read_saved` returns it. It is answered with
    AppWorld's report, ``{"verdict"}``, or with the reason why there is no report, ``{"unusable"}``.
    """
    from appworld import evaluator
    from appworld.apps import model_lib
    from appworld.common.path_store import path_store

    channel.receive()
    load, began = evaluator.Task.load, False

    def load_task(**arguments: Any) -> Any:
        nonlocal began
        task = load(**arguments)
        task.ground_truth.evaluation_module()
        tests, difficulty = len(task.ground_truth.test_data), task.ground_truth.metadata["difficulty"]
        channel.answer({"tests": tests, "difficulty": difficulty})
        began = True
        write_saved((channel.receive() or {})["files"], saved_folder(task_id))
        return task

    evaluator.Task = SimpleNamespace(load=load_task)
    begins = os.path.join(path_store.data, "tasks", task_id)
    model_lib.apply_db_changes = functools.partial(_apply_checked, model_lib.read_jsonl, begins)
    try:
        tracker = evaluator.evaluate_task(task_id, EXPERIMENT, suppress_errors=True, save_report=False)
        report = tracker.to_dict(stats_only=False)
        for failure in report["failures"]:
            del failure["trace"]
        channel.answer({"verdict": report})
    except Exception as error:
        reason = str(error) if isinstance(error, UnusableWorld) else _said(error)
        channel.answer({"unusable" if began else "error": reason[:2000]})


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _apply_checked(read: Callable[..., list[Any]], begins: str, connection: Any, path: str | None) -> list[Any]:
    """AppWorld's `apply_db_changes`, but it checks a saved world's changes first; it trusts the task's own changes."""
    own = None if path is None else os.path.join(begins, "dbs", os.path.basename(path))
    changes, trusted = (
        [] if each is None or not os.path.exists(each) else read(each, use_json_plus=False) for each in (path, own)
    )
    apply_changes(connection, changes, trusted)
    return changes
