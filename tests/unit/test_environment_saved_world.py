"""A saved world: what of it is read, and which of its statements are carried out."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draco_ray.environments.appworld.saved_world import (
    MAX_SAVED_BYTES,
    UnusableWorld,
    apply_changes,
    read_saved,
    write_saved,
)


@pytest.fixture
def app() -> Iterator[sqlite3.Connection]:
    """A database as AppWorld's apps have: records, a search index, and the trigger that keeps it in step."""
    connection = sqlite3.connect("file:app?mode=memory&cache=shared", uri=True)
    connection.executescript(
        """
        CREATE TABLE notes (id INTEGER PRIMARY KEY AUTOINCREMENT, title TEXT NOT NULL, pinned INTEGER, record_hash);
        CREATE VIRTUAL TABLE notes_fts USING fts5(id, saved_search_text, tokenize = 'porter');
        CREATE TRIGGER sync_fts_after_delete_notes AFTER DELETE ON notes
        BEGIN DELETE FROM notes_fts WHERE id = old.id; END;
        INSERT INTO notes (title) VALUES ('first');
        INSERT INTO notes_fts (id, saved_search_text) VALUES (1, 'first');
        """
    )
    yield connection
    connection.close()


INSERT: Any = ["INSERT INTO notes (title, pinned) VALUES (?, ?)", ["a", 1], False]
HONEST: list[Any] = [
    INSERT,
    ["INSERT INTO notes (title, pinned) VALUES (?, ?)", [["b", 1], ["c", None]], True],
    ["INSERT INTO notes_fts (id, saved_search_text) VALUES (?, ?)", [2, "a"], False],
    [
        "INSERT INTO notes_fts (id, saved_search_text) VALUES (:id, :saved_search_text)",
        {"id": 3, "saved_search_text": "b"},
        False,
    ],
    ["UPDATE notes SET pinned=?, record_hash=? WHERE notes.id = ?", [0, "x", 2], False],
    ["UPDATE notes_fts SET saved_search_text = ? WHERE id = ?", ["d", 2], False],
    ["DELETE FROM notes WHERE notes.id = ?", [1], False],
    ["DELETE FROM notes WHERE notes.id IN (?, ?)", [3, 4], False],
]


def test_what_appworld_saves_is_carried_out(app: sqlite3.Connection) -> None:
    apply_changes(app, HONEST, [])
    assert app.execute("SELECT id, title, pinned FROM notes").fetchall() == [(2, "a", 0)]
    # The trigger did its part, and the index can be searched.
    assert app.execute("SELECT id FROM notes_fts WHERE saved_search_text MATCH 'd'").fetchall() == [(2,)]
    assert app.execute("SELECT count(*) FROM notes_fts").fetchone() == (1,)


BOMB = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
STATEMENTS = {
    "attach": "ATTACH DATABASE 'stolen.db' AS stolen",
    "attach at a time": "ATTACH DATABASE CASE WHEN date('now') > '2000' THEN 'stolen.db' ELSE ':memory:' END AS s",
    "attach behind a comment": "/* INSERT INTO notes */ -- DELETE\nATTACH 'stolen.db' AS s",
    "detach": "DETACH DATABASE main",
    "vacuum into": "VACUUM INTO 'stolen.db'",
    "backup": "VACUUM",
    "pragma": "PRAGMA writable_schema = 1",
    "pragma directory": "PRAGMA temp_store_directory = '/tmp'",
    "explained": "EXPLAIN INSERT INTO notes (title) VALUES ('x')",
    "plan": "EXPLAIN QUERY PLAN DELETE FROM notes",
    "query plan": "QUERY PLAN INSERT INTO notes (title) VALUES ('x')",
    "two statements": "INSERT INTO notes (title) VALUES ('x'); ATTACH 'stolen.db' AS s",
    "nothing": "",
    "comment": "-- nothing",
    "null character": "INSERT INTO notes (title) VALUES ('x')\0; ATTACH 'stolen.db' AS s",
    "function": "INSERT INTO notes (title) VALUES (load_extension('/tmp/x.so'))",
    "function of no harm": "INSERT INTO notes (title) VALUES (hex(randomblob(100000000)))",
    "function in where": "DELETE FROM notes WHERE writefile('stolen.db', title)",
    "operator that is a function": "DELETE FROM notes WHERE title LIKE '%'",
    "select": "SELECT 1",
    "insert from select": "INSERT INTO notes (title) SELECT name FROM sqlite_master",
    "subquery": "UPDATE notes SET title = (SELECT sql FROM sqlite_master LIMIT 1)",
    "update from": "UPDATE notes SET title = other.title FROM notes AS other, notes AS third",
    "recursion": BOMB + "INSERT INTO notes (title) SELECT x FROM n",
    "recursion in delete": BOMB + "DELETE FROM notes WHERE id IN (SELECT x FROM n)",
    "recursion behind a trigger's name": "WITH sync_fts_after_delete_notes AS (SELECT sql FROM sqlite_master) "
    "INSERT INTO notes (title) SELECT * FROM sync_fts_after_delete_notes",
    "table function": "INSERT INTO notes (title) SELECT value FROM generate_series(1, 1000000000)",
    "returning a function": "INSERT INTO notes (title) VALUES ('x') RETURNING hex(title)",
    "returning a selection": "DELETE FROM notes RETURNING (SELECT sql FROM sqlite_master)",
    "on conflict": "INSERT INTO notes (id, title) VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET title = (SELECT 1)",
    "schema": "UPDATE sqlite_master SET sql = 'CREATE TABLE notes (x)'",
    "sequence": "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    "index's own table": "DELETE FROM notes_fts_data",
    "index's own content": "INSERT INTO notes_fts_content VALUES (7, 8, 9)",
    "index command": "INSERT INTO notes_fts (notes_fts) VALUES ('delete-all')",
    "index command with rank": "INSERT INTO notes_fts (notes_fts, rank) VALUES ('rank', 'bm25(10.0)')",
    "index command in other words": 'insert into "NOTES_FTS" ("NOTES_FTS") values (\'rebuild\')',
    "index command by replace": "REPLACE INTO [notes_fts] (notes_fts) VALUES ('rebuild')",
    "create table": "CREATE TABLE mine (x)",
    "create temporary table": "CREATE TEMP TABLE notes (x)",
    "create trigger": "CREATE TRIGGER t AFTER INSERT ON notes BEGIN DELETE FROM notes; END",
    "create temporary trigger": "CREATE TEMP TRIGGER t AFTER INSERT ON main.notes BEGIN DELETE FROM notes; END",
    "create view": "CREATE VIEW v AS SELECT 1",
    "create index": "CREATE INDEX i ON notes (title)",
    "virtual table": "CREATE VIRTUAL TABLE v USING fts5(x)",
    "virtual table of files": "CREATE VIRTUAL TABLE v USING csv(filename='/etc/passwd')",
    "drop": "DROP TABLE notes",
    "alter": "ALTER TABLE notes RENAME TO other",
    "reindex": "REINDEX",
    "analyze": "ANALYZE",
    "begin": "BEGIN EXCLUSIVE",
    "commit": "COMMIT",
    "savepoint": "SAVEPOINT s",
    "no such table": "INSERT INTO nothing (x) VALUES (1)",
    "no such database": "INSERT INTO temp.notes (title) VALUES ('x')",
    "syntax": "INSERT INTO",
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS.keys())
@pytest.mark.parametrize("many", [False, True])
def test_a_statement_that_does_more_is_not_carried_out(
    app: sqlite3.Connection, statement: str, many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(app.iterdump())
    changes: Any = [INSERT, [statement, [[]] if many else [], many]]
    with pytest.raises(UnusableWorld):
        apply_changes(app, changes, [])
    # Nothing of the whole world is, once one statement of it is none.
    assert list(app.iterdump()) == before
    assert list(tmp_path.iterdir()) == []


CHANGES = {
    "not a list": {"statement": "INSERT"},
    "text": "INSERT INTO notes (title) VALUES ('x')",
    "too short": ["INSERT INTO notes (title) VALUES ('x')", []],
    "number as statement": [1, [], False],
    "many as number": ["DELETE FROM notes", [], 1],
    "nested value": ["INSERT INTO notes (title) VALUES (?)", [["x"]], False],
    "object": ["INSERT INTO notes (title) VALUES (?)", [{}], False],
    "parameters that are none": ["DELETE FROM notes", 7, False],
    "no parameters": ["INSERT INTO notes (title) VALUES (?)", [], False],
    "no rows": ["INSERT INTO notes (title) VALUES (?)", [], True],
    "a number too large": ["INSERT INTO notes (title) VALUES (?)", [1 << 70], False],
    "a constraint": ["INSERT INTO notes (title) VALUES (?)", [None], False],
    "lone surrogate": ["INSERT INTO notes (title) VALUES (?)", ["\ud800"], False],
    "lone surrogate in the statement": ["INSERT INTO notes (title) VALUES ('\ud800')", [], False],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_that_is_none_is_an_error(app: sqlite3.Connection, change: Any) -> None:
    with pytest.raises((UnusableWorld, sqlite3.Error, OverflowError, UnicodeEncodeError)):
        apply_changes(app, [change], [])


def test_a_text_that_is_doubled_without_end_is_an_error(app: sqlite3.Connection) -> None:
    doubling: Any = ["UPDATE notes SET title = title || title", [], False]
    with pytest.raises((UnusableWorld, sqlite3.Error), match="too big"):
        apply_changes(app, [doubling] * 40, [])


def test_what_the_task_begins_with_is_not_asked(app: sqlite3.Connection) -> None:
    own: Any = [["CREATE TABLE more (x)", [], False], INSERT]
    theirs: Any = ["CREATE TABLE others (x)", [], False]
    more: Any = ["INSERT INTO more (x) VALUES (1)", [], False]
    apply_changes(app, [*own, more], own)
    assert app.execute("SELECT x FROM more").fetchall() == [(1,)]
    with pytest.raises(UnusableWorld, match="CREATE TABLE others"):
        apply_changes(app, [INSERT, theirs], own)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for name, text in {"dbs/venmo.jsonl": "[]\n", "dbs/model_hashes.json": "{}", "logs/api_calls.jsonl": "é\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_saved_world_is_read_and_laid_out_again(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("dbs/venmo.db", "dbs/..jsonl", "dbs/venmo.jsonl-wal", "misc/notes.txt", "logs/other.txt"):
        (saved / name).parent.mkdir(exist_ok=True)
        (saved / name).write_text("hostile", encoding="utf-8")
    files = read_saved(str(saved))
    assert files == {"dbs/venmo.jsonl": "[]\n", "dbs/model_hashes.json": "{}", "logs/api_calls.jsonl": "é\n"}
    again = tmp_path_factory.mktemp("again")
    write_saved(files, str(again))
    assert read_saved(str(again)) == files


def spoil(path: Path, how: str) -> None:
    path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to("/etc/passwd")
    elif how == "dangling link":
        path.symlink_to("/nothing")
    elif how == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif how == "one byte too large":
        path.write_bytes(b"x" * (MAX_SAVED_BYTES + 1))
    elif how == "no text":
        path.write_bytes(b"\xff\xfe\x00")
    elif how == "surrogate":
        path.write_bytes("\ud800".encode("utf-8", "surrogatepass"))
    elif how == "device":
        path.symlink_to("/dev/zero")


SPOILT = ("fifo", "folder", "link", "dangling link", "huge", "one byte too large", "no text", "surrogate", "device")


@pytest.mark.parametrize("how", SPOILT)
def test_a_database_that_is_no_plain_file_makes_the_world_unusable(saved: Path, how: str) -> None:
    spoil(saved / "dbs" / "venmo.jsonl", how)
    with pytest.raises(UnusableWorld, match=r"dbs/venmo\.jsonl: "):
        read_saved(str(saved))


@pytest.mark.parametrize("how", SPOILT)
def test_a_log_that_is_no_plain_file_is_left_out(saved: Path, how: str) -> None:
    spoil(saved / "logs" / "api_calls.jsonl", how)
    assert sorted(read_saved(str(saved))) == ["dbs/model_hashes.json", "dbs/venmo.jsonl"]


def test_folders_that_are_none(saved: Path) -> None:
    (saved / "dbs").rename(saved / "elsewhere")
    (saved / "dbs").symlink_to(saved / "elsewhere")
    with pytest.raises(UnusableWorld, match="dbs: "):
        read_saved(str(saved))
    with pytest.raises(UnusableWorld, match="dbs: "):
        read_saved(str(saved / "nowhere"))


@pytest.mark.parametrize(
    "name", ["../x.jsonl", "dbs/../x.jsonl", "/dbs/x.jsonl", "dbs/x.db", "dbs/a/b.jsonl", "x", "dbs/\0.jsonl"]
)
def test_a_name_that_is_not_appworlds_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnusableWorld, match="is not a file of a saved world"):
        write_saved({name: json.dumps([])}, str(tmp_path / "world"))
    assert list(tmp_path.iterdir()) == []
