"""The tools of the shop's desk, on a SQLite database that every rollout begins anew."""

from __future__ import annotations

import sqlite3

shop = sqlite3.connect(":memory:", isolation_level=None)


def reset(task: dict) -> None:
    """Fill the shop with the task's orders."""
    shop.executescript(
        "drop table if exists orders; drop table if exists log;"
        "create table orders (item text primary key, state text);"
        "create table log (what text, item text);"
    )
    shop.executemany("insert into orders values (?, ?)", task["orders"].items())


def show_order(item: str) -> str:
    """Show the state of an order.

    Args:
        item: What was ordered, such as lamp.
    """
    return f"{item} is {_state('show', item)}"


def refund(item: str) -> str:
    """Pay an order back. Only delivered orders are refunded.

    Args:
        item: What was ordered.
    """
    state = _state("refund", item)
    if state != "delivered":
        raise ValueError(f"{item} is {state}, only delivered orders are refunded")
    shop.execute("update orders set state = 'refunded' where item = ?", (item,))
    return f"{item} is refunded"


def decline(item: str) -> str:
    """Tell the customer that an order is not refunded.

    Args:
        item: What was ordered.
    """
    _state("decline", item)
    return f"{item} is declined"


def end_state() -> list[tuple[str, str]]:
    """What was done with which order."""
    return shop.execute("select what, item from log").fetchall()


def evaluate(task: dict, state: list[tuple[str, str]]) -> dict[str, bool]:
    """Whether every order was looked at first, and then refunded or declined as the policy asks."""
    asked: dict[str, str] = task["expected"]
    done = {item: [what for what, logged in state if logged == item] for item in asked}
    return {
        "looked first": all(steps[:1] == ["show"] for steps in done.values()),
        "decided as the policy asks": all(steps[-1:] == [asked[item]] for item, steps in done.items()),
        "nothing else": all(item in asked for _, item in state),
    }


def _state(what: str, item: str) -> str:
    found = shop.execute("select state from orders where item = ?", (item,)).fetchone()
    if found is None:
        raise LookupError(f"there is no order of a {item}")
    shop.execute("insert into log values (?, ?)", (what, item))
    return str(found[0])
