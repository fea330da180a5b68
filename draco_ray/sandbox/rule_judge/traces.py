"""What is known of a run once its code has been read: calls, conditions, printed values, and what depends on what."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.vocabulary import READING, SUPPORT_APPS

_FAILED = re.compile(
    r"^Execution failed\.|^Traceback \(most recent call last\)|^(?:\w+\.)*\w*(?:Error|Exception): ", re.MULTILINE
)

Key = frozenset[int]
NONE: Key = frozenset()


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of an expression's value."""

    calls: Key = NONE
    """Indices of the API calls whose results it depends on."""
    tests: Key = NONE
    """Indices of the conditions under which it, or an item of it, was chosen."""
    operations: frozenset[str] = frozenset()
    """Functions, operators and keys it went through: ``len``, ``max``, ``-``, ``[title]``."""
    text: str | None = None
    """The value itself, as text, where the code alone determines it."""
    from_task: bool = False
    """Whether it was read from the task's text."""
    secret: bool = False
    """Whether it is, or contains, a password or an access token."""
    apis: frozenset[tuple[str, str]] = frozenset()
    """API functions it may stand for (``fetch = apis.spotify.show_song_library``)."""
    function: str | None = None
    """The function of the run's own that it stands for."""

    def __or__(self, other: Value) -> Value:
        if other is EMPTY:
            return self
        if self is EMPTY:
            return other
        return Value(
            calls=self.calls | other.calls,
            tests=self.tests | other.tests,
            operations=self.operations | other.operations,
            from_task=self.from_task or other.from_task,
            secret=self.secret or other.secret,
            apis=self.apis | other.apis,
        )

    def through(self, operation: str) -> Value:
        """The value after an operation."""
        return replace(self, operations=self.operations | {operation}, text=None, apis=frozenset(), function=None)


EMPTY = Value()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One place where an API is called."""

    step: int
    app: str
    api: str
    arguments: dict[str, Value]
    looped: bool
    """Whether it stands in a loop or comprehension."""
    iterated: Value
    """What that loop iterates over."""
    tests: Key
    """Conditions around it."""
    failed: bool
    """Whether its statement raised, or came after the one that did."""
    page_varies: bool
    """Whether it asks for one page after the other."""

    @property
    def name(self) -> str:
        """``app.api``."""
        return f"{self.app}.{self.api}"

    @property
    def changes(self) -> bool:
        """Whether it changes something in an app the task can be about."""
        return self.app not in SUPPORT_APPS and READING.search(self.api) is None

    @property
    def about_data(self) -> bool:
        """Whether it is a call to an app the task can be about, other than logging in."""
        return self.app not in SUPPORT_APPS and self.api != "login"

    @property
    def subject(self) -> Value:
        """Everything it acts upon: its arguments but the token, and what it is repeated over."""
        value = self.iterated
        for name, argument in self.arguments.items():
            if name != "access_token":
                value |= argument
        return replace(value, tests=value.tests | self.tests)


@dataclass(frozen=True, slots=True)
class Test:
    """One condition: a comparison of two values."""

    step: int
    operator: str
    """``<``, ``<=``, ``>``, ``>=``, ``==``, ``!=``, ``in``, ``not in``, ``endswith``, ``startswith``."""
    left: Value
    right: Value
    left_source: str
    right_source: str

    @property
    def source(self) -> str:
        """The condition as code."""
        return f"{self.left_source} {self.operator} {self.right_source}"


@dataclass(frozen=True, slots=True)
class Shown:
    """One printed value."""

    step: int
    value: Value
    source: str
    text: str | None
    """What the output says it was; None where that cannot be told."""


@dataclass(slots=True)
class Trace:
    """Everything that is known of a run."""

    steps: tuple[Step, ...]
    calls: list[Call] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    assigned_in: dict[str, int] = field(default_factory=dict)
    last_data: tuple[int, Value] | None = None
    """The step and value of the last assignment or print that depends on some app's data."""
    failed: dict[int, str] = field(default_factory=dict)
    """Step -> the error's last visible line."""
    unparsable: set[int] = field(default_factory=set)
    operated_in: dict[str, set[int]] = field(default_factory=dict)
    """Operation -> the steps it was applied in."""

    def depends(self, value: Value) -> Key:
        """Calls that ``value`` depends on, those behind its conditions included."""
        found: set[int] = set(value.calls)
        for index in self.all_tests(value):
            found |= self.tests[index].left.calls | self.tests[index].right.calls
        todo = list(found)
        while todo:
            call = self.calls[todo.pop()]
            new = set(call.subject.calls) - found
            found |= new
            todo += new
        return frozenset(found)

    def all_tests(self, value: Value) -> Key:
        """Conditions on ``value``, and those on what it is computed from or compared with."""
        found: set[int] = set()
        todo = set(value.tests)
        calls = set(value.calls)
        seen: set[int] = set()
        while todo or calls:
            if todo:
                index = todo.pop()
                found.add(index)
                test = self.tests[index]
                todo |= (test.left.tests | test.right.tests) - found
                calls |= (test.left.calls | test.right.calls) - seen
            else:
                number = calls.pop()
                seen.add(number)
                subject = self.calls[number].subject
                todo |= subject.tests - found
                calls |= subject.calls - seen
        return frozenset(found)


def number_in(text: str | None) -> int | None:
    """The number that a text is; None for any other text, and for a number too long to be one of ours.

    >>> number_in("17"), number_in("\u00b2"), number_in("9" * 5000)
    (17, None, None)
    """
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


def failure(output: str | None) -> str | None:
    """The last visible line of an error in a step's output, or None.

    >>> failure("17")
    >>> failure("Execution failed. Traceback:\\n ...\\nKeyError: 'x'")
    "KeyError: 'x'"
    """
    if output is None or not _FAILED.search(output):
        return None
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("[output cut")]
    named = [line for line in lines if re.match(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Iteration)\b", line)]
    return (named or lines)[-1][:160]
