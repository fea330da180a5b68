"""Reference solutions of the sandbox's scenario families, and their faulty variants, as code cells.

The demonstrations of the starter policy are made from these. So the cells of a family are the same text for all its
tasks (they read the instruction and the accounts through the API), they are short, every cell opens with a comment
that says what it does, and all families share their idioms: reading the accounts, logging in, fetching all pages,
completing. Standard library only: both virtual environments import this module.

>>> [cell.splitlines()[0] for cell in families()["longest_library_song"].script(frozenset({Fault.NO_COMPLETION}))]
['# Read the task and the accounts.', '# Log in to spotify.', '# Fetch all pages of the song library.', \
'# Find the longest song.', '# Report the result.']
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

SPLITS = ("train", "dev", "test_normal", "test_challenge")
VARIETIES = ("standard", "hard")
"""Kinds of world; each has its own task families over the same people and rows."""


class Fault(StrEnum):
    """What a scripted rollout can do wrong."""

    FIRST_PAGE_ONLY = "first_page_only"
    """Reads the first page of a list and skips the later ones."""
    WRONG_SOURCE = "wrong_source"
    """Reads another list than the one the task is about."""
    WRONG_FILTER = "wrong_filter"
    """Selects by a wrong condition."""
    NO_COMPLETION = "no_completion"
    """Reports in a cell of its own that the work is done, and never calls complete_task."""
    PRINT_SECRET = "print_secret"
    """Prints a password; harmless to success."""
    REPEAT_FAILING_CALL = "repeat_failing_call"
    """Repeats a call without its access token, then recovers; harmless to success."""
    CONTINUE_AFTER_COMPLETION = "continue_after_completion"
    """Runs another cell after complete_task; harmless to success."""


FATAL = frozenset({Fault.FIRST_PAGE_ONLY, Fault.WRONG_SOURCE, Fault.WRONG_FILTER, Fault.NO_COMPLETION})
"""Faults with which a task must fail; the others are only bad conduct."""
HARMLESS = frozenset(Fault) - FATAL

Faults = frozenset[Fault]

ACCOUNTS_CELL = """\
# Read the task and the accounts.
task = apis.supervisor.show_active_task()["instruction"]
profile = apis.supervisor.show_profile()
passwords = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}"""


def cell(comment: str, *lines: str) -> str:
    """A code cell: its comment line, then its code."""
    return "\n".join((f"# {comment}", *lines))


def login_cell(app: str, *, secret: bool = False) -> str:
    """Log in to an app, binding ``<app>_token``; ``secret`` prints the password too."""
    user = "phone_number" if app == "phone" else "email"
    login = f'{app}_token = apis.{app}.login(username=profile["{user}"], password=passwords["{app}"])["access_token"]'
    return cell(f"Log in to {app}.", login, *([f'print(passwords["{app}"])'] if secret else []))


def fetch_cells(what: str, api: str, faults: Faults, extra: str = "", paged: bool = True) -> list[str]:
    """Read a list into ``rows``: all pages, or as the faults say.

    Args:
        what: the list's name in the comment.
        api: ``<app>.<api>``.
        faults: FIRST_PAGE_ONLY and REPEAT_FAILING_CALL change the cells, others do not.
        extra: further arguments of the call, each followed by a comma and a space.
        paged: False for an API that returns the whole list at once.
    """
    token = f"access_token={api.split('.')[0]}_token"
    cells = []
    if Fault.REPEAT_FAILING_CALL in faults:
        cells += [cell(f"Fetch the {what}.", f"rows = apis.{api}({extra.removesuffix(', ')})", "print(len(rows))")] * 2
    if not paged or Fault.FIRST_PAGE_ONLY in faults:
        return [*cells, cell(f"Fetch the {what}.", f"rows = apis.{api}({extra}{token})", "print(len(rows))")]
    loop = cell(
        f"Fetch all pages of the {what}.",
        "rows, page_index = [], 0",
        "while True:",
        f"    page = apis.{api}({extra}page_index=page_index, {token})",
        "    if not page: break",
        "    rows += page",
        "    page_index += 1",
        "print(len(rows))",
    )
    return [*cells, loop]


@dataclass(frozen=True)
class Change:
    """The rows of one model that a task must change; it may change no other rows of that model.

    Each row has the values of ``fields`` in the end state (for removed rows, the start state); a dotted field follows
    a relation. ``updated`` rows are compared like the others, and only their fields in ``touched`` may differ.
    """

    model: str
    fields: tuple[str, ...]
    added: tuple[tuple[Any, ...], ...] = ()
    updated: tuple[tuple[Any, ...], ...] = ()
    removed: tuple[tuple[Any, ...], ...] = ()
    touched: tuple[str, ...] = ()


@dataclass(frozen=True)
class SideEffect:
    """A model that AppWorld's own bookkeeping changes along the way: ``added`` rows or updates of ``touched``."""

    model: str
    added: bool = False
    touched: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """One task of a scenario: what fills its instruction, and what must be true in the end."""

    params: dict[str, str | int] = field(default_factory=dict)
    answer: str | int | float | None = None
    changes: tuple[Change, ...] = ()
    side_effects: tuple[SideEffect, ...] = ()


@dataclass(frozen=True)
class Family:
    """A kind of task: its wordings, and scripts that do it correctly or with faults. A row of ``families.toml``."""

    name: str
    apps: tuple[str, ...]
    """Apps the reference solution logs in to, in that order; the supervisor app is not counted."""
    difficulty: int
    """1, 2 or 3."""
    fatal: Faults
    """The fatal faults the family has."""
    wordings: tuple[str, ...]
    """Instruction templates, one per scenario: two for train, then dev, then test_normal."""
    steps: tuple[dict[str, Any], ...]
    """The cells between logging in and completing, with their variants for faults."""
    variety: str = "standard"
    splits: tuple[str, ...] = ("train", "dev", "test_normal")
    answers: bool = False
    """Whether the task asks for an answer (bound to ``answer`` by the script)."""

    @property
    def faults(self) -> Faults:
        """All faults the family's script can be given."""
        return self.fatal | HARMLESS

    def script(self, faults: Faults = frozenset()) -> list[str]:
        """The code cells of a rollout with the given faults; the reference solution without any.

        NO_COMPLETION without other faults is the reference solution with a report in place of its last cell.
        Raises: ValueError if the family does not have one of the faults.
        """
        if unknown := faults - self.faults:
            raise ValueError(f"family {self.name} does not have {sorted(unknown)}, only {sorted(self.faults)}")
        logins = [login_cell(app, secret=k == 0 and Fault.PRINT_SECRET in faults) for k, app in enumerate(self.apps)]
        cells = [ACCOUNTS_CELL, *logins]
        repeats = faults
        for step in self.steps:
            fault = next(
                (each for each in (Fault.WRONG_SOURCE, Fault.WRONG_FILTER) if each in faults & set(step)), None
            )
            if "cell" in step:
                cells.append(step[fault]["cell"] if fault else step["cell"])
                continue
            row = step | (step[fault] if fault else {})
            cells += fetch_cells(row["fetch"], row["api"], repeats, row.get("arguments", ""), row.get("paged", True))
            # Only the first list of a family is fetched with the failing call.
            repeats = faults - {Fault.REPEAT_FAILING_CALL}
        if Fault.NO_COMPLETION in faults:
            # Report in a cell, so that there is a step to blame: a turn without code is not a step.
            report = "print(answer)" if self.answers else 'print("Everything is done.")'
            return [*cells, cell("Report the result.", report)]
        answer = "answer" if self.answers else "None"
        cells.append(cell("Complete the task.", f'apis.supervisor.complete_task(answer={answer}, status="success")'))
        if Fault.CONTINUE_AFTER_COMPLETION in faults:
            cells.append(cell("Check the result again.", "print(len(rows))"))
        return cells


@cache
def families() -> dict[str, Family]:
    """The scenario families of all varieties by name, in a fixed order."""
    table = tomllib.loads((Path(__file__).parent / "families.toml").read_text("utf-8"))
    rows: dict[str, dict[str, Any]] = {
        name: {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        for name, row in table.items()
    }
    return {name: Family(name, **row | {"fatal": frozenset(map(Fault, row["fatal"]))}) for name, row in rows.items()}
