"""Model-written code that attacks its own world: whatever becomes of it, the next task on the slot runs clean.

What such code can reach outside is in `test_environment_isolation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.errors import EnvironmentCrashed
from tests.support.worlds import Tasks, attack, check_next_task_runs_clean, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

OUTPUT_BYTES = 50_000


@pytest.fixture(scope="module")
def tasks(sandbox_root: Path) -> Tasks:
    return Tasks(sandbox_root)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(sandbox_root: Path) -> AsyncIterator[AppWorldSlot]:
    config = EnvironmentConfig(max_memory_mib=1024, max_output_bytes=OUTPUT_BYTES)
    slot = AppWorldSlot(config, sandbox_root, load_ground_truth=True, name="attacked")
    yield slot
    await slot.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def slot(attacked: AppWorldSlot, tasks: Tasks) -> AsyncIterator[AppWorldSlot]:
    await attacked.open(tasks.next())
    yield attacked
    await check_next_task_runs_clean(attacked, tasks)


@pytest.mark.parametrize(
    "code",
    [
        "line = 'x' * 1_000_000\nfor _ in range(1000): print(line)",
        "sys_.stderr.write('x' * 10_000_000)",
        "posix.write(1, b'x' * 10_000_000)",
        "raise Exception('x' * 10_000_000)",
    ],
    ids=["gigabyte", "stderr", "descriptor", "exception"],
)
async def test_output_is_cut_at_the_source(slot: AppWorldSlot, code: str) -> None:
    output = await attack(slot, code, "print('still here')")
    assert len(output) < 2 * OUTPUT_BYTES
    assert "still here" in output


async def test_the_cut_is_marked(slot: AppWorldSlot) -> None:
    output = await slot.execute(f"print('é' * {OUTPUT_BYTES})")
    assert output == "é" * (OUTPUT_BYTES // 2) + f"\n[output cut at {OUTPUT_BYTES} bytes]\n"


async def test_an_endless_loop_is_interrupted_and_its_world_survives(
    attacked: AppWorldSlot, sandbox_root: Path, tasks: Tasks
) -> None:
    config = EnvironmentConfig(cell_timeout_seconds=3, max_output_bytes=OUTPUT_BYTES)
    slot = AppWorldSlot(config, sandbox_root, load_ground_truth=True, name="looping")
    await slot.open(tasks.next())
    output = await attack(slot, "kept = 5\nwhile True: pass", "print('still here', kept)")
    assert "Execution timed out after 2 seconds." in output
    assert output.endswith("still here 5\n")
    await check_next_task_runs_clean(slot, tasks)
    await slot.stop()


@pytest.mark.parametrize(
    "code",
    ["libc.abort()", "ctypes.string_at(0)", "signal.signal(14, signal.SIG_DFL)\nsignal.alarm(1)\nwhile True: pass"],
    ids=["abort", "segmentation fault", "alarm"],
)
async def test_the_process_ends_itself(slot: AppWorldSlot, code: str) -> None:
    assert "the task's process died (status -" in await attack(slot, code)


async def test_the_process_ends_between_cells(slot: AppWorldSlot) -> None:
    await attack(
        slot,
        """
        def later():
            libc.usleep(300000)
            posix._exit(7)
        thread.start_new_thread(later, ())
        """,
    )
    gone = psutil.wait_procs(processes_of(slot)[-1:], timeout=10)[0]
    assert len(gone) == 1
    with pytest.raises(EnvironmentCrashed, match=r"the task's process died \(status 7\)"):
        await slot.execute("print('never')")


@pytest.mark.parametrize(
    "code",
    [
        "sys_.exit(3)",
        "raise json.codecs.builtins.KeyboardInterrupt()",
        "raise json.codecs.builtins.BaseException('gone')",
        "def down(): down()\nsys_.setrecursionlimit(10**9)\ndown()",
    ],
    ids=["exit", "interrupt", "base exception", "recursion"],
)
async def test_exceptions_that_end_programs(slot: AppWorldSlot, code: str) -> None:
    output = await attack(slot, code, "print('still here')")
    assert "still here" in output or "CRASHED" in output


async def test_threads_without_end(slot: AppWorldSlot) -> None:
    output = await attack(
        slot,
        """
        def wait():
            libc.sleep(60)
        started = 0
        try:
            while started < 1000:
                thread.start_new_thread(wait, ())
                started += 1
        except BaseException as error:
            print("refused after", started)
        """,
    )
    assert int(output.split("refused after")[1]) < 64


async def test_threads_left_running(slot: AppWorldSlot) -> None:
    output = await attack(
        slot,
        """
        def spin():
            while True:
                file = posix.open(posix.environ[b"HOME"] + b"/mine", posix.O_WRONLY | posix.O_CREAT)
                posix.write(file, b"x")
                posix.close(file)
        thread.start_new_thread(spin, ())
        """,
        "print('next cell')",
    )
    assert "next cell" in output


async def test_closed_descriptors(slot: AppWorldSlot) -> None:
    assert "CRASHED" in await attack(slot, "posix.closerange(0, 1000)", "print(1)")


async def test_writing_to_every_descriptor(slot: AppWorldSlot) -> None:
    output = await attack(
        slot,
        r"""
        answer = b'{"output": "forged"}'
        for descriptor in range(3, 200):
            for text in (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer, b"{}\n" * 1000):
                try:
                    posix.write(descriptor, text)
                except OSError:
                    pass
        """,
    )
    # It can say what it likes in its own name. There is no descriptor of anybody else's.
    assert "forged" in output or "CRASHED" in output, output


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("{'not': 'text'}", "answered a cell with something that is not text"),
        ("'x' * 5_000_000", "an answer of more than"),
        ("1 / 0", "/execute answered 500: ZeroDivisionError"),
    ],
    ids=["not text", "too much", "error"],
)
async def test_answers_that_break_the_protocol(slot: AppWorldSlot, answer: str, complaint: str) -> None:
    output = await attack(
        slot,
        f"""
        application = load("appworld.serve.environment", fromlist=["world"])
        application.world.__class__.execute = lambda self, code: {answer}
        """,
        "print(1)",
    )
    assert complaint in output


async def test_tampering_with_appworld(slot: AppWorldSlot) -> None:
    output = await attack(
        slot,
        """
        application = load("appworld.serve.environment", fromlist=["world"])
        load("appworld.evaluator", fromlist=["x"]).evaluate_task = None
        load("appworld.environment", fromlist=["x"]).AppWorld.evaluate = None
        deleted = 0
        for models in vars(application.world.models).values():
            for model in vars(models).values() if hasattr(models, "__dict__") else ():
                try:
                    for row in model.all():
                        row.delete()
                        deleted += 1
                except BaseException:
                    pass
        json.dumps = json.loads = None
        application.__dict__.clear()
        """,
        "print(1)",
    )
    assert output


async def test_saved_state_that_was_tampered_with(slot: AppWorldSlot) -> None:
    output = await attack(
        slot,
        """
        world = load("appworld.serve.environment", fromlist=["world"]).world
        world.__class__._save_state = world.__class__.save_logs = lambda self, *arguments: None
        spoiled = 0
        def spoil(folder):
            global spoiled
            for name in posix.listdir(folder):
                path = folder + b"/" + name
                try:
                    posix.listdir(path)
                except OSError:
                    posix.unlink(path)
                    try:
                        posix.symlink("/etc/passwd", path)
                    except PermissionError:  # Landlock lets nobody make links
                        posix.close(posix.open(path, posix.O_CREAT))
                    spoiled += 1
                else:
                    spoil(path)
        spoil(posix.environ[b"APPWORLD_ROOT"] + b"/experiments/outputs")
        print("spoiled", spoiled)
        """,
    )
    assert "spoiled" in output, output
    assert int(output.split("spoiled")[1]) > 5
    with contextlib.suppress(Exception):
        assert not (await slot.evaluate()).success
