"""Loads AppWorld once and forks the world servers of several slots, which share its memory.

Loading takes seconds and 250 MB; a fork takes milliseconds and copies only what it changes. The template never runs
model code: it is outside the namespaces of the servers it forks.

    slots ──control socket──► template ──fork──► world server of a slot ──fork──► process of its current task
      └──────────────a control socket of its own──┘

Each message is an order: the slot's spec as JSON with two file descriptors, the server's control socket and a log file.
The template itself sends one message, ``{"event": "ready", …}``. It ends when
its socket is closed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence

from draco_ray.environments.appworld.process_roles import preload_appworld
from draco_ray.environments.appworld.world_server import SlotSpec, WorldServer
from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import SCRATCH_FOLDERS, UNAVAILABLE, JailSpec, jail_env_vars, make_jail_folders
from draco_ray.environments.jail.system_calls import refuse_system_calls

_OWN_NAMESPACES = linux.NEW_PIDS | linux.NEW_MOUNTS | linux.NEW_IPC
_LARGEST_ORDER = 1 << 16
_NO_FILTER = 4


class WorldTemplate:
    """Forks a world server per order."""

    def __init__(self, spec: JailSpec) -> None:
        self._spec = spec
        self._control = socket.socket(fileno=spec.control_fd)

    def run(self, *, system_calls_refused: bool) -> None:
        """Serve until the control socket is closed; reports ``system_calls_refused`` to the host."""
        preload_appworld(self._spec.output_bytes)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        ready = {
            "event": "ready",
            "system_calls_refused": system_calls_refused,
            "tasks_own_the_host": not self._spec.mounts and self._spec.task_uids is None and os.geteuid() == 0,
        }
        self._control.send(json.dumps(ready).encode())
        while True:
            order, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_ORDER, 2)
            if not order:
                return
            if os.fork() == 0:
                self._serve(SlotSpec(**json.loads(order)), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _serve(self, slot: SlotSpec, control_fd: int, stderr: int) -> None:
        status = 1
        try:
            self._control.close()
            os.dup2(stderr, sys.stderr.fileno())
            os.close(stderr)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            linux.set_undumpable()
            control = socket.socket(fileno=control_fd)
            if self._spec.mounts:
                enter_own_namespaces(self._spec.scratch_mib)
                control.send(b"forked")
                child = os.fork()
                if child:
                    # The slot knows only the id of this process; the server is a child of it and ends with it.
                    control.close()
                    os.waitpid(child, 0)
                    os._exit(0)
                linux.die_with_parent()
                world, scratch, is_mounted = self._spec.world, SCRATCH_FOLDERS, True
            else:
                linux.adopt_orphans()
                world, home = make_jail_folders(slot.directory, self._spec.data)
                scratch = (home, os.path.join(world, "experiments"))
                is_mounted = mount_scratch(scratch, self._spec.scratch_mib)
                os.environ.update(jail_env_vars(world, home, os.environ["PYTHONPATH"]))
                tempfile.tempdir = None
                os.chdir(world)
                control.send(b"forked")
            uids = self._spec.task_uids
            # Random, because templates do not know of each other; there are millions of user ids.
            uid = random.SystemRandom().randint(*uids) if uids else None
            server = WorldServer(
                self._spec,
                slot,
                control,
                scratch=scratch,
                scratch_is_mounted=is_mounted,
                task_uid=uid,
            )
            server.run()
            status = 0
        except BaseException as error:
            print(f"world server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)


def mount_scratch(folders: Sequence[str], scratch_mib: int) -> bool:
    """Mount scratch folders of limited size, if possible. Returns: whether this process may mount."""
    try:
        linux.unshare(linux.NEW_MOUNTS)
        linux.detach_mounts()
        for folder in folders:
            linux.mount_tmpfs(folder, scratch_mib, 0o1777)
    except OSError:
        return False
    return True


def enter_own_namespaces(scratch_mib: int) -> None:
    """Isolate from the template and other slots: own scratch, no shared memory and, from the next fork on, a process
    namespace."""
    linux.unshare(_OWN_NAMESPACES)
    linux.detach_mounts()
    for folder in SCRATCH_FOLDERS:
        linux.mount_tmpfs(folder, scratch_mib, 0o1777)


def try_confinement(spec: JailSpec) -> bool:
    """Try confinement once in a temporary process; exit the program if it fails.

    Returns: whether system calls can be refused here.
    """
    child = os.fork()
    if child == 0:
        status = UNAVAILABLE
        try:
            if spec.mounts:
                enter_own_namespaces(spec.scratch_mib)
            linux.drop_privileges(spec.task_uids[0] if spec.task_uids else None)
            status = 0 if refuse_system_calls() else _NO_FILTER
        except OSError as error:
            print(f"isolation level {spec.level!r} is not available: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, _NO_FILTER):
        sys.exit(UNAVAILABLE)
    return status == 0


if __name__ == "__main__":
    linux.set_undumpable()
    jail = JailSpec.from_json(sys.argv[1])
    can_refuse = try_confinement(jail)
    WorldTemplate(jail).run(system_calls_refused=can_refuse)
