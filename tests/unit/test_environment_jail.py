"""What decides how a task is confined: the system call filter, users, levels, what is shown."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest

from draco_ray.environments.appworld import template_process
from draco_ray.environments.appworld.template_process import (
    TemplateKey,
    shared_template,
)
from draco_ray.environments.jail import launch
from draco_ray.environments.jail.confine import (
    ISOLATION_LEVELS,
    JailSpec,
    bubblewrap_arguments,
    landlock_readable,
    spare_uids,
)
from draco_ray.environments.jail.launch import LevelUnavailable
from draco_ray.environments.jail.system_calls import _REFUSED, Instruction, build_seccomp_filter
from draco_ray.errors import EnvironmentCrashed, IsolationUnavailable

ALLOW, REFUSE, MISSING, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def judge(program: list[Instruction], architecture: int, number: int, *arguments: int) -> int:
    """What the kernel would do with a call: an interpreter of its filter language."""
    data = {0: number, 4: architecture}
    for index, value in enumerate(arguments):
        data |= {16 + 8 * index: value & 0xFFFFFFFF, 20 + 8 * index: value >> 32}
    accumulator, position = 0, 0
    while True:
        operation, if_true, if_false, operand = program[position]
        position += 1
        if operation == 0x20:
            accumulator = data.get(operand, 0)
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x25: accumulator > operand, 0x45: bool(accumulator & operand)}
            position += if_true if holds[operation] else if_false


@pytest.mark.parametrize(
    ("call", "x86_64", "aarch64", "expected"),
    [
        (("read",), 0, 63, ALLOW),
        (("openat",), 257, 56, ALLOW),
        (("accept4",), 288, 242, ALLOW),
        (("listen",), 50, 201, ALLOW),
        (("exit_group",), 231, 94, ALLOW),
        (("socket",), 41, 198, REFUSE),
        (("connect",), 42, 203, REFUSE),
        (("execve",), 59, 221, REFUSE),
        (("kill",), 62, 129, REFUSE),
        (("ptrace",), 101, 117, REFUSE),
        (("io_uring_setup",), 425, 425, REFUSE),
        (("memfd_create",), 319, 279, REFUSE),
        (("clone3",), 435, 435, MISSING),
        (("from the future",), 451, 451, MISSING),
        (("x32 or worse",), 0x40000000 | 41, 0x40000000 | 198, MISSING),
        (("clone of a process", 0x11), 56, 220, REFUSE),
        (("clone of a thread", 0x3D0F00), 56, 220, ALLOW),
        (("socketpair of streams", 1, 0x80801), 53, 199, ALLOW),
        (("socketpair of datagrams", 1, 0x80802), 53, 199, REFUSE),
        (("own limits", 0), 302, 261, ALLOW),
        (("another's limits", 77), 302, 261, REFUSE),
        (("a new limit", 0, 0, 0x1000), 302, 261, REFUSE),
        (("a new limit far away", 0, 0, 1 << 32), 302, 261, REFUSE),
        (("setrlimit",), 160, 164, REFUSE),
        (("chmod",), 90, 53, REFUSE),
        (("fchmod",), 91, 52, REFUSE),
        (("fchmodat2",), 452, 452, MISSING),
        (("utimensat",), 280, 88, REFUSE),
        (("futimesat or its successor",), 261, 88, REFUSE),
        (("inotify_init1",), 294, 26, REFUSE),
        (("inotify_add_watch",), 254, 27, REFUSE),
        (("setpriority",), 141, 140, REFUSE),
        (("sched_setscheduler",), 144, 119, REFUSE),
        (("sched_setattr",), 314, 274, REFUSE),
        (("ioprio_set",), 251, 30, REFUSE),
        (("mknodat",), 259, 33, REFUSE),
        (("timer_create",), 222, 107, REFUSE),
        (("setitimer",), 38, 103, ALLOW),
        (("shmat",), 30, 196, REFUSE),
        (("mq_unlink",), 241, 181, REFUSE),
        (("copy a descriptor", 5, 0), 72, 25, ALLOW),
        (("copy a descriptor, closed on exec", 5, 1030), 72, 25, ALLOW),
        (("F_SETFL", 5, 4), 72, 25, ALLOW),
        (("F_SETLK", 5, 6), 72, 25, ALLOW),
        (("F_SETOWN", 5, 8), 72, 25, REFUSE),
        (("F_SETSIG", 5, 10), 72, 25, REFUSE),
        (("F_SETOWN_EX", 5, 15), 72, 25, REFUSE),
        (("F_SETLEASE", 5, 1024), 72, 25, REFUSE),
        (("F_NOTIFY", 5, 1026), 72, 25, REFUSE),
        (("F_SETPIPE_SZ", 5, 1031), 72, 25, REFUSE),
        (("FIONBIO", 5, 0x5421), 16, 29, ALLOW),
        (("isatty", 5, 0x5401), 16, 29, ALLOW),
        (("FIOSETOWN", 5, 0x8901), 16, 29, REFUSE),
        (("SIOCSPGRP", 5, 0x8902), 16, 29, REFUSE),
        (("FIOASYNC", 5, 0x5452), 16, 29, REFUSE),
        (("TIOCSTI", 5, 0x5412), 16, 29, REFUSE),
        (("FS_IOC_SETFLAGS", 5, 0x40086602), 16, 29, REFUSE),
        (("openat for writing", -100 & 0xFFFFFFFF, 1, 0o101), 257, 56, ALLOW),
        (("openat of a folder", -100 & 0xFFFFFFFF, 1, 0o200000), 257, 56, ALLOW),
        (("openat2",), 437, 437, MISSING),
        (("PR_SET_NAME", 15), 157, 167, ALLOW),
        (("PR_SET_PDEATHSIG", 1), 157, 167, REFUSE),
        (("PR_SET_DUMPABLE", 4), 157, 167, REFUSE),
        (("PR_SET_PTRACER", 0x59616D61), 157, 167, REFUSE),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_filter(call: tuple[str, *tuple[int, ...]], x86_64: int, aarch64: int, expected: int) -> None:
    for machine, number in (("x86_64", x86_64), ("aarch64", aarch64)):
        program = build_seccomp_filter(machine)
        assert program is not None
        assert judge(program, ARCHITECTURES[machine], number, *call[1:]) == expected, machine


@pytest.mark.parametrize(
    ("arguments", "x86_64", "aarch64"),
    [((), 263, 35), ((), 84, 35), ((), 82, 276), ((), 316, 276), ((0xFFFFFF9C, 1, 0o20200002), 257, 56)],
    ids=["unlinkat", "rmdir", "rename", "renameat2", "open without a name"],
)
def test_what_is_counted_is_not_removed(arguments: tuple[int, ...], x86_64: int, aarch64: int) -> None:
    for machine, number in (("x86_64", x86_64), ("aarch64", aarch64)):
        for may_remove, expected in ((True, ALLOW), (False, REFUSE)):
            program = build_seccomp_filter(machine, may_remove=may_remove)
            assert program is not None
            assert judge(program, ARCHITECTURES[machine], number, *arguments) == expected, machine


def test_every_call_of_the_filter_has_its_own_number() -> None:
    for column in (0, 1):
        numbers = [pair[column] for pair in _REFUSED.values() if pair[column] is not None]
        assert len(numbers) == len(set(numbers))


def test_the_filter_kills_what_calls_by_another_convention() -> None:
    program = build_seccomp_filter("x86_64")
    assert program is not None
    assert judge(program, 0x40000003, 102) == KILL


def test_there_is_no_filter_for_an_unknown_machine() -> None:
    assert build_seccomp_filter("riscv64") is None


def test_spare_users_of_a_whole_machine_and_of_a_container() -> None:
    first, last = spare_uids("         0          0 4294967295\n") or (0, 0)
    assert first > 1_000_000_000
    assert last - first > 1_000_000
    assert spare_uids("0 100000 65536\n") == (32768, 65535)
    assert spare_uids("0 1000 1\n") is None


def jail(level: str, data: Path) -> JailSpec:
    return JailSpec(level=level, control_fd=3, directory="/d", data=str(data), scratch_mib=7, output_bytes=9)


def test_a_jail_survives_its_journey() -> None:
    for users in (None, (5, 6)):
        spec = JailSpec(**{**jail("rlimits", Path("/x")).__dict__, "task_uids": users})
        assert JailSpec.from_json(spec.to_json()) == spec
        assert "\n" not in spec.to_json()


def test_landlock_shows_one_task_without_its_ground_truth(tmp_path: Path) -> None:
    for name in ("base_dbs", "tasks/a_1/ground_truth", "tasks/b_1"):
        (tmp_path / name).mkdir(parents=True)
    shown = landlock_readable(jail("landlock", tmp_path), ["a_1/specs.json", "a_1/dbs"])
    of_data = {str(Path(path).relative_to(tmp_path)) for path in shown if Path(path).is_relative_to(tmp_path)}
    assert of_data == {"base_dbs", "tasks/a_1/specs.json", "tasks/a_1/dbs"}
    assert str(Path(sys.prefix).resolve()) in shown
    assert not {"/", "/etc", "/home", "/proc", "/tmp"} & set(shown)


def test_packages_of_another_environment_are_shown_and_other_folders_of_the_path_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "other" / "site-packages"
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages), str(tmp_path / "repository")])
    shown = landlock_readable(JailSpec(**jail("landlock", tmp_path).__dict__ | {"data": ""}), [])
    assert str(packages) in shown
    assert str(tmp_path / "repository") not in shown


def test_bubblewrap_shuts_everything_off_and_shows_files_read_only(tmp_path: Path) -> None:
    arguments = bubblewrap_arguments(jail("bubblewrap", tmp_path))
    assert {"--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--die-with-parent"} <= set(arguments)
    index = arguments.index(str(tmp_path))
    assert arguments[index - 1 : index + 2] == ["--ro-bind", str(tmp_path), "/world/data"]
    assert "--bind" not in arguments
    assert arguments[arguments.index("--size") + 1] == str(7 << 20)


class FakeTemplate:
    """A template without a process, for the choice of levels and the sharing of templates."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.alive = True

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception | None]:
    """What happens when a template is started at a level; levels that are tried move to the end."""
    outcomes: dict[str, Exception | None] = dict.fromkeys(ISOLATION_LEVELS)

    def start(key: TemplateKey, level: str, timeout_seconds: float) -> FakeTemplate:
        outcomes[level] = outcomes.pop(level)
        error = outcomes[level]
        if error is not None:
            raise error
        return FakeTemplate(level)

    monkeypatch.setattr(template_process.TemplateProcess, "start", staticmethod(start))
    monkeypatch.setattr(launch, "_reached", {})
    monkeypatch.setattr(template_process, "_templates", {})
    return outcomes


def key(isolation: str = "auto", python: str = "/python") -> TemplateKey:
    return TemplateKey(python=python, isolation=isolation, data=Path("/data"), output_bytes=10)


def test_auto_takes_the_strongest_level_there_is(starts: dict[str, Exception | None]) -> None:
    assert shared_template(key(), 1).level == "namespaces"
    starts["namespaces"] = LevelUnavailable("no")
    starts["bubblewrap"] = LevelUnavailable("no")
    assert shared_template(key(python="/other"), 1).level == "landlock"
    # It is remembered: the levels in front are not tried again.
    starts["namespaces"] = None
    shared_template(key(python="/other"), 1).kill()
    assert shared_template(key(python="/other"), 1).level == "landlock"


def test_a_level_asked_for_by_name_is_not_what_auto_takes_later(starts: dict[str, Exception | None]) -> None:
    assert shared_template(key("rlimits"), 1).level == "rlimits"
    assert shared_template(key(), 1).level == "namespaces"


def test_a_level_asked_for_by_name_is_never_replaced(starts: dict[str, Exception | None]) -> None:
    starts["namespaces"] = LevelUnavailable("not allowed here")
    with pytest.raises(EnvironmentCrashed, match="AppWorld cannot be started: namespaces: not allowed here"):
        shared_template(key("namespaces"), 1)


def test_an_accident_does_not_weaken_the_isolation(starts: dict[str, Exception | None]) -> None:
    starts["namespaces"] = EnvironmentCrashed("AppWorld was not loaded within 1 s")
    with pytest.raises(EnvironmentCrashed, match="was not loaded"):
        shared_template(key(), 1)
    starts["namespaces"] = None
    assert shared_template(key(), 1).level == "namespaces"


def test_auto_does_not_take_limits_alone(starts: dict[str, Exception | None]) -> None:
    for level in ISOLATION_LEVELS[:-1]:
        starts[level] = LevelUnavailable(f"no {level}")
    with pytest.raises(IsolationUnavailable, match=r"no landlock; environment\.isolation=rlimits would"):
        shared_template(key(), 1)
    assert next(iter(starts)) == "rlimits"  # never tried


def test_a_warning_says_when_nothing_but_limits_is_left(
    starts: dict[str, Exception | None], caplog: pytest.LogCaptureFixture
) -> None:
    assert shared_template(key("rlimits"), 1).level == "rlimits"
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the host's files" in warning


def test_a_template_is_shared(starts: dict[str, Exception | None]) -> None:
    first = shared_template(key(), 1)
    assert shared_template(key(), 1) is first
    assert shared_template(key(python="/other"), 1) is not first


def test_a_dead_template_is_replaced(starts: dict[str, Exception | None]) -> None:
    first = shared_template(key(), 1)
    first.kill()
    second = shared_template(key(), 1)
    assert second is not first
    assert second.alive


def test_what_is_asked_of_a_jail_holds_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    assert "secret" not in json.dumps(jail("rlimits", Path("/x")).__dict__)
