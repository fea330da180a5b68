"""The process behind a task or an evaluation: forks the process that does it, and ends with everything it forked.

It is forked from a `world_template`, so AppWorld is already loaded. It never runs model-written code itself: the task's
process does. That process serves AppWorld's HTTP application on the slot's socket. Every task and every evaluation has
a server of its own, with scratch of its own, so nothing a task leaves behind (patched modules, threads, files, memory)
reaches the next one.

The slot communicates with it over a socket, one JSON object per line:

    slot   {"do": "task", "task_id": ...}        fork the task's process
           {"do": "save", "task_id": ...}        end that process and read the world that it saved
           {"do": "evaluate", "task_id": ..., "files": ...}
                                                 run AppWorld's evaluator on a saved world
    server {"event": "forked"}                   the server exists
           {"event": "done", ...}                the answer to an order: for "save" the files under "saved", for
                                                 "evaluate" AppWorld's verdict, or why there is none (`engine.judge`)
           {"event": "exited", "status": ..., "killed": ...}
                                                 the task's process ended; whether it was killed from outside

End of file on that socket ends the server: it cannot outlive its slot.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from draco_ray.environments.appworld.engine import judge, saved_folder, serve
from draco_ray.environments.appworld.saved_world import MAX_SAVED_BYTES, UnusableWorld, read_saved
from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SHOWN_OF_A_TASK, JailSpec, readable_in_place
from draco_ray.environments.jail.system_calls import refuse_system_calls

MOST_PROCESSES = 64
"""Maximum number of processes and threads of a task; AppWorld itself needs a few threads."""
MAX_EVALUATION_BYTES = 6 * MAX_SAVED_BYTES + (8 << 20)
"""Maximum size of an evaluation's answer, saved files included. JSON may need six bytes to encode one."""


@dataclass(frozen=True)
class SlotSpec:
    """Settings of a server."""

    directory: str
    """The server's private folder on the host."""
    evaluate: bool
    """Whether AppWorld's evaluator, which reads ground truth, may run."""
    memory_mib: int
    cpu_seconds: int
    """CPU time limit of a task's process."""
    evaluate_cpu_seconds: int
    """CPU time limit of an evaluation."""


class WorldServer:
    """Forks and ends processes as ordered by the slot."""

    def __init__(
        self,
        jail: JailSpec,
        slot: SlotSpec,
        control: socket.socket,
        listener: socket.socket,
        *,
        scratch: Sequence[str],
        scratch_is_mounted: bool,
        task_uid: int | None,
    ) -> None:
        """Take over the sockets.

        Args:
            scratch: the folders a task may write in.
            scratch_is_mounted: whether each is a file system of limited size; else their contents are counted.
            task_uid: user of the processes that run model-written code; None: the server's.
        """
        self._jail = jail
        self._slot = slot
        self._control = control
        self._listener = listener
        self._scratch = tuple(scratch)
        self._scratch_is_mounted = scratch_is_mounted
        self._task_uid = task_uid
        self._task_pid: int | None = None
        self._wakes: tuple[int, ...] = ()
        self._received = bytearray()

    def run(self) -> None:
        """Serve the slot until it closes its end."""
        self._wakes = wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        # Set it here: `tempfile` finds it by creating and removing a file, which a task's process may not do.
        tempfile.tempdir = os.environ["TMPDIR"]
        while True:
            ready, _, _ = select.select([self._control.fileno(), wake_reader], [], [])
            if wake_reader in ready:
                os.read(wake_reader, 4096)
                self._notice_exits()
            if self._control.fileno() in ready:
                data = self._control.recv(1 << 20)
                if not data:
                    break
                self._received += data
                if data.endswith(b"\n"):
                    orders, self._received = self._received.splitlines(), bytearray()
                    for order in orders:
                        self._obey(json.loads(order))
        self._end_task()

    def _say(self, **message: Any) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _obey(self, order: dict[str, Any]) -> None:
        task_id, answer = order["task_id"], dict[str, Any]()
        if order["do"] == "task":
            self._start_task(task_id)
        elif order["do"] == "save":
            self._end_task()
            answer = self._ask(lambda tell: _tell_saved(task_id, tell), [])
        elif self._slot.evaluate:
            answer = self._ask(lambda tell: judge(task_id, order["files"], tell), [task_id])
        else:
            answer = {"error": "this slot was started without ground truth"}
        self._say(event="done", **answer)

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
        self._part()
        if self._jail.mounts:
            show_only(task_id, os.path.join(self._jail.world, "data", "tasks"))
        self._confine([os.path.join(task_id, name) for name in SHOWN_OF_A_TASK], self._slot.cpu_seconds)
        serve(self._listener)

    def _part(self) -> None:
        """In a forked process: leave the server's session and close its descriptors."""
        _forget_signals()
        os.setsid()
        self._control.close()
        for descriptor in self._wakes:
            os.close(descriptor)

    def _confine(self, tasks: list[str], cpu_seconds: int) -> None:
        """Drop all privileges but access to the visible files. ``tasks``: readable parts of the tasks' folder, if
        Landlock restricts access."""
        processes = MOST_PROCESSES
        if self._task_uid is None and not self._jail.mounts:
            # In the host's user namespace the limit counts all processes of this user: add those that run already.
            processes += _processes_of(os.getuid())
        linux.limit(
            memory_mib=self._slot.memory_mib,
            processes=processes,
            file_mib=self._jail.scratch_mib,
            cpu_seconds=cpu_seconds,
        )
        linux.drop_privileges(self._task_uid)
        linux.close_to_inspection()
        linux.die_with_parent()
        refuse_system_calls(may_remove=self._scratch_is_mounted)
        if self._jail.level == "landlock":
            linux.reach_only(readable=readable_in_place(self._jail, tasks), writable=(*self._scratch, os.devnull))

    def _ask(self, work: Callable[[Callable[[dict[str, Any]], None]], None], tasks: list[str]) -> dict[str, Any]:
        """Read or evaluate a saved world in a separate confined process.

        Args:
            work: called there with a function that reports results.
            tasks: see `_confine`.
        Returns: all results; ``unusable``: the world made the process die, ``killed``: something else did.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                self._part()
                self._confine(tasks, self._slot.evaluate_cpu_seconds)
                with open(writer, "wb") as pipe:
                    work(lambda found: _write_line(pipe, found))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        with open(reader, "rb") as pipe:
            said = pipe.read(MAX_EVALUATION_BYTES).splitlines()
        _, status, usage = os.wait4(child, 0)
        answer: dict[str, Any] = {}
        try:
            for line in said:
                answer.update(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            answer["unusable"] = "the output of the evaluator's process cannot be read"
        if status:
            # A process that reported nothing has not yet read anything that the world's code wrote.
            outside = not said or _killed(status, usage, self._slot.evaluate_cpu_seconds)
            how = f"the evaluator's process died (status {os.waitstatus_to_exitcode(status)})"
            answer["killed" if outside else "unusable"] = how
        return answer

    def _notice_exits(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._task_pid:
                self._task_pid = None
                killed = _killed(status, usage, self._slot.cpu_seconds)
                self._say(event="exited", status=os.waitstatus_to_exitcode(status), killed=killed)

    def _end_task(self) -> None:
        self._task_pid = None
        linux.end_descendants()


def show_only(task_id: str, tasks: str) -> None:
    """Enter a new mount namespace in which only this task's specs and databases are visible.

    After privileges are dropped, the task's ground truth and all other tasks cannot be reached.
    """
    linux.unshare(linux.NEW_MOUNTS)
    linux.detach_mounts()
    linux.mount_tmpfs("/view", 1, 0o755)
    for name in SHOWN_OF_A_TASK:
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


def _killed(status: int, usage: resource.struct_rusage, cpu_seconds: int) -> bool:
    """Whether a process was killed from outside, by an operator or because the machine ran out of memory.

    The process's own code cannot send SIGKILL; the kernel sends it when the process has used up its CPU time.
    """
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL and usage.ru_utime + usage.ru_stime < cpu_seconds


def _tell_saved(task_id: str, tell: Callable[[dict[str, Any]], None]) -> None:
    tell({})
    try:
        tell({"saved": read_saved(saved_folder(task_id))})
    except UnusableWorld as error:
        tell({"unusable": str(error)})


def _write_line(pipe: IO[bytes], said: dict[str, Any]) -> None:
    pipe.write(json.dumps(said).encode() + b"\n")
    pipe.flush()


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _processes_of(uid: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count
