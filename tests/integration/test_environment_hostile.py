"""Model-written code that attacks its own world: whatever becomes of it, the next task on the slot runs clean.

What such code can reach outside is in `test_environment_isolation`.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.errors import EnvironmentCrashed, WorldBroken
from tests.support.autoscaling import poll_until
from tests.support.worlds import Tasks, attack, check_next_task_runs_clean, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OUTPUT_BYTES = 50_000
APPS = (
    *("admin", "amazon", "api_docs", "file_system", "gmail", "phone"),
    *("simple_note", "splitwise", "spotify", "supervisor", "todoist", "venmo"),
)


@pytest.fixture(scope="module")
def tasks(sandbox_root: Path) -> Tasks:
    return Tasks(sandbox_root)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(sandbox_root: Path) -> AsyncIterator[AppWorldSlot]:
    config = EnvironmentConfig(max_memory_mib=1024, max_output_bytes=OUTPUT_BYTES)
    slot = AppWorldSlot(config, sandbox_root, load_ground_truth=True, name="attacked")
    yield slot
    await slot.close()


@pytest_asyncio.fixture(loop_scope="module")
async def slot(attacked: AppWorldSlot, tasks: Tasks) -> AsyncIterator[AppWorldSlot]:
    await attacked.open(tasks.next())
    yield attacked
    await check_next_task_runs_clean(attacked, tasks)


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def then_clean(attacked: AppWorldSlot, tasks: Tasks) -> AsyncIterator[None]:
    """After the tests of a class, each of which opens a task after the other, the next task runs clean."""
    yield
    await check_next_task_runs_clean(attacked, tasks)


@pytest_asyncio.fixture(loop_scope="module")
async def opened(attacked: AppWorldSlot, tasks: Tasks, then_clean: None) -> AppWorldSlot:
    """The slot with a task, for tests of one kind."""
    await attacked.open(tasks.next())
    return attacked


class TestOutput:
    """What is printed."""

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
    async def test_output_is_cut_at_the_source(self, opened: AppWorldSlot, code: str) -> None:
        output = await attack(opened, code, "print('still here')")
        assert len(output) < 2 * OUTPUT_BYTES
        assert "still here" in output

    async def test_the_cut_is_marked(self, opened: AppWorldSlot) -> None:
        output = await opened.act(f"print('é' * {OUTPUT_BYTES})")
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
    await slot.close()


class TestEnds:
    """What ends a program, or its process."""

    @pytest.mark.parametrize(
        "code",
        ["libc.abort()", "ctypes.string_at(0)", "signal.signal(14, signal.SIG_DFL)\nsignal.alarm(1)\nlibc.pause()"],
        ids=["abort", "segmentation fault", "alarm"],
    )
    async def test_the_process_ends_itself(self, opened: AppWorldSlot, code: str) -> None:
        assert "the task's process died (status -" in await attack(opened, code)

    async def test_the_process_ends_between_cells(self, opened: AppWorldSlot) -> None:
        await attack(
            opened,
            """
            def later():
                libc.usleep(300000)
                posix._exit(7)
            thread.start_new_thread(later, ())
            """,
        )
        # The server reaps it at the next order.
        process = processes_of(opened)[-1]
        await poll_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(EnvironmentCrashed, match=r"the task's process died \(status 7\)"):
            await opened.act("print('never')")

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
    async def test_exceptions_that_end_programs(self, opened: AppWorldSlot, code: str) -> None:
        output = await attack(opened, code, "print('still here')")
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
            for text in (answer + b"\n", b"3 " + answer + b"\n", b"{}\n" * 1000):
                try:
                    posix.write(descriptor, text)
                except OSError:
                    pass
        """,
    )
    # It can say what it likes in its own name. There is no descriptor of anybody else's.
    assert "forged" in output or "CRASHED" in output, output


class TestAnswers:
    """Answers that the server would not give."""

    @pytest.mark.parametrize(
        ("answer", "complaint"),
        [
            ("{'not': 'text'}", "the answer to a cell is not text"),
            ("'x' * 5_000_000", "the task's process sent an answer of more than"),
            ("1 / 0", "ZeroDivisionError"),
        ],
        ids=["not text", "too much", "error"],
    )
    async def test_answers_that_break_the_protocol(self, opened: AppWorldSlot, answer: str, complaint: str) -> None:
        output = await attack(
            opened,
            f"""
            found("AppWorld").__class__.execute = lambda self, code: {answer}
            """,
            "print(1)",
        )
        assert complaint in output


ANSWERS = {
    "deep": b'{"output": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep object": b'{"output": ' + b'{"x":' * 100_000 + b"1" + b"}" * 100_001,
    "many digits": b'{"output": ' + b"9" * 100_000 + b"}",
    "not a number": b'{"output": NaN}',
    "infinity": b'{"output": 1e99999}',
    "not an object": b"[1]",
    "no output": b"{}",
    "null": b"\0" * 100,
    "no text": b"\xff\xfe\xfd",
    "nothing": b"",
    "utf-16": '{"output": 1}'.encode("utf-16"),
    "an error that is none": b'{"error": ' + b"[" * 100 + b"]" * 100 + b"}",
    "terminal": b'{"error": "\\u001b[2J\\n\\r\\u0000\\ud800 gone"}',
}
LINES = {
    "garbage": b"\xff" * 1000 + b"\n",
    "half a line": b'NUMBER {"output": ',
    "an empty line": b"\n",
    "no number": b'{"output": "forged"}\n',
    "another number": b'9 {"output": "forged"}\n',
    "a number of many digits": b"9" * 100_000 + b' {"output": "forged"}\n',
    "two answers": b'NUMBER {"output": "forged"}\n' * 2,
    "more than an answer": b'NUMBER {"output": "forged"}\nmore',
    "another protocol": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "without an end": b"NUMBER " + b"y" * 2_000_000,
    **{f"answer: {name}": b"NUMBER " + answer + b"\n" for name, answer in ANSWERS.items()},
}


@pytest.mark.parametrize("raw", LINES.values(), ids=LINES.keys())
async def test_any_answer_is_a_failed_rollout_and_no_more(attacked: AppWorldSlot, tasks: Tasks, raw: bytes) -> None:
    await attacked.open(tasks.next())
    said = await attack(
        attacked,
        f"""
        raw = load("zlib").decompress(load("base64").b64decode("{b64encode(zlib.compress(raw)).decode()}"))
        channel = found("Channel")
        first = channel.__class__.answer
        def answer(self, told):
            text = raw.replace(b"NUMBER", self._number)
            while text:
                text = text[posix.write(self.connection.fileno(), text) :]
            posix._exit(0)
        def once(self, told):
            first(self, told)
            self.__class__.answer = answer
        channel.__class__.answer = once
        """,
    )
    assert "failed" not in said
    with pytest.raises(WorldBroken) as broken:
        await attacked.act("print(1)")
    assert str(broken.value).isprintable()
    assert len(str(broken.value)) < 1000


async def test_text_that_is_none_is_spelt_out(slot: AppWorldSlot) -> None:
    output = await attack(
        slot,
        r"print('a\ud800b')",
        r"raise Exception('\udfff')",
        r"'x' '\udc80'",
        "x = '\ud800'",
        r"apis.venmo.search_users(access_token='\ud800', query='\udc00')",
        "print('\0')",
        "(" * 5000 + ")" * 5000,
        "-" * 100_000 + "1",
        "x\0y",
        "print('still here')",
    )
    output.encode("utf-8")
    assert "a\\ud800b" in output
    assert "still here" in output


async def test_who_ended_a_process_decides_whose_doing_it_was(attacked: AppWorldSlot, tasks: Tasks) -> None:
    await attacked.open(tasks.next())
    processes_of(attacked)[-1].kill()
    with pytest.raises(EnvironmentCrashed, match=r"died \(status -9\)") as lost:
        await attacked.act("while True: pass")
    assert not isinstance(lost.value, WorldBroken)
    await attacked.open(tasks.next())
    with pytest.raises(WorldBroken, match=r"died \(status 1\)"):
        await attacked.act("json.codecs.builtins.__import__('posix')._exit(1)")


async def test_tampering_with_appworld(slot: AppWorldSlot) -> None:
    output = await attack(
        slot,
        """
        load("appworld.evaluator", fromlist=["x"]).evaluate_task = None
        load("appworld.environment", fromlist=["x"]).AppWorld.evaluate = None
        deleted = 0
        for models in vars(found("AppWorld").models).values():
            for model in vars(models).values() if hasattr(models, "__dict__") else ():
                try:
                    for row in model.all():
                        row.delete()
                        deleted += 1
                except BaseException:
                    pass
        json.dumps = json.loads = None
        load("draco_ray.environments.appworld.process_roles", fromlist=["x"]).__dict__.clear()
        """,
        "print(1)",
    )
    assert output


SPOIL = """
world = found("AppWorld")
world.__class__._save_state = world.__class__.save_logs = lambda self, *arguments: None
dbs = world.output_db_home_path_on_disk
path = dbs + "/supervisor.jsonl"
def write(text, path=path):
    file = posix.open(path, posix.O_WRONLY | posix.O_TRUNC | posix.O_CREAT, 0o600)
    posix.write(file, text)
    posix.close(file)
"""
SPOILT = {
    "attach": 'write(json.dumps(["ATTACH DATABASE \'" + dbs + "/stolen.db\' AS s", [], False]).encode())',
    "vacuum": 'write(json.dumps(["VACUUM INTO \'" + dbs + "/stolen.db\'", [], False]).encode())',
    "function": "write(json.dumps(['DELETE FROM tasks WHERE load_extension(1)', [], False]).encode())",
    "garbage": "write(bytes(range(256)) * 100)",
    "deep": "write(b'[' * 1_000_000)",
    "half a line": "write(b'[\"UPDATE tasks SE')",
    "not a change": "write(b'{\"x\": NaN}')",
    "many digits": "write(b'[\"UPDATE tasks SET id = ?\", [' + b'9' * 10000 + b'], false]')",
    "surrogate": "write(json.dumps(['UPDATE tasks SET status = ?', ['\\ud800'], False]).encode())",
    "unknown table": "write(json.dumps(['UPDATE nothing SET x = 1', [], False]).encode())",
    "folder": "posix.unlink(path); posix.mkdir(path)",
    "link": "posix.unlink(path); posix.symlink('/dev/zero', path)",
    "sparse": "write(b''); file = posix.open(path, posix.O_WRONLY); posix.ftruncate(file, 120 << 20)",
    "closed": "posix.unlink(path); posix.close(posix.open(path, posix.O_WRONLY | posix.O_CREAT, 0))",
    "hashes": "write(b'[' * 100_000, dbs + '/model_hashes.json')",
    "no folder": "[posix.unlink(dbs + '/' + name) for name in posix.listdir(dbs)]; posix.rmdir(dbs)",
    "expensive": "write((json.dumps(['UPDATE tasks SET status = status || status', [], False]) + '\\n').encode() * 99)",
    "full": "[write(b'x' * 4096, posix.environ[b'HOME'].decode() + '/' + str(number)) for number in range(19_000)]",
}


class TestSpoilt:
    """Worlds whose saved state is not what AppWorld saves."""

    @pytest.mark.parametrize("code", SPOILT.values(), ids=SPOILT.keys())
    async def test_a_spoilt_world_has_failed(self, opened: AppWorldSlot, code: str) -> None:
        output = await attack(opened, SPOIL, code)
        if "CRASHED" not in output:  # where files are counted
            verdict = await opened.evaluate()
            assert not verdict.success
            assert verdict.failures

    async def test_a_database_in_place_of_its_changes_is_not_looked_at(self, opened: AppWorldSlot) -> None:
        await attack(opened, SPOIL, "write(b'SQLite format 3', dbs + '/venmo.db')")
        verdict = await opened.evaluate()
        assert {name for name in verdict.saved if name.startswith("dbs/")} == {
            f"dbs/{name}" for name in (*(f"{app}.jsonl" for app in APPS), "model_hashes.json")
        }

    async def test_saved_state_that_was_tampered_with(self, opened: AppWorldSlot) -> None:
        output = await attack(
            opened,
            """
            world = found("AppWorld")
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
        assert not (await opened.evaluate()).success
