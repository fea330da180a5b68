"""Translates function calls to the code that a careful coder would have written for them.

With function calling (``environment.use: appworld_functions``) a step has a JSON object for each call, in the form of
Qwen2.5 and Qwen3, but the rules read code. So each call becomes an assignment to a new variable, and an argument whose
value an earlier result contains becomes that variable: passwords, tokens and ids pass from results to calls, as in
code.

The calls do not show what a policy computes between them. If no result contains the answer, these rules find no source
for it, and they see no loop if pages are requested one by one: a judge model would see more.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from draco_ray.sandbox.rule_judge.reading import Run, Step

# Code may imitate a call with this text. Outside a string that is a syntax error, and the step's output shows it.
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_NUMBERED = re.compile(r"^\((\d{1,3})\) \w+: ", re.MULTILINE)
_ERROR = re.compile(r"error: (?:\w+: )?")
_KEY = "#"
"""Stands for the key of a value that is outside of all JSON objects and so has no key."""

Known = dict[str | int, str]
"""A value found in an earlier result -> the expression for it."""


def calls_as_code(run: Run) -> Run:
    """The run with each call as one statement, and without messages; steps that are code already are kept."""
    known: Known = {}
    steps: list[Step] = []
    for step in run.steps:
        if step.message:
            continue
        calls = _calls(step.code)
        results = _results(step.output, len(calls))
        for (name, arguments), result in zip(calls, results, strict=True):
            variable = f"result_{len(steps) + 1}"
            code = f"{variable} = apis.{name.replace('__', '.', 1)}({_given(arguments, known)})"
            steps.append(Step(number=step.number, code=code, output=_output(result)))
            known |= {value: f"{variable}{key}" for key, value in _leaves(result)}
        if not calls:
            steps.append(step)
    return replace(run, steps=tuple(steps))


def _calls(action: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each API call in a step; empty if any call cannot be parsed."""
    found = []
    for match in _CALL.finditer(action):
        try:
            call = json.loads(match[1])
        except (ValueError, RecursionError):
            return []
        name, arguments = call.get("name"), call.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict) or not all(map(_is_name, arguments)):
            return []
        app, _, api = name.partition("__")
        if not (_is_name(app) and _is_name(api)):
            return []
        found.append((name, arguments))
    return [] if found and _is_python(action) else found


def _is_python(action: str) -> bool:
    """Whether a step is code, in which a call can only be quoted."""
    with warnings.catch_warnings(), suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        warnings.simplefilter("ignore")
        ast.parse(action)
        return True
    return False


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _results(output: str | None, count: int) -> list[str | None]:
    """The output of each call; if there are several, their outputs are numbered."""
    if output is None or count < 2:
        return [output] * count
    at = {int(match[1]): match.span() for match in _NUMBERED.finditer(output)}
    begins = sorted(span for number, span in at.items() if number <= count)
    ends = [begin for begin, _ in begins[1:]] + [len(output)]
    texts: list[str | None] = [output[begin:end].rstrip("\n") for (_, begin), end in zip(begins, ends, strict=False)]
    return texts if len(texts) == count else [output] * count


def _output(result: str | None) -> str | None:
    """A call's result; for a refused call, its error in the form of a failed cell's output."""
    if result is None or not (error := _ERROR.match(result)):
        return result
    return f"Execution failed. Traceback:\nException: {result[error.end() :]}"


def _given(arguments: dict[str, Any], known: Known) -> str:
    return ", ".join(f"{name}={_expression(value, known)}" for name, value in arguments.items())


def _expression(value: Any, known: Known) -> str:
    seen = known.get(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    return repr(value) if seen is None else seen


def _leaves(result: str | None) -> Iterator[tuple[str, str | int]]:
    """Texts and ids in a result, each with its innermost key as a subscript."""
    try:
        todo: list[tuple[str, Any]] = [(_KEY, json.loads(result or ""))]
    except (ValueError, RecursionError):
        return
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += value.items()
        elif isinstance(value, list):
            todo += [(key, entry) for entry in value]
        elif isinstance(value, str) or (isinstance(value, int) and key.endswith("_id")):
            yield ("" if key == _KEY else f"[{key!r}]"), value
