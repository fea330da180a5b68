"""The few expressions over a task's text that code uses to pick out its parameters, evaluated without running code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_UNBOUNDED = re.compile(r"(?<!\\)[*+]|\{\d*,\}")
_LONGEST_PATTERN = 200
_LONGEST_TEXT = 2000

Known = str | list[str] | None


def evaluate(node: ast.expr, text_of: Callable[[str], str | None], task: str) -> Known:
    """What an expression evaluates to: a regular expression's match, a part of a split, a number read from text.

    Args:
        node: the expression.
        text_of: the text that a variable holds, None where that is not known.
        task: what ``show_active_task()["instruction"]`` returns.
    Returns: a text (numbers as text), a list of texts, or None for any other expression.
    """
    match node:
        case ast.Constant(value=str(constant)):
            return constant
        case ast.Name(id=name):
            return text_of(name)
        case ast.Subscript(value=ast.Call(func=function), slice=ast.Constant(value="instruction")):
            return task if api_of(function) == ("supervisor", "show_active_task") else None
        case ast.Subscript(value=container, slice=ast.Constant(value=int(index))):
            items = evaluate(container, text_of, task)
            return items[index] if isinstance(items, list) and -len(items) <= index < len(items) else None
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="findall"), args=[pattern, searched]):
            return _findall(evaluate(pattern, text_of, task), evaluate(searched, text_of, task))
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="search"), args=[pattern, searched]),
                attr="group",
            ),
            args=arguments,
        ):
            found = _findall(
                evaluate(pattern, text_of, task), evaluate(searched, text_of, task), groups=bool(arguments)
            )
            return found[0] if found else None
        case ast.Call(func=ast.Attribute(value=owner, attr="split"), args=[ast.Constant(value=str(separator))]):
            whole = evaluate(owner, text_of, task)
            return whole.split(separator) if isinstance(whole, str) and separator else None
        case ast.Call(func=ast.Attribute(value=owner, attr="strip" | "lower"), args=[]):
            whole = evaluate(owner, text_of, task)
            return whole.strip() if isinstance(whole, str) else None
        case ast.Call(func=ast.Name(id="int" | "float" | "str"), args=[argument]):
            number = None if isinstance(argument, ast.Constant) else evaluate(argument, text_of, task)
            return number if isinstance(number, str) else None
        case _:
            return None


def api_of(node: ast.expr) -> tuple[str, str] | None:
    """App and API of an expression ``apis.<app>.<api>``."""
    match node:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="apis"), attr=app), attr=api):
            return app, api
    return None


def _findall(pattern: Known, text: Known, groups: bool = True) -> list[str] | None:
    """`re.findall` with a policy's own pattern; None for one that could take long on purpose."""
    if not isinstance(pattern, str) or not isinstance(text, str):
        return None
    if len(pattern) > _LONGEST_PATTERN or len(text) > _LONGEST_TEXT or len(_UNBOUNDED.findall(pattern)) > 2:
        return None
    # A repeated group or a back reference is what makes matching take exponential time.
    if re.search(r"\)[*+{]|\\[1-9]", pattern):
        return None
    try:
        matches = list(re.finditer(pattern, text))
    except (re.error, RecursionError, OverflowError):
        return None
    return [(match[1] if groups and match.re.groups else match[0]) or "" for match in matches]
