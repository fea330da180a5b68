"""Tools in their jail: real processes at every level, what they can reach, and every way a call can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import GuardedWorld, World, make_environment
from draco_ray.environments.tools.environment import ToolsEnvironment
from draco_ray.errors import ConfigError, EnvironmentCrashed, IsolationUnavailable, WorldBroken, WorldError
from tests.conftest import LEVELS

pytestmark = pytest.mark.slow

SECRET = 's3cr"t key'
TOOLS = '''
import json, os, socket, sqlite3, subprocess, time, urllib.parse

SEEN = []
KEY = os.environ.get("DESK_KEY", "")


def reset(task: dict) -> None:
    if task.get("bad"):
        raise KeyError("orders")
    if task.get("ends"):
        os._exit(4)
    SEEN.append(task["id"])
    with sqlite3.connect("shop.db") as shop:
        shop.execute("create table orders (id text)")
        shop.execute("insert into orders values (?)", (task["order"],))


def orders() -> list[str]:
    """List the orders."""
    with sqlite3.connect("shop.db") as shop:
        return [row[0] for row in shop.execute("select id from orders")] + SEEN


def leak() -> str:
    """Tell everything."""
    return "\\n".join([KEY, json.dumps(KEY), urllib.parse.quote(KEY), str(dict(os.environ))])


def big(length: int) -> str:
    """Return a lot."""
    return "x" * length


def told(padding: int, key: str = KEY) -> str:
    """Tell the key behind a lot."""
    return "x" * padding + KEY


def deny() -> None:
    """Fail with the key behind a lot."""
    raise ValueError("x" * (500 - len("ValueError: ") - 6) + KEY)


def fork() -> str:
    """Start a process that comes back, too."""
    return "child" if os.fork() == 0 else "parent"


def end() -> None:
    """End the process."""
    os._exit(3)


def stick() -> None:
    """Hang where no signal is heard."""
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)


def reach(what: str) -> str:
    """Try to reach something."""
    if what == "network":
        return str(socket.create_connection(("127.0.0.1", 9)))
    if what == "program":
        return subprocess.run(["/bin/true"]).returncode
    if what == "memory":
        return len(bytearray(1 << 40))
    return open(what).read()


def end_state() -> dict:
    return {"orders": orders()[:-1], "seen": SEEN}


def evaluate(task: dict, state: dict) -> dict:
    if task.get("odd"):
        return {"done": {1}}
    return {"expected": [task["expected"]] == state["orders"], "seen": state["seen"] == [task["id"]]}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Where other users can read it, as the jail's may be another one.
    tmp_path.parent.parent.chmod(0o755)
    tmp_path.parent.chmod(0o755)
    tmp_path.chmod(0o755)
    (tmp_path / "desk_tools.py").write_text(TOOLS)
    rows = [
        {"id": "a", "instruction": "List.", "order": "A1", "expected": "A1"},
        {"id": "b", "instruction": "List.", "order": "B1", "expected": "X9"},
        {"id": "bad", "instruction": "List.", "order": "C1", "bad": True},
        {"id": "odd", "instruction": "List.", "order": "C1", "odd": True},
        {"id": "ends", "instruction": "List.", "order": "C1", "ends": True},
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("DESK_KEY", SECRET)
    return tmp_path


def environment(
    folder: Path, *, ground_truth: bool = True, isolation: str = "auto", seconds: float = 600, **options: object
) -> ToolsEnvironment:
    config = EnvironmentConfig(
        use="tools",
        options={"tools": [str(folder / "desk_tools.py")], "secrets": ["DESK_KEY"], **options},
        isolation=isolation,
        cell_timeout_seconds=seconds,
        max_output_bytes=5000,
    )
    made = make_environment(config, DataConfig(root=folder), ground_truth=ground_truth, name="desk")
    assert isinstance(made, ToolsEnvironment)
    return made


@contextlib.asynccontextmanager
async def opened(desk: ToolsEnvironment, task_id: str = "a") -> AsyncIterator[World]:
    world = GuardedWorld(await desk.open(task_id), "desk", desk.config.cell_timeout_seconds)
    yield world
    await world.close()


async def call(world: World, name: str, **arguments: object) -> str:
    return await world.act(json.dumps({"name": name, "arguments": arguments}))


@pytest.mark.parametrize("level", LEVELS)
async def test_every_level_runs_tools_on_a_clean_desk_and_keeps_them_in(folder: Path, level: str) -> None:
    desk = environment(folder, isolation=level)
    try:
        with contextlib.suppress(IsolationUnavailable):
            async with opened(desk) as world:
                assert await call(world, "orders") == '["A1","a"]'
                for what in ("network", "program", "memory"):
                    assert (await call(world, "reach", what=what)).startswith("error: reach: ")
                hidden = "" if level == "rlimits" else "error: reach: "
                for path in ("/etc/passwd", str(folder / "tasks.jsonl")):
                    assert (await call(world, "reach", what=path)).startswith(hidden)
                verdict = await world.evaluate()
                assert (verdict.success, verdict.passed_tests, verdict.total_tests) == (True, 2, 2)
            # Neither what a module remembers nor what is in scratch is there for the next task.
            async with opened(desk, "b") as world:
                assert await call(world, "orders") == '["B1","b"]'
                assert (await world.evaluate()).failures == ("expected",)
            return
        pytest.skip(f"this machine offers no isolation level {level}")
    finally:
        await desk.stop()


async def test_secrets_are_blotted_out_and_long_results_cut(folder: Path) -> None:
    desk = environment(folder)
    async with opened(desk) as world:
        told = await call(world, "leak")
        assert told.count("[secret DESK_KEY]") == 4
        assert "s3cr" not in told
        assert await call(world, "big", length=5100) == "x" * 5000 + "\n[output cut: 100 more characters]"
        assert await call(world, "big", length=5000) == "x" * 5000
        assert await call(world, "absent") == (
            "error: there is no tool 'absent'; there are big, deny, end, fork, leak, orders, reach, stick, told"
        )
        # A cut leaves no half of one.
        assert await call(world, "told", padding=4994) == "x" * 4994 + "\n[output cut: 10 more characters]"
        assert (await call(world, "deny")).endswith("xxx\n[output cut: 6 more characters]")
    assert "DESK_KEY" not in desk.facts
    assert "s3cr" not in desk.facts + desk.task("a").tools
    await desk.stop()


async def test_what_a_tool_ends_or_hangs_is_a_failed_rollout_and_the_next_one_plays(folder: Path) -> None:
    desk = environment(folder)
    with pytest.raises(WorldBroken, match=r"environment desk: task a: tool end ended its process \(status 3\)"):
        async with opened(desk) as world:
            await call(world, "end")
    # Only what never ends depends on a short time.
    patient, desk.config = desk.config, desk.config.model_copy(update={"cell_timeout_seconds": 1.0})
    with pytest.raises(WorldBroken, match=r"tool stick could not be stopped after its time limit of 1.25 s"):
        async with opened(desk) as world:
            await call(world, "stick")
    desk.config = patient
    for task, why in (("bad", "reset: KeyError: 'orders'"), ("ends", r"reset ended its process \(status 4\)")):
        with pytest.raises(EnvironmentCrashed, match=rf"task {task}: cannot be started: {why}") as crashed:
            await desk.open(task)
        assert not isinstance(crashed.value, WorldBroken)
    async with opened(desk) as world:
        assert await call(world, "orders") == '["A1","a"]'
    await desk.stop()


async def test_an_evaluator_that_says_neither_yes_nor_no_is_no_failure_of_the_agents(folder: Path) -> None:
    desk = environment(folder)
    async with opened(desk, "odd") as world:
        with pytest.raises(WorldError, match=r"evaluate returned \"\{'done': \{1\}\}\", expected True, False, or"):
            await world.evaluate()
    await desk.stop()


async def test_a_process_that_a_tool_has_forked_answers_nothing(folder: Path) -> None:
    desk = environment(folder, programs=True)
    async with opened(desk) as world:
        assert await call(world, "fork") == "parent"
        assert await call(world, "orders") == '["A1","a"]'
    await desk.stop()


async def test_several_desks_at_a_time_and_ends_that_leave_nothing(folder: Path) -> None:
    desks = [environment(folder) for _ in range(4)]
    for desk, world in zip(desks, await asyncio.gather(*(desk.open("a") for desk in desks)), strict=True):
        assert await call(world, "orders") == '["A1","a"]'
        assert desk._process is not None
    directories = [desk._process._folder.path for desk in desks if desk._process is not None]
    assert all(directory.exists() for directory in directories)
    await asyncio.gather(*(desk.stop() for desk in desks))
    assert not any(directory.exists() for directory in directories)


async def test_without_ground_truth_nothing_is_evaluated_or_expected(folder: Path) -> None:
    desk = environment(folder, ground_truth=False)
    assert desk.evaluates
    async with opened(desk) as world:
        with pytest.raises(WorldError, match="without ground truth"):
            await world.evaluate()
    await desk.stop()
    (folder / "desk_tools.py").write_text(TOOLS.partition("def end_state")[0])
    assert not environment(folder).evaluates


def test_the_judge_is_told_of_the_tools(folder: Path) -> None:
    facts = environment(folder, facts="Only delivered orders are refunded.\n- Be brief.").facts
    lines = facts.splitlines()
    assert all(line.startswith("- ") for line in lines)
    assert "- Tool `reach(what: string)`: Try to reach something." in lines
    assert lines[-2:] == ["- Only delivered orders are refunded.", "- Be brief."]


def test_what_cannot_be_used_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "other.py").write_text("import nothing_like_it")
    with pytest.raises(ConfigError, match="other.py: cannot be imported: ModuleNotFoundError"):
        environment(folder, tools=[str(folder / "other.py")]).facts  # noqa: B018
    monkeypatch.setenv("DESK_KEY", "abc")
    with pytest.raises(ConfigError, match="set DESK_KEY in the environment, to at least 4 characters"):
        environment(folder).task("a")
    with pytest.raises(WorldError, match="no task has split 'dev'; expected one of train"):
        environment(folder).tasks("dev")
