"""Kills a writer of judge replies at each of its changes of a file, and says what was wrong afterwards.

Run by `tests/unit/test_judging_reply_cache.py` with `killed_writes.c` preloaded: SQLite writes in C, where Python's
audit events (`tests.support.killed`) see nothing. Each writer is a fork of this process, which has no other thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

from draco_ray.judging.reply_cache import REPLIES_FILE, ReplyCache, read_cost_ledger

LIBC = ctypes.CDLL(None)
ANSWER: dict[str, object] = {"text": "x" * 9000}
"""A reply that is longer than a page of the database."""


async def write(folder: Path, done: Callable[[str], object]) -> None:
    """Store replies as a judge worker does; ``done`` is called after each change that must persist."""
    cache = ReplyCache(folder)
    for number in range(2):
        await cache.begin(f"r{number}", 0.5)
        done(f"begun {number}")
        await cache.settle(f"r{number}", 0.25, (f"k{number}", ANSWER))
        done(f"settled {number}")
    await cache.put("batch", {"text": "a list"})
    done("put")
    await cache.forget("k0")
    done("forgotten")


def problems(folder: Path, acknowledged: set[str]) -> list[str]:
    """Errors that a later process finds, given the changes that were acknowledged to the killed one."""
    cache = ReplyCache(folder)
    book, found = read_cost_ledger(folder), []
    with contextlib.closing(sqlite3.connect(folder / REPLIES_FILE)) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            found.append("the file is damaged")

    def kept(key: str) -> bool:
        answer = asyncio.run(cache.get(key))
        if answer not in (None, ANSWER, {"text": "a list"}):
            found.append(f"{key} is another answer")
        return answer is not None

    for number in range(2):
        request, key = f"r{number}", f"k{number}"
        if f"begun {number}" in acknowledged and request not in book.settled.keys() | book.under_way.keys():
            found.append(f"{request} is not in the book")
        if f"settled {number}" in acknowledged and book.settled.get(request) != 0.25:
            found.append(f"{request} is not settled")
        forgotten = number == 0 and "put" in acknowledged
        if not forgotten and kept(key) != (request in book.settled):
            found.append(f"{key} and what it cost are not kept together")
    if "put" in acknowledged and not kept("batch"):
        found.append("batch is not kept")
    if "forgotten" in acknowledged and kept("k0"):
        found.append("k0 is still there")
    # The next process can still write.
    asyncio.run(cache.put("later", {"text": "a list"}))
    return found if kept("later") else [*found, "nothing can be written any more"]


def fork(work: Callable[[int], object]) -> tuple[int, str]:
    """Wait status and output of a child that runs ``work``, which gets a pipe to write to."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        with contextlib.suppress(BaseException):
            work(writes)
            code = 0
        os._exit(code)
    os.close(writes)
    with os.fdopen(reads) as said:
        words = said.read()
    _, status = os.waitpid(child, 0)
    return status, words


def at(folder: Path, point: int, *, half: bool) -> tuple[bool, list[str]]:
    """Whether a writer was killed at change ``point``, and the errors afterwards."""

    def writer(pipe: int) -> None:
        ctypes.c_int.in_dll(LIBC, "killed_writes_half").value = half
        ctypes.c_long.in_dll(LIBC, "killed_writes_left").value = point
        asyncio.run(write(folder, lambda word: os.write(pipe, f"{word}\n".encode())))

    def reader(pipe: int) -> None:
        os.write(pipe, "\n".join(problems(folder, acknowledged)).encode())

    status, words = fork(writer)
    acknowledged = set(words.splitlines())
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status:
        return killed, ["the writer failed"]
    status, words = fork(reader)
    return killed, words.splitlines() if status == 0 else [*words.splitlines(), "the reader failed"]


def main(root: Path) -> None:
    """Print how many points there were and a line for each problem."""
    points, wrong = 0, 0
    for half in (False, True):
        for point in range(10_000):
            folder = root / "replies"
            killed, found = at(folder, point, half=half)
            shutil.rmtree(folder, ignore_errors=True)
            for problem in found:
                print(f"point {point}{' (half)' if half else ''}: {problem}")
                wrong += 1
            if not killed:
                break
            points += 1
    print(f"{points} points, {wrong} problems")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
