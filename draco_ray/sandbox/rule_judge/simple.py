"""A rule judge of your own in a few lines: give criteria with a check each, and it answers the prompts of all phases.

It stands in for a judge model when you try an environment without one. Name it in ``judge.rule_judge.use``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import Finding, named_or_last
from draco_ray.sandbox.rule_judge.phases import RuleJudge
from draco_ray.sandbox.rule_judge.reading import Run, Step


class Steps(tuple[Step, ...]):
    """The steps of a run, messages included; ``ended`` is why the run ended, such as ``finished`` or ``turn_limit``."""

    ended: str = ""


Check = Callable[[str, Steps], tuple[Verdict, Sequence[int]]]
"""(the task's text, the steps of a run) -> verdict, and the numbers of the responsible steps. A pass or a fail without
numbers cites the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleRule:
    """A criterion, and your function that checks it."""

    title: str
    instruction: str
    """Evaluator instruction of the criterion."""
    check: Check
    discovered = False

    def applies(self, task: str) -> bool:
        """Always true: stage1 proposes the rule for every task."""
        return True

    def criterion(self, task: str) -> dict[str, str]:
        """The criterion, equal for every task."""
        return {"title": self.title, "description": self.instruction, "evaluator_instruction": self.instruction}

    def judge(self, run: Run, task: str) -> Finding:
        """The verdict of the check; a run without steps fails."""
        shown = Steps(run.steps)
        shown.ended = run.ended
        verdict, steps = self.check(task, shown) if run.steps else (Verdict.FAIL, ())
        last = () if verdict is Verdict.NOT_APPLICABLE else named_or_last(run.steps, ())
        return Finding(verdict, tuple(steps) or last, "The rule's check says so.")


def rule_judge(rules: Sequence[SimpleRule]) -> RuleJudge:
    """A judge that proposes every rule, keeps those that some run fails, and verifies runs by the checks.

    Returns: the function that answers a judge's prompt, for ``judge.rule_judge.use``.
    """
    by_title = {rule.title: rule for rule in rules}
    return RuleJudge(rules, lambda rubric: by_title.get(rubric.title))
