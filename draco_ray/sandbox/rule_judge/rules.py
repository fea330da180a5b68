"""All rules, each with its criterion (``rules.yaml``), its check, and the tasks it is for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from draco_ray.sandbox.rule_judge import checks
from draco_ray.sandbox.rule_judge.case import Case, Finding, case_of
from draco_ray.sandbox.rule_judge.demands import PAGED, RULE_TABLES, Demands, read_demands
from draco_ray.sandbox.rule_judge.reading import PromptCriterion, Run


@dataclass(frozen=True, slots=True)
class Rule:
    """A criterion, and the check that gives its verdict on a run."""

    key: str
    check: Callable[[Case], Finding]
    about: Callable[[Demands], bool] | None
    """Whether stage1 proposes the rule for a task with these demands; None: stage2 proposes it when a run fails it."""
    title: str
    description: str
    evaluator_instruction: str
    words: str

    @property
    def discovered(self) -> bool:
        """Whether stage2 proposes the rule; such a rule's verdict does not depend on the task's text."""
        return self.about is None

    def applies(self, task: str) -> bool:
        """Whether stage1 proposes the rule for a task."""
        return self.about is not None and self.about(read_demands(task))

    def judge(self, run: Run, task: str) -> Finding:
        """The verdict on a run."""
        return self.check(case_of(run, task))

    def criterion(self, task: str) -> dict[str, str]:
        """The rule's criterion for a task, in the prompts' format; if ``task`` is empty, one that fits any task."""
        demands = read_demands(task)
        instruction = self.evaluator_instruction.format(
            lists=" and ".join(entry.name for entry in demands.lists) or "the list the task names",
            conditions="; ".join(demands.conditions) or "what the task says",
            actions="; ".join(action.name for action in demands.actions) or "the change the task asks for",
        )
        return {"title": self.title, "description": self.description, "evaluator_instruction": instruction}


_CHECKS: dict[str, tuple[Callable[[Case], Finding], Callable[[Demands], bool] | None]] = {
    "outcome": (checks.judge_outcome, lambda demands: True),
    "source": (checks.judge_source, lambda demands: bool(demands.lists)),
    "pages": (checks.judge_pages, lambda demands: any(PAGED & set(entry.apis) for entry in demands.lists)),
    "selection": (checks.judge_selection, lambda demands: bool(demands.conditions or demands.lists)),
    "actions": (checks.judge_actions, lambda demands: not demands.question),
    "completion": (checks.judge_completion, lambda demands: True),
    "errors": (checks.judge_errors, None),
    "secrets": (checks.judge_secrets, None),
    "stop": (checks.judge_stop, None),
}
RULES = tuple(Rule(key, *_CHECKS[key], **criterion) for key, criterion in RULE_TABLES["criteria"].items())
"""The rules, the one with the strongest signal first."""
_BY_TITLE = {rule.title.casefold(): rule for rule in RULES}


@lru_cache(maxsize=4096)
def find_rule(rubric: PromptCriterion) -> Rule | None:
    """The rule for any criterion: by title if the title is one of ours, else the rule with the most matching words.

    A matching word in the title counts 4 points, in the description 2, in the instruction 1. None below 2 points.
    """
    if own := _BY_TITLE.get(rubric.title.strip().casefold()):
        return own

    def points(rule: Rule) -> int:
        def hits(text: str) -> int:
            return len({match.group().casefold() for match in re.finditer(rule.words, text, re.IGNORECASE)})

        return 4 * hits(rubric.title) + 2 * hits(rubric.description) + hits(rubric.instruction)

    best = max(RULES, key=points)
    return best if points(best) >= 2 else None
