"""What model-written code can reach, at every isolation level this host allows."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.environments.jail import linux
from draco_ray.environments.jail.confine import jail_env_vars
from draco_ray.errors import EnvironmentCrashed
from tests.conftest import LEVELS
from tests.support.worlds import Tasks, attack, check_next_task_runs_clean, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SECRET = "sk-not-for-the-policy-4711"
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tasks(sandbox_root: Path) -> Tasks:
    return Tasks(sandbox_root)


@pytest.fixture(scope="module", autouse=True)
def _secret() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_API_KEY", SECRET)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS)
async def slot(request: pytest.FixtureRequest, sandbox_root: Path, tasks: Tasks) -> AsyncIterator[AppWorldSlot]:
    level = request.param
    config = EnvironmentConfig(isolation=level, max_memory_mib=1024, start_timeout_seconds=600)
    slot = AppWorldSlot(config, sandbox_root, load_ground_truth=True, name="isolated")
    try:
        await slot.open(tasks.next())
    except EnvironmentCrashed as error:
        if "is not available" not in str(error):
            raise
        pytest.skip(str(error))
    assert slot.isolation_level == level
    yield slot
    processes = processes_of(slot)
    await slot.close()
    assert psutil.wait_procs(processes, timeout=600)[1] == []


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def hostile(slot: AppWorldSlot, tasks: Tasks) -> AsyncIterator[AppWorldSlot]:
    """The slot, with a task for one test or for the tests of a class; the next task must run clean."""
    await slot.open(tasks.next())
    yield slot
    await check_next_task_runs_clean(slot, tasks)


def hides_files(slot: AppWorldSlot) -> bool:
    """``rlimits`` alone does not: it is for hosts that offer nothing better."""
    return slot.isolation_level != "rlimits"


class TestWithinReach:
    """Attempts that leave the world as it is: all in one task."""

    async def test_environment_variables(self, hostile: AppWorldSlot) -> None:
        output = await attack(
            hostile,
            "print(str(sorted(name.decode() for name in posix.environ)))",
            "print(str(posix.environ), 'user', posix.getuid())",
            f"""
            for process in ["self", 1, *range(posix.getppid() - 3, posix.getppid() + 1), {os.getpid()}]:
                attempt(f"environment of {{process}}", lambda: read(f"/proc/{{process}}/environ"))
            """,
        )
        # bwrap adds one of its own.
        assert output.splitlines()[0].replace("'PWD', ", "") == str(sorted(jail_env_vars("", "", "")))
        assert SECRET not in output
        if hides_files(hostile) or f"user {os.getuid()}" not in output:
            assert f"environment of {os.getpid()} REFUSED" in output

    async def test_importing_the_rest_of_this_package(self, hostile: AppWorldSlot) -> None:
        output = await attack(
            hostile,
            """
            for module in ["environments.jail.linux", "errors", "config.schema", "sandbox", "judging"]:
                attempt(module, lambda: load("draco_ray." + module))
            """,
        )
        first, *others = output.splitlines()
        assert "environments.jail.linux DONE" in first
        assert [line.split(" (")[0].split(" No ")[0] for line in others] == [
            f"{module} REFUSED ModuleNotFoundError" for module in ("errors", "config.schema", "sandbox", "judging")
        ]

    async def test_reading_files(self, hostile: AppWorldSlot, tasks: Tasks, sandbox_root: Path) -> None:
        own, other = hostile.task.task_id, tasks.next()
        paths = {
            "passwd": "/etc/passwd",
            "repository": str(REPOSITORY / "pyproject.toml"),
            "truth": str(sandbox_root / "data" / "tasks" / own / "ground_truth" / "answer.json"),
            "other": str(sandbox_root / "data" / "tasks" / other / "specs.json"),
        }
        output = await attack(hostile, *(f"attempt({name!r}, lambda: read({path!r}))" for name, path in paths.items()))
        inside = await attack(
            hostile,
            f"""
            tasks = posix.environ[b"APPWORLD_ROOT"].decode() + "/data/tasks/"
            attempt("own", lambda: len(read(tasks + "{own}/specs.json")))
            attempt("truth", lambda: read(tasks + "{own}/ground_truth/answer.json"))
            attempt("other", lambda: read(tasks + "{other}/specs.json"))
            attempt("list", lambda: posix.listdir(tasks) == ["{own}"])
            """,
        )
        assert "own DONE" in inside
        if hides_files(hostile):
            assert "DONE" not in output
            assert "truth REFUSED" in inside
            assert "other REFUSED" in inside
            assert "list DONE True" in inside or "list REFUSED" in inside
        else:
            assert "passwd DONE" in output

    async def test_writing_files(self, hostile: AppWorldSlot, sandbox_root: Path) -> None:
        with tempfile.TemporaryDirectory() as open_to_all:
            os.chmod(open_to_all, 0o777)
            folders = {
                "etc": Path("/etc"),
                "repository": REPOSITORY,
                "data": sandbox_root / "data",
                "interpreter": Path(appworld_python(None)).parent,
                "open_to_all": Path(open_to_all),
            }
            output = await attack(
                hostile,
                "create = lambda path: posix.open(path, posix.O_WRONLY | posix.O_CREAT)",
                *(f"attempt({name!r}, lambda: create('{path}/by-a-task'))" for name, path in folders.items()),
                "attempt('scratch', lambda: create(posix.environ[b'HOME'] + b'/by-a-task'))",
                f"attempt('truncate', lambda: posix.truncate('{sandbox_root}/sandbox.json', 0))",
                "print('user', posix.getuid())",
            )
            files = {name: path / "by-a-task" for name, path in folders.items()}
            written = {name for name, file in files.items() if file.exists()}
            for file in files.values():
                file.unlink(missing_ok=True)
        if hides_files(hostile):
            assert written == set()
        elif f"user {os.getuid()}\n" not in output:
            assert written == {"open_to_all"}
        assert "scratch DONE" in output
        assert "truncate REFUSED" in output

    async def test_sockets(self, hostile: AppWorldSlot) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as local:
            os.chmod(folder, 0o755)
            tcp.bind(("127.0.0.1", 0))
            local.bind(f"{folder}/socket")
            os.chmod(f"{folder}/socket", 0o777)
            for server in (tcp, local):
                server.listen()
                server.setblocking(False)
            output = await attack(
                hostile,
                "sockets = load('_socket')",
                f"attempt('tcp', lambda: sockets.socket(2, 1).connect(('127.0.0.1', {tcp.getsockname()[1]})))",
                "attempt('outbound', lambda: sockets.socket(2, 1).connect(('192.0.2.1', 443)))",
                "attempt('udp', lambda: sockets.socket(2, 2).sendto(b'x', ('192.0.2.1', 53)))",
                f"attempt('local', lambda: sockets.socket(1, 1).connect('{folder}/socket'))",
                "attempt('packets', lambda: sockets.socket(17, 3))",
                "attempt('netlink', lambda: sockets.socket(16, 3))",
                "attempt('datagrams', lambda: sockets.socketpair(1, 2))",
                """
                number = 41 if posix.uname().machine == "x86_64" else 198
                attempt("by hand", lambda: 1 / (libc.syscall(number, 2, 1, 0) + 1))
                """,
            )
            assert output.count("REFUSED") == 8, output
            for server in (tcp, local):
                with pytest.raises(BlockingIOError):
                    server.accept()

    async def test_processes(self, hostile: AppWorldSlot) -> None:
        before = len(processes_of(hostile))
        output = await attack(
            hostile,
            "attempt('fork', posix.fork)",
            "attempt('vfork', lambda: 1 / (libc.vfork() + 1))",
            "attempt('spawn', lambda: posix.posix_spawn(sys_.executable, [sys_.executable, '-c', 'while 1: 1'], {}))",
            "attempt('exec', lambda: posix.execv(sys_.executable, [sys_.executable, '-c', 'while 1: 1']))",
            """
            for _ in range(10000):
                try:
                    posix.fork()
                except OSError:
                    pass
            """,
        )
        assert output.count("REFUSED") == 4, output
        assert len(processes_of(hostile)) == before

    async def test_other_processes_and_privileges(self, hostile: AppWorldSlot) -> None:
        output = await attack(
            hostile,
            *(
                f"attempt('kill', lambda: posix.kill({process}, 9))"
                for process in (-1, 0, 1, "posix.getppid()", os.getpid())
            ),
            "attempt('ptrace', lambda: 1 / (libc.ptrace(16, posix.getppid(), 0, 0) + 1))",
            "attempt('limit', lambda: load('resource').prlimit(posix.getppid(), 7, (1, 1)))",
            "attempt('raise', lambda: load('resource').setrlimit(9, (-1, -1)))",
            "attempt('become', lambda: posix.setgroups([0]))",
            "attempt('chroot', lambda: posix.chroot('/'))",
            "attempt('unshare', lambda: 1 / (libc.unshare(0x10000000) + 1))",
            "attempt('mount', lambda: 1 / (libc.mount(b'x', posix.environ[b'HOME'], b'tmpfs', 0, 0) + 1))",
        )
        assert output.count("REFUSED") == 12, output

    async def test_signals_by_another_hand(self, hostile: AppWorldSlot) -> None:
        output = await attack(
            hostile,
            "check = lambda result: 1 / (result + 1)",
            *(
                f"attempt('{name}', lambda: check(libc.fcntl(0, {command}, {os.getpid()})))"
                for name, command in (("F_SETOWN", 8), ("F_SETSIG", 10), ("F_SETOWN_EX", 15), ("F_SETLEASE", 1024))
            ),
            """
            owner = (ctypes.c_int * 1)(posix.getppid())
            for descriptor in range(3, 40):
                for request in (0x8901, 0x8902):
                    if libc.ioctl(descriptor, request, owner) == 0:
                        print("OWNED", descriptor)
            timer, event = (ctypes.c_void_p * 1)(), (ctypes.c_int * 16)(0, 0, 9, 0)
            attempt("timer_create", lambda: check(libc.timer_create(1, event, timer)))
            attempt("setrlimit", lambda: load("resource").setrlimit(0, (1, 1)))
            attempt("PR_SET_PDEATHSIG", lambda: check(libc.prctl(1, 0, 0, 0, 0)))
            attempt("PR_SET_DUMPABLE", lambda: check(libc.prctl(4, 1, 0, 0, 0)))
            """,
        )
        assert "OWNED" not in output
        assert output.count("REFUSED") == 8, output

    async def test_what_is_not_a_files_content(self, hostile: AppWorldSlot) -> None:
        output = await attack(
            hostile,
            """
            home = posix.environ[b"HOME"]
            file = posix.open(home + b"/plain", posix.O_WRONLY | posix.O_CREAT)
            check = lambda result: 1 / (result + 1)
            """,
            *(
                f"attempt({what!r}, lambda: {what})"
                for what in (
                    "posix.chmod(home + b'/plain', 0o777)",
                    "posix.chmod(file, 0o777)",
                    "posix.utime(home + b'/plain', (1, 1))",
                    "posix.utime(file, (1, 1))",
                    "posix.mkfifo(home + b'/fifo')",
                    "posix.mknod(home + b'/file')",
                    "posix.mknod(home + b'/device', 0o20666, 0x103)",
                    "posix.setxattr(home + b'/plain', b'user.x', b'y')",
                    "load('fcntl').flock(file, 2)",
                    "check(libc.inotify_init())",
                    "check(libc.inotify_init1(0))",
                    "posix.nice(1)",
                    "posix.setpriority(0, 0, 5)",
                    "posix.sched_setaffinity(0, [0])",
                    "posix.sched_setscheduler(0, posix.SCHED_IDLE, posix.sched_param(0))",
                    "check(libc.syscall(251 if posix.uname().machine == 'x86_64' else 30, 1, 0, 0x6000))",
                    "check(libc.shmget(0, 4096, 0o1600))",
                    "check(libc.shmat(0, 0, 0))",
                )
            ),
        )
        assert output.count("REFUSED") == 18, output


@pytest.mark.usefixtures("slot")
class TestMemory:
    async def test_is_limited(self, slot: AppWorldSlot, tasks: Tasks) -> None:
        await slot.open(tasks.next())
        output = await attack(
            slot,
            "attempt('at once', lambda: len(bytearray(8 << 30)))",
            """
            kept = []
            try:
                while True:
                    kept.append(bytearray(16 << 20))
            except MemoryError:
                del kept
                print("piecewise REFUSED")
            """,
        )
        assert "at once REFUSED MemoryError" in output
        assert "piecewise REFUSED" in output or "CRASHED" in output


@pytest.mark.usefixtures("hostile")
class TestDisk:
    async def test_what_it_writes_is_limited_and_removed(self, slot: AppWorldSlot, tasks: Tasks) -> None:
        output = await attack(
            slot,
            """
            home = posix.environ[b"HOME"]
            posix.chdir(home)
            posix.mkdir("nested")
            posix.chdir("nested")
            for _ in range(1500):
                posix.mkdir("d")
                posix.chdir("d")
            posix.chdir(posix.environ[b"APPWORLD_ROOT"] + b"/experiments")
            posix.symlink("/etc", "link")
            posix.mkdir("closed")
            posix.close(posix.open("closed/file", posix.O_WRONLY | posix.O_CREAT))
            posix.chmod("closed", 0)
            posix.umask(0o777)
            posix.chdir(home)
            """,
            """
            def fill():
                for number in range(100):
                    file = posix.open(f"large{number}", posix.O_WRONLY | posix.O_CREAT)
                    for _ in range(20):
                        posix.write(file, b"x" * (1 << 20))
                libc.usleep(5000000)
            attempt("fill", fill)
            """,
        )
        # Where scratch is a mount it is full; elsewhere the slot sees what is written and ends it.
        assert "fill REFUSED OSError [Errno 28]" in output or "CRASHED environment isolated" in output
        await slot.open(tasks.next())
        found = await attack(
            slot,
            "print('home', str(posix.listdir(posix.environ[b'HOME'].decode())))",
            "print('experiments', str(posix.listdir(posix.environ[b'APPWORLD_ROOT'].decode() + '/experiments')))",
            "print('cwd', posix.getcwd() == posix.environ[b'APPWORLD_ROOT'].decode())",
        )
        assert "nested" not in found
        assert "large0" not in found
        assert "experiments ['outputs']\n" in found
        assert "cwd True\n" in found


@pytest.mark.usefixtures("hostile")
class TestUnseenFiles:
    async def test_are_limited(self, slot: AppWorldSlot) -> None:
        output = await attack(
            slot,
            """
            posix.chdir(posix.environ[b"HOME"])
            posix.umask(0)
            posix.mkdir("closed", 0o300)
            def fill(names):
                for number in range(30):
                    file = posix.open(names + str(number), posix.O_WRONLY | posix.O_CREAT)
                    try:
                        posix.unlink(names + str(number))
                    except OSError as error:
                        print("kept", error)
                    for _ in range(20):
                        posix.write(file, b"x" * (1 << 20))
                libc.usleep(5000000)
            """,
            "attempt('without a name', lambda: fill('lost'))",
            "attempt('in a closed folder', lambda: fill('closed/hidden'))",
        )
        # Where scratch is a mount it is full; elsewhere nothing is removed, and what cannot be counted is too much.
        full = output.count("REFUSED OSError [Errno 28]") == 2
        assert full or "CRASHED environment isolated" in output, output


@pytest.mark.usefixtures("slot")
class TestLinks:
    async def test_are_not_followed_by_who_cleans_up(self, slot: AppWorldSlot, tasks: Tasks) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            kept = Path(folder, "kept")
            kept.mkdir()
            Path(kept, "file").write_text("kept", encoding="utf-8")
            kept.chmod(0o555)
            Path(kept, "file").chmod(0o400)
            await slot.open(tasks.next())
            await attack(
                slot,
                f"""
                for place in (posix.environ[b"HOME"], posix.environ[b"APPWORLD_ROOT"] + b"/experiments"):
                    for target in ("{kept}", "{kept}/file"):
                        for number in range(3):
                            try:
                                posix.symlink(target, place.decode() + "/link" + target[-4:] + str(number))
                                posix.link(target, place.decode() + "/hard" + target[-4:] + str(number))
                            except OSError:
                                pass
                    posix.mkdir(place + b"/closed", 0)
                """,
            )
            await check_next_task_runs_clean(slot, tasks)
            assert kept.stat().st_mode & 0o777 == 0o555
            assert Path(kept, "file").stat().st_mode & 0o777 == 0o400
            assert Path(kept, "file").read_text(encoding="utf-8") == "kept"


@pytest.mark.usefixtures("slot")
class TestHang:
    async def test_is_ended_by_the_wall_clock(self, slot: AppWorldSlot, sandbox_root: Path, tasks: Tasks) -> None:
        # Of its own, so that only this test depends on a short time.
        config = EnvironmentConfig(
            isolation=slot.isolation_level, max_memory_mib=1024, cell_timeout_seconds=3, start_timeout_seconds=600
        )
        slot = AppWorldSlot(config, sandbox_root, load_ground_truth=True, name="hung")
        await slot.open(tasks.next())
        output = await attack(
            slot,
            """
            thread.start_new_thread(lambda: [libc.sleep(1000) for _ in iter(int, 1)], ())
            while True:
                try:
                    while True:
                        libc.sleep(1000)
                except BaseException:
                    pass
            """,
        )
        assert f"CRASHED environment hung: task {slot.task.task_id}: the cell took longer than 3 s" in output
        assert slot.pid is None
        await check_next_task_runs_clean(slot, tasks)
        await slot.close()


@pytest.mark.usefixtures("slot")
class TestDeath:
    async def test_of_the_task_is_reported(self, slot: AppWorldSlot, tasks: Tasks) -> None:
        await slot.open(tasks.next())
        assert "the task's process died (status 7)" in await attack(slot, "posix._exit(7)")


WITHOUT_MOUNTS = """
import asyncio, sys
from pathlib import Path
from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.slot import AppWorldSlot
from tests.support.worlds import Tasks, attack, check_next_task_runs_clean

async def main(root):
    tasks = Tasks(root)
    for level in ("landlock", "rlimits"):
        config = EnvironmentConfig(isolation=level, start_timeout_seconds=600)
        slot = AppWorldSlot(config, root, load_ground_truth=True, name=level)
        for cell in CELLS:
            await slot.open(tasks.next())
            print(level, await attack(slot, "home = posix.environ[b'HOME'].decode() + '/'\\n" + cell), flush=True)
        await check_next_task_runs_clean(slot, tasks)
        await slot.close()

CELLS = [
    "file = posix.open(home + 'x', 65, 0o600)\\nattempt('unlink', lambda: posix.unlink(home + 'x'))"
    "\\nattempt('rename', lambda: posix.rename(home + 'x', home + 'y'))"
    "\\nattempt('nameless', lambda: posix.open(home, 0o20200002, 0o600))",
    "posix.umask(0)\\nposix.mkdir(home + 'closed', 0o300)\\nlibc.sleep(5)",
    "for number in range(9):\\n    file = posix.open(home + str(number), 65, 0o600)\\n"
    "    for _ in range(20): posix.write(file, b'x' * (1 << 20))\\nlibc.sleep(5)",
]
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_where_nothing_can_be_mounted_what_is_written_is_counted(sandbox_root: Path) -> None:
    """As for an ordinary user: no mount that would give scratch a size, and nothing to be read in a closed folder."""
    lacking = {linux.CAP_SYS_ADMIN, linux.CAP_DAC_OVERRIDE, linux.CAP_DAC_OVERRIDE + 1}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WITHOUT_MOUNTS, str(sandbox_root)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        preexec_fn=lambda: linux.keep_capabilities(frozenset(range(64)) - lacking),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for level in ("landlock", "rlimits"):
        assert done.stdout.count(f"CRASHED environment {level}") == 2, done.stdout
    assert done.stdout.count("REFUSED PermissionError [Errno 1]") == 6, done.stdout
    assert done.stdout.count("it wrote more than 128 MiB or 20000 files, or files that cannot be counted") >= 2
