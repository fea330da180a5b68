"""Builds a jail for processes that will run model-written code, then starts the program that the spec names in it:
AppWorld's world template, or the tool server.

Run with that program's Python: ``python -m draco_ray.environments.jail.confine '<spec as JSON>'``. Standard library
only.

Four levels, strongest first, and what remains accessible at each:

    namespaces   the interpreter, system libraries and one task's data, read-only, and a little writable scratch
                 memory; no network, no other processes
    bubblewrap   the same, set up by ``bwrap``, for hosts that allow namespaces to that program only
    landlock     the same files, by the kernel's Landlock (Linux 6.2); other processes and the network are visible but
                 cannot be used. Needs no privilege, so it works in most containers
    rlimits      the file system as the user sees it, and the environment of the user's other processes: for trusted
                 policies, or if a container is the boundary

At every level a task has no environment variables, no capabilities, its own user if root starts it, limits on memory,
files and time, and (on x86-64 and arm64) the restrictions of `system_calls`: no sockets, processes or signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from draco_ray.environments.jail import linux
from draco_ray.temp_dirs import lock_shared, remove_abandoned

ISOLATION_LEVELS = ("namespaces", "bubblewrap", "landlock", "rlimits")
AUTOMATIC_LEVELS = ISOLATION_LEVELS[:-1]
"""Levels that ``auto`` may choose. The last level hides no files of the host, so it must be named explicitly."""

UNAVAILABLE = 3
"""Exit status: this level is not available on the host."""

_EVERYTHING = linux.NEW_MOUNTS | linux.NEW_NETWORK | linux.NEW_PIDS | linux.NEW_IPC | linux.NEW_UTS | linux.NEW_CGROUP
_SERVER_CAPABILITIES = frozenset(
    {
        linux.CAP_DAC_OVERRIDE,
        linux.CAP_FOWNER,
        linux.CAP_KILL,
        linux.CAP_SETGID,
        linux.CAP_SETUID,
        linux.CAP_SETPCAP,
        linux.CAP_SYS_ADMIN,
    }
)
"""Capabilities of the server, for mounts, changing users, killing processes and removing their files. A task's process
has none."""

_FIRST_SPARE_UID, _SPARE_UIDS = 1_900_000_000, 1 << 22

SHOWN_OF_A_TASK = ("specs.json", "dbs")
"""The parts of a task's folder that are shown; its ground truth is not among them."""

JAIL_CODE = ("__init__.py", "temp_dirs.py", "environments/__init__.py", "environments/jail")
"""Parts of this package that run in every jail."""
_PROGRAM = "/program"
_WORLD = "/world"
SCRATCH_FOLDERS = ("/scratch", f"{_WORLD}/experiments")
"""Writable folders of a jail that is built from mounts. The first is the home folder. ``/tmp`` is a link to it, unless
the jail needs a folder ``/tmp``: for an agent's program, or because a visible path lies below ``/tmp``."""
WORKSPACE = "/workspace"
_TMP = "/tmp"
_TEST_LINKS = (("/tests", "/run/draco/tests"), ("/logs", "/scratch/logs"), ("/app", WORKSPACE))
"""(link, target) for tests of Harbor's tasks: their own files, their reward, and the agent's work."""
_DEVICES = ("null", "zero", "random", "urandom")
_DEVICE_LINKS = (
    ("fd", "/proc/self/fd"),
    *((f"std{name}", f"/proc/self/fd/{n}") for n, name in enumerate(("in", "out", "err"))),
)
_NETWORK = tuple(
    path
    for path in (
        "/etc/resolv.conf",
        "/etc/hosts",
        "/etc/nsswitch.conf",
        "/etc/ssl",
        "/etc/pki",
        "/usr/share/ca-certificates",
    )
    if os.path.exists(path)
)
"""Host files for name resolution and TLS certificates, visible in a jail with network."""


@dataclass(frozen=True)
class JailSpec:
    """Description of a jail. It is passed as JSON on the command line, so it may hold no secret."""

    level: str
    control_fd: int
    directory: str
    """Private folder of the jail on the host."""
    data: str
    """The ``data`` folder of AppWorld's data root; empty: none."""
    scratch_mib: int
    output_bytes: int
    """Maximum output of one cell, in bytes."""
    world: str = ""
    """AppWorld's root inside the jail."""
    mounts: bool = False
    """Whether the file system is built from mounts, so that slots and tasks can have their own view."""
    task_uids: tuple[int, int] | None = None
    """First and last user id for tasks; None: they run as the server's user."""
    module: str = "draco_ray.environments.appworld.world_template"
    """Module to start in the jail with this spec as its argument."""
    code: tuple[str, ...] = ("environments/appworld",)
    """Further parts of this package that the module needs."""
    shown: tuple[str, ...] = ()
    """Further files and folders of the host, shown read-only at their own paths."""
    network: bool = False
    """Whether programs use the host's network, loopback included."""
    workspace: str = ""
    """Folder of the host that an agent's program may write, mounted at `WORKSPACE`. The jail then also has ``/proc``,
    its own ``/tmp`` and its own loopback device."""
    mapped: Mapping[str, str] = field(default_factory=dict)
    """Path in the jail -> file or folder of the host that is visible there, read-only."""

    @property
    def program(self) -> str:
        """Folder on the host from which the jail's Python imports this package."""
        return os.path.join(self.directory, "program")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JailSpec:
        """Inverse of `to_json`."""
        fields = json.loads(text)
        for name in ("task_uids", "code", "shown"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)


def main() -> int:
    """Enter the jail described by the first argument. Returns: the program's exit status."""
    spec = JailSpec.from_json(sys.argv[1])
    # The jail's user must be able to read these files, although a run's own files are private.
    os.umask(0o022)
    linux.maximize_oom_score()
    _leave_caretaker(spec)
    try:
        if spec.level == "namespaces":
            return _in_namespaces(spec)
        if spec.level == "bubblewrap":
            _in_bubblewrap(spec)
        if spec.level == "landlock":
            linux.require_landlock()
        _in_place(spec)
    except OSError as error:
        print(f"isolation level {spec.level!r} is not available: {error}", file=sys.stderr)
    return UNAVAILABLE


def _leave_caretaker(spec: JailSpec) -> None:
    """Fork a process that outlives the jail. When the last process in the jail has ended, it removes the jail's folders
    if the host process was killed."""
    watched, held = os.pipe()
    # Every process in the jail holds this end of the pipe, so the pipe closes when the last process ends.
    os.set_inheritable(held, True)
    if os.fork():
        os.close(watched)
        return
    os.close(held)
    os.close(spec.control_fd)
    # Close standard streams too: the host assumes that the jail has ended when they close.
    for standard in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    os.setsid()
    root = Path(spec.directory).parent
    with contextlib.suppress(OSError):
        held_too = lock_shared(root)
        while os.read(watched, 4096):
            pass
        os.close(held_too)
        # Removes nothing while the host process lives: that process holds the lock too, and removes the folder itself.
        remove_abandoned(root.parent)
    os._exit(0)


def _in_namespaces(spec: JailSpec) -> int:
    task_uids: tuple[int, int] | None = None
    namespaces = _EVERYTHING & ~linux.NEW_NETWORK if spec.network else _EVERYTHING
    try:
        # The real root user needs no user namespace, and can run tasks as other users.
        linux.unshare(namespaces)
        task_uids = spare_uids(Path("/proc/self/uid_map").read_text(encoding="ascii"))
    except PermissionError:
        linux.new_user_namespace(namespaces)
    linux.detach_mounts()
    root = os.path.join(spec.directory, "root")
    os.mkdir(root)
    linux.mount_tmpfs(root, 4, 0o755)
    if spec.workspace:
        _mount_workspace(spec, root)
    for source, target in _visible(spec):
        inside = root + target
        if os.path.isdir(source):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            Path(inside).touch()
        linux.bind_mount(source, inside)
        linux.restrict_mount(inside)
    for source, target in _system_links():
        os.symlink(source, root + target)
    os.makedirs(root + "/dev", exist_ok=True)
    for device in _DEVICES:
        Path(f"{root}/dev/{device}").touch()
        linux.bind_mount(f"/dev/{device}", f"{root}/dev/{device}")
        linux.restrict_mount(f"{root}/dev/{device}", devices=True)
    for scratch in SCRATCH_FOLDERS:
        os.makedirs(root + scratch)
        linux.mount_tmpfs(root + scratch, spec.scratch_mib, 0o1777)
    if not os.path.exists(root + _TMP):
        os.symlink(SCRATCH_FOLDERS[0], root + _TMP)
    os.makedirs(root + "/view", exist_ok=True)
    linux.enter_root(root)
    linux.restrict_mount("/", recursive=False)

    # The next child is process 1 of the new process namespace: when it ends, all others in the namespace end.
    child = os.fork()
    if child:
        os.close(spec.control_fd)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    linux.die_with_parent()
    if spec.workspace:
        with contextlib.suppress(OSError):  # The kernel refuses if a container masks parts of its /proc.
            linux.mount_proc("/proc")
        linux.unmount("/view")
    linux.keep_capabilities(_SERVER_CAPABILITIES)
    _serve(replace(spec, world=_WORLD, task_uids=task_uids, mounts=True), SCRATCH_FOLDERS[0], _PROGRAM)
    return UNAVAILABLE


def _mount_workspace(spec: JailSpec, root: str) -> None:
    """Set up what only the jail of an agent's program has, such as the workspace, its own ``/tmp`` and loopback."""
    if not spec.network:
        linux.start_loopback()
    for folder in (_TMP, WORKSPACE, "/proc", "/view", "/dev"):
        os.mkdir(root + folder)
    for name, target in _TEST_LINKS:
        os.symlink(target, root + name)
    linux.mount_tmpfs(root + _TMP, spec.scratch_mib, 0o1777)
    linux.bind_mount(spec.workspace, root + WORKSPACE)
    linux.restrict_mount(root + WORKSPACE, writable=True)
    # A user namespace may mount /proc only while another /proc is visible.
    linux.bind_mount("/proc", root + "/view")
    for name, target in _DEVICE_LINKS:
        os.symlink(target, f"{root}/dev/{name}")


def _in_bubblewrap(spec: JailSpec) -> None:
    program = shutil.which("bwrap")
    if program is None:
        raise OSError("bwrap was not found on PATH")
    served = replace(spec, world=_WORLD, mounts=True)
    arguments = [*bubblewrap_arguments(served), sys.executable, *_template_arguments(served)]
    os.execve(program, ["bwrap", *arguments], jail_env_vars(_WORLD, SCRATCH_FOLDERS[0], _PROGRAM))


def bubblewrap_arguments(spec: JailSpec) -> list[str]:
    """Options of ``bwrap`` that set up what `_in_namespaces` does."""
    arguments = [
        *("--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc"),
        *("--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--as-pid-1"),
        *(() if spec.network else ("--unshare-net",)),
    ]
    for capability in ("DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP", "SYS_ADMIN"):
        arguments += ["--cap-add", f"CAP_{capability}"]
    if spec.workspace:
        size = str(spec.scratch_mib << 20)
        arguments += ["--size", size, "--perms", "1777", "--tmpfs", _TMP, "--bind", spec.workspace, WORKSPACE]
        arguments += ["--proc", "/proc"]
        for name, target in (*((f"/dev/{name}", target) for name, target in _DEVICE_LINKS), *_TEST_LINKS):
            arguments += ["--symlink", target, name]
    for source, target in _visible(spec):
        arguments += ["--ro-bind", source, target]
    for source, target in _system_links():
        arguments += ["--symlink", source, target]
    for device in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for scratch in SCRATCH_FOLDERS:
        arguments += ["--size", str(spec.scratch_mib << 20), "--perms", "1777", "--tmpfs", scratch]
    if not spec.workspace and not any(Path(target).is_relative_to(_TMP) for _, target in _visible(spec)):
        arguments += ["--symlink", SCRATCH_FOLDERS[0], _TMP]
    return [*arguments, "--dir", "/view", "--remount-ro", "/", "--chdir", _WORLD]


def _in_place(spec: JailSpec) -> None:
    task_uids = None
    if os.geteuid() == 0 and _reachable_for_others(
        sys.prefix,
        sys.base_prefix,
        *([spec.data] if spec.data else []),
        *spec.shown,
        _package(),
        os.path.dirname(spec.directory),
    ):
        task_uids = spare_uids(Path("/proc/self/uid_map").read_text(encoding="ascii"))
    world, home = make_jail_folders(spec.directory, spec.data)
    _serve(replace(spec, world=world, task_uids=task_uids), home, spec.program)


def make_jail_folders(directory: str, data: str) -> tuple[str, str]:
    """Create AppWorld's root and a home in a private folder, if there is no mount namespace.

    Returns: both; tasks may write to the home and to the root's ``experiments``.
    """
    world, home = os.path.join(directory, "world"), os.path.join(directory, "tmp")
    os.mkdir(world)
    if data:
        os.symlink(data, os.path.join(world, "data"))
    os.chmod(directory, 0o711)
    for scratch in (os.path.join(world, "experiments"), home):
        os.mkdir(scratch)
        os.chmod(scratch, 0o1777)
    return world, home


def _serve(spec: JailSpec, home: str, program: str) -> None:
    os.chdir(spec.world)
    os.execve(sys.executable, [sys.executable, *_template_arguments(spec)], jail_env_vars(spec.world, home, program))


def _template_arguments(spec: JailSpec) -> list[str]:
    return ["-P", "-s", "-m", spec.module, spec.to_json()]


def jail_env_vars(world: str, home: str, program: str) -> dict[str, str]:
    """The complete environment of processes in the jail."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": program,
        "PYTHONDONTWRITEBYTECODE": "1",
        # With a fixed hash seed, Python iterates over a set in the same order in every slot.
        "PYTHONHASHSEED": "0",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "HOME": home,
        "TMPDIR": home,
        "APPWORLD_ROOT": world,
        "APPWORLD_CACHE": home,
    }


def spare_uids(uid_map: str) -> tuple[int, int] | None:
    """Unused user ids. The tasks of a slot run as one of them, so that their processes are counted separately and
    cannot signal or inspect any other process, not even another slot's.

    Args:
        uid_map: content of ``/proc/self/uid_map``; inside a container it may have few users.
    Returns: the first and the last, or None if there are fewer than a thousand users.
    """
    for line in uid_map.splitlines():
        first, _, count = map(int, line.split())
        if first <= _FIRST_SPARE_UID and first + count > _FIRST_SPARE_UID + _SPARE_UIDS:
            return _FIRST_SPARE_UID, _FIRST_SPARE_UID + _SPARE_UIDS - 1
        if count >= 1000:
            # Take the upper half of the ids, because the container's own users have ids in the lower half.
            return first + count // 2, first + count - 1
    return None


def landlock_readable(spec: JailSpec, tasks: Iterable[str]) -> list[str]:
    """The paths that a process may read at the level ``landlock``: those that other levels make visible by mounts.

    Args:
        tasks: the readable paths in AppWorld's folder ``data/tasks``, relative to that folder.
    """
    shown = [source for source, _ in _visible(spec) if source != spec.data]
    if not spec.data:
        return [*shown, *(f"/dev/{device}" for device in _DEVICES)]
    data = [os.path.join(spec.data, name) for name in os.listdir(spec.data) if name != "tasks"]
    data += [os.path.join(spec.data, "tasks", name) for name in tasks]
    return [*shown, *data, *(f"/dev/{device}" for device in _DEVICES)]


def _package() -> str:
    return str(Path(__file__).resolve().parents[2])


def _visible(spec: JailSpec) -> list[tuple[str, str]]:
    """(path on the host, path in the jail) of everything visible, read-only, outermost first."""
    package = _package()
    pairs = [(spec.data, f"{_WORLD}/data")] if spec.data else []
    pairs += [(f"{package}/{code}", f"{_PROGRAM}/draco_ray/{code}") for code in (*JAIL_CODE, *spec.code)]
    pairs += [(os.path.realpath(source), target) for target, source in spec.mapped.items()]
    pairs += [(os.path.realpath(path), path) for path in (*spec.shown, *(_NETWORK if spec.network else ()))]
    system = ("/etc/ld.so.cache", "/usr/share/zoneinfo", *(f"/usr/{name}" for name in _libraries("/usr")))
    pairs += [(path, path) for path in system if os.path.exists(path)]
    pairs += [(f"/{name}", f"/{name}") for name in _libraries("/") if not os.path.islink(f"/{name}")]
    for prefix in (sys.base_prefix, sys.prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))):
        pairs += [(os.path.realpath(prefix), path) for path in {prefix, os.path.realpath(prefix)}]
    # A .pth file may add packages of another virtual environment to the path; these are visible too.
    for path in sys.path:
        if path.endswith(("/site-packages", "/dist-packages")):
            pairs.append((os.path.realpath(path), path))
    outermost: dict[str, str] = {}
    for source, target in sorted(set(pairs), key=lambda pair: (pair[1], pair[0])):
        if not any(target == shown or target.startswith(shown + "/") for shown in outermost):
            outermost[target] = source
    return [(source, target) for target, source in outermost.items()]


def _libraries(folder: str) -> list[str]:
    return [name for name in ("lib", "lib32", "lib64", "libx32") if os.path.isdir(os.path.join(folder, name))]


def _system_links() -> list[tuple[str, str]]:
    return [(os.readlink(f"/{name}"), f"/{name}") for name in _libraries("/") if os.path.islink(f"/{name}")]


def _reachable_for_others(*paths: str) -> bool:
    for path in map(Path, map(os.path.realpath, paths)):
        if any(not folder.stat().st_mode & 0o001 for folder in (path, *path.parents)):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
