"""An environment slot: the client of a server in a jail. The server plays one task; the slot is the task's `World`.

slot ──control socket──► world server (has loaded AppWorld, runs no model-written code; every task gets a new server)
  └────socket──► the server's fork for the current task (runs AppWorld and model-written code)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.data_root import check_data_root, load_task
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.environments.appworld.process_roles import escape_surrogates, truncate
from draco_ray.environments.appworld.server_process import ServerProcess, TaskProcessEnded
from draco_ray.environments.appworld.template_process import TemplateKey, shared_template
from draco_ray.environments.appworld.world_server import MAX_EVALUATION_BYTES
from draco_ray.environments.base import WorldVerdict
from draco_ray.errors import EnvironmentCrashed, WorldBroken, WorldError
from draco_ray.records import Task

_SOFT_SHARE = 0.8
"""Share of the cell timeout at which AppWorld interrupts a cell with an error message. The full timeout is for code
that cannot be interrupted."""
_LONGEST_REASON = 500


def soft_cell_timeout(config: EnvironmentConfig) -> int:
    """Seconds after which AppWorld interrupts a cell with an error message."""
    return max(1, math.floor(config.cell_timeout_seconds * _SOFT_SHARE))


class AppWorldSlot:
    """Plays tasks one after another, each in a new AppWorld server; is also the `World` of the open task.

    Not for concurrent use; belongs to one event loop.
    """

    def __init__(self, config: EnvironmentConfig, data_root: Path, *, load_ground_truth: bool, name: str) -> None:
        """Prepare a slot; its server starts with the first task.

        Args:
            data_root: folder with ``data/tasks``, ``data/base_dbs``, …; read-only.
            load_ground_truth: whether `evaluate` may be called. Processes that run model-written code never see ground
                truth.
            name: for messages.
        Raises: WorldError: the data root or AppWorld's Python cannot be used.
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
        self._server: ServerProcess | None = None
        self._task: Task | None = None
        self._over = False

    @property
    def task(self) -> Task:
        """The open task, even if its world crashed. Raises: RuntimeError: there is none."""
        if self._task is None:
            raise RuntimeError(f"environment {self._name}: no task is open")
        return self._task

    @property
    def pid(self) -> int | None:
        """Process id of the server (its outermost process); None if there is none."""
        return self._server.pid if self._server else None

    @property
    def isolation_level(self) -> str | None:
        """``namespaces``, ``bubblewrap``, ``landlock`` or ``rlimits``; None if there is no server."""
        return self._server.level if self._server else None

    async def open(self, task_id: str) -> AppWorldSlot:
        """Begin a task in a new server; an open task is closed first.

        Returns: itself.
        Raises: WorldError: there is no such task; EnvironmentCrashed: the server cannot be started.
        """
        task = load_task(self._root, task_id)
        await self.close()
        await self._start()
        answer = await self._ask(task_id, {"timeout_seconds": soft_cell_timeout(self._config)}, begin="task")
        if answer.get("instruction") != task.instruction:
            reason = answer.get("error", "the server opened a different task than requested")
            await self._crash(task_id, reason, own=False)
        self._task = task
        self._over = False
        return self

    async def act(self, action: str) -> str:
        """Run a cell of model-written code in the open task.

        Returns: its output or AppWorld's error message; at most ``max_output_bytes`` and a mark.
        Raises: WorldBroken: the process died, or exceeded the cell timeout or its memory, or broke the protocol;
            EnvironmentCrashed: the same, but not caused by the task's code. The server is then killed, and the next
            `open` starts another.
        """
        task_id = self.task.task_id
        if self._over:
            raise RuntimeError(
                f"environment {self._name}: task {task_id} has already been evaluated, so no more code can be run"
            )
        # Source code must not have lone surrogates, but text copied from an API's result may.
        code = action.encode("utf-8", "replace").decode("utf-8")
        answer = await self._ask(task_id, {"code": code}, cell=True)
        output = answer.get("output")
        if not isinstance(output, str):
            await self._crash(task_id, answer.get("error", "the answer to a cell is not text"), own=True)
        # Cut as `BoundedText` does, in case the task's code replaced `BoundedText`.
        return truncate(escape_surrogates(output), self._config.max_output_bytes)

    async def evaluate(self) -> WorldVerdict:
        """AppWorld's evaluation of the open task; no more cells can be run afterwards.

        A world that AppWorld cannot evaluate was manipulated, so it counts as failed.

        Raises: WorldError: the slot has no ground truth, or the task has no usable one; EnvironmentCrashed: the
            evaluator hangs or dies; WorldBroken: the world exceeded its limits.
        """
        task_id = self.task.task_id
        if not self._load_ground_truth:
            raise WorldError(f"environment {self._name} was started without ground truth and cannot evaluate {task_id}")
        self._over = True
        await self._ask(task_id, {}, begin="save")
        answer = await self._ask(task_id, {})
        return await self._evaluate(task_id, answer["saved"]) if "saved" in answer else _failed(answer)

    async def evaluate_saved(self, task_id: str, files: Mapping[str, str]) -> WorldVerdict:
        """AppWorld's evaluation of a saved world of any task; an open task is closed.

        Args:
            files: see `WorldVerdict.saved`.
        Raises: as `evaluate`.
        """
        load_task(self._root, task_id)
        self._task = None
        return await self._evaluate(task_id, files)

    async def _evaluate(self, task_id: str, files: Mapping[str, str]) -> WorldVerdict:
        await self._end_server()
        await self._start()
        began = await self._ask(task_id, {}, begin="evaluate")
        if "error" in began:
            raise WorldError(f"task {task_id} cannot be evaluated: {began['error']}")
        answer = await self._ask(task_id, {"files": dict(files)})
        if "verdict" not in answer:
            return _failed({**began, **answer})
        verdict = answer["verdict"]
        return WorldVerdict(
            success=bool(verdict["success"]),
            passed_tests=len(verdict["passes"]),
            total_tests=int(verdict["num_tests"]),
            difficulty=verdict["difficulty"],
            failures=tuple(failure["requirement"] for failure in verdict["failures"]),
            # The evaluator has checked the SQL statements in ``dbs/<app>.jsonl`` before executing them.
            saved=dict(files),
        )

    async def close(self) -> None:
        """End the open task's server and everything in it. The slot can be used again."""
        self._task = None
        await self._end_server()

    async def _start(self) -> None:
        try:
            template = await asyncio.to_thread(shared_template, self._key, self._config.start_timeout_seconds)
            self._server = await ServerProcess.start(template, self._config, evaluate=self._load_ground_truth)
        except EnvironmentCrashed as error:
            raise type(error)(f"environment {self._name}: {error}") from error

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.kill()

    async def _ask(
        self, task_id: str, order: Mapping[str, Any], *, begin: str = "", cell: bool = False
    ) -> dict[str, Any]:
        """Send an order to the process that the server has forked, and return its answer.

        Args:
            begin: role (`world_server.ROLES`) of a new process, which is forked first and then gets the order. It has
                read nothing that model-written code wrote, so if it ends, `EnvironmentCrashed` is raised and
                not `WorldBroken`, unless the server exceeded its limits. Empty: the current process gets the order.
            cell: whether the order is a cell of model-written code; a timeout then raises `WorldBroken`, too.
        """
        config, server = self._config, self._server
        if server is None:
            raise EnvironmentCrashed(f"environment {self._name}: task {task_id}: the server has ended")
        seconds = config.cell_timeout_seconds if cell else config.start_timeout_seconds
        try:
            if begin:
                await server.begin(begin, task_id, seconds)
            return await server.ask(order, seconds, _longest(config) if cell else MAX_EVALUATION_BYTES)
        except asyncio.CancelledError:
            # The process is still busy, so the server cannot be used again.
            await self._end_server()
            raise
        except TimeoutError:
            reason, own = f"{'the cell' if cell else begin or 'the evaluation'} took longer than {seconds:g} s", cell
        except TaskProcessEnded as ended:
            reason, own = str(ended), bool(server.excess) if begin else ended.own
            if own and not (begin or cell):
                return {"unusable": reason}
        return await self._crash(task_id, reason, own=own)

    async def _crash(self, task_id: str, reason: str, *, own: bool) -> NoReturn:
        await self._end_server()
        kind = WorldBroken if own else EnvironmentCrashed
        raise kind(f"environment {self._name}: task {task_id}: {one_line(reason)}")


def _longest(config: EnvironmentConfig) -> int:
    """Maximum size in bytes of the answer to a cell. JSON may encode one byte of output as six bytes."""
    return 6 * config.max_output_bytes + (1 << 20)


def _failed(answer: Mapping[str, Any]) -> WorldVerdict:
    """The verdict on a world that cannot be evaluated."""
    reason = f"the saved world cannot be evaluated: {one_line(answer.get('unusable'))}"
    tests, difficulty = answer.get("tests", 0), answer.get("difficulty")
    return WorldVerdict(success=False, total_tests=tests, difficulty=difficulty, failures=(reason,))


def one_line(said: object) -> str:
    """A process's output for a message: short, and only printable characters."""
    text = str(said)[: 4 * _LONGEST_REASON]
    printable = "".join(each if each.isprintable() else " " if each.isspace() else ascii(each)[1:-1] for each in text)
    return printable if len(printable) <= _LONGEST_REASON else printable[:_LONGEST_REASON] + "…"
