"""A seccomp filter that refuses system calls which tasks do not need.

Model-written code can then compute, use visible files and answer on its socket. It cannot open sockets, start processes
or programs, send signals, trace, change limits or priorities, change modes or times of files, or use exotic calls. The
filter needs no privilege and applies at every isolation level. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> (AUDIT_ARCH number, column of the table below)."""

_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # Timers and a lower CPU time limit can both send SIGKILL, which would look as if the process were killed from
    # outside.
    "timer_create": (222, 107),
    "setrlimit": (160, 164),
    # Shared memory and queues that belong to no process, so that no process limit counts them.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Resources counted per user or for the whole machine.
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "sync": (162, 81),
    "syncfs": (306, 267),
    # Scheduling: priorities, policies and CPUs.
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # Landlock does not restrict these on files one owns.
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "flock": (73, 32),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "seccomp": (317, 277),
}
_REMOVAL: dict[str, tuple[int | None, int | None]] = {
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
}
"""System calls that remove or rename files. They are refused, too, if the host limits a task's files by counting them,
so that no file escapes the count. AppWorld does not need these calls, because it overwrites its files."""
_MISSING = {"clone3": (435, 435), "openat2": (437, 437)}
"""System calls that are reported as missing, because a filter cannot read their flags in memory; the C library falls
back to older calls."""

_ONLY: dict[str, tuple[tuple[int | None, int | None], int, tuple[int, ...]]] = {
    # Copying, locking (SQLite) and O_NONBLOCK are allowed; setting an owner is not, as the owner would get signals.
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),
    # ioctl also sets owners (FIOSETOWN, SIOCSPGRP), file attributes and devices. Allowed: non-blocking, close-on-exec,
    # the number of readable bytes, and whether a file is a terminal.
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # Allowed: thread names and queries. Refused, for example: outliving the server, and becoming traceable.
    "prctl": ((157, 167), 0, (3, 15, 16, 21, 23, 39)),
}
"""System calls that are allowed only with certain values of one argument: name -> (the call's numbers, index of the
argument, allowed values)."""

_OPEN = (((2, None), 1), ((257, 56), 2))
"""open and openat, and the index of their flags."""
_NAMELESS_FILE = 0x400000
"""The bit of O_TMPFILE in open()'s flags. Such opens are refused, because a file without a name cannot be counted."""

_CLONE, _SOCKETPAIR, _PRLIMIT = (56, 220), (53, 199), (302, 261)
_NEWEST = 450
"""Highest known system call number. Higher ones are reported as missing, so that libraries fall back to older calls."""

_CLONE_THREAD = 0x10000
_SOCKET_KIND, _SOCK_STREAM = 0xF, 1

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_ABOVE, _IF_BITS = 0x15, 0x25, 0x45
_ALLOW, _KILL_PROCESS, _FAIL_WITH = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def build_seccomp_filter(machine: str, *, may_remove: bool = True) -> list[Instruction] | None:
    """The filter as bytecode; None: the system call numbers of ``machine`` are not known.

    Args:
        may_remove: whether files may be removed and renamed.
    """
    if machine not in _ARCHITECTURES or sys.byteorder != "little":
        return None
    architecture, column = _ARCHITECTURES[machine]
    refuse: Instruction = (_RETURN, 0, 0, _FAIL_WITH | errno.EPERM)
    missing: Instruction = (_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS)
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        # Other calling conventions use other numbers.
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_ABOVE, 0, 1, _NEWEST),
        missing,
    ]
    for answer, calls in ((missing, _MISSING), (refuse, _REFUSED), (refuse, {} if may_remove else _REMOVAL)):
        for numbers in calls.values():
            number = numbers[column]
            if number is not None:
                program += [(_IF_EQUAL, 0, 1, number), answer]
    for numbers, argument, values in _ONLY.values():
        number = numbers[column]
        assert number is not None
        tests = [each for value in values for each in ((_IF_EQUAL, 0, 1, value), allow)]
        program += [(_IF_EQUAL, 0, len(tests) + 2, number), _load_argument(argument), *tests, refuse]
    for numbers, argument in () if may_remove else _OPEN:
        number = numbers[column]
        if number is not None:
            program += [(_IF_EQUAL, 0, 4, number), _load_argument(argument)]
            program += [(_IF_BITS, 0, 1, _NAMELESS_FILE), refuse, allow]
    return [
        *program,
        # Threads are allowed.
        *((_IF_EQUAL, 0, 4, _CLONE[column]), _load_argument(0)),
        *((_IF_BITS, 0, 1, _CLONE_THREAD), allow, refuse),
        # Event loops need a stream socket pair. A datagram socket could be connected elsewhere.
        *((_IF_EQUAL, 0, 5, _SOCKETPAIR[column]), _load_argument(1), (_AND, 0, 0, _SOCKET_KIND)),
        *((_IF_EQUAL, 0, 1, _SOCK_STREAM), allow, refuse),
        # A process may only read its own limits: pid 0, and a null pointer (in two halves) as the new limit.
        *((_IF_EQUAL, 0, 8, _PRLIMIT[column]), _load_argument(0), (_IF_EQUAL, 0, 5, 0)),
        *(_load_argument(2), (_IF_EQUAL, 0, 3, 0), _load_argument(2, upper=True), (_IF_EQUAL, 0, 1, 0), allow, refuse),
        allow,
    ]


def _load_argument(index: int, *, upper: bool = False) -> Instruction:
    # By default the lower half: the kernel ignores the upper half of flags, commands and process ids.
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * upper)


def refuse_system_calls(*, may_remove: bool = True) -> bool:
    """Apply the filter permanently to this thread and what it starts. Set no-new-privileges first.

    Args:
        may_remove: see `build_seccomp_filter`.
    Returns: False if the machine or the kernel does not support it; then nothing is changed.
    """
    program = build_seccomp_filter(os.uname().machine, may_remove=may_remove)
    if program is None:
        return False
    encoded = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    filter_ = _Program(len(program), encoded)
    zero = ctypes.c_ulong(0)
    libc = ctypes.CDLL(None, use_errno=True)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    return bool(libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), mode, ctypes.byref(filter_), zero, zero) == 0)
