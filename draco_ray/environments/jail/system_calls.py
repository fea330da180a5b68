"""A filter (seccomp) that refuses a task the system calls it has no use for.

What model-written code may do then is compute, use the files it can see and answer on the socket it was given: it
opens no socket, starts no process or program, signals, traces or limits nobody, and asks the kernel for nothing
exotic. The filter needs no privilege and holds at every isolation level. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> (its AUDIT_ARCH number, its column below)."""

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
    # Memory that belongs to no process, so that no limit on processes sees it.
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Landlock leaves these of a file one owns alone.
    "truncate": (76, 45),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
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
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKETPAIR, _PRLIMIT = (53, 199), (302, 261)
_NEWEST = 450
"""System calls above are younger than anything here needs; libraries fall back when they are missing."""

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


def filter_program(machine: str) -> list[Instruction] | None:
    """The filter in the kernel's bytecode, None for a machine whose numbers are not known here."""
    if machine not in _ARCHITECTURES or sys.byteorder != "little":
        return None
    architecture, column = _ARCHITECTURES[machine]
    refuse: Instruction = (_RETURN, 0, 0, _FAIL_WITH | errno.EPERM)
    missing: Instruction = (_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS)
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        # Calls by another convention have other numbers.
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_ABOVE, 0, 1, _NEWEST),
        missing,
        # Its flags are in memory, where a filter cannot look; without it the C library uses clone.
        (_IF_EQUAL, 0, 1, _CLONE3[column]),
        missing,
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [(_IF_EQUAL, 0, 1, number), refuse]
    return [
        *program,
        # Threads are allowed.
        *((_IF_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _ARGUMENTS_AT)),
        *((_IF_BITS, 0, 1, _CLONE_THREAD), allow, refuse),
        # An event loop wakes itself with a pair of streams. A datagram socket could be pointed elsewhere.
        *((_IF_EQUAL, 0, 5, _SOCKETPAIR[column]), (_LOAD, 0, 0, _ARGUMENTS_AT + 8), (_AND, 0, 0, _SOCKET_KIND)),
        *((_IF_EQUAL, 0, 1, _SOCK_STREAM), allow, refuse),
        # One's own limits, not those of another process.
        *((_IF_EQUAL, 0, 4, _PRLIMIT[column]), (_LOAD, 0, 0, _ARGUMENTS_AT)),
        *((_IF_EQUAL, 0, 1, 0), allow, refuse),
        allow,
    ]


def refuse_system_calls() -> bool:
    """Put the filter on this thread and what it starts, for good. Set no-new-privileges first.

    Returns: False where the machine or the kernel has no such filter; nothing has changed then.
    """
    program = filter_program(os.uname().machine)
    if program is None:
        return False
    encoded = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    filter_ = _Program(len(program), encoded)
    zero = ctypes.c_ulong(0)
    libc = ctypes.CDLL(None, use_errno=True)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    return bool(libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), mode, ctypes.byref(filter_), zero, zero) == 0)
