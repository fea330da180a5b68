"""The Linux system calls that a jail needs, through libc: namespaces, mounts, capabilities, limits, Landlock.

Standard library only, because this runs with AppWorld's Python. `system_calls` has the filter of system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Collection, Iterable

NEW_MOUNTS = 0x00020000
NEW_CGROUP = 0x02000000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_SYS_ADMIN = 1, 3, 5, 6, 7, 8, 21

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
# New system calls have the same number on every architecture.
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_CREATE_RULESET_VERSION, _LANDLOCK_RULE_PATH_BENEATH = 1, 1
_LANDLOCK_OLDEST = 3
"""The first version that prevents truncation of read-only files (Linux 6.2)."""
_LANDLOCK_RIGHTS = {3: 0x7FFF, 5: 0xFFFF}
"""All file-system rights by version; rights that are not granted are denied."""
_READ_FILE, _READ_FOLDER, _WRITE_FILE, _TRUNCATE = 0x4, 0x8, 0x2, 0x4000
_CHANGE_FOLDER = 0x10 | 0x20 | 0x80 | 0x100
"""Landlock rights to remove folders and files, and to make folders and regular files."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_LAST_CPU_SECONDS = 2
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1

_libc = ctypes.CDLL(None, use_errno=True)


class _LandlockRules(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _LandlockPath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Enter new namespaces as given by ``flags``. Raises: OSError: the host forbids it."""
    _check(_libc.unshare(flags), "unshare")


def new_user_namespace(flags: int) -> None:
    """Enter new namespaces as an ordinary user, by a new user namespace in which the caller is root."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def detach_mounts() -> None:
    """Stop propagation of mounts to and from the outside."""
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "make / private")


def mount_tmpfs(target: str, mebibytes: int, mode: int) -> None:
    """Mount a memory file system of at most ``mebibytes`` and 20,000 files."""
    options = f"size={mebibytes}m,nr_inodes=20000,mode={mode:o}".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _check(_libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", flags, options), f"mount tmpfs on {target}")


def mount_proc(target: str) -> None:
    """Mount the proc file system of this process namespace. Raises: OSError: the host masks parts of its /proc."""
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _check(_libc.mount(b"proc", os.fsencode(target), b"proc", flags, None), f"mount proc on {target}")


def start_loopback() -> None:
    """Bring up the loopback device of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def bind_mount(source: str, target: str) -> None:
    """Bind-mount ``source``, a file or a folder with its mounts, at ``target``."""
    flags = ctypes.c_ulong(_MS_BIND | _MS_REC)
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None), f"bind {source} to {target}")


def restrict_mount(target: str, *, devices: bool = False, writable: bool = False, recursive: bool = True) -> None:
    """Forbid set-uid programs on a mount; also writing, unless ``writable``, and device files, unless ``devices``."""
    flags = (0 if writable else _ATTR_RDONLY) | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    attributes = _MountAttributes(attr_set=flags)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"mount_setattr {target}")


def unmount(target: str) -> None:
    """Detach the topmost mount of ``target``, even if it is in use."""
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"unmount {target}")


def enter_root(new_root: str) -> None:
    """Make the mount ``new_root`` the root of the file system and detach the old root."""
    os.chdir(new_root)
    # The old root is now mounted on top of the new one, and is detached.
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "detach the old root")
    os.chdir("/")


def _prctl(option: int, value: int = 0) -> int:
    zero = ctypes.c_ulong(0)
    return int(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero))


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that forked it ends. A change of user undoes it."""
    _check(_prctl(_PR_SET_PDEATHSIG, number), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER")


def end_descendants(spare: Collection[int] = ()) -> dict[int, int]:
    """Kill all descendants and wait for them, also for orphans if this process adopts them or is process 1.

    Args:
        spare: children to keep, if this is not process 1.
    Returns: process id -> wait status.
    """
    ended: dict[int, int] = {}
    if os.getpid() == 1:
        # Process 1 of a namespace can kill everything else in it with one call.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                ended.update([os.waitpid(-1, 0)])
        return ended
    # The children of a killed child become children of this process (`adopt_orphans`), and are killed in the next pass.
    while children := children_of(os.getpid()).difference(spare):
        for child in children:
            os.kill(child, signal.SIGKILL)  # the child's id is not reused before waitpid
            ended.update([os.waitpid(child, 0)])
    return ended


def children_of(pid: int) -> set[int]:
    """Ids of the children of a process."""
    found: set[int] = set()
    if not os.path.isdir("/proc"):
        return found
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                # The name in parentheses may contain anything; the parent is the second field after it.
                if int(file.read().rpartition(")")[2].split()[1]) == pid:
                    found.add(int(name))
        except OSError:
            continue
    return found


def set_undumpable() -> None:
    """Prevent other processes of the same user from reading or tracing this one."""
    _check(_prctl(_PR_SET_DUMPABLE, 0), "PR_SET_DUMPABLE")


def keep_capabilities(keep: frozenset[int]) -> None:
    """Drop every capability outside ``keep`` permanently, also for programs started later."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in keep:
            _prctl(_PR_CAPBSET_DROP, capability)  # fails for capability numbers that the kernel does not know


def drop_privileges(uid: int | None) -> None:
    """Give up capabilities and set-uid programs permanently and, unless ``uid`` is None, the groups and the user.

    Args:
        uid: the new user (and group) id; None: unchanged.
    """
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "PR_SET_NO_NEW_PRIVS")
    keep_capabilities(frozenset())
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def limit(
    *,
    memory_mib: int,
    processes: int | None,
    file_mib: int,
    cpu_seconds: int,
    open_files: int = 256,
    reserves: bool = False,
) -> None:
    """Limit this process and what it forks.

    Args:
        memory_mib: address space of a process or, with ``reserves``, only its writable memory, because JavaScript
            engines reserve address space that they never use.
        processes: processes and threads of this user in its user namespace; None: unlimited.
        file_mib: size of a file.
        cpu_seconds: CPU time of a process; then SIGXCPU, and soon SIGKILL.
    """
    mebibyte = 1 << 20
    for name, value in (
        (resource.RLIMIT_DATA if reserves else resource.RLIMIT_AS, memory_mib * mebibyte),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_mib * mebibyte),
        (resource.RLIMIT_CPU, cpu_seconds + _LAST_CPU_SECONDS),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        if value is None:
            continue
        hard = resource.getrlimit(name)[1]
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bounded, bounded))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_seconds, hard), hard))


def maximize_oom_score() -> None:
    """Have the kernel kill this process and its descendants first when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def landlock_version() -> int:
    """Version of the kernel's Landlock interface; 0: none, or disabled."""
    flag = ctypes.c_uint32(_LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, int(_libc.syscall(ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), flag)))


def require_landlock() -> None:
    """Check that the kernel has a recent Landlock. Raises: OSError: Landlock is missing or too old."""
    if landlock_version() < _LANDLOCK_OLDEST:
        raise OSError(
            f"Landlock has version {landlock_version()}, expected version {_LANDLOCK_OLDEST} (Linux 6.2) or later"
        )


def apply_landlock(*, readable: Iterable[str], writable: Iterable[str], network: bool = False) -> None:
    """Restrict this process by Landlock: no other files, no TCP port, and on newer kernels no signals to outside.

    Permanent. Set no-new-privileges first (`drop_privileges`).

    Args:
        readable: files and folders; missing ones are ignored.
        writable: files and folders that may be read too.
        network: whether TCP may be used.
    Raises: OSError: the kernel has no Landlock.
    """
    version = landlock_version()
    rights = max(mask for since, mask in _LANDLOCK_RIGHTS.items() if since <= version)
    # The kernel accepts only fields it knows: TCP since version 4, signals and abstract sockets since version 6.
    rules = _LandlockRules(rights, 0x3 if version >= 4 and not network else 0, 0x3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _landlock(_SYS_LANDLOCK_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    for paths, file_rights, folder_rights in (
        (readable, _READ_FILE, _READ_FILE | _READ_FOLDER),
        (
            writable,
            _READ_FILE | _WRITE_FILE | _TRUNCATE,
            _READ_FILE | _READ_FOLDER | _WRITE_FILE | _TRUNCATE | _CHANGE_FOLDER,
        ),
    ):
        for path in paths:
            if not os.path.exists(path):
                continue
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = _LandlockPath(folder_rights if os.path.isdir(path) else file_rights, place)
            kind = ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH)
            _landlock(_SYS_LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), kind, ctypes.byref(rule), 0)
            os.close(place)
    _landlock(_SYS_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), 0)
    os.close(ruleset)


def _landlock(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
