"""One environment slot: an AppWorld server process in a jail, and the client that plays one task at a time in it.

    slot ──control socket──► world server (loads AppWorld once, runs no model code)
      └────HTTP, unix socket──► its fork for the current task (AppWorld's own application, model code)

The HTTP side is `appworld.serve.environment:app` as packaged. Every request has a connection of its own, because time
stands still inside a task and the server would reset an idle one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from draco_ray.config import EnvironmentConfig
from draco_ray.environments.appworld_python import appworld_python
from draco_ray.environments.data_root import check_data_root, load_task
from draco_ray.environments.jail import LEVELS, JailSpec
from draco_ray.environments.world_server import EXPERIMENT
from draco_ray.errors import EnvironmentCrashed, WorldError
from draco_ray.records import Evaluation, Task, Trajectory

log = logging.getLogger(__name__)

_PROCESSES = 64
"""Processes and threads of one task; AppWorld itself needs a handful of threads."""
_MOST_PROCESSES = 2 * _PROCESSES
"""Seen from outside, where the host does not enforce the limit (a container's root)."""
_SCRATCH_MIB = 128
"""What a task may write, and the largest file."""
_SOFT_SHARE = 0.8
"""AppWorld interrupts a cell itself at this share of the cell timeout, which an honest endless loop survives as an
error message. The wall clock is for code that does not let itself be interrupted."""
_WATCH_SECONDS = 0.25

_levels_reached: dict[str, str] = {}
"""The level ``auto`` reached in this process, by interpreter, so that later slots do not try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVerdict:
    """AppWorld's evaluation of a finished world."""

    success: bool
    passed_tests: int
    total_tests: int
    difficulty: int | None
    failures: tuple[str, ...]
    """Requirements that are not met."""


class AppWorldSlot:
    """A world to play tasks in, one after the other; satisfies `draco_ray.agent.World` while a task is open.

    Not for concurrent use. A slot belongs to one event loop.
    """

    def __init__(self, config: EnvironmentConfig, data_root: Path, *, load_ground_truth: bool, name: str) -> None:
        """Prepare a slot; its server starts with the first task.

        Args:
            data_root: folder with ``data/tasks``, ``data/base_dbs``, …; never written to.
            load_ground_truth: whether `evaluate` may be called. The process that runs model-written code sees no
                ground truth either way.
            name: for messages.
        Raises: WorldError when the data root or AppWorld's Python cannot be used.
        """
        check_data_root(data_root)
        self._config = config
        self._root = data_root.resolve()
        self._load_ground_truth = load_ground_truth
        self._name = name
        self._python = appworld_python(config.appworld_python)
        self._server: _Server | None = None
        self._task: Task | None = None
        self._tasks_played = 0

    @property
    def task(self) -> Task:
        """The open task. Raises RuntimeError when none is."""
        if self._task is None:
            raise RuntimeError(f"environment {self._name}: no task is open")
        return self._task

    @property
    def pid(self) -> int | None:
        """Process id of the server (the outermost of its processes), None while there is none."""
        return self._server.pid if self._server else None

    @property
    def isolation_level(self) -> str | None:
        """``namespaces``, ``bubblewrap`` or ``rlimits``; None while there is no server."""
        return self._server.level if self._server else None

    @property
    def memory_mib(self) -> float:
        """Resident memory of the server and the open task's processes; pages they share count once for each."""
        return self._server.usage()[0] if self._server else 0.0

    async def open(self, task_id: str) -> Task:
        """Begin a task in a process nothing has run in before; an open one is closed first.

        Returns: the task, as read from its specs.
        Raises: WorldError for a task that is not there; EnvironmentCrashed when the server cannot be started.
        """
        task = load_task(self._root, task_id)
        await self.close_task()
        if self._server is None:
            self._server = await self._start()
        await self._order("task", task_id)
        limit = max(1, math.floor(self._config.cell_timeout_seconds * _SOFT_SHARE))
        answer = await self._request(
            "/initialize",
            {
                "task_id": task_id,
                "experiment_name": EXPERIMENT,
                # The evaluator, a process of its own, loads it instead.
                "load_ground_truth": False,
                "timeout_seconds": limit,
            },
            task_id,
            self._config.start_timeout_seconds,
        )
        if not isinstance(answer, dict) or answer.get("instruction") != task.instruction:
            await self._crash(task_id, "the server opened another task than its specs describe")
        self._task = task
        self._tasks_played += 1
        return task

    async def execute(self, code: str) -> str:
        """Run a cell of model-written code in the open task.

        Returns: what it printed, or AppWorld's message for it; at most ``max_output_bytes`` and a mark.
        Raises: EnvironmentCrashed when the process died, outlived the cell timeout, outgrew its memory or broke the
            protocol. The server has then been killed; the next `open` starts another.
        """
        task_id = self.task.task_id
        output = await self._request(
            "/execute", {"task_id": task_id, "code": code}, task_id, self._config.cell_timeout_seconds
        )
        if not isinstance(output, str):
            await self._crash(task_id, "the server answered a cell with something that is not text")
        return output

    async def evaluate(self) -> WorldVerdict:
        """AppWorld's own evaluation of the open task. No more cells can be run in it.

        Raises: WorldError when the slot was made without ground truth or the task has none that can be used;
            EnvironmentCrashed when the evaluator hangs or dies.
        """
        task_id = self.task.task_id
        if not self._load_ground_truth:
            raise WorldError(f"environment {self._name} was started without ground truth and cannot evaluate {task_id}")
        answer = await self._order("evaluate", task_id)
        if "verdict" not in answer:
            raise WorldError(f"task {task_id} cannot be evaluated: {answer.get('error')}")
        verdict = answer["verdict"]
        return WorldVerdict(
            success=bool(verdict["success"]),
            passed_tests=len(verdict["passes"]),
            total_tests=int(verdict["num_tests"]),
            difficulty=verdict["difficulty"],
            failures=tuple(failure["requirement"] for failure in verdict["failures"]),
        )

    async def evaluate_rollout(self, trajectory: Trajectory, *, run: int = 0) -> Evaluation:
        """`evaluate`, as a record of the rollout that was just played; one that crashed its world has failed."""
        if self._task is None:
            lost = "the world crashed before it could be evaluated"
            verdict = WorldVerdict(success=False, passed_tests=0, total_tests=0, difficulty=None, failures=(lost,))
        else:
            verdict = await self.evaluate()
        return Evaluation(
            task_id=trajectory.task_id,
            run=run,
            turns=len(trajectory.turns),
            ended=trajectory.ended,
            success=verdict.success,
            passed_tests=verdict.passed_tests,
            total_tests=verdict.total_tests,
            difficulty=verdict.difficulty,
            failures=verdict.failures,
        )

    async def close_task(self) -> None:
        """End the open task's process, and the server too when it has played its share or has grown too large."""
        if self._server is None or self._task is None:
            return
        task_id = self.task.task_id
        too_large = self._server.usage()[0] > self._config.recycle_above_mib
        self._task = None
        if too_large or self._tasks_played >= self._config.recycle_after_tasks:
            await self.stop()
            return
        await self._order("clear", task_id)

    async def stop(self) -> None:
        """End the server and everything in it."""
        server, self._server, self._task = self._server, None, None
        self._tasks_played = 0
        if server is not None:
            await server.kill()

    async def _start(self) -> _Server:
        wanted = self._config.isolation
        levels: tuple[str, ...] = LEVELS if wanted == "auto" else (wanted,)
        if wanted == "auto" and self._python in _levels_reached:
            levels = (_levels_reached[self._python],)
        complaints = []
        for level in levels:
            try:
                server = await _Server.start(
                    self._python, level, self._config, self._root / "data", evaluate=self._load_ground_truth
                )
            except EnvironmentCrashed as error:
                complaints.append(f"{level}: {error}")
                continue
            if _levels_reached.get(self._python) != level:
                _levels_reached[self._python] = level
                weak = " (the host's files stay readable)" if level == "rlimits" else ""
                log.log(
                    logging.WARNING if weak else logging.INFO, "model-written code is isolated by %s%s", level, weak
                )
            return server
        raise EnvironmentCrashed(
            f"environment {self._name}: the AppWorld server did not start: {'; '.join(complaints)}"
        )

    async def _order(self, do: str, task_id: str) -> dict[str, Any]:
        assert self._server is not None
        try:
            async with asyncio.timeout(self._config.start_timeout_seconds):
                return await self._server.order(do, task_id)
        except TimeoutError:
            await self._crash(task_id, f"no answer to {do!r} within {self._config.start_timeout_seconds:g} s")
        except (OSError, ValueError, EOFError):
            await self._crash(task_id, f"the server died: {self._server.complaint()}")
        except asyncio.CancelledError:
            await self.stop()
            raise
        raise AssertionError

    async def _request(self, path: str, body: dict[str, object], task_id: str, seconds: float) -> Any:
        """POST to the task's process. Returns the ``output`` of its answer."""
        server = self._server
        if server is None:
            raise EnvironmentCrashed(f"environment {self._name}: task {task_id}: the server is gone")
        request = asyncio.ensure_future(server.post(path, body, 6 * self._config.max_output_bytes + (1 << 20)))
        watch = asyncio.ensure_future(server.watch(self._config.max_memory_mib))
        try:
            await asyncio.wait({request, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                status, answer = request.result()
                if status == 200 and "output" in answer:
                    return answer["output"]
                reason = f"{path} answered {status}: {answer.get('error', answer)}"
            elif watch.done():
                reason = watch.result()
            else:
                reason = f"{path} took longer than {seconds:g} s"
        except (httpx.HTTPError, OSError, ValueError, EOFError) as error:
            # Where the process died, its end says more than the broken connection does.
            reason = server.exit_reason() or f"{path}: {type(error).__name__}: {error}"
        except asyncio.CancelledError:
            # The cell goes on in the server: it cannot be used again.
            await self.stop()
            raise
        finally:
            for pending in (request, watch):
                pending.cancel()
            await asyncio.gather(request, watch, return_exceptions=True)
        return await self._crash(task_id, reason)

    async def _crash(self, task_id: str, reason: str) -> Any:
        await self.stop()
        raise EnvironmentCrashed(f"environment {self._name}: task {task_id}: {reason}")


class _Server:
    """The server's process, its two sockets and its private folder."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        level: str,
        directory: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.level = level
        self._process = process
        self._directory = directory
        self._reader = reader
        self._writer = writer
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.ensure_future(self._listen())
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=_socket_path(directory), limits=httpx.Limits(max_keepalive_connections=0)
            ),
            base_url="http://world",
            timeout=None,
            trust_env=False,
        )

    @classmethod
    async def start(cls, python: str, level: str, config: EnvironmentConfig, data: Path, *, evaluate: bool) -> _Server:
        """Start a server and wait until it has loaded AppWorld.

        Raises: EnvironmentCrashed, the process's own words, when it cannot.
        """
        process, directory, control = await asyncio.to_thread(_launch, python, level, config, data, evaluate)
        server = cls(process, level, directory, *await asyncio.open_connection(sock=control))
        try:
            async with asyncio.timeout(config.start_timeout_seconds):
                ready = await server._answers.get()
            if ready != {"event": "ready"}:
                raise EnvironmentCrashed(server.complaint())
        except TimeoutError:
            await server.kill()
            raise EnvironmentCrashed(f"not ready within {config.start_timeout_seconds:g} s") from None
        except BaseException:
            await server.kill()
            raise
        return server

    @property
    def pid(self) -> int:
        """Process id of the outermost process."""
        return self._process.pid

    async def order(self, do: str, task_id: str) -> dict[str, Any]:
        """Have the server do something. Raises EOFError when it is gone."""
        self._writer.write(json.dumps({"do": do, "task_id": task_id}).encode() + b"\n")
        await self._writer.drain()
        answer = await self._answers.get()
        if answer is None:
            raise EOFError
        return answer

    async def post(self, path: str, body: dict[str, object], max_bytes: int) -> tuple[int, dict[str, Any]]:
        """POST JSON to the task's process. Returns status and answer.

        Raises: ValueError when the answer is larger than ``max_bytes`` (reading stops there) or is not a JSON object.
        """
        received = bytearray()
        async with self._http.stream("POST", path, json=body) as response:
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > max_bytes:
                    raise ValueError(f"an answer of more than {max_bytes} bytes")
        answer = json.loads(received)
        if not isinstance(answer, dict):
            raise ValueError("an answer that is not a JSON object")
        return response.status_code, answer

    async def watch(self, max_memory_mib: float) -> str:
        """Wait until the task's process has ended or its processes outgrow their memory. Returns which."""
        while True:
            done, _ = await asyncio.wait({self._exited}, timeout=_WATCH_SECONDS)
            if done:
                return self._exited.result()
            memory, processes = self.usage()
            if memory > max_memory_mib:
                return f"its processes held {memory:.0f} MiB of memory, more than the {max_memory_mib} MiB allowed"
            if processes > _MOST_PROCESSES:
                return f"it ran {processes} processes"

    def usage(self) -> tuple[float, int]:
        """(resident MiB, processes) of the server and everything below it."""
        memory = 0
        try:
            tree = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0.0, 0
        for process in tree:
            try:
                memory += process.memory_info().rss
            except psutil.Error:
                continue
        return memory / (1 << 20), len(tree)

    def exit_reason(self) -> str | None:
        """How the task's process ended; None while it runs."""
        return self._exited.result() if self._exited.done() else None

    def complaint(self) -> str:
        """The last line the server wrote before it died."""
        try:
            text = Path(self._directory, "stderr").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:500] if lines else "it left no message"

    async def kill(self) -> None:
        """End the server and all its descendants and remove its folder."""
        self._listening.cancel()
        # In a process namespace the second process takes all others with it; elsewhere each is ended by itself.
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.pid)
            for process in (launcher, *launcher.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        await asyncio.to_thread(self._process.wait)
        self._writer.close()
        await self._http.aclose()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _listen(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            if message["event"] == "exited":
                if not self._exited.done():
                    self._exited.set_result(f"the task's process died (status {message['status']})")
                continue
            if self._exited.done():
                # What ended was the process before this answer.
                self._exited = asyncio.get_running_loop().create_future()
            self._answers.put_nowait(message)
        if not self._exited.done():
            self._exited.set_result("the server died")
        self._answers.put_nowait(None)


def _launch(
    python: str, level: str, config: EnvironmentConfig, data: Path, evaluate: bool
) -> tuple[subprocess.Popen[bytes], str, socket.socket]:
    """Start the server's process. Returns it, its private folder and our end of its control socket."""
    directory = tempfile.mkdtemp(prefix="draco-slot-")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_socket_path(directory))
    listener.listen(16)
    control, their_control = socket.socketpair()
    spec = JailSpec(
        level=level,
        control_fd=their_control.fileno(),
        listen_fd=listener.fileno(),
        directory=directory,
        data=str(data),
        evaluate=evaluate,
        memory_mib=config.max_memory_mib,
        processes=_PROCESSES,
        scratch_mib=_SCRATCH_MIB,
        cpu_seconds=math.ceil(60 * config.cell_timeout_seconds),
        output_bytes=config.max_output_bytes,
    )
    package_parent = Path(__file__).resolve().parents[2]
    with open(os.path.join(directory, "stderr"), "wb") as stderr:
        process = subprocess.Popen(
            [python, "-P", "-s", "-m", "draco_ray.environments.jail", spec.to_json()],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(package_parent), "LANG": "C.UTF-8"},
            pass_fds=(their_control.fileno(), listener.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            cwd="/",
        )
    their_control.close()
    listener.close()
    return process, directory, control


def _socket_path(directory: str) -> str:
    return os.path.join(directory, "http")
