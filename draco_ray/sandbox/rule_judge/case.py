"""A run of a task, with the derived facts that several rules use."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from draco_ray.records import Verdict
from draco_ray.sandbox.function_calls import calls_as_code
from draco_ray.sandbox.rule_judge.demands import Action, read_demands
from draco_ray.sandbox.rule_judge.reading import Run, Step
from draco_ray.sandbox.rule_judge.trace import EMPTY_VALUE, ApiCall, CodeTrace, Selection, Value, merge_values

Steps = int | Iterable[int]


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict of a rule on a run."""

    verdict: Verdict
    steps: tuple[int, ...]
    """1-based numbers of the steps that decided the verdict."""
    because: str
    """One sentence; for a fail also what should have been done."""


class Case:
    """A run and its task, with the facts derived from both that several rules use."""

    def __init__(self, run: Run, task: str) -> None:
        self.run = calls_as_code(run)
        self._citable = self.run.steps or run.steps
        """The steps that a finding may cite: the actions, or the messages of a run without actions."""
        self.demands = read_demands(task)
        self.trace = CodeTrace(self.run.steps, task)
        done = [call for call in self.trace.calls if not call.failed]
        self.changes = [call for call in done if call.changes]
        """Calls that changed something."""
        self.demanded = [
            call for call in self.changes if any(makes_change(each, call) for each in self.demands.actions)
        ]
        """Changes that the task asks for."""
        self.completions = [call for call in done if call.name == "supervisor.complete_task"]
        self.last_step = run.steps[-1].number if run.steps else 0

    @cached_property
    def answer(self) -> Value:
        """The answer of the last complete_task call."""
        arguments = self.completions[-1].arguments if self.completions else {}
        return arguments.get("answer", arguments.get("#0", EMPTY_VALUE))

    @cached_property
    def result(self) -> Value:
        """The run's result: its answer, else its changes, else the last value it assigned or printed."""
        changed = merge_values(each.subject for each in self.demanded or self.changes)
        value = self.answer if self.demands.question else changed
        return value if value.calls else self.trace.last_data[1]

    @property
    def result_step(self) -> int:
        """The step that produced the result."""
        return self.demanded[0].step if self.demanded else self.trace.last_data[0] or self.last_step

    @cached_property
    def sources(self) -> list[ApiCall]:
        """Calls that the result was computed from."""
        return [self.trace.calls[index] for index in sorted(self.result.calls)]

    @cached_property
    def conditions(self) -> list[Selection]:
        """The selecting operations that the result depends on."""
        return [self.trace.tests[index] for index in sorted(self.result.tests)]

    def omission(self, *words: str) -> tuple[int, ...]:
        """The step to blame for what is missing: the first failed step whose code has one of ``words``, else the first
        failed step, else the completion, else the last step."""
        failed = [step for step in self.run.steps if step.number in self.trace.failed]
        tried = [step for step in failed if any(word in step.code for word in words)]
        steps = [*(step.number for step in tried or failed), *(call.step for call in self.completions)]
        return (steps[0] if steps else self.last_step,)

    def passed(self, because: str, *steps: Steps) -> Finding:
        """A pass; without ``steps`` it cites the last step."""
        return Finding(Verdict.PASS, self._cited(steps), because)

    def failed(self, because: str, *steps: Steps) -> Finding:
        """A fail; without ``steps`` it cites the last step."""
        return Finding(Verdict.FAIL, self._cited(steps), because)

    def _cited(self, steps: Iterable[Steps]) -> tuple[int, ...]:
        named = {number for each in steps for number in ([each] if isinstance(each, int) else each)}
        return named_or_last(self._citable, named)


case_of = lru_cache(maxsize=64)(Case)
"""The case of a run and its task, cached so that all rules share it."""


def first_failure(findings: Iterable[Finding]) -> Finding | None:
    """The first fail among the findings; None if there is none."""
    return next((finding for finding in findings if finding.verdict is Verdict.FAIL), None)


def named_or_last(steps: Sequence[Step], named: Container[int]) -> tuple[int, ...]:
    """The numbers of the steps that are ``named``; if there are none, the number of the last step."""
    numbers = [step.number for step in steps]
    return tuple(number for number in numbers if number in named) or tuple(numbers[-1:])


def not_applicable(because: str) -> Finding:
    """A verdict of not applicable, which cites no step."""
    return Finding(Verdict.NOT_APPLICABLE, (), because)


def makes_change(action: Action, call: ApiCall) -> bool:
    """Whether a call makes the change that ``action`` describes."""
    if not re.fullmatch(action.apis, call.api):
        return False
    name, wanted = action.setting or ("", "")
    return not name or (name in call.arguments and call.arguments[name].text in {wanted, None})
