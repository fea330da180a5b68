"""One environment slot: an AppWorld server in a jail, and the client that plays one task at a time in it.

    slot ──control socket──► world server (has AppWorld loaded, runs no model code)
      └────HTTP, unix socket──► its fork for the current task (AppWorld's own application, model code)

The HTTP side is `appworld.serve.environment:app` as packaged. Every request has a connection of its own, because time
stands still inside a task and the server would reset an idle one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.data_root import check_data_root, load_task
from draco_ray.environments.appworld.engine import EXPERIMENT
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.environments.appworld.server_process import ServerProcess
from draco_ray.environments.appworld.template_process import (
    TemplateKey,
    TemplateProcess,
    acquire_template,
    release_template,
)
from draco_ray.errors import EnvironmentCrashed, WorldError
from draco_ray.records import Evaluation, Task, Trajectory

_SOFT_SHARE = 0.8
"""AppWorld interrupts a cell itself at this share of the cell timeout, which an honest endless loop survives as an
error message. The wall clock is for code that does not let itself be interrupted."""
_LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldVerdict:
    """AppWorld's evaluation of a finished world."""

    success: bool
    passed_tests: int
    total_tests: int
    difficulty: int | None
    failures: tuple[str, ...]
    """Requirements that are not met."""


def soft_cell_timeout(config: EnvironmentConfig) -> int:
    """Seconds after which AppWorld itself stops a cell and says so in its output."""
    return max(1, math.floor(config.cell_timeout_seconds * _SOFT_SHARE))


class AppWorldSlot:
    """A world to play tasks in, one after the other; satisfies `draco_ray.rollout.World` while a task is open.

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
        self._key = TemplateKey(
            python=appworld_python(config.appworld_python),
            isolation=config.isolation,
            data=self._root / "data",
            output_bytes=config.max_output_bytes,
        )
        self._template: TemplateProcess | None = None
        self._server: ServerProcess | None = None
        self._task: Task | None = None
        self._over = False
        self._tasks_played = 0
        self._saved: dict[str, str] = {}

    @property
    def saved_files(self) -> dict[str, str]:
        """What AppWorld saved of the task `evaluate` judged last: ``dbs/<app>.jsonl``, ``logs/...`` -> content. Names
        are plain; the content is as the task's process left it, bytes that are no text as surrogates."""
        return self._saved

    @property
    def task(self) -> Task:
        """The open task, also when its world has crashed. Raises RuntimeError when none is."""
        if self._task is None:
            raise RuntimeError(f"environment {self._name}: no task is open")
        return self._task

    @property
    def pid(self) -> int | None:
        """Process id of the server (the outermost of its processes), None while there is none."""
        return self._server.pid if self._server else None

    @property
    def isolation_level(self) -> str | None:
        """``namespaces``, ``bubblewrap``, ``landlock`` or ``rlimits``; None while there is no server."""
        return self._server.level if self._server else None

    @property
    def memory_mib(self) -> float:
        """Resident memory of the slot's processes without the outermost, MiB. Pages that they share with each other or
        with the processes of other slots count once for each."""
        return self._server.usage()[0] if self._server else 0.0

    async def open(self, task_id: str) -> Task:
        """Begin a task in a process nothing has run in before; an open one is closed first.

        Returns: the task, as read from its specs.
        Raises: WorldError for a task that is not there; EnvironmentCrashed when the server cannot be started.
        """
        task = load_task(self._root, task_id)
        await self.close_task()
        if self._server is not None:
            try:
                await self._begin(task)
                return task
            except EnvironmentCrashed:
                # The server had played tasks before: what they did to it is not this task's fault.
                pass
        self._server = await self._start()
        await self._begin(task)
        return task

    async def execute(self, code: str) -> str:
        """Run a cell of model-written code in the open task.

        Returns: what it printed, or AppWorld's message for it; at most ``max_output_bytes`` and a mark.
        Raises: EnvironmentCrashed when the process died, outlived the cell timeout, outgrew its memory or broke the
            protocol. The server has then been killed; the next `open` starts another.
        """
        task_id = self.task.task_id
        if self._over:
            raise RuntimeError(f"environment {self._name}: task {task_id} has been evaluated: nothing more can be run")
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
        self._over = True
        self._saved = {}
        answer = await self._order("evaluate", task_id)
        if "verdict" not in answer:
            raise WorldError(f"task {task_id} cannot be evaluated: {answer.get('error')}")
        self._saved = dict(answer["saved"])
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
        if self._server is None:
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
        """End the open task's process, and the server too when it has played its share or has grown too large.

        Raises: nothing: a server that cannot do it is ended.
        """
        task, self._task = self._task, None
        if self._server is None or task is None:
            return
        too_large = self._server.usage()[0] > self._config.recycle_above_mib
        if too_large or self._tasks_played >= self._config.recycle_after_tasks:
            await self._end_server()
            return
        with contextlib.suppress(EnvironmentCrashed):
            await self._order("clear", task.task_id)

    async def stop(self) -> None:
        """End the server and everything in it. The slot may be used again."""
        self._task = None
        await self._end_server()
        if self._template is not None:
            self._template = None
            await asyncio.to_thread(release_template, self._key)

    async def _begin(self, task: Task) -> None:
        await self._order("task", task.task_id)
        answer = await self._request(
            "/initialize",
            {
                "task_id": task.task_id,
                "experiment_name": EXPERIMENT,
                # The evaluator, a process of its own, loads it instead.
                "load_ground_truth": False,
                "timeout_seconds": soft_cell_timeout(self._config),
            },
            task.task_id,
            self._config.start_timeout_seconds,
        )
        if not isinstance(answer, dict) or answer.get("instruction") != task.instruction:
            await self._crash(task.task_id, "the server opened another task than its specs describe")
        self._task = task
        self._over = False
        self._tasks_played += 1

    async def _start(self) -> ServerProcess:
        try:
            if self._template is not None and not self._template.alive:
                self._template = None
                await asyncio.to_thread(release_template, self._key)
            if self._template is None:
                self._template = await self._acquire()
            return await ServerProcess.start(self._template, self._config, evaluate=self._load_ground_truth)
        except EnvironmentCrashed as error:
            raise EnvironmentCrashed(f"environment {self._name}: {error}") from error

    async def _acquire(self) -> TemplateProcess:
        starting = asyncio.ensure_future(
            asyncio.to_thread(acquire_template, self._key, self._config.start_timeout_seconds)
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled. What it brings is given back by it.
            starting.add_done_callback(self._give_back)
            raise

    def _give_back(self, starting: asyncio.Future[TemplateProcess]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            release_template(self._key)

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        self._tasks_played = 0
        if server is not None:
            await server.kill()

    async def _order(self, do: str, task_id: str) -> dict[str, Any]:
        server = self._server
        if server is None:
            raise EnvironmentCrashed(f"environment {self._name}: task {task_id}: the server is gone")
        try:
            async with asyncio.timeout(self._config.start_timeout_seconds):
                return await server.order(do, task_id)
        except TimeoutError:
            await self._crash(task_id, f"no answer to {do!r} within {self._config.start_timeout_seconds:g} s")
        except (OSError, ValueError, EOFError):
            await self._crash(task_id, f"the server died: {server.complaint()}")
        except asyncio.CancelledError:
            await self._end_server()
            raise

    async def _request(self, path: str, body: dict[str, object], task_id: str, seconds: float) -> Any:
        """POST to the task's process. Returns the ``output`` of its answer."""
        server = self._server
        if server is None:
            raise EnvironmentCrashed(f"environment {self._name}: task {task_id}: the server is gone")
        request = asyncio.ensure_future(server.post(path, body, 6 * self._config.max_output_bytes + (1 << 20)))
        watch = asyncio.ensure_future(server.watch(self._config.max_memory_mib))
        reason = f"{path} took longer than {seconds:g} s"
        try:
            await asyncio.wait({request, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                status, answer = request.result()
                if status == 200 and "output" in answer:
                    return answer["output"]
                reason = f"{path} answered {status}: {answer.get('error', answer)}"
            elif watch.done():
                reason = watch.result()
        except ValueError as error:
            reason = f"{path}: {error}"
        except (httpx.HTTPError, OSError) as error:
            # Where the process died, its end says more than the broken connection does, and is known a moment later.
            ended, _ = await asyncio.wait({watch}, timeout=_LAST_WORDS_SECONDS)
            reason = watch.result() if ended else f"{path}: {type(error).__name__}: {error}"
        except asyncio.CancelledError:
            # The cell goes on in the server: it cannot be used again.
            await self._end_server()
            raise
        finally:
            for pending in (request, watch):
                pending.cancel()
            await asyncio.gather(request, watch, return_exceptions=True)
        return await self._crash(task_id, reason)

    async def _crash(self, task_id: str, reason: str) -> NoReturn:
        await self._end_server()
        raise EnvironmentCrashed(f"environment {self._name}: task {task_id}: {reason}")
