"""One run under one task, and what several rules want to know of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.calls import in_code
from draco_ray.sandbox.rule_judge.demands import Demands, read_demands
from draco_ray.sandbox.rule_judge.reading import Run
from draco_ray.sandbox.rule_judge.traces import EMPTY, Call, Test, Value
from draco_ray.sandbox.rule_judge.tracing import trace
from draco_ray.sandbox.rule_judge.vocabulary import ActionWords

EVERY = re.compile(r"\b(?:all|every|each|any|those|others)\b", re.IGNORECASE)
"""Words by which a task means more than one thing."""
EMPTY_TEXTS = frozenset({"0", "[]", "{}", "set()", "None", "''", '""', ""})
"""How nothing looks when it is printed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule says of a run."""

    verdict: Verdict
    steps: tuple[int, ...]
    """1-based steps that decided it."""
    because: str
    """One sentence; for a fail also what should have been done."""


class Case:
    """One run under one task, and what several rules want to know of it."""

    def __init__(self, run: Run, task: str) -> None:
        self.run = in_code(run)
        self.demands: Demands = read_demands(task)
        self.trace = trace(self.run, task)

    @cached_property
    def changes(self) -> list[Call]:
        """Calls that changed something."""
        return [call for call in self.trace.calls if call.changes and not call.failed]

    @cached_property
    def completions(self) -> list[Call]:
        """Successful complete_task calls."""
        return [
            call
            for call in self.trace.calls
            if call.app == "supervisor" and call.api == "complete_task" and not call.failed
        ]

    @cached_property
    def result(self) -> Value:
        """What the run worked out: its answer, or what it changed; failing that, the last data it had in hand."""
        if self.demands.question:
            answer = self.answer
            if answer.calls:
                return answer
        else:
            demanded = [call for call in self.changes if self.demanded(call)]
            value = EMPTY
            for call in demanded or self.changes:
                value |= self.grounded(call.subject, call.step)
            if value.calls or value.tests:
                return value
        return self.trace.last_data[1] if self.trace.last_data else EMPTY

    @cached_property
    def answer(self) -> Value:
        """The answer handed in, traced back to what was printed if it was typed in."""
        if not self.completions:
            return EMPTY
        # A later call replaces an earlier one.
        call = self.completions[-1]
        return self.grounded(call.arguments.get("answer", call.arguments.get("#0", EMPTY)), call.step)

    @cached_property
    def result_step(self) -> int:
        """The step in which the result came about."""
        demanded = [call.step for call in self.changes if self.demanded(call)]
        if not self.demands.question and demanded:
            return demanded[0]
        return self.trace.last_data[0] if self.trace.last_data else self.last_step

    @cached_property
    def sources(self) -> list[Call]:
        """Calls that the result was computed from."""
        return [self.trace.calls[index] for index in sorted(self.trace.depends(self.result))]

    @cached_property
    def conditions(self) -> list[Test]:
        """Conditions behind the result."""
        return [self.trace.tests[index] for index in sorted(self.trace.all_tests(self.result))]

    @cached_property
    def data_calls(self) -> frozenset[int]:
        """Indices of the calls that returned some app's data."""
        return frozenset(index for index, call in enumerate(self.trace.calls) if call.about_data)

    @property
    def last_step(self) -> int:
        """The last step, 0 in a run without any."""
        return self.run.steps[-1].number if self.run.steps else 0

    def grounded(self, value: Value, step: int) -> Value:
        """``value``, joined with what was printed before if it repeats that as a literal."""
        if value.calls or value.text is None or value.from_task or value.text in EMPTY_TEXTS:
            return value
        for shown in reversed(self.trace.shown):
            if shown.step < step and shown.value.calls and value.text in (self.output(shown.step) or ""):
                return shown.value
        return value

    def output(self, step: int) -> str | None:
        """What a step printed."""
        return next((found.output for found in self.run.steps if found.number == step), None)

    def demanded(self, call: Call) -> bool:
        """Whether the task asks for this change."""
        return any(does(action, call) for action in self.demands.actions)

    def steps(self, *numbers: int | Iterable[int]) -> tuple[int, ...]:
        """Citable steps: within the run, ascending, each once."""
        flat: set[int] = set()
        for number in numbers:
            flat |= {number} if isinstance(number, int) else set(number)
        valid = {step.number for step in self.run.steps}
        return tuple(sorted(flat & valid))

    def omission(self, *words: str) -> tuple[int, ...]:
        """Where something that never happened should have: a failed try, else the first error, else before the end."""
        failed = [step for step in self.run.steps if step.number in self.trace.failed]
        for step in failed:
            if any(word in step.code for word in words):
                return (step.number,)
        if failed:
            return (failed[0].number,)
        if self.completions:
            return (self.completions[0].step,)
        return self.steps(self.last_step)

    def passed(self, because: str, *steps: int | Iterable[int]) -> Finding:
        """A pass."""
        return Finding(Verdict.PASS, self.steps(*steps) or self.steps(self.last_step), because)

    def failed(self, because: str, *steps: int | Iterable[int]) -> Finding:
        """A fail."""
        return Finding(Verdict.FAIL, self.steps(*steps) or self.steps(self.last_step), because)


def not_applicable(because: str) -> Finding:
    """Neither."""
    return Finding(Verdict.NOT_APPLICABLE, (), because)


def does(action: ActionWords, call: Call) -> bool:
    """Whether a call makes the change."""
    return action.apis.search(call.api) is not None and all(
        (value := call.arguments.get(name)) is not None and value.text in {str(wanted), None}
        for name, wanted in action.settings
    )


def bare_code(code: str) -> str:
    """Code without its comment lines."""
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#")).strip()
