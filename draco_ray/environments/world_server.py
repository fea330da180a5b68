"""The process behind a slot: loads AppWorld once and forks a fresh process for every task.

Run inside the jail by AppWorld's Python. It never runs model-written code itself; the process it forks does, serves
AppWorld's own HTTP application on the slot's socket, and is killed with everything it started when the task is over.
So nothing a task leaves behind (patched modules, threads, files, memory) reaches the next one, and a task begins
within 0.2 s instead of the 3 s that loading AppWorld takes.

The slot speaks to it over a socket, one JSON object a line:

    slot   {"do": "task", "task_id": ...}        end the current task, fork a process for this one
           {"do": "evaluate", "task_id": ...}    end the task's process, run AppWorld's evaluator on what it saved
           {"do": "clear"}                       end the task's process
    server {"event": "ready"}                    AppWorld is loaded
           {"event": "done"}                     a "task" or "clear" has been carried out
           {"event": "exited", "status": ...}    the task's process ended by itself
           {"event": "evaluated", ...}           AppWorld's verdict, or "error"

End of file on that socket ends the server: it cannot outlive its slot.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
from typing import Any

from draco_ray.environments import linux
from draco_ray.environments.jail import JailSpec

EXPERIMENT = "slot"
"""AppWorld's name for the folder a task's state is saved in."""

_CUT = "\n[output cut at {limit} bytes]\n"


class BoundedText(io.StringIO):
    """Captured standard output that keeps the first ``limit`` bytes and forgets the rest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._left = limit

    def write(self, text: str) -> int:
        """Take what still fits. Returns the length of ``text``: the writer does not notice."""
        if self._left > 0:
            # At most `left` characters can fit, so a huge text is cut before it is encoded.
            kept = cut_to_bytes(text[: self._left + 1], self._left)
            self._left -= len(kept.encode("utf-8", "surrogatepass"))
            super().write(kept)
            if len(kept) < len(text):
                self._left = 0
                super().write(_CUT.format(limit=self._limit))
        return len(text)


def cut_to_bytes(text: str, limit: int) -> str:
    """The longest prefix of ``text`` of at most ``limit`` bytes in UTF-8."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= limit:
        return text
    return data[:limit].decode("utf-8", "ignore")


class WorldServer:
    """Forks and ends the processes of tasks, at the slot's word."""

    def __init__(self, spec: JailSpec) -> None:
        self._spec = spec
        self._control = socket.socket(fileno=spec.control_fd)
        self._listener = socket.socket(fileno=spec.listen_fd)
        self._task_pid: int | None = None
        self._received = b""

    def run(self) -> None:
        """Serve the slot until it closes its end."""
        prepare(self._spec.output_bytes)
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        self._say(event="ready")
        while True:
            ready, _, _ = select.select([self._control.fileno(), wake_reader], [], [])
            if wake_reader in ready:
                os.read(wake_reader, 4096)
                self._notice_exits()
            if self._control.fileno() in ready:
                data = self._control.recv(65536)
                if not data:
                    break
                self._received += data
                while b"\n" in self._received:
                    line, self._received = self._received.split(b"\n", 1)
                    self._obey(json.loads(line))
        self._end_task()

    def _say(self, **message: Any) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _obey(self, order: dict[str, str]) -> None:
        self._end_task()
        if order["do"] == "evaluate":
            self._say(event="evaluated", **self._evaluate(order["task_id"]))
            return
        self._clear_scratch()
        if order["do"] == "task":
            self._start_task(order["task_id"])
        self._say(event="done")

    def _start_task(self, task_id: str) -> None:
        self._task_pid = os.fork()
        if self._task_pid == 0:
            try:
                self._become_task(task_id)
            except BaseException as error:
                print(f"world server: task {task_id}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)

    def _become_task(self, task_id: str) -> None:
        _forget_signals()
        os.setsid()
        self._control.close()
        if self._spec.hides_tasks:
            show_only(task_id, os.path.join(self._spec.world, "data", "tasks"))
        self._confine()
        serve(self._listener)

    def _confine(self) -> None:
        spec = self._spec
        processes = spec.processes
        if spec.task_uid is None and not spec.hides_tasks:
            # In the host's own user namespace the limit counts everything else this user runs.
            processes += _processes_of(os.getuid())
        linux.limit(
            memory_mib=spec.memory_mib,
            processes=processes,
            file_mib=spec.scratch_mib,
            cpu_seconds=spec.cpu_seconds,
        )
        linux.drop_privileges(spec.task_uid)
        linux.close_to_inspection()
        linux.die_with_parent()

    def _evaluate(self, task_id: str) -> dict[str, Any]:
        """Run AppWorld's evaluator in a process of its own, which has never seen the model's code."""
        if not self._spec.evaluate:
            return {"error": "this slot was started without ground truth"}
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _forget_signals()
                self._control.close()
                self._confine()
                with open(writer, "w", encoding="utf-8") as pipe:
                    json.dump(_verdict(task_id), pipe)
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else {"error": "the evaluator's process died"}

    def _notice_exits(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._task_pid:
                self._task_pid = None
                self._say(event="exited", status=os.waitstatus_to_exitcode(status))

    def _end_task(self) -> None:
        self._task_pid = None
        # As process 1 of its namespace the server can end everything else in it at a stroke; outside a namespace it
        # is the one its descendants' orphans come to, and ends them generation by generation.
        if os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    return
        while children := _children_of(os.getpid()):
            for child in children:
                os.kill(child, signal.SIGKILL)  # its number stays its own until it is waited for
                os.waitpid(child, 0)

    def _clear_scratch(self) -> None:
        home = os.environ["HOME"]
        for folder in (os.path.join(self._spec.world, "experiments"), home):
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def prepare(output_bytes: int) -> None:
    """Import what a task needs and bound what it can print, so that forks share it."""
    import uvicorn.lifespan.off
    import uvicorn.loops.asyncio
    import uvicorn.protocols.http.h11_impl  # noqa: F401
    from appworld.apps import build_main_app, get_all_apps
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.environment import AppWorld
    from appworld.serve.environment import app
    from fastapi import Request
    from fastapi.responses import JSONResponse

    for name in get_all_apps():
        importlib.import_module(f"appworld.apps.{name}.models")
    build_main_app(get_all_apps())
    # AppWorld caches both by their arguments; these are the ones it loads a task with.
    ApiDocCollection.load(load_apps=tuple(get_all_apps(skip_admin=True)), include_response_schemas=True)

    capture: Any = importlib.import_module("IPython.utils.capture")
    capture.StringIO = functools.partial(BoundedText, output_bytes)
    execute = AppWorld.execute

    def execute_bounded(self: Any, code: str) -> str:
        message = execute(self, code)
        if len(message) > output_bytes // 4:
            return cut_to_bytes(message[: output_bytes + 1], output_bytes)
        return message

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


def show_only(task_id: str, tasks: str) -> None:
    """In a mount namespace of this process, leave of all tasks only this one's specs and databases.

    Its ground truth, and everything about other tasks, is then out of reach for good once privileges are dropped.
    """
    linux.unshare(linux.NEW_MOUNTS)
    linux.detach_mounts()
    linux.mount_tmpfs("/view", 1, 0o755)
    for name in ("specs.json", "dbs"):
        source, target = os.path.join(tasks, task_id, name), os.path.join("/view", task_id, name)
        if os.path.isdir(source):
            os.makedirs(target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        linux.bind(source, target)
        linux.seal(target)
    linux.bind("/view", tasks)
    linux.seal("/view", recursive=False)
    linux.seal(tasks, recursive=False)


def _verdict(task_id: str) -> dict[str, Any]:
    from appworld.evaluator import evaluate_task

    try:
        tracker = evaluate_task(task_id, EXPERIMENT, suppress_errors=True, save_report=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"verdict": tracker.to_dict(stats_only=False)}


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _children_of(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                # The name in parentheses may hold anything; the parent is the second field after it.
                if int(file.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(name))
        except OSError:
            continue
    return found


def _processes_of(uid: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


if __name__ == "__main__":
    linux.close_to_inspection()
    WorldServer(JailSpec.from_json(sys.argv[1])).run()
