"""The process behind a slot: forks a fresh process for every task, ends it, and has its outcome evaluated.

Forked from a `world_template`, so AppWorld is loaded when it begins. It never runs model-written code itself; the
process it forks does, serves AppWorld's own HTTP application on the slot's socket, and is killed with everything it
started when the task is over. So nothing a task leaves behind (patched modules, threads, files, memory) reaches the
next one, and a task begins within 0.2 s.

The slot speaks to it over a socket, one JSON object a line:

    slot   {"do": "task", "task_id": ...}        end the current task, fork a process for this one
           {"do": "evaluate", "task_id": ...}    end the task's process, run AppWorld's evaluator on what it saved
           {"do": "clear"}                       end the task's process
    server {"event": "forked"}                   it exists
           {"event": "done"}                     a "task" or "clear" has been carried out
           {"event": "exited", "status": ...}    the task's process ended by itself
           {"event": "evaluated", ...}           AppWorld's verdict, or "error"

End of file on that socket ends the server: it cannot outlive its slot.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draco_ray.environments.appworld.engine import serve, verdict
from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SHOWN_OF_A_TASK, JailSpec, readable_in_place
from draco_ray.environments.jail.system_calls import refuse_system_calls


@dataclass(frozen=True)
class SlotSpec:
    """What a slot asks of its server."""

    directory: str
    """Private folder of the slot on the host."""
    evaluate: bool
    """Whether AppWorld's evaluator, which reads ground truth, may be run."""
    memory_mib: int
    processes: int
    scratch_mib: int
    cpu_seconds: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SlotSpec:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


class WorldServer:
    """Forks and ends the processes of tasks, at the slot's word."""

    def __init__(
        self,
        jail: JailSpec,
        slot: SlotSpec,
        control: socket.socket,
        listener: socket.socket,
        *,
        scratch: Sequence[str],
        task_uid: int | None,
    ) -> None:
        """Take over the sockets.

        Args:
            scratch: the folders a task may write in.
            task_uid: user of the processes that run model-written code; None: the server's own.
        """
        self._jail = jail
        self._slot = slot
        self._control = control
        self._listener = listener
        self._scratch = tuple(scratch)
        self._task_uid = task_uid
        self._task_pid: int | None = None
        self._received = b""

    def run(self) -> None:
        """Serve the slot until it closes its end."""
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
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
        if self._jail.mounts:
            show_only(task_id, os.path.join(self._jail.world, "data", "tasks"))
        self._confine([os.path.join(task_id, name) for name in SHOWN_OF_A_TASK])
        serve(self._listener)

    def _confine(self, tasks: list[str]) -> None:
        """Give up everything but what is in sight. ``tasks``: what to read of the tasks' folder, where Landlock says
        what is in sight."""
        spec = self._slot
        processes = spec.processes
        if self._task_uid is None and not self._jail.mounts:
            # In the host's own user namespace the limit counts everything else this user runs.
            processes += _processes_of(os.getuid())
        linux.limit(
            memory_mib=spec.memory_mib,
            processes=processes,
            file_mib=spec.scratch_mib,
            cpu_seconds=spec.cpu_seconds,
        )
        linux.drop_privileges(self._task_uid)
        linux.close_to_inspection()
        linux.die_with_parent()
        refuse_system_calls()
        if self._jail.level == "landlock":
            linux.reach_only(readable=readable_in_place(self._jail, tasks), writable=(*self._scratch, os.devnull))

    def _evaluate(self, task_id: str) -> dict[str, Any]:
        """Run AppWorld's evaluator in a process of its own, which has never seen the model's code."""
        if not self._slot.evaluate:
            return {"error": "this slot was started without ground truth"}
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _forget_signals()
                self._control.close()
                self._confine([task_id])
                with open(writer, "w", encoding="utf-8") as pipe:
                    json.dump(verdict(task_id), pipe)
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
        for folder in self._scratch:
            if self._jail.mounts:
                linux.unmount(folder)
                linux.mount_tmpfs(folder, self._slot.scratch_mib, 0o1777)
            elif (found := [entry.path for entry in os.scandir(folder)]) and not linux.remove_all(found):
                raise OSError(f"{folder} cannot be cleared")


def show_only(task_id: str, tasks: str) -> None:
    """In a mount namespace of this process, leave of all tasks only this one's specs and databases.

    Its ground truth, and everything about other tasks, is then out of reach for good once privileges are dropped.
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
