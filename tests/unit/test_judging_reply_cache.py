"""The store of judge replies: JSON in SQLite, shared by processes, and nothing in it is ever carried out."""

from __future__ import annotations

import asyncio
import os
import pickle
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from draco_ray.errors import StoreError
from draco_ray.judging.reply_cache import FILE, PICKLED_FILE, ReplyCache

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
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4
    cache = ReplyCache(tmp_path)
    assert len(cache) == 160
    assert asyncio.run(cache.get("c-39")) == {"text": "c" * 500}


async def test_a_pickle_in_a_received_folder_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = tmp_path / "carried-out"
    folder = tmp_path / "replies"
    folder.mkdir()
    # What diskcache kept: mode 4 is a pickled value.
    with sqlite3.connect(folder / PICKLED_FILE) as old:
        old.execute("CREATE TABLE Cache (key BLOB, raw INTEGER, mode INTEGER, value BLOB)")
        old.execute("INSERT INTO Cache VALUES ('a', 1, 4, ?)", (pickle.dumps(Exploit(marker)),))
    cache = ReplyCache(folder)
    assert await cache.get("a") is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(folder / PICKLED_FILE) in line
    assert "\n" not in line
    # A value of that kind in today's file is no answer either.
    with sqlite3.connect(folder / FILE) as received:
        received.execute("INSERT INTO replies VALUES ('a', ?)", (pickle.dumps(Exploit(marker), protocol=0).decode(),))
    assert await cache.get("a") is None
    assert not marker.exists()


@pytest.mark.parametrize("value", ["", "[" * 100_000, "[1]", '{"text": ', "null"])
async def test_an_answer_that_is_not_readable_is_asked_for_again(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReplyCache(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute("INSERT INTO replies VALUES ('a', ?)", (value,))
    assert await cache.get("a") is None
    assert "asked for again" in caplog.text
    await cache.put("a", {"text": "new"})
    assert await cache.get("a") == {"text": "new"}


async def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match="cannot be read: file is not a database; move that file away") as caught:
        ReplyCache(tmp_path)
    assert str(tmp_path / FILE) in str(caught.value)
    assert "\n" not in str(caught.value)


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
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="another process has been writing there"):
        await cache.put("a", {"text": "a"})
    other.execute("ROLLBACK")
    await cache.put("a", {"text": "a"})
    assert await cache.get("a") == {"text": "a"}
    other.close()
