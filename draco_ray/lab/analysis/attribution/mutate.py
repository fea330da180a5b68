"""Faults planted into any rollout's code by small edits of its text, found through its syntax tree.

Comments, names and layout stay as the author wrote them, so that a judge cannot tell an edited cell by its looks. Each
edit offers candidates; whether one is a fault is for AppWorld's tests to say.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from draco_ray.lab.analysis.attribution.rubric import COMPLETION
from draco_ray.sandbox.world.scripts import Fault

_OPPOSITES: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_EXTREMES = {"max": "min", "min": "max"}
OTHER_LISTS = {
    "show_song_library": ("show_liked_songs", "show_album_library"),
    "show_liked_songs": ("show_song_library",),
    "show_album_library": ("show_song_library",),
    "show_playlist_library": ("show_album_library",),
    "show_inbox_threads": ("show_outbox_threads",),
    "show_outbox_threads": ("show_inbox_threads",),
    "show_received_payment_requests": ("show_sent_payment_requests",),
    "show_sent_payment_requests": ("show_received_payment_requests",),
    "show_wish_list": ("show_cart",),
    "show_cart": ("show_wish_list",),
}
"""AppWorld's list APIs with others of the same app that a hurried reader takes for them."""
REPORT = 'print("Everything is done.")'
LOOK_AGAIN = "# Check that it is done.\nprint(apis.supervisor.show_active_task())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A rollout's cells with one fault in them, not yet executed."""

    fault: Fault
    cells: tuple[str, ...]
    planted: tuple[int, ...]
    """1-based steps that were changed or added."""


class _Cell:
    """A cell's text beside its syntax tree; positions in the tree count bytes."""

    def __init__(self, text: str) -> None:
        """Parse a cell. Raises: SyntaxError or ValueError where it is no Python."""
        self.tree = ast.parse(text)
        self._text = text.encode()
        starts = [0]
        for line in self._text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        end_line, end_column = node.end_lineno, node.end_col_offset
        assert end_line is not None
        assert end_column is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end_column

    def text(self, start: int, end: int) -> str:
        return self._text[start:end].decode()

    def replaced(self, start: int, end: int, new: str) -> str:
        return (self._text[:start] + new.encode() + self._text[end:]).decode()


def mutants(cells: Sequence[str]) -> Iterator[Mutant]:
    """Every candidate that the edits offer, by kind of fault and then by step."""
    readable: list[tuple[int, _Cell]] = []
    for index, text in enumerate(cells):
        with suppress(SyntaxError, ValueError):
            readable.append((index, _Cell(text)))
    for fault, edit in _EDITS.items():
        for index, cell in readable:
            for edited in edit(cell):
                yield Mutant(fault=fault, cells=(*cells[:index], edited, *cells[index + 1 :]), planted=(index + 1,))
    for index, cell in readable:
        for call in _without_token(cell):
            planted = (index + 1, index + 2)
            repeated = (*cells[:index], call, call, *cells[index:])
            yield Mutant(fault=Fault.REPEAT_FAILING_CALL, cells=repeated, planted=planted)
    if cells and COMPLETION in cells[-1]:
        after = (*cells, LOOK_AGAIN)
        yield Mutant(fault=Fault.CONTINUE_AFTER_COMPLETION, cells=after, planted=(len(after),))


def reworded(cells: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The same code laid out anew and without comments, and the 1-based steps in which that shows."""
    texts = []
    for cell in cells:
        try:
            texts.append(ast.unparse(ast.parse(cell)))
        except (SyntaxError, ValueError):
            texts.append(cell)
    changed = tuple(number for number, (old, new) in enumerate(zip(cells, texts, strict=True), 1) if old != new)
    return tuple(texts), changed


def _first_page(cell: _Cell) -> Iterator[str]:
    """A loop over pages ends after its first round."""
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.For | ast.While) and _asks_for_pages(node):
            last = node.body[-1]
            if last.lineno > node.lineno:
                _, end = cell.span(last)
                yield cell.replaced(end, end, f"\n{' ' * last.col_offset}break")
        elif isinstance(node, ast.comprehension) and isinstance(node.iter, ast.Call) and _calls(node.iter, "range"):
            start, end = cell.span(node.iter)
            if any(_asks_for_pages(other) for other in ast.walk(cell.tree) if isinstance(other, ast.expr)):
                yield cell.replaced(start, end, "range(1)")


def _other_list(cell: _Cell) -> Iterator[str]:
    """Another list of the same app is read."""
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.Attribute):
            for other in OTHER_LISTS.get(node.attr, ()):
                _, end = cell.span(node)
                yield cell.replaced(end - len(node.attr.encode()), end, other)


def _other_condition(cell: _Cell) -> Iterator[str]:
    """A condition says the opposite, or the least is taken for the most."""
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.Compare) and _selects(cell.tree, node) and len(node.ops) == 1:
            sign, opposite = _OPPOSITES.get(type(node.ops[0]), ("", ""))
            start, end = cell.span(node.left)[1], cell.span(node.comparators[0])[0]
            between = cell.text(start, end)
            if sign and between.count(sign) == 1:
                yield cell.replaced(start, end, between.replace(sign, opposite))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _EXTREMES:
            start, end = cell.span(node.func)
            yield cell.replaced(start, end, _EXTREMES[node.func.id])


def _no_completion(cell: _Cell) -> Iterator[str]:
    """The work is reported instead of handed in."""
    for node in ast.walk(cell.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _calls(node.value, "complete_task"):
            yield cell.replaced(*cell.span(node), REPORT)


def _secret(cell: _Cell) -> Iterator[str]:
    """A password that is used to log in is printed too."""
    for statement in cell.tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _calls(node, "login"):
                for keyword in node.keywords:
                    if keyword.arg == "password" and statement.col_offset == 0:
                        _, end = cell.span(statement)
                        yield cell.replaced(end, end, f"\nprint({cell.text(*cell.span(keyword.value))})")


def _without_token(cell: _Cell) -> Iterator[str]:
    """A statement of one call, without the access token that the call needs."""
    for statement in cell.tree.body:
        if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            token = next((keyword for keyword in call.keywords if keyword.arg == "access_token"), None)
            if token is None:
                continue
            start, end = cell.span(statement)
            first, last = cell.span(token)
            before = cell.text(start, first).rstrip()
            after = cell.text(last, end).lstrip().removeprefix(",").lstrip()
            yield before.removesuffix(",") + after if after.startswith(")") else before + after


_EDITS: dict[Fault, Callable[[_Cell], Iterator[str]]] = {
    Fault.FIRST_PAGE_ONLY: _first_page,
    Fault.WRONG_SOURCE: _other_list,
    Fault.WRONG_FILTER: _other_condition,
    Fault.NO_COMPLETION: _no_completion,
    Fault.PRINT_SECRET: _secret,
}


def _calls(node: ast.Call, name: str) -> bool:
    return (isinstance(node.func, ast.Attribute) and node.func.attr == name) or (
        isinstance(node.func, ast.Name) and node.func.id == name
    )


def _asks_for_pages(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.keyword) and inner.arg == "page_index" for inner in ast.walk(node))


def _selects(tree: ast.Module, compare: ast.Compare) -> bool:
    """Whether a comparison chooses items: it is of a comprehension, or of an ``if`` that does not end a loop."""
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension):
            tests: list[ast.expr] = node.ifs
        elif isinstance(node, ast.If) and not any(isinstance(inner, ast.Break) for inner in ast.walk(node)):
            tests = [node.test]
        else:
            continue
        if any(inner is compare for test in tests for inner in ast.walk(test)):
            return True
    return False
