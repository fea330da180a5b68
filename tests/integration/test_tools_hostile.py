"""Code of the policy inside a tool's process, against the sockets, the evaluator and the next task on its slot."""

from __future__ import annotations

import asyncio
import json
import select
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from draco_ray.config.schema import AgentConfig, DataConfig, EnvironmentConfig
from draco_ray.engine.tool_calls import ParsedToolCalls, ToolCall
from draco_ray.environments.base import GuardedWorld, WorldVerdict, make_environment
from draco_ray.environments.tools.environment import ToolsEnvironment
from draco_ray.errors import EnvironmentCrashed, IsolationUnavailable, WorldBroken
from draco_ray.records import EpisodeEnd, Message, Usage
from draco_ray.rollout.agent import PolicyTurn, RolloutRequest, TokenRecord
from draco_ray.rollout.worker import RolloutWorkerActor
from tests.conftest import LEVELS

pytestmark = pytest.mark.slow

EXPECTED = "the-answer-is-forty-two"
TOOLS = '''
import os

answers = []
told = []


def reset(task: dict) -> None:
    assert "expected" not in task
    told.append(task)
    answers.append(task["id"])


def run_python(code: str) -> str:
    """Run Python code in this process, and tell what it left in `told`."""
    space = {"answers": answers}
    exec(code, space)
    return str(space.get("told", "ran"))


def answer(text: str) -> str:
    """Answer."""
    answers.append(text)
    return "noted"


def end_state() -> list:
    return answers


def evaluate(task: dict, state: list) -> bool:
    if task["id"] == "broken":
        raise RuntimeError("the evaluator is broken")
    if state[1:] == ["raise"]:
        raise RuntimeError("evaluate cannot read that")
    if state[1:] == ["odd"]:
        return "neither"
    if state[1:] == ["exit"]:
        os._exit(5)
    return state == [task["id"], task["expected"]] and answers == []
'''
TIMERS_END = "[each.join() for each in threading.enumerate() if isinstance(each, threading.Timer)]"
PRELUDE = """
import gc, json, os, re, signal, socket, stat, sys, threading, time

def sockets():
    found = []
    for number in range(256):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.append(number)
        except OSError:
            pass
    return found

def asked():
    # The number of the order that this process is carrying out.
    frame = sys._getframe()
    while "channel" not in frame.f_locals:
        frame = frame.f_back
    return int(frame.f_locals["channel"]._number)

def say(*messages, raw=b"", number=None):
    number = number or asked()
    data = b"".join(b"%d %s\\n" % (number, json.dumps(each).encode()) for each in messages) + raw
    for number in sockets():
        try:
            os.write(number, data)
        except OSError:
            pass

def found(pattern):
    # Where something is in this process: among what the collector knows, and in all of its memory.
    known = gc.get_referents(*gc.get_objects())
    known = {id(each): each for each in (*known, *gc.get_referents(*known)) if type(each) is str}
    places = ["gc"] if any(re.search(pattern, text) for text in known.values()) else []
    try:
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(each, 16) for each in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    memory.seek(first)
                    if re.search(pattern.encode(), memory.read(last - first)):
                        places.append("memory")
    except FileNotFoundError:
        places.append("no /proc")
    return sorted(set(places))
"""
EVERY_ANSWER: tuple[dict[str, Any], ...] = (
    {"text": "forged", "length": 6},
    {"state": ["a", EXPECTED]},
    {"evaluated": True},
    {"failed": "forged"},
    {"unusable": "forged"},
    {"tools": [], "hooks": []},
    {"opened": True},
    {"died": 0},
    {"closed": True},
    {},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Where other users can read it, as the jail's may be another one.
    for each in (tmp_path.parent.parent, tmp_path.parent, tmp_path):
        each.chmod(0o755)
    (tmp_path / "run_tools.py").write_text(TOOLS)
    row = {"instruction": "Answer.", "shown": "the-task-is-shown", "expected": EXPECTED}
    rows = [{"id": name, **row} for name in ("a", "b", "broken")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def environment(folder: Path, *, isolation: str = "auto", **options: object) -> ToolsEnvironment:
    config = EnvironmentConfig(
        use="tools",
        options={"tools": [str(folder / "run_tools.py")], **options},
        isolation=isolation,
        cell_timeout_seconds=15,
        start_timeout_seconds=600,
        max_output_bytes=5000,
    )
    made = make_environment(config, DataConfig(root=folder), ground_truth=True, name="desk")
    assert isinstance(made, ToolsEnvironment)
    return made


class Slot:
    """A slot as a rollout worker has it: what raises `EnvironmentCrashed`, and nothing else, is played again."""

    def __init__(self, desk: ToolsEnvironment) -> None:
        self.desk = desk

    async def play(self, *calls: tuple[str, str], task_id: str = "a") -> tuple[list[str], WorldVerdict]:
        """What calls returned, each a tool and its one argument, and the verdict."""
        world = GuardedWorld(await self.desk.open(task_id), "desk", self.desk.config.cell_timeout_seconds)
        try:
            told = []
            for tool, argument in calls:
                if tool == "run_python":
                    argument = PRELUDE + textwrap.dedent(argument)
                arguments = {"code" if tool == "run_python" else "text": argument}
                told.append(await world.act(json.dumps({"name": tool, "arguments": arguments})))
            return told, await world.evaluate()
        finally:
            await world.close()


@pytest_asyncio.fixture
async def slot(folder: Path) -> AsyncIterator[Slot]:
    desk = environment(folder)
    yield Slot(desk)
    await desk.stop()


async def test_the_honest_rollout(slot: Slot) -> None:
    for _ in range(2):
        assert (await slot.play(("answer", EXPECTED)))[1].success
        assert not (await slot.play(("answer", "wrong"), task_id="b"))[1].success


async def test_a_forged_line_of_any_kind_is_a_result_and_the_slot_is_replaced(slot: Slot) -> None:
    # In place of the call's own answer, which is then one that nobody has asked for.
    codes = [f"say({forged!r})" for forged in EVERY_ANSWER]
    text = EVERY_ANSWER[0]
    codes += [f"say({text!r}, {text!r})", f"say({text!r}, number=asked() - 1)", f"say({text!r}, number=asked() + 1)"]
    # Between two calls, or in place of the second one's answer.
    codes += [f"threading.Timer(0.2, say, [{text!r}], {{'number': asked() + 1}}).start()"]
    for code in codes:
        with pytest.raises(WorldBroken, match="^environment desk: task a: "):
            await slot.play(("run_python", code), ("run_python", TIMERS_END), ("answer", EXPECTED))
        assert (await slot.play(("answer", EXPECTED)))[1].success


@pytest.mark.parametrize(
    "codes",
    [
        # Lines that are none, or not alone.
        ("say(raw=b'{\"text\": ')", "say(raw=b'\\n')", "say(raw=b'\\xff\\n')"),
        ("say(raw=b'[' * 100_000 + b'\\n')", "say(raw=b'9' * 100_000 + b'\\n')"),
        ("say({'text': 5, 'length': 1})", "say({'text': 'a', 'length': -1})", "say({'text': 'a', 'length': 'b'})"),
        (
            "say(raw=b'1e0 {}\\n')",
            "say(raw=b'%d {}{}\\n' % asked())",
            "say(raw=b'%d ' % asked() + b'[' * 100_000 + b'\\n')",
        ),
        ("while True: say(raw=b'x' * 1_000_000)", "while True: say({'text': 'x' * 100_000, 'length': 100_000})"),
        # Ends of the socket, and of the process.
        (
            "[os.close(number) for number in sockets()]",
            "[socket.socket(fileno=number).shutdown(socket.SHUT_RDWR) for number in sockets()]",
        ),
        ("os._exit(0)", "os._exit(7)", "import ctypes; ctypes.string_at(0)"),
        ("threading.Timer(0.2, os._exit, [0]).start(); " + TIMERS_END,),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(600)",),
        # Another function in place of the one that answers.
        ("sys.modules['draco_ray.environments.tools.functions'].call = lambda *given: 5",),
    ],
)
async def test_what_confuses_or_ends_the_process_is_a_result_and_the_slot_is_replaced(
    slot: Slot, codes: tuple[str, ...]
) -> None:
    for code in codes:
        with pytest.raises(WorldBroken, match="^environment desk: task a: "):
            await slot.play(("run_python", code), ("answer", EXPECTED))
        assert (await slot.play(("answer", EXPECTED)))[1].success


async def test_a_process_that_ends_after_the_last_call_is_no_second_try(slot: Slot) -> None:
    world = GuardedWorld(await slot.desk.open("a"), "desk", 4)
    process = slot.desk._process
    assert process is not None
    assert process._channel is not None
    await call(world, "threading.Timer(0.1, os._exit, [3]).start()")
    await asyncio.to_thread(select.select, [process._channel], [], [])
    await world.close()
    assert not process.alive
    assert (await slot.play(("answer", EXPECTED)))[1].success


@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize("programs", [False, True])
async def test_the_server_outlives_what_a_tool_starts_and_signals(folder: Path, isolation: str, programs: bool) -> None:
    slot = Slot(environment(folder, isolation=isolation, programs=programs))
    # A process that keeps the socket, that is nobody's child, and that answers.
    leave = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(0.2)
                say({"text": "forged", "length": 6})
        os._exit(0)
    """
    try:
        for code in ("os.kill(os.getppid(), 9)", leave):
            try:
                told, _ = await slot.play(("run_python", code))
                assert programs or told[0].startswith("error: run_python: PermissionError")
            except IsolationUnavailable:
                pytest.skip(f"this machine offers no isolation level {isolation}")
            except WorldBroken:
                assert programs
            told, verdict = await slot.play(("answer", EXPECTED), ("run_python", "time.sleep(0.5)"), ("answer", "more"))
            assert told == ["noted", "ran", "noted"]
            assert not verdict.success
    finally:
        await slot.desk.stop()


async def test_the_evaluator_is_out_of_reach(slot: Slot) -> None:
    code = """
    yes = lambda *given: True
    for module in list(sys.modules.values()):
        if "evaluate" in vars(module):
            module.evaluate = yes
    for each in gc.get_objects():
        if type(each) is dict and "evaluate" in each:
            each["evaluate"] = yes
        if type(each).__name__ == "function" and each.__name__ in ("evaluate", "with_json"):
            each.__code__ = yes.__code__
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if type(value).__name__ == "Functions":
                value.hooks["evaluate"] = yes
        frame = frame.f_back
    """
    told, verdict = await slot.play(("run_python", code))
    assert told == ["ran"]
    assert not verdict.success
    assert (await slot.play(("answer", EXPECTED)))[1].success


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
async def test_what_is_expected_is_not_in_the_memory_of_the_tools(folder: Path, isolation: str) -> None:
    slot = Slot(environment(folder, isolation=isolation))
    # Evaluations have gone before on this slot, with the same answer.
    for _ in range(2):
        assert (await slot.play(("answer", EXPECTED)))[1].success
    shown, hidden = "the-[t]ask-is-shown", "the-[a]nswer-is-f[o]rty"
    (first, second), _ = await slot.play(
        ("run_python", f"told = found({shown!r})"), ("run_python", f"told = found({hidden!r})")
    )
    if isolation == "rlimits":
        assert (first, second) == ("['gc', 'memory']", "[]")
    else:
        assert (first, second) in (("['gc', 'memory']", "[]"), ("['gc', 'no /proc']", "['no /proc']"))
    await slot.desk.stop()


async def test_an_end_that_evaluate_cannot_read_is_a_failure_and_one_of_its_own_is_not(slot: Slot) -> None:
    for left, said in (("raise", "evaluate cannot read that"), ("odd", "'neither'"), ("exit", r"status 5")):
        with pytest.raises(WorldBroken, match=said):
            await slot.play(("answer", left))
    forged = (
        "sys.modules['run_tools'].answers.append({1})",
        "sys.modules['run_tools'].answers.extend(['x' * 1_000_000] * 17)",
        "code = compile('def f(): raise SystemExit', '', 'exec'); exec(code); "
        "sys.modules['run_tools'].end_state.__code__ = f.__code__",
    )
    for code in forged:
        with pytest.raises(WorldBroken, match="end_state: "):
            await slot.play(("run_python", code))
    with pytest.raises(EnvironmentCrashed, match="before any tool call: .*the evaluator is broken") as own:
        await slot.play(("answer", EXPECTED), task_id="broken")
    assert not isinstance(own.value, WorldBroken)
    assert (await slot.play(("answer", EXPECTED)))[1].success


class Scripted:
    """A policy, and its one conversation: the calls that it makes, a turn each, and then none."""

    name = "scripted"

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._left = iter(calls)
        self.told: list[str] = []

    def begin(self, prompt: tuple[Message, ...], request: RolloutRequest) -> Scripted:
        return self

    async def sample(self) -> PolicyTurn:
        call = next(self._left, None)
        return PolicyTurn(
            text="", cut=False, tool_use=None if call is None else ParsedToolCalls(text="", calls=(call,))
        )

    def record_turn(self, step: int) -> tuple[int, int]:
        return 0, 0

    def append_observation(self, observation: str) -> bool:
        raise NotImplementedError

    def append_results(self, results: Sequence[str]) -> bool:
        self.told += results
        return True

    def token_record(self) -> TokenRecord:
        none = np.zeros(0, int)
        return TokenRecord(
            token_ids_T=none,
            sampled_T=none.astype(bool),
            logprob_T=none.astype(np.float32),
            step_T=none,
            prompt_length=0,
            policy_version=0,
            usage=Usage(),
        )


def python(code: str) -> ToolCall:
    return ToolCall(name="run_python", arguments={"code": PRELUDE + code})


def nested(depth: int) -> ToolCall:
    lists: list[Any] = []
    for _ in range(depth):
        lists = [lists]
    return ToolCall(name="answer", arguments={"text": lists})


async def rollout(desk: ToolsEnvironment, folder: Path, calls: Sequence[ToolCall]) -> tuple[Any, Any, list[str]]:
    """The summary and the verdict of a rollout worker's rollout, and what the policy was told."""
    policy = Scripted(calls)
    worker: Any = RolloutWorkerActor(
        "w",
        lambda config: [policy],
        agent=AgentConfig(use="tool_calling"),
        environment=desk.config,
        data=DataConfig(root=folder),
        ground_truth=True,
        slots=1,
    )
    request = RolloutRequest(task_id="a", group="step1/a", rollout=0, attempt=0, seed=1)
    _, summary, evaluated = await worker.rollout(request, 0)
    await worker.stop()
    return summary, evaluated, policy.told


@pytest.mark.parametrize(
    ("last", "ended"),
    [
        ("say({'text': 'forged', 'length': 6})", {EpisodeEnd.CRASHED}),
        ("os._exit(0)", {EpisodeEnd.CRASHED}),
        # After the last answer only the verdict can be lost; a slow machine has not read that answer yet.
        ("threading.Timer(0.1, os._exit, [0]).start()", {EpisodeEnd.FINISHED, EpisodeEnd.CRASHED}),
        (
            "threading.Timer(0.1, say, [{'state': []}], {'number': asked() + 1}).start()",
            {EpisodeEnd.FINISHED, EpisodeEnd.CRASHED},
        ),
    ],
)
async def test_no_end_that_the_policy_makes_is_played_again(
    slot: Slot, folder: Path, last: str, ended: set[EpisodeEnd]
) -> None:
    answer = ToolCall(name="answer", arguments={"text": EXPECTED})
    after = [] if EpisodeEnd.FINISHED in ended else [answer]
    summary, evaluated, _ = await rollout(slot.desk, folder, [answer, python(last), *after])
    assert summary.ended in ended
    assert summary.ended is EpisodeEnd.FINISHED or not evaluated.evaluation.success
    summary, evaluated, _ = await rollout(slot.desk, folder, [answer])
    assert (summary.ended, evaluated.evaluation.success) == (EpisodeEnd.FINISHED, True)


async def test_arguments_that_are_nested_deeply_are_the_policys_to_mend(slot: Slot, folder: Path) -> None:
    calls = [nested(depth) for depth in range(20, 1000, 35)]
    summary, _, told = await rollout(slot.desk, folder, calls)
    assert summary.ended is EpisodeEnd.FINISHED, summary.error
    assert all(each.startswith("error: answer: ") for each in told)


async def test_a_call_that_outlasts_everybodys_patience_is_the_calls_doing(slot: Slot) -> None:
    limit = slot.desk.config.cell_timeout_seconds
    world = GuardedWorld(await slot.desk.open("a"), "desk", limit)
    # This process is held up, so that the call's time and the caller's end at once.
    held_up = asyncio.get_running_loop().call_later(0.5, time.sleep, limit + 2)
    with pytest.raises(WorldBroken, match="could not be stopped"):
        await call(world, "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(600)")
    held_up.cancel()
    await world.close()


async def call(world: GuardedWorld, code: str) -> str:
    return await world.act(json.dumps({"name": "run_python", "arguments": {"code": PRELUDE + code}}))
