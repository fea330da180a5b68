"""A judge's calls killed at every line that keeps a reply, a bill or a row, each time resumed to the end.

Run as a process: ``python -m tests.support.kill_points FOLDER``. It prints a JSON line for two runs with one cache and
one per kill point: what the provider was paid, and what the cost ledger and the archive contain after the run was
resumed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import openai  # noqa: F401  (before the forks)
import pyarrow.compute as pc

from draco_ray.config.schema import JudgeConfig, Price
from draco_ray.judging import pricing, reply_cache
from draco_ray.judging.build import build_judge
from draco_ray.judging.completion import Request
from draco_ray.judging.endpoint import Endpoint
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Stage1
from draco_ray.judging.reply_cache import read_cost_ledger
from draco_ray.records import Message
from draco_ray.runs import directory as parts
from draco_ray.runs import store
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import PaidCalls, RunStore

KEEPING = frozenset(str(module.__file__) for module in (parts, reply_cache, store))
Line = tuple[str, int]
KILLED = 137
TASKS = ("7f1a", "7f2b", "7f3c")
ANSWER = '[{"title": "t", "description": "d", "evaluator_instruction": "e"}]'
DOLLARS = Price(input=1000.0, output=1000.0)


async def complete(self: Endpoint, request: Request, server: object, max_tokens: int, timeout: float) -> Any:
    """The provider: it is paid as soon as it answers. The first task's first reply is invalid and is re-asked."""
    words = sum(len(message.content) for message in request.messages) // 4
    text = "no JSON" if TASKS[0] in request.messages[0].content and len(request.messages) == 1 else ANSWER
    dollars = (words + 20) * DOLLARS.input / 1e6
    _pay(Path(self._config.key_variable), dollars)
    usage = SimpleNamespace(prompt_tokens=words, completion_tokens=20, total_tokens=words + 20)
    message = SimpleNamespace(content=text)
    return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")], usage=usage)


def _pay(ledger: Path, dollars: float) -> None:
    with open(ledger, "a", encoding="utf-8") as file:
        file.write(f"{dollars}\n")


def judge_all(folder: Path, cache: Path | None = None) -> None:
    """A step: every task is judged, two at a time, and recorded; then the step is gathered.

    Args:
        folder: folder of the run and of the file of payments.
        cache: the reply cache; None: the run's own.
    """
    config = JudgeConfig(
        model="openai/m",
        api_base="http://nowhere",
        api_key_env=str(folder / "paid"),
        cache=cache or folder / "run/judge_cache",
        prices={"openai/m": DOLLARS},
        structured_output=False,
    )
    run = RunDirectory(folder / "run")
    kept = RunStore(run)
    booked = PaidCalls(kept, "")

    async def judge_one(judge: Any, task: str) -> None:
        question = Stage1((Message(role="user", content=f"do the {task} thing"),))
        judged = await judge.ask(question, CallContext(group=task, task_id=task, rollout=None))
        assert judged.ok, judged.error
        kept.write("judge_calls", 1, task, booked.rows(1, task, judged.calls))

    async def judge_each() -> None:
        judge = build_judge(config)
        await asyncio.gather(judge_one(judge, TASKS[0]), judge_one(judge, TASKS[1]))
        await judge_one(judge, TASKS[2])

    asyncio.run(judge_each())
    kept.gather(1)


def trace_lines(seen: Callable[[Line], None]) -> None:
    """From now on call ``seen`` with every line of the modules in `KEEPING` that runs, in any thread."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in KEEPING:
            return None
        if event == "line":
            seen((frame.f_code.co_filename, frame.f_lineno))
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def lines_of(folder: Path) -> Counter[Line]:
    """How often each line runs in a process that is not killed."""
    counts: Counter[Line] = Counter()

    def judge_and_tell() -> None:
        trace_lines(lambda line: counts.update([line]))
        judge_all(folder)
        sys.settrace(None)
        (folder / "lines").write_text(json.dumps([[*line, times] for line, times in counts.items()]), encoding="utf-8")

    assert forked(judge_and_tell) == 0
    told = json.loads((folder / "lines").read_text(encoding="utf-8"))
    return Counter({(file, number): times for file, number, times in told})


def killed_at(folder: Path, wanted: Line, time: int) -> None:
    """Judge, and end the process before the line ``wanted`` runs for the ``time``-th time."""
    left = time

    def end(line: Line) -> None:
        nonlocal left
        left -= line == wanted
        if left == 0:
            os._exit(KILLED)

    trace_lines(end)
    judge_all(folder)


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own; returns its exit code."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _paid(folder: Path) -> list[float]:
    ledger = folder / "paid"
    return [float(line) for line in ledger.read_text(encoding="utf-8").splitlines()] if ledger.exists() else []


def read_accounts(folder: Path) -> dict[str, Sequence[float]]:
    """The amounts that were paid, booked and archived."""
    book = read_cost_ledger(folder / "run/judge_cache")
    archive = RunDirectory(folder / "run").table("judge_calls", 1)
    assert len(set(archive.column("call_id").to_pylist())) == archive.num_rows
    return {
        "paid": _paid(folder),
        "settled": list(book.settled.values()),
        "under_way": list(book.under_way.values()),
        "archived": archive.filter(pc.field("dollars") > 0).column("dollars").to_pylist(),
    }


def side_by_side(folders: Sequence[Path]) -> None:
    """Two runs with one reply cache at the same time, and a third one after them."""
    cache = folders[0].parent / "cache"
    children = []
    for folder in folders[:2]:
        if (child := os.fork()) == 0:
            code = 1
            try:
                judge_all(folder, cache)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert forked(partial(judge_all, folders[2], cache)) == 0
    paid = [_paid(folder) for folder in folders]
    settled = sorted(read_cost_ledger(cache).settled.values())
    print(
        json.dumps({"paid": paid, "settled": settled, "under_way": len(read_cost_ledger(cache).under_way)}), flush=True
    )


def main() -> None:
    """Kill once at every line that runs, halfway through the times that it runs."""
    Endpoint.complete = complete  # type: ignore[method-assign]
    # Our price is known, and importing LiteLLM would make every fork large.
    pricing._litellm_price = lambda *_: None
    folder = Path(sys.argv[1])

    def begun(name: str) -> Path:
        RunDirectory.create(folder / name / "run", "")
        return folder / name

    # Fill caches that are computed once per process, so that forks need not.
    judge_all(begun("before"))
    side_by_side([begun(name) for name in ("one", "other", "later")])
    for point, (line, times) in enumerate(lines_of(begun("whole")).items()):
        tried = begun(str(point))
        killed = forked(partial(killed_at, tried, line, (times + 1) // 2))
        # The number of writes in a transaction varies, and so does how often a line runs: 0 means that the run ended.
        if killed not in (KILLED, 0):
            raise RuntimeError(f"it was to be killed at {line} and ended with {killed}")
        if (ended := forked(partial(judge_all, tried))) != 0:
            raise RuntimeError(f"killed at {line} it could not be resumed: {ended}")
        print(json.dumps({"line": line, "killed": killed == KILLED, **read_accounts(tried)}), flush=True)
        shutil.rmtree(tried)


if __name__ == "__main__":
    main()
