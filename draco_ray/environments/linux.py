"""The few Linux calls a jail needs, through libc: namespaces, mounts, capabilities, limits.

Standard library only: this runs under AppWorld's Python.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

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
# New system calls have one number on every architecture.
_SYS_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


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
    """Leave the namespaces named by ``flags`` for new ones. Raises OSError where the host forbids it."""
    _check(_libc.unshare(flags), "unshare")


def new_user_namespace(flags: int) -> None:
    """Leave namespaces as an ordinary user: a new user namespace in which the caller is root makes it legal."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(NEW_USER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def detach_mounts() -> None:
    """Stop mounts made here from showing up outside, and the other way round."""
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "make / private")


def mount_tmpfs(target: str, mebibytes: int, mode: int) -> None:
    """A memory file system that holds at most ``mebibytes`` and 20,000 files."""
    options = f"size={mebibytes}m,nr_inodes=20000,mode={mode:o}".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _check(_libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", flags, options), f"mount tmpfs on {target}")


def bind(source: str, target: str) -> None:
    """Show ``source`` (a file or a folder with what is mounted below it) at ``target``."""
    flags = ctypes.c_ulong(_MS_BIND | _MS_REC)
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None), f"bind {source} to {target}")


def seal(target: str, *, devices: bool = False, recursive: bool = True) -> None:
    """Make a mount read-only, without set-uid programs and (unless ``devices``) without device files."""
    attributes = _MountAttributes(attr_set=_ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV))
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check(result, f"mount_setattr {target}")


def enter_root(new_root: str) -> None:
    """Make the mount ``new_root`` the root of the file system and drop the old one from sight."""
    os.chdir(new_root)
    # The old root is stacked on the new one at the same place, and what is on top is then taken off.
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "detach the old root")
    os.chdir("/")


def _prctl(option: int, value: int = 0) -> int:
    zero = ctypes.c_ulong(0)
    return int(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends. Forgotten when the user changes."""
    _check(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER")


def close_to_inspection() -> None:
    """Keep other processes of the same user from reading or tracing this one."""
    _check(_prctl(_PR_SET_DUMPABLE, 0), "PR_SET_DUMPABLE")


def keep_capabilities(keep: frozenset[int]) -> None:
    """Drop every capability outside ``keep`` from what this process or a program it runs can ever have."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in keep:
            _prctl(_PR_CAPBSET_DROP, capability)  # fails for numbers the kernel does not know


def drop_privileges(uid: int | None) -> None:
    """Give up everything for good: capabilities, groups, set-uid programs and, unless None, the user.

    Args:
        uid: the user (and group) to become; None stays who one is.
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


def limit(*, memory_mib: int, processes: int, file_mib: int, cpu_seconds: int) -> None:
    """Limit this process and what it forks.

    Args:
        memory_mib: address space of one process.
        processes: processes and threads of this user (counted in its user namespace).
        file_mib: size of a file.
        cpu_seconds: processor time of one process over its life.
    """
    mebibyte = 1 << 20
    for name, value in (
        (resource.RLIMIT_AS, memory_mib * mebibyte),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_mib * mebibyte),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bounded, bounded))
