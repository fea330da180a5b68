"""The tools of a library's desk, on a SQLite database that every rollout begins anew."""

from __future__ import annotations

import sqlite3

library = sqlite3.connect(":memory:", isolation_level=None)


def reset(task: dict) -> None:
    """Fill the library with the task's member, loans and holds."""
    library.executescript(
        "drop table if exists member; drop table if exists loan; drop table if exists log;"
        "create table member (card text primary key, name text, fine real);"
        "create table loan (book text primary key, overdue integer, holds integer, renewed integer default 0);"
        "create table log (what text, about text);"
    )
    library.execute("insert into member values (?, ?, ?)", (task["card"], task["name"], task["fine"]))
    loans = [(loan["book"], loan["overdue"], loan["holds"]) for loan in task["loans"]]
    library.executemany("insert into loan (book, overdue, holds) values (?, ?, ?)", loans)


def show_member(card: str) -> str:
    """Show a member's name and unpaid fine.

    Args:
        card: Number of the library card, such as C41.
    """
    name, fine = _member(card)
    _log("show_member", card)
    return f"{card}: {name}, unpaid fine {fine:.2f} dollars"


def list_loans(card: str) -> str:
    """List the books that a member has borrowed, with what matters for a renewal.

    Args:
        card: Number of the library card.
    """
    _member(card)
    _log("list_loans", card)
    found = library.execute("select book, overdue, holds from loan order by book").fetchall()
    return "\n".join(f"{book}: {'overdue' if late else 'on time'}, {holds} holds" for book, late, holds in found)


def renew(book: str) -> str:
    """Renew a loan for two weeks.

    Args:
        book: Title of the borrowed book.
    """
    found = library.execute("select overdue, holds from loan where book = ?", (book,)).fetchone()
    if found is None:
        raise LookupError(f"no loan of a book called {book}")
    _log("renew", book)
    library.execute("update loan set renewed = 1 where book = ?", (book,))
    return f"{book} is renewed"


def waive_fine(card: str) -> str:
    """Cancel a member's unpaid fine.

    Args:
        card: Number of the library card.
    """
    _member(card)
    _log("waive_fine", card)
    library.execute("update member set fine = 0 where card = ?", (card,))
    return f"the fine of {card} is waived"


def refuse(reason: str) -> str:
    """Tell the member that the request cannot be granted.

    Args:
        reason: Why, in a few words.
    """
    _log("refuse", reason)
    return "the member is told"


def end_state() -> dict[str, list]:
    """What was renewed, waived and refused, and every call in order."""
    return {
        "renewed": [book for (book,) in library.execute("select book from loan where renewed order by book")],
        "waived": [card for (card,) in library.execute("select card from member where fine = 0")],
        "log": library.execute("select what, about from log").fetchall(),
    }


def evaluate(task: dict, state: dict) -> dict[str, bool]:
    """Whether exactly what the rules allow was done, after looking it up, and anything else was refused."""
    expected, calls = task["expected"], [what for what, _ in state["log"]]
    refused, waived = "refuse" in calls, "waive_fine" in calls
    looks = {"renew": "list_loans", "waive_fine": "show_member"}
    return {
        "looked": all(looks[what] in calls[:at] for at, what in enumerate(calls) if what in looks),
        "renewals": state["renewed"] == sorted(expected["renew"]),
        "fine": waived == expected["waive"],
        "refusal": refused == expected["refuse"],
    }


def _member(card: str) -> tuple[str, float]:
    found = library.execute("select name, fine from member where card = ?", (card,)).fetchone()
    if found is None:
        raise LookupError(f"no member with card {card}")
    return str(found[0]), float(found[1])


def _log(what: str, about: str) -> None:
    library.execute("insert into log values (?, ?)", (what, about))
