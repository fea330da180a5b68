"""MCP servers as tools: a command in the jail and a URL, both with the real package on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import GuardedWorld, World, make_environment
from draco_ray.environments.tools import mcp_servers
from draco_ray.environments.tools.environment import ToolsEnvironment
from draco_ray.environments.tools.mcp_servers import McpSession, merge_tool_schemas
from draco_ray.environments.tools.options import ToolsOptions
from draco_ray.environments.tools.process import CommandProcess
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldBroken
from tests.conftest import REPOSITORY
from tests.support.http_mcp_server import DROP, error, reply, result, serving

pytestmark = pytest.mark.slow

SERVER = REPOSITORY / "tests" / "support" / "desk_mcp_server.py"
RAW_SERVER = REPOSITORY / "tests" / "support" / "raw_mcp_server.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copy(SERVER, tmp_path / "desk_server.py")
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "instruction": "Write a note."}')
    monkeypatch.setenv("DESK_KEY", "s3cret key")
    # As in the processes of a run, whose files are private.
    before = os.umask(0o077)
    yield tmp_path
    os.umask(before)


def environment(folder: Path, server: dict[str, object], **options: object) -> ToolsEnvironment:
    config = EnvironmentConfig(
        use="tools",
        options={"mcp": {"desk": server}, "secrets": ["DESK_KEY"], **options},
        cell_timeout_seconds=600,
        start_timeout_seconds=600,
        max_output_bytes=5000,
    )
    made = make_environment(config, DataConfig(root=folder), ground_truth=False, name="desk")
    assert isinstance(made, ToolsEnvironment)
    return made


def command(folder: Path) -> dict[str, object]:
    file = str(folder / "desk_server.py")
    return {"command": ["python", file], "reads": [file]}


@contextlib.asynccontextmanager
async def opened(desk: ToolsEnvironment) -> AsyncIterator[World]:
    world = GuardedWorld(await desk.open("a"), "desk", 600)
    try:
        yield world
    finally:
        await world.close()


async def call(world: World, name: str, **arguments: object) -> str:
    return await world.act(json.dumps({"name": name, "arguments": arguments}))


def jailed() -> list[psutil.Process]:
    """The processes of jails that this process has started itself."""
    # An earlier test's Ray may have left zombies, which have no command line.
    living = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in living if "tools.server" in " ".join(each.cmdline())]


@pytest.fixture
def url() -> Iterator[str]:
    """A server of one's own, already running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "running" in line:
            break
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


async def test_a_command_is_started_anew_in_the_jail_for_every_rollout(folder: Path) -> None:
    desk = environment(folder, command(folder))
    assert not desk.evaluates
    assert "- Tool `note(text: string)`: Write a note." in desk.facts
    async with opened(desk) as world:
        assert await call(world, "note", text="hello") == "1 notes"
    # One for functions, one for the command: they serve all rollouts.
    assert len(before := jailed()) == 2
    async with opened(desk) as world:
        assert jailed() == before
        assert await call(world, "note", text="hello") == "1 notes"
        assert await call(world, "leak") == "the key is [secret DESK_KEY]"
        assert "No such file" in await call(world, "reach", path="/etc/passwd")
        assert "No such file" in await call(world, "reach", path=str(folder / "tasks.jsonl"))
        assert (await call(world, "note")).startswith("error: note: ")
        assert (await call(world, "fail")).startswith("error: fail: ")
        assert await call(world, "long") == "x" * 5000 + "\n[output cut: 100 more characters]"
        assert await call(world, "absent") == (
            "error: there is no tool 'absent'; there are end, fail, leak, long, note, reach, slow"
        )
    await desk.stop()
    assert not jailed()


async def test_a_server_that_dies_or_hangs_costs_no_more_than_its_rollout(folder: Path) -> None:
    # One without a package: it starts in a tenth of the time.
    desk = environment(folder, raw(folder))
    async with opened(desk) as world:
        assert await call(world, "embedded") == "inside"
        # The call may have been the cause: it is not played again.
        with pytest.raises(WorldBroken, match="task a: MCP server desk was lost: .*Connection closed"):
            await call(world, "end")
        with pytest.raises(WorldBroken, match="the episode has ended"):
            await call(world, "embedded")
    # Only what is never answered depends on a short time.
    patient, desk.config = desk.config, desk.config.model_copy(update={"cell_timeout_seconds": 1.0})
    async with opened(desk) as world:
        assert await call(world, "slow") == "error: slow: stopped after 1 s without an answer"
        # What it does not read fills its pipe.
        with contextlib.suppress(WorldBroken):
            for _ in range(3):
                assert (await call(world, "embedded", a="x" * 1_000_000)).startswith("error: embedded: stopped after")
    desk.config = patient
    async with opened(desk) as world:
        assert await call(world, "embedded") == "inside"
    await desk.stop()


async def test_a_url_has_a_session_for_every_rollout(folder: Path, url: str) -> None:
    desk = environment(folder, {"url": url, "headers": {"Authorization": "Bearer {DESK_KEY}"}})
    async with opened(desk) as world:
        assert await call(world, "note", text="hello") == "1 notes"
    async with opened(desk) as world:
        # The server is not ours to begin anew.
        assert await call(world, "note", text="hello") == "2 notes"
        with pytest.raises(WorldBroken, match="MCP server desk was lost"):
            await call(world, "end")
    with pytest.raises(EnvironmentCrashed, match="MCP server desk was lost") as lost:
        await desk.open("a")
    assert not isinstance(lost.value, WorldBroken)
    await desk.stop()


def raw(folder: Path, *arguments: str) -> dict[str, object]:
    file = shutil.copy(RAW_SERVER, folder / "raw_server.py")
    return {"command": ["python", str(file), *arguments], "reads": [str(file)]}


async def test_what_is_no_text_is_told_and_what_is_no_protocol_is_passed_over(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = environment(folder, raw(folder))
    assert "- Tool `linked(a?: 5, b?: any)`:" in desk.facts
    async with opened(desk) as world:
        assert await call(world, "embedded") == "inside"
        assert await call(world, "linked") == "[resource_link: file:///b]"
        assert await call(world, "structured") == '{"orders": ["A1"]}'
    await desk.stop()
    assert "Traceback" not in caplog.text


async def test_an_answer_that_does_not_fit_what_was_promised_costs_no_rollout(folder: Path) -> None:
    desk = environment(folder, raw(folder))
    async with opened(desk) as world:
        for tool, said in (
            ("misfitting", "Invalid structured content returned by tool misfitting"),
            ("unstructured", "Tool unstructured has an output schema but did not return structured content"),
            ("malformed", "validation error"),
        ):
            told = await call(world, tool)
            assert told.startswith(f"error: {tool}: its answer cannot be read: ")
            assert said in told
            assert "\n" not in told
        assert await call(world, "embedded") == "inside"
    await desk.stop()


async def test_half_a_character_costs_no_rollout(folder: Path) -> None:
    desk = environment(folder, raw(folder))
    async with opened(desk) as world:
        assert await call(world, "halved", day="\ud83d", **{"\ud83d": ["\ud83d"]}) == "a? 😀 \\ud83d"
        assert await call(world, "no_utf8") == "a\ufffd"
        assert await call(world, "embedded") == "inside"
    await desk.stop()


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_half_a_character_over_http_costs_no_session(kind: str) -> None:
    def halved(asked: Any) -> bytes:
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"content": [{"type": "text", "text": "a\ud83d"}]}}
        text = json.dumps(answer)
        return reply((f"data: {text}\n\n" if kind == "text/event-stream" else text).encode(), kind=kind)

    async with serving("tools/call", halved) as url:
        session = session_at(url)
        await session.start()
        assert await session.call("note", {"day": "\ud83d"}) == "a?"
        await session.stop()


@pytest.mark.parametrize(
    ("cursors", "tools"), [("a", 2), ("aa", None), ("abab", None), ("abcb", None), (["a", "b", ""], 3), ([""], 1)]
)
async def test_pages_of_tools_come_to_an_end(cursors: Sequence[str], tools: int | None) -> None:
    left = iter(cursors)

    def page(asked: Any) -> bytes:
        cursor = next(left, None)
        more = {} if cursor is None else {"nextCursor": cursor}
        return result(asked, {"tools": [{"name": "note", "inputSchema": {"type": "object"}}], **more})

    async with serving("tools/list", page) as url:
        session = session_at(url)
        if tools is None:
            with pytest.raises(EnvironmentCrashed, match="^MCP server desk was lost: .*the cursor '.' twice"):
                await session.start()
        else:
            assert len(await session.start()) == tools
        await session.stop()


async def test_of_a_server_those_tools_are_offered_that_are_named(folder: Path) -> None:
    desk = environment(folder, {**raw(folder), "tools": ["embedded", "structured"]})
    offered = json.loads(desk.task("a").tools)
    assert [tool["function"]["name"] for tool in offered] == ["embedded", "structured"]
    assert "linked" not in desk.facts
    async with opened(desk) as world:
        assert await call(world, "embedded") == "inside"
        assert await call(world, "linked") == "error: there is no tool 'linked'; there are embedded, structured"
    await desk.stop()
    lacking = environment(folder, {**raw(folder), "tools": ["embedded", "absent"]})
    with pytest.raises(
        EnvironmentCrashed, match=r"^MCP server desk has no tool absent; expected one of embedded, linked, str"
    ):
        await asyncio.to_thread(lacking.task, "a")


async def test_a_server_that_never_answers_is_one_line_and_leaves_nothing(folder: Path) -> None:
    unforeseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: unforeseen.append(told))
    desk = environment(folder, raw(folder))
    # Tools of functions are started first, always.
    await asyncio.to_thread(desk.task, "a")
    options = ToolsOptions.model_validate({"mcp": {"desk": raw(folder, "silent")}})
    processes = {"desk": await CommandProcess.start(options.mcp["desk"], options, desk.config, {})}
    config = desk.config.model_copy(update={"start_timeout_seconds": 2})
    session = McpSession("desk", options, config, {}, processes)
    with pytest.raises(EnvironmentCrashed, match="^MCP server desk was not ready within 2 s$"):
        await session.start()
    await session.stop()
    await processes["desk"].kill()
    del session
    gc.collect()
    assert not unforeseen
    assert not jailed()


async def test_what_cannot_be_started_is_one_line(folder: Path) -> None:
    absent = environment(folder, {"command": ["no-such-program"]})
    with pytest.raises(EnvironmentCrashed, match="no-such-program: No such file") as refused:
        await asyncio.to_thread(absent.task, "a")
    assert "\n" not in str(refused.value)
    schema = {"type": "function", "function": {"name": "note"}}
    with pytest.raises(
        ConfigError, match="tool note exists twice, in environment.options.tools and in MCP server desk"
    ):
        merge_tool_schemas([schema], {"desk": [schema]})


async def test_what_a_server_says_last_holds_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"denied to \[secret DESK_KEY\]$"

    async def lost(*given: object) -> None:
        raise EnvironmentCrashed(f"MCP server desk was lost: denied to {os.environ['DESK_KEY']}")

    absent = environment(folder, {"command": ["sh", "-c", "echo denied to $DESK_KEY >&2; exit 3"]})
    with pytest.raises(EnvironmentCrashed, match=f"its last output: {said}"):
        await asyncio.to_thread(absent.task, "a")
    desk = environment(folder, raw(folder))
    async with opened(desk) as world:
        monkeypatch.setattr(McpSession, "call", lost)
        with pytest.raises(EnvironmentCrashed, match=said):
            await call(world, "embedded")
    monkeypatch.setattr(McpSession, "start", lost)
    with pytest.raises(EnvironmentCrashed, match=said):
        await desk.open("a")
    await desk.stop()


def session_at(url: str, start: float = 100_000, call: float = 100_000) -> McpSession:
    config = EnvironmentConfig(use="tools", start_timeout_seconds=start, cell_timeout_seconds=call)
    return McpSession("desk", ToolsOptions.model_validate({"mcp": {"desk": {"url": url}}}), config, {}, {})


ODD = [
    (reply(b"no", 401, "text/plain"), "the server answered with HTTP status 401"),
    (reply(b'{"error": "expired"}', 403), "the server answered with HTTP status 403"),
    (reply(b"", 404, "text/plain"), "the server answered with HTTP status 404"),
    (error(-32600, "gone", 404), "the server answered with HTTP status 404"),
    (reply(b"", 502, "text/html"), "the server answered with HTTP status 502"),
    (reply(b"", 302, headers="location: http://localhost:1/\r\n"), "the server answered with HTTP status 302"),
    (
        reply(b"<html>Sign in</html>", kind="text/html"),
        "the server answered with text/html, expected application/json or",
    ),
    (reply(b"{no"), "Failed to parse JSON"),
    (reply(b'{"a": 1}'), "Failed to parse JSON"),
    (reply(b"data: {no\n\n", kind="text/event-stream"), "Failed to parse SSE"),
    (reply(b"", kind="text/event-stream"), "stream ended without a response"),
    (DROP, "disconnected"),
]


@pytest.mark.parametrize(("odd", "said"), ODD)
@pytest.mark.parametrize("method", ["initialize", "tools/call"])
async def test_an_answer_over_http_that_is_no_answer_loses_the_session_in_one_line(
    method: str, odd: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(method, odd) as url:
        session = session_at(url)

        async def play() -> None:
            await session.start()
            # The policy is told nothing of it: it could mend nothing.
            await session.call("note", {})

        with pytest.raises(EnvironmentCrashed, match=f"^MCP server desk was lost: .*{said}") as lost:
            await play()
        await session.stop()
    assert "\n" not in str(lost.value)
    assert "Traceback" not in caplog.text


async def test_what_a_server_says_of_arguments_is_the_policys_to_mend() -> None:
    async with serving("tools/call", error(-32602, "no text given", 400)) as url:
        session = session_at(url)
        await session.start()
        assert await session.call("note", {}) == "error: note: no text given"
        await session.stop()


async def test_a_server_that_stops_answering_over_http_is_waited_for_no_longer_than_is_said() -> None:
    async with serving("initialize", None) as url:
        session = session_at(url, start=1)
        with pytest.raises(EnvironmentCrashed, match="^MCP server desk was not ready within 1 s$"):
            await session.start()
        await session.stop()
    async with serving("tools/call", None) as url:
        session = session_at(url, call=1)
        await session.start()
        assert await session.call("note", {}) == "error: note: stopped after 1 s without an answer"
        await session.stop()


async def test_a_server_that_does_not_let_a_session_end_holds_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "FAREWELL_SECONDS", 0.1)
    async with serving("delete", None) as url:
        session = session_at(url)
        await session.start()
        assert await session.call("note", {}) == "written"
        await session.stop()
