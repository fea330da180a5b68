"""Confine the process that will run model-written code, then start the world server in it.

Run by AppWorld's Python: ``python -m draco_ray.environments.jail '<spec as JSON>'``. Standard library only.

Three levels, strongest first; what each takes away:

    namespaces   network, other processes, the file system but the interpreter, system libraries, one task's data and
                 a little scratch memory; user (a user of its own when started by root)
    bubblewrap   the same, set up by ``bwrap`` where the host allows that program more than it allows us
    rlimits      environment variables and capabilities; memory, processes, files and time are limited. The file system
                 stays readable: for trusted policies, or inside a container that is itself the wall
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from draco_ray.environments import linux

LEVELS = ("namespaces", "bubblewrap", "rlimits")

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
"""What the server needs to show a task's process its own task only, to change its user, to end it and to clear what it
wrote. The task's process has none."""

_FIRST_SPARE_UID = 1_900_000_000

_PROGRAM = "/program"
_WORLD = "/world"
_DEVICES = ("null", "zero", "random", "urandom")


@dataclass(frozen=True)
class JailSpec:
    """What the slot asks for; travels as JSON on the command line, so nothing secret may be in it."""

    level: str
    control_fd: int
    listen_fd: int
    directory: str
    """Private folder of the slot on the host."""
    data: str
    """The data root's ``data`` folder."""
    evaluate: bool
    """Whether the server may run AppWorld's evaluator, which reads ground truth."""
    memory_mib: int
    processes: int
    scratch_mib: int
    cpu_seconds: int
    output_bytes: int
    world: str = ""
    """AppWorld's root as the server sees it."""
    task_uid: int | None = None
    """User of the processes that run model-written code; None: the server's own."""
    hides_tasks: bool = False
    """Whether a task's process can be shown its own task only (needs a mount namespace)."""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JailSpec:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


def main() -> int:
    """Enter the jail named by the first argument. Returns the server's exit status, if it ever ends."""
    spec = JailSpec.from_json(sys.argv[1])
    try:
        if spec.level == "namespaces":
            return _in_namespaces(spec)
        if spec.level == "bubblewrap":
            _in_bubblewrap(spec)
        _in_place(spec)
    except OSError as error:
        print(f"isolation level {spec.level!r} is not available: {error}", file=sys.stderr)
    return 3


def _in_namespaces(spec: JailSpec) -> int:
    task_uid: int | None = None
    try:
        # A real root needs no user namespace, and may give tasks a user of their own.
        linux.unshare(_EVERYTHING)
        task_uid = spare_uid(Path("/proc/self/uid_map").read_text(encoding="ascii"), os.getpid())
    except PermissionError:
        linux.new_user_namespace(_EVERYTHING)
    linux.detach_mounts()
    root = os.path.join(spec.directory, "root")
    os.mkdir(root)
    linux.mount_tmpfs(root, 4, 0o755)
    for source, target in _visible(spec):
        inside = root + target
        if os.path.isdir(source):
            os.makedirs(inside, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            Path(inside).touch()
        linux.bind(source, inside)
        linux.seal(inside)
    for source, target in _system_links():
        os.symlink(source, root + target)
    os.mkdir(root + "/dev")
    for device in _DEVICES:
        Path(f"{root}/dev/{device}").touch()
        linux.bind(f"/dev/{device}", f"{root}/dev/{device}")
        linux.seal(f"{root}/dev/{device}", devices=True)
    for scratch in ("/tmp", f"{_WORLD}/experiments"):
        os.makedirs(root + scratch)
        linux.mount_tmpfs(root + scratch, spec.scratch_mib, 0o1777)
    os.mkdir(root + "/view")
    linux.enter_root(root)
    linux.seal("/", recursive=False)

    # The new process namespace begins with the next child: it is process 1 in there and takes all others with it.
    child = os.fork()
    if child:
        os.close(spec.control_fd)
        os.close(spec.listen_fd)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    linux.die_with_parent()
    linux.keep_capabilities(_SERVER_CAPABILITIES)
    _serve(replace(spec, world=_WORLD, task_uid=task_uid, hides_tasks=True), _PROGRAM)
    return 3


def _in_bubblewrap(spec: JailSpec) -> None:
    program = shutil.which("bwrap")
    if program is None:
        raise OSError("no bwrap on PATH")
    served = replace(spec, world=_WORLD, hides_tasks=True)
    arguments = [*bubblewrap_arguments(served), sys.executable, *_server_arguments(served)]
    os.execve(program, ["bwrap", *arguments], _environment(_WORLD, _PROGRAM))


def bubblewrap_arguments(spec: JailSpec) -> list[str]:
    """Options of ``bwrap`` that set up what `_in_namespaces` does."""
    arguments = [
        *("--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-net", "--unshare-ipc"),
        *("--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--as-pid-1"),
    ]
    for capability in ("DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP", "SYS_ADMIN"):
        arguments += ["--cap-add", f"CAP_{capability}"]
    for source, target in _visible(spec):
        arguments += ["--ro-bind", source, target]
    for source, target in _system_links():
        arguments += ["--symlink", source, target]
    for device in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for scratch in ("/tmp", f"{_WORLD}/experiments"):
        arguments += ["--size", str(spec.scratch_mib << 20), "--perms", "1777", "--tmpfs", scratch]
    return [*arguments, "--dir", "/view", "--remount-ro", "/", "--chdir", _WORLD]


def _in_place(spec: JailSpec) -> None:
    world = os.path.join(spec.directory, "world")
    os.mkdir(world)
    os.symlink(spec.data, os.path.join(world, "data"))
    task_uid = None
    if os.geteuid() == 0 and _reachable_for_others(sys.prefix, sys.base_prefix, spec.data, _package()):
        task_uid = spare_uid(Path("/proc/self/uid_map").read_text(encoding="ascii"), os.getpid())
        os.chmod(spec.directory, 0o711)
    for scratch in (os.path.join(world, "experiments"), os.path.join(spec.directory, "tmp")):
        os.mkdir(scratch)
        os.chmod(scratch, 0o1777)
    linux.adopt_orphans()
    _serve(replace(spec, world=world, task_uid=task_uid), os.path.dirname(_package()))


def _serve(spec: JailSpec, program: str) -> None:
    os.chdir(spec.world)
    os.execve(sys.executable, [sys.executable, *_server_arguments(spec)], _environment(spec.world, program))


def _server_arguments(spec: JailSpec) -> list[str]:
    return ["-P", "-s", "-m", "draco_ray.environments.world_server", spec.to_json()]


def _environment(world: str, program: str) -> dict[str, str]:
    home = "/tmp" if world == _WORLD else os.path.join(os.path.dirname(world), "tmp")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": program,
        "PYTHONDONTWRITEBYTECODE": "1",
        # One order of sets and dicts in every slot.
        "PYTHONHASHSEED": "0",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "HOME": home,
        "TMPDIR": home,
        "APPWORLD_ROOT": world,
        "APPWORLD_CACHE": home,
    }


def spare_uid(uid_map: str, process: int) -> int | None:
    """A user nobody else is, for the tasks of one slot: its processes are counted apart, and it can signal or inspect
    no other process, not even another slot's.

    Args:
        uid_map: ``/proc/self/uid_map``; inside a container it may offer few users.
        process: id of the launcher, which keeps slots apart.
    Returns: the user's number, or None where there are fewer than a thousand.
    """
    for line in uid_map.splitlines():
        first, _, count = map(int, line.split())
        if first <= _FIRST_SPARE_UID and first + count > _FIRST_SPARE_UID + (1 << 22):
            return _FIRST_SPARE_UID + process
        if count >= 1000:
            # The upper half: the lower one is where a container's own users are.
            return first + count // 2 + process % (count // 2)
    return None


def _package() -> str:
    return str(Path(__file__).resolve().parents[1])


def _visible(spec: JailSpec) -> list[tuple[str, str]]:
    """(path on the host, path in the jail) of everything that is shown, read-only, outermost first."""
    package = _package()
    modules = ("__init__", *(f"environments/{name}" for name in ("__init__", "linux", "jail", "world_server")))
    pairs = [(spec.data, f"{_WORLD}/data")]
    pairs += [(f"{package}/{module}.py", f"{_PROGRAM}/draco_ray/{module}.py") for module in modules]
    system = ("/etc/ld.so.cache", "/usr/share/zoneinfo", *(f"/usr/{name}" for name in _libraries("/usr")))
    pairs += [(path, path) for path in system if os.path.exists(path)]
    pairs += [(f"/{name}", f"/{name}") for name in _libraries("/") if not os.path.islink(f"/{name}")]
    for prefix in (sys.base_prefix, sys.prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))):
        pairs += [(os.path.realpath(prefix), path) for path in {prefix, os.path.realpath(prefix)}]
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
