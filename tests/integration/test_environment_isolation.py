"""What model-written code can reach, at every isolation level this host allows."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.environments.jail.confine import LEVELS, environment
from draco_ray.errors import EnvironmentCrashed
from tests.support.worlds import Tasks, attack, check_next_task_runs_clean, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

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
    config = EnvironmentConfig(isolation=level, max_memory_mib=1024)
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
    await slot.stop()
    assert psutil.wait_procs(processes, timeout=10)[1] == []


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
        assert output.splitlines()[0].replace("'PWD', ", "") == str(sorted(environment("", "", "")))
        assert SECRET not in output
        if hides_files(hostile) or f"user {os.getuid()}" not in output:
            assert f"environment of {os.getpid()} REFUSED" in output

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


@pytest.mark.usefixtures("hostile")
class TestMemory:
    async def test_is_limited(self, slot: AppWorldSlot) -> None:
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


@pytest.mark.usefixtures("slot")
class TestHang:
    async def test_is_ended_by_the_wall_clock(self, slot: AppWorldSlot, sandbox_root: Path, tasks: Tasks) -> None:
        # Of its own, so that only this test depends on a short time.
        config = EnvironmentConfig(isolation=slot.isolation_level, max_memory_mib=1024, cell_timeout_seconds=3)
        slot = AppWorldSlot(config, sandbox_root, load_ground_truth=True, name="hung")
        await slot.open(tasks.next())
        output = await attack(
            slot,
            """
            thread.start_new_thread(lambda: [1 for _ in iter(int, 1)], ())
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass
            """,
        )
        assert f"CRASHED environment hung: task {slot.task.task_id}: /execute took longer than 3 s" in output
        assert slot.pid is None
        await check_next_task_runs_clean(slot, tasks)
        await slot.stop()


@pytest.mark.usefixtures("hostile")
class TestDeath:
    async def test_of_the_task_is_reported(self, slot: AppWorldSlot) -> None:
        assert "the task's process died (status 7)" in await attack(slot, "posix._exit(7)")
