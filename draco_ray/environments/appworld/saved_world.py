"""Reads a world saved by AppWorld, which hostile code could modify, and checks it before AppWorld evaluates it.

AppWorld saves a database as the SQL that changed it, in ``dbs/<app>.jsonl`` with lines ``[statement, parameters,
many]``. Its evaluator executes any statement, also ``ATTACH DATABASE``, which writes files. Here a statement may only
insert into, update and delete from the app's own tables, which SQLite's compiler checks (`make_statement_checker`).
Runs in the jail with AppWorld's Python.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MAX_SAVED_BYTES = 16 << 20
"""Maximum total size of a saved world."""

_DATABASES = "dbs"
_STATE = re.compile(r"[a-z_]{1,64}\.jsonl|model_hashes\.json")
"""Names of files that AppWorld's evaluator reads. The evaluator would prefer a file ``<app>.db``, which hostile
code could craft."""
_RECORDS = (
    ("logs", ("api_calls.jsonl", "environment_io.md")),
    ("version", ("code.txt", "data.txt")),
)
"""Other files of a saved world, by folder: never executed, and omitted if they cannot be read."""

Change = tuple[str, Sequence[Any] | Mapping[str, Any], bool]
"""Statement, parameters, and whether the parameters are several rows."""


class UnusableWorld(Exception):
    """The saved files are not a world of AppWorld, because of the code that ran in it."""


def read_saved(folder: str) -> dict[str, str]:
    """Read a world from the folder in which AppWorld saved it. Hostile code could write in this folder, too.

    Returns: path relative to ``folder``, e.g. ``dbs/<app>.jsonl`` -> content of the file.
    Raises: UnusableWorld: there is no folder of databases, or a database is not a regular file, not UTF-8, or too
        large.
    """
    found: dict[str, str] = {}
    left = MAX_SAVED_BYTES
    try:
        databases = _open(folder, _DATABASES, os.O_DIRECTORY)
    except OSError as error:
        raise UnusableWorld(f"{_DATABASES}: {error.strerror}") from error
    for name in sorted(filter(_STATE.fullmatch, os.listdir(databases))):
        try:
            text = _read(databases, name, left)
        except (OSError, ValueError) as error:
            raise UnusableWorld(f"{_DATABASES}/{name}: {error}") from error
        left -= len(text.encode())
        found[f"{_DATABASES}/{name}"] = text
    os.close(databases)
    for subfolder, names in _RECORDS:
        for name in names:
            try:
                parent = _open(folder, subfolder, os.O_DIRECTORY)
                text = _read(parent, name, left)
            except (OSError, ValueError):
                continue
            os.close(parent)
            left -= len(text.encode())
            found[f"{subfolder}/{name}"] = text
    return found


def write_saved(files: Mapping[str, str], folder: str) -> None:
    """Write a saved world to a new folder. Raises: UnusableWorld: a name that `read_saved` never returns."""
    known = {f"{subfolder}/{name}" for subfolder, names in _RECORDS for name in names}
    for name, text in files.items():
        database = name.removeprefix(f"{_DATABASES}/")
        if name not in known and (database == name or not _STATE.fullmatch(database)):
            raise UnusableWorld(f"{name[:80]!r} is not a file of a saved world")
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(text.encode())


def _open(folder: str | int, name: str, flags: int) -> int:
    # Do not wait for a writer of a FIFO, and do not follow links.
    parent, path = (None, os.path.join(folder, name)) if isinstance(folder, str) else (folder, name)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=parent)


def _read(folder: int, name: str, limit: int) -> str:
    with open(_open(folder, name, 0), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than the {MAX_SAVED_BYTES >> 20} MiB allowed for a saved world")
    return data.decode("utf-8")


def apply_changes(connection: sqlite3.Connection, changes: Sequence[Change], trusted: Sequence[Change]) -> None:
    """Apply the changes of a saved database.

    Args:
        connection: the app's original database.
        trusted: the task's initial changes; if ``changes`` begins with them, that part is not checked.
    Raises: UnusableWorld: a change is not allowed; sqlite3's errors: it cannot be applied.
    """
    begun = len(trusted) if list(changes[: len(trusted)]) == list(trusted) else 0
    _run(connection, changes[:begun])
    new = changes[begun:]
    if new:
        for change in new:
            _check_shape(change)
        check = make_statement_checker(connection)
        for statement, (parameters, many) in {change[0]: change[1:] for change in new}.items():
            check(statement, parameters, many)
        # Limit the length of values, which stops statements that double a text many times.
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_SAVED_BYTES)
        connection.set_authorizer(_stay_in_this_database)
        _run(connection, new)
        connection.set_authorizer(None)
    connection.commit()


def _run(connection: sqlite3.Connection, changes: Sequence[Change]) -> None:
    for statement, parameters, many in changes:
        (connection.executemany if many else connection.execute)(statement, parameters)


def _stay_in_this_database(action: int, *_: str | None) -> int:
    """Authorizer of running statements: denies other databases; internal work of the search index is allowed."""
    return sqlite3.SQLITE_DENY if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH) else sqlite3.SQLITE_OK


def _check_shape(change: Any) -> None:
    if not (isinstance(change, list) and len(change) == 3):
        raise UnusableWorld("a saved change is not [statement, parameters, many]")
    statement, parameters, many = change
    rows = parameters if many is True and isinstance(parameters, list) else [parameters]
    plain = all(
        value is None or isinstance(value, str | int | float)
        for row in rows
        for value in (row.values() if isinstance(row, dict) else row if isinstance(row, list) else [row, ...])
    )
    if not (isinstance(statement, str) and isinstance(many, bool) and plain):
        raise UnusableWorld("the parameters of a saved change are not rows of plain values")


_BEGINS = ("INSERT INTO ", "UPDATE ", "DELETE FROM ")
"""Beginnings of the statements that AppWorld saves. Other statements are refused, because the authorizer sees ``VACUUM
INTO`` only when it runs."""
_INDEX_INSERT = re.compile(r"INSERT INTO \w+_fts \(id, saved_search_text\) VALUES \([?:\w, ]+\)")
"""AppWorld's inserts into a search index. Others are refused, because through other columns an index accepts
commands."""
_WORD = re.compile(r"\w+")
_CHANGES = (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_READ)


def make_statement_checker(connection: sqlite3.Connection) -> Callable[[str, Any, bool], None]:
    """Returns a function that checks a statement by compiling it on ``connection`` without running it.

    While compiling, SQLite reports a statement's actions independently of its parameters. Allowed: insert into, update
    and delete from existing tables and search indexes, and read their columns. Not allowed: SELECT (so no recursion),
    functions, pragmas, other databases, schema changes.

    The function takes a statement, its parameters and whether they are several rows; it raises UnusableWorld.
    """
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    indexes = {name for _, name, sql in rows if (sql or "").upper().startswith("CREATE VIRTUAL")}
    internal = tuple(f"{name}_" for name in indexes)
    tables = {name for kind, name, _ in rows if kind == "table" and not name.startswith(("sqlite_", *internal))}
    for index in indexes:
        # Use each index once now: its first use reads its own tables, and `authorize` would refuse that later.
        connection.execute(f'SELECT 1 FROM "{index}" LIMIT 0').fetchall()
    refused: list[str] = []

    def authorize(action: int, name: str | None, _: str | None, database: str | None, source: str | None) -> int:
        if action in _CHANGES and name in tables and database == "main":
            return sqlite3.SQLITE_OK
        refused.append(_ACTIONS.get(action, f"action {action} on") + (f" {name}" if name else ""))
        return sqlite3.SQLITE_DENY

    def check(statement: str, parameters: Any, many: bool) -> None:
        if not statement.startswith(_BEGINS):
            raise UnusableWorld(f"a saved change is not an INSERT, UPDATE or DELETE: {statement[:80]!r}")
        of_index = statement.startswith("INSERT") and _named(indexes) & _named(_WORD.findall(statement))
        if of_index and not _INDEX_INSERT.fullmatch(statement):
            raise UnusableWorld(
                f"a saved change modifies a search index in another way than AppWorld: {statement[:80]!r}"
            )
        refused.clear()
        connection.set_authorizer(authorize)
        try:
            connection.execute(f"EXPLAIN {statement}", parameters[0] if many else parameters).fetchall()
        except (sqlite3.Error, sqlite3.Warning, IndexError, ValueError) as error:
            why = f"is not allowed to {refused[0]}" if refused else f"cannot be used: {error}"
            raise UnusableWorld(f"a saved change {why}: {statement[:80]!r}") from error
        finally:
            connection.set_authorizer(None)

    return check


def _named(names: Iterable[str]) -> set[str]:
    return {name.lower() for name in names}


_ACTIONS = {
    sqlite3.SQLITE_ATTACH: "attach",
    sqlite3.SQLITE_DETACH: "detach",
    sqlite3.SQLITE_PRAGMA: "use the pragma",
    sqlite3.SQLITE_FUNCTION: "call a function",
    sqlite3.SQLITE_SELECT: "select",
    sqlite3.SQLITE_READ: "read",
    sqlite3.SQLITE_INSERT: "insert into",
    sqlite3.SQLITE_UPDATE: "update",
    sqlite3.SQLITE_DELETE: "delete from",
}
