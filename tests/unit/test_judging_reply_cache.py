"""The store of judge replies: JSON in SQLite, shared by processes, and nothing in it is ever carried out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from draco_ray.errors import StoreError
from draco_ray.judging import reply_cache
from draco_ray.judging.reply_cache import (
    BUSY_SECONDS,
    CLAIM_SECONDS,
    REPLIES_FILE,
    CostLedger,
    ReplyCache,
    check_store,
    read_cost_ledger,
    request_key,
)
from tests.support.mounts import patch_mounts
from tests.support.turns import LoopClock, outcome, yield_turns

REPOSITORY = Path(__file__).resolve().parents[2]


class Exploit:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.file),))


async def test_answers_are_kept_replaced_and_forgotten(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "replies")
    assert await cache.get("a") is None
    await cache.put("a", {"text": "ä\x00\ud800 ", "input_tokens": 3})
    await cache.put("b", {"text": "b"})
    await cache.put("b", {"text": "c"})
    assert len(cache) == 2
    again = ReplyCache(tmp_path / "replies")
    assert await again.get("a") == {"text": "ä\x00\ud800 ", "input_tokens": 3}
    assert await again.get("b") == {"text": "c"}
    await again.forget("b")
    await again.forget("b")
    assert await cache.get("b") is None


async def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "replies"
    await ReplyCache(folder).put("a", {"text": "a"})
    assert await ReplyCache(folder).get("a") == {"text": "a"}


async def test_of_those_who_would_ask_the_same_one_goes_after_the_other(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path)
    await outcome(cache.claim("key", "first"))
    await outcome(cache.claim("another", "second"))
    waiting = [asyncio.create_task(cache.claim("key", by)) for by in ("second", "third")]
    await outcome(cache.claim("key", "first"))
    await cache.release("key", "nobody")
    await yield_turns(50)
    assert not any(each.done() for each in waiting)
    await cache.release("key", "first")
    await outcome(waiting[0])
    assert not waiting[1].done()
    await cache.release("key", "second")
    await outcome(waiting[1])


async def test_nobody_waits_for_the_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, clock = ReplyCache(tmp_path), LoopClock(monkeypatch)
    clock.now = float(math.ceil(clock.now))
    monkeypatch.setattr(reply_cache, "time", SimpleNamespace(monotonic=lambda: clock.now))
    await cache.claim("key", "killed")
    await clock.pass_(CLAIM_SECONDS - 5)
    await cache.claim("key", "killed")
    second = asyncio.create_task(cache.claim("key", "second"))
    await clock.pass_(CLAIM_SECONDS - 0.5)
    late = asyncio.create_task(cache.claim("key", "late"))
    await yield_turns(50)
    assert (second.done(), late.done()) == (False, False)
    late.cancel()
    await clock.pass_(0.5)
    assert second.done()
    # A process that was only stopped changes nothing of the claim that took the place of its own.
    await cache.release("key", "killed")
    third = asyncio.create_task(cache.claim("key", "third"))
    await yield_turns(50)
    assert not third.done()
    await cache.release("key", "second")
    await outcome(third)


WRITER = """
import asyncio, sys
from pathlib import Path
from draco_ray.judging.reply_cache import ReplyCache

async def main(name):
    cache = ReplyCache(Path(sys.argv[1]))
    await asyncio.gather(*(cache.put(f"{name}-{number}", {"text": name * 500}) for number in range(40)))

asyncio.run(main(sys.argv[2]))
"""


def test_processes_write_side_by_side(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], env=environment) for name in "abcd"
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    cache = ReplyCache(tmp_path)
    assert len(cache) == 160
    assert asyncio.run(cache.get("c-39")) == {"text": "c" * 500}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: install one")
def test_a_writer_that_is_killed_at_any_write_keeps_what_it_was_told_and_a_reply_with_its_cost(tmp_path: Path) -> None:
    """Every write, sync, cut and removal of SQLite's is a place to die at: before it, and with half of the bytes."""
    preloaded = tmp_path / "killed_writes.so"
    source = REPOSITORY / "tests" / "support" / "killed_writes.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(preloaded), str(source), "-ldl"], check=True)
    # In memory: thousands of syncs would wait for the disk.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.killed_replies", folder],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "LD_PRELOAD": str(preloaded)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    points, _, problems, _ = done.stdout.splitlines()[-1].replace(",", "").split()
    assert int(points) > 200
    assert int(problems) == 0, done.stdout


async def test_a_pickle_in_a_received_file_is_not_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "carried-out"
    cache = ReplyCache(tmp_path)
    with sqlite3.connect(tmp_path / REPLIES_FILE) as received:
        received.execute("INSERT INTO replies VALUES ('a', ?)", (pickle.dumps(Exploit(marker), protocol=0).decode(),))
    assert await cache.get("a") is None
    assert not marker.exists()


@pytest.mark.parametrize("value", ["", "[" * 100_000, "[1]", '{"text": ', "null"])
async def test_an_answer_that_is_not_readable_is_asked_for_again(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReplyCache(tmp_path)
    with sqlite3.connect(tmp_path / REPLIES_FILE) as file:
        file.execute("INSERT INTO replies VALUES ('a', ?)", (value,))
    assert caplog.records == []
    with sqlite3.connect(tmp_path / REPLIES_FILE) as file:
        file.execute("INSERT INTO replies VALUES (?, ?)", ("0123456789abcdef", value))
    assert await cache.get("a") is None
    assert await cache.get("0123456789abcdef") is None
    assert [record.getMessage() for record in caplog.records] == [
        f"judge reply {key} in {tmp_path / REPLIES_FILE} cannot be read, so the request is sent again"
        for key in ("a", "0123456789ab")
    ]
    await cache.put("a", {"text": "new"})
    assert await cache.get("a") == {"text": "new"}


async def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / REPLIES_FILE).write_bytes(b"not a database" * 1000)
    with pytest.raises(
        StoreError, match="cannot be read: file is not a database; restore the file from a copy"
    ) as caught:
        ReplyCache(tmp_path)
    assert str(tmp_path / REPLIES_FILE) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of some dozen replies and their requests."""
    folder = tmp_path_factory.mktemp("kept")

    async def keep() -> None:
        cache = ReplyCache(folder)
        for number in range(40):
            await cache.settle(f"r{number}", 0.5, (f"k{number}", {"text": "x" * 3000}))

    asyncio.run(keep())
    return (folder / REPLIES_FILE).read_bytes()


@pytest.mark.parametrize("left", [0, 1, 99, 100, 4096, 5000, 0.5, -4096])
def test_a_file_that_has_lost_its_end_is_damage_and_no_empty_book(kept: bytes, tmp_path: Path, left: float) -> None:
    content = kept[: int(left * len(kept)) if isinstance(left, float) else left]
    (tmp_path / REPLIES_FILE).write_bytes(content)
    for read in (check_store, read_cost_ledger, ReplyCache):
        with pytest.raises(
            StoreError, match=f"{REPLIES_FILE} .*: .*; restore the file from a copy, or choose another"
        ) as problem:
            read(tmp_path)
        assert "\n" not in str(problem.value)
    assert (tmp_path / REPLIES_FILE).read_bytes() == content


async def test_pages_that_were_overwritten_are_found_before_a_run_goes_on(kept: bytes, tmp_path: Path) -> None:
    (tmp_path / REPLIES_FILE).write_bytes(kept)
    assert check_store(tmp_path)
    (tmp_path / REPLIES_FILE).write_bytes(kept[:-1])
    with pytest.raises(StoreError, match="are damaged: the last page is truncated at byte"):
        check_store(tmp_path)
    for page in range(0, len(kept), 4096):
        (tmp_path / REPLIES_FILE).write_bytes(kept[:page] + b"\xff" * 4096 + kept[page + 4096 :])
        with pytest.raises(StoreError, match="judge replies in .* are damaged: "):
            check_store(tmp_path)
        (tmp_path / REPLIES_FILE).write_bytes(kept[:page] + b"\0" * 4096 + kept[page + 4096 :])
        with contextlib.suppress(StoreError):
            check_store(tmp_path)
            # The page had the end of a long reply only, which is then not read as another one.
            found = [await ReplyCache(tmp_path).get(f"k{number}") for number in range(40)]
            assert all(each in (None, {"text": "x" * 3000}) for each in found)


@pytest.mark.parametrize("suffix", ["-journal", "-wal"])
def test_a_journal_without_its_file_is_damage(tmp_path: Path, suffix: str) -> None:
    assert not check_store(tmp_path)
    (tmp_path / f"{REPLIES_FILE}{suffix}").write_bytes(b"x" * 512)
    for read in (check_store, read_cost_ledger, ReplyCache):
        with pytest.raises(
            StoreError,
            match=f"are damaged: {REPLIES_FILE}{suffix} exists but {REPLIES_FILE} does not; restore the file",
        ):
            read(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(REPLIES_FILE)] == [
        f"{REPLIES_FILE}{suffix}"
    ]


async def test_a_cancelled_reader_leaves_the_store_usable(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path)
    tasks = [asyncio.create_task(cache.put(str(number), {"n": number})) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await cache.get("19") == {"n": 19}


async def test_a_process_that_stopped_in_the_midst_of_a_write_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draco_ray.judging.reply_cache.BUSY_SECONDS", 0.05)
    cache = ReplyCache(tmp_path)
    other = sqlite3.connect(tmp_path / REPLIES_FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="another process has locked the file"):
        await cache.put("a", {"text": "a"})
    other.execute("ROLLBACK")
    await cache.put("a", {"text": "a"})
    assert await cache.get("a") == {"text": "a"}
    other.close()


# --- the cost ledger --------------------------------------------------------------------------------------------------


async def test_a_request_is_in_the_book_with_the_most_until_it_is_settled(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "with its parents"
    assert read_cost_ledger(folder) == CostLedger(settled={}, under_way={})
    cache = ReplyCache(folder)
    assert read_cost_ledger(folder) == CostLedger(settled={}, under_way={})
    for number, most in (("a/1", 2.0), ("a/2", 3.0), ("b/1", 5.0)):
        await cache.begin(number, most)
    assert read_cost_ledger(folder).under_way == {"a/1": 2.0, "a/2": 3.0, "b/1": 5.0}
    await cache.settle("a/1", 0.5, ("key", {"text": "x"}))
    # Asked without a reply, and never entered before: what it cost counts all the same.
    await cache.settle("b/1", 1.0)
    await cache.settle("b/2", 0.25)
    assert (len(cache), await cache.get("key")) == (1, {"text": "x"})
    assert read_cost_ledger(folder, "a/") == CostLedger(settled={"a/1": 0.5}, under_way={"a/2": 3.0})
    whole = read_cost_ledger(folder)
    assert whole == CostLedger(settled={"a/1": 0.5, "b/1": 1.0, "b/2": 0.25}, under_way={"a/2": 3.0})
    assert whole.dollars == 4.75
    # Begun again under the same number it is open again; settled again, the last word counts.
    await cache.begin("a/1", 7.0)
    await cache.settle("b/1", 1.5)
    assert read_cost_ledger(folder) == CostLedger(settled={"b/1": 1.5, "b/2": 0.25}, under_way={"a/1": 7.0, "a/2": 3.0})


async def test_a_reply_that_cannot_be_kept_is_not_booked_either(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path)
    await cache.begin("1", 2.0)
    with sqlite3.connect(tmp_path / REPLIES_FILE) as file:
        file.execute("DROP TABLE requests")
        file.execute(
            "CREATE TABLE requests (number TEXT PRIMARY KEY, most REAL NOT NULL, dollars REAL CHECK (dollars < 1))"
        )
    with pytest.raises(StoreError):
        await cache.settle("1", 2.0, ("key", {"text": "x"}))
    assert await cache.get("key") is None


def test_a_damaged_book_is_said(tmp_path: Path) -> None:
    (tmp_path / REPLIES_FILE).write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError) as problem:
        read_cost_ledger(tmp_path)
    assert f"the cost ledger in {tmp_path / REPLIES_FILE} cannot be read: file is not a database; restore" in str(
        problem.value
    )


@pytest.mark.parametrize(
    "row",
    [("a", 1.0, -50.0), ("a", -5.0, None), ("a", 1.0, math.inf), ("a", "x", 1.0), ("a", 1.0, "y"), ("a", None, 1.0),
     (None, 1.0, 1.0), (5, 1.0, 1.0), (b"a", 1.0, b"x")],
)  # fmt: skip
def test_a_book_that_does_not_say_dollars_is_named(tmp_path: Path, row: tuple[object, ...]) -> None:
    """A negative amount would be more budget than there is."""
    with sqlite3.connect(tmp_path / REPLIES_FILE) as file:
        file.execute("CREATE TABLE requests (number, most, dollars)")
        file.execute("INSERT INTO requests VALUES ('fine', 1.0, 0.5)")
    assert read_cost_ledger(tmp_path).dollars == 0.5
    with sqlite3.connect(tmp_path / REPLIES_FILE) as file:
        file.execute("INSERT INTO requests VALUES (?, ?, ?)", row)
    for run in ("", "other/"):
        with pytest.raises(StoreError, match="the cost ledger in .* cannot be read: request ") as problem:
            read_cost_ledger(tmp_path, run)
        assert "\n" not in str(problem.value)


def test_readers_and_writers_wait_for_each_other_as_long_as_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, waited = sqlite3.connect, []

    def noted(*arguments: object, **named: object) -> sqlite3.Connection:
        waited.append(named.get("timeout"))
        return connect(*arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr("draco_ray.judging.reply_cache.sqlite3.connect", noted)
    ReplyCache(tmp_path)
    read_cost_ledger(tmp_path)
    assert waited == [BUSY_SECONDS] * 3


def test_a_key_is_of_everything_that_is_sent_in_whatever_order() -> None:
    request = {"text": "\u00e4 \u8a55", "folder": Path("a"), "n": 1}
    assert request_key(request) == request_key(dict(reversed(request.items())))
    assert len({request_key(request | change) for change in ({}, {"n": 2}, {"text": "a"}, {"folder": Path("b")})}) == 4


def test_replies_are_kept_on_no_disk_that_machines_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever command would keep them: a run, `draco judge`, a replay."""
    patch_mounts(monkeypatch, (str(tmp_path.resolve() / "home"), "nfs4"))
    folder = tmp_path.resolve() / "home" / "judge_cache"
    with pytest.raises(StoreError) as caught:
        ReplyCache(folder)
    assert str(caught.value) == (
        f"judge replies cannot be stored in {folder}: {folder.parent} is a shared file system (nfs4), where SQLite "
        "may lose paid replies; choose a folder on a local disk (--out, or judge.cache of a training run)"
    )
    assert not (tmp_path / "home").exists()
