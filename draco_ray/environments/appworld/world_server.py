"""The server behind a task or an evaluation: forks its processes, all of which end with the server.

It is forked from a `world_template`, so AppWorld is already loaded. Every task and every evaluation has a server of its
own, with scratch of its own, so nothing a task leaves behind (patched modules, threads, files, memory) reaches the next
one. An order is one of `ROLES` and a task id. The first answer of every process comes before it has read anything that
model-written code wrote.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from draco_ray.environments.appworld import process_roles
from draco_ray.environments.appworld.saved_world import MAX_SAVED_BYTES
from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SHOWN_OF_A_TASK, JailSpec, landlock_readable
from draco_ray.environments.jail.fork_server import Channel, ForkServer
from draco_ray.environments.jail.system_calls import refuse_system_calls

ROLES = {
    "task": process_roles.play,
    "save": process_roles.send_saved_world,
    "evaluate": process_roles.evaluate_saved_world,
}
MOST_PROCESSES = 64
"""Maximum number of processes and threads of a task; AppWorld itself needs a few threads."""
MAX_EVALUATION_BYTES = 6 * MAX_SAVED_BYTES + (8 << 20)
"""Maximum size in bytes of an answer that contains a saved world or its verdict. JSON may encode one byte of a file as
six bytes."""
_PATIENCE_SECONDS = 1.0


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


class WorldServer(ForkServer):
    """Forks and ends processes as ordered by the slot."""

    def __init__(
        self,
        jail: JailSpec,
        slot: SlotSpec,
        control: socket.socket,
        *,
        scratch: Sequence[str],
        scratch_is_mounted: bool,
        task_uid: int | None,
    ) -> None:
        """Take over the socket.

        Args:
            scratch: the folders a task may write in.
            scratch_is_mounted: whether each is a file system of limited size; else their contents are counted.
            task_uid: user of the processes that run model-written code; None: the server's.
        """
        super().__init__(control, _PATIENCE_SECONDS)
        self._jail = jail
        self._slot = slot
        self._scratch = tuple(scratch)
        self._scratch_is_mounted = scratch_is_mounted
        self._task_uid = task_uid
        # Set it here: `tempfile` finds it by creating and removing a file, which a task's process may not do.
        tempfile.tempdir = os.environ["TMPDIR"]

    def begin(self, order: str, channel: Channel) -> None:
        """Confine this process and run the role that ``order`` names."""
        role, _, task_id = order.partition(" ")
        os.setsid()
        tasks: list[str] = []
        if role == "task":
            tasks = [os.path.join(task_id, name) for name in SHOWN_OF_A_TASK]
            if self._jail.mounts:
                hide_other_tasks(task_id, os.path.join(self._jail.world, "data", "tasks"))
        elif role == "evaluate":
            tasks = [task_id]
            if not self._slot.evaluate:
                channel.receive()
                channel.answer({"error": "this slot was started without ground truth"})
                return
        self._confine(tasks, self._slot.cpu_seconds if role == "task" else self._slot.evaluate_cpu_seconds)
        ROLES[role](task_id, channel)

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
        linux.set_undumpable()
        linux.die_with_parent()
        refuse_system_calls(may_remove=self._scratch_is_mounted)
        if self._jail.level == "landlock":
            linux.apply_landlock(readable=landlock_readable(self._jail, tasks), writable=(*self._scratch, os.devnull))


def hide_other_tasks(task_id: str, tasks: str) -> None:
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
        linux.bind_mount(source, target)
        linux.restrict_mount(target)
    linux.bind_mount("/view", tasks)
    linux.restrict_mount("/view", recursive=False)
    linux.restrict_mount(tasks, recursive=False)


def _processes_of(uid: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count
