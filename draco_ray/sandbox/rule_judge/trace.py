"""What a run's code does: its API calls, and from which of them each value was computed.

The code is parsed, never executed. Statements are read in their order, and every variable has a `Value`: the calls and
comparisons it depends on. So a rule can ask "does the answer come from the list that the task names?" instead of "does
that list's name occur?", and a comment or an unused call proves nothing. Of a step that raised, only the statements
before the failing line count. An expression that this parser does not understand has an empty value.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from draco_ray.sandbox.rule_judge.reading import Step

SUPPORT_APPS = frozenset({"supervisor", "api_docs"})
"""Apps that describe the task and the APIs; no task is about these apps."""
_READING = re.compile(r"^(?:show|search|get|login|logout|find|list|read)(?:_|$)|_exists$")
_SECRET_APIS = frozenset({"login", "show_account_passwords", "show_payment_cards"})
_FAILED = re.compile(
    r"^Execution failed\.|^Traceback \(most recent call last\)|^(?:\w+\.)*\w*(?:Error|Exception): ", re.MULTILINE
)
_LINE = re.compile(r'File "<[^>\n]{0,80}>", line (\d{1,9})\b')
_SELECTING = frozenset({"endswith", "startswith", "difference", "intersection"})
"""Methods that select."""
_MAX_NODES = 4000
_SYMBOLS: dict[type[ast.AST], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
_SYMBOLS |= {ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in", ast.Sub: "-", ast.BitAnd: "&"}


@dataclass(frozen=True, slots=True)
class Value:
    """Known properties of an expression's value."""

    calls: frozenset[int] = frozenset()
    """Indices of the API calls that the value depends on."""
    tests: frozenset[int] = frozenset()
    """Indices of the selecting operations that the value depends on."""
    text: str | None = None
    """The value itself, as text, if code and task alone determine it."""
    from_task: bool = False
    """Whether the value contains text of the task."""
    secret: bool = False
    """Whether the value is, or contains, a password or an access token."""

    def __or__(self, other: Value) -> Value:
        secret, from_task = self.secret or other.secret, self.from_task or other.from_task
        return Value(self.calls | other.calls, self.tests | other.tests, from_task=from_task, secret=secret)


EMPTY_VALUE = Value()


def merge_values(values: Iterable[Value]) -> Value:
    """A value that depends on all of these."""
    return reduce(or_, values, EMPTY_VALUE)


@dataclass(frozen=True, slots=True, eq=False)
class ApiCall:
    """One place where an API is called."""

    step: int
    app: str
    api: str
    arguments: dict[str, Value]
    subject: Value
    """What the call depends on: its arguments except ``access_token``, and the conditions and loops around it."""
    failed: bool
    """Whether the call's statement raised, or comes after the statement that did."""
    page_varies: bool
    """Whether the call requests one page after another."""

    @property
    def name(self) -> str:
        """Full name of the API: ``app.api``."""
        return f"{self.app}.{self.api}"

    def text(self, argument: str) -> str | None:
        """The argument's value if the code has it as a literal."""
        value = self.arguments.get(argument, EMPTY_VALUE)
        return None if value.from_task else value.text

    @property
    def about_data(self) -> bool:
        """Whether the call goes to an app that a task can be about, and is not a login."""
        return self.app not in SUPPORT_APPS and self.api != "login"

    @property
    def changes(self) -> bool:
        """Whether the call changes something in an app that a task can be about."""
        return self.about_data and _READING.search(self.api) is None


@dataclass(frozen=True, slots=True)
class Selection:
    """One operation that selects: a comparison, a set operation, an extreme."""

    step: int
    operator: str
    """``<``, ``==``, ``not in``, ``-``, ``endswith``, ``not endswith``, ``max`` and so on."""
    left: Value
    right: Value
    source: str
    """Source code of the operation."""


def error_line(output: str | None) -> str | None:
    """The last visible line of an error in a step's output, or None.

    >>> error_line("17")
    >>> error_line("Execution failed. Traceback:\\n ...\\nKeyError: 'x'")
    "KeyError: 'x'"
    """
    if output is None or not _FAILED.search(output):
        return None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Iteration)\b", line)]
    return (named or lines)[-1][:160]


class CodeTrace:
    """Calls, operations and values of a run of a task; the outputs of its steps show which statements failed."""

    def __init__(self, steps: Iterable[Step], task: str) -> None:
        self.calls: list[ApiCall] = []
        self.tests: list[Selection] = []
        self.leaks: set[int] = set()
        """Steps that print a password or an access token."""
        self.last_data = (0, EMPTY_VALUE)
        """The step and value of the last assignment or print that depends on some app's data."""
        self.failed: dict[int, str] = {}
        """Step -> the error's last visible line."""
        self._task = task
        self._env: dict[str, Value] = {}
        for step in steps:
            self._step(step)

    def _step(self, step: Step) -> None:
        """Read one step."""
        self._number, self._nodes = step.number, 0
        self._failing_line: int | None = None
        self._control = EMPTY_VALUE
        """Conditions and loops around the current statement."""
        self._loops: list[bool] = []
        """For each loop around the current statement, whether it can run more than once."""
        error = error_line(step.output)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                body = ast.parse(step.code).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
            self.failed[step.number] = error or f"not valid Python: {str(problem)[:100]}"
            return
        if error is not None:
            self.failed[step.number] = error
            line = _LINE.search(step.output or "")
            self._failing_line = int(line[1]) if line else 0
        with suppress(RecursionError):
            self._inside(body, EMPTY_VALUE, [])

    def _inside(self, body: Iterable[ast.stmt], control: Value, loops: list[bool]) -> None:
        """Read a block under a condition or in a loop."""
        before = self._control, self._loops
        self._control, self._loops = self._control | replace(control, secret=False), self._loops + loops
        for statement in body:
            self._statement(statement)
        self._control, self._loops = before

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self._bind(target, self._value(value), node)
            case ast.AugAssign(target=target, value=value):
                self._bind(target, self._value(value) | self._value(target), node)
            case ast.For(target=target, iter=iterator, body=body):
                items = self._value(iterator)
                self._bind(target, replace(items, text=None), None)
                self._inside(body, items, [_repeats(body, iterator)])
            case ast.While(test=test, body=body):
                self._value(test)
                self._inside(body, EMPTY_VALUE, [_repeats(body)])
            case ast.If(test=test, body=body, orelse=orelse):
                self._inside([*body, *orelse], self._value(test), [])
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._statement(child)
                    elif isinstance(child, ast.expr):
                        self._value(child)

    def _failed(self, node: ast.AST) -> bool:
        """Whether a statement raised, or was never reached."""
        return self._failing_line is not None and (getattr(node, "end_lineno", None) or 0) >= self._failing_line

    def _bind(self, target: ast.expr, value: Value, statement: ast.stmt | None) -> None:
        if statement is not None and self._failed(statement):
            return
        for name in _names(target):
            result = value if isinstance(target, ast.Name) else replace(value, text=None)
            if self._control != EMPTY_VALUE or isinstance(target, ast.Subscript | ast.Attribute):
                # The old value may survive: under a condition, or if only a part is assigned.
                result = result | self._env.get(name, EMPTY_VALUE) | self._control
            self._env[name] = result
            self._note(result)

    def _note(self, value: Value) -> None:
        if any(self.calls[index].about_data for index in value.calls):
            self.last_data = (self._number, value)

    def _value(self, node: ast.expr) -> Value:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            return EMPTY_VALUE
        match node:
            case ast.Constant(value=constant):
                return Value(text=str(constant)) if constant not in (None, ...) else EMPTY_VALUE
            case ast.Name(id=name):
                return self._env.get(name, EMPTY_VALUE)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="apis"), attr=app), attr=api)):
                return self._api_call(app, api, node)
            case ast.Call(func=ast.Name(id="int" | "float" | "str"), args=[argument]):
                return self._value(argument)
            case ast.Call(func=ast.Name(id="max" | "min" | "sorted" as extreme), args=[items, *_]):
                return self._test(extreme, items, ast.Constant(None), node)
            case ast.Call(func=ast.Attribute(value=left, attr=attr), args=[right, *_]) if attr in _SELECTING:
                return self._test(attr, left, right, node)
            case ast.Call():
                return self._call(node)
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(attr="findall"), args=[ast.Constant(value=str(pattern)), searched]),
                slice=ast.Constant(value=0),
            ) if self._value(searched).from_task:
                return Value(text=_first_match(pattern, self._task), from_task=True)
            case ast.Subscript(value=container, slice=ast.Constant(value=key)):
                value = self._value(container)
                return replace(value, text=None, secret=value.secret and key != "account_name")
            case ast.Subscript(value=left, slice=ast.Name() as right) if self._value(right).from_task:
                # Looking something up by a name from the task is a comparison like any other.
                return self._test("==", left, right, node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return self._test(_SYMBOLS.get(type(operator), "is"), left, right, node)
            case ast.BinOp(left=left, op=ast.Sub() | ast.BitAnd() as operator, right=right):
                return self._test(_SYMBOLS[type(operator)], left, right, node)
            case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Attribute(value=left, attr=attr), args=[right])):
                return self._test(f"not {attr}", left, right, node)
        return self._children(node)

    def _children(self, node: ast.AST) -> Value:
        children = [child.value if isinstance(child, ast.keyword) else child for child in ast.iter_child_nodes(node)]
        return merge_values(self._value(child) for child in children if isinstance(child, ast.expr))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        before, result = (self._control, self._loops), EMPTY_VALUE
        for generator in node.generators:
            items = self._value(generator.iter)
            self._env |= dict.fromkeys(_names(generator.target), replace(items, text=None))
            self._loops = [*self._loops, _repeats((), generator.iter)]
            result |= items | merge_values(map(self._value, generator.ifs))
        self._control |= replace(result, secret=False)
        made = self._children(node)
        self._control, self._loops = before
        return replace(result | made, secret=made.secret)

    def _call(self, node: ast.Call) -> Value:
        value = self._children(node)
        match node.func:
            case ast.Name(id="print") if not self._failed(node):
                self.leaks |= {self._number} if value.secret else set()
                self._note(value)
            case ast.Name(id="len" | "bool" | "type"):
                return replace(value, secret=False)
            case ast.Attribute(value=ast.Name(id=name), attr="append" | "add" | "extend" | "update"):
                self._env[name] = self._env.get(name, EMPTY_VALUE) | value | self._control
                self._note(self._env[name])
        return value

    def _api_call(self, app: str, api: str, node: ast.Call) -> Value:
        arguments = {keyword.arg or "**": self._value(keyword.value) for keyword in node.keywords}
        arguments |= {f"#{index}": self._value(argument) for index, argument in enumerate(node.args)}
        if api == "show_active_task":
            return Value(from_task=True)
        subject = merge_values(value for name, value in arguments.items() if name != "access_token") | self._control
        subject = replace(subject, secret=False, from_task=False)
        page = next((keyword.value for keyword in node.keywords if keyword.arg == "page_index"), ast.Constant(0))
        page_varies = not isinstance(page, ast.Constant) and bool(self._loops) and all(self._loops)
        call = ApiCall(self._number, app, api, arguments, subject, self._failed(node), page_varies)
        self.calls.append(call)
        if call.failed:
            return EMPTY_VALUE
        return replace(subject, calls=subject.calls | {len(self.calls) - 1}, secret=api in _SECRET_APIS)

    def _test(self, operator: str, left: ast.expr, right: ast.expr, node: ast.expr) -> Value:
        test = Selection(self._number, operator, self._value(left), self._value(right), ast.unparse(node))
        self.tests.append(test)
        value = test.left | test.right
        return replace(value, tests=value.tests | {len(self.tests) - 1}, secret=False)


def _names(target: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]


def _repeats(body: Sequence[ast.stmt], iterator: ast.expr | None = None) -> bool:
    """Whether a loop can run more than once: not over ``range(1)``, and without an unconditional break or return."""
    once = iterator is not None and ast.unparse(iterator) == "range(1)"
    return not once and not any(isinstance(each, ast.Break | ast.Return) for each in body)


def _first_match(pattern: str, text: str) -> str | None:
    """The first match, or its group; None for a pattern that may take exponential time."""
    repeats = re.findall(r"(?<!\\)[*+]|\{\d*,\}", pattern)
    if len(pattern) > 200 or len(repeats) > 2 or re.search(r"\)[*+{]|\\[1-9]", pattern):
        return None
    with suppress(re.error, RecursionError, OverflowError):
        if match := re.search(pattern, text[:2000]):
            return str(match[1] if match.re.groups else match[0])
    return None
