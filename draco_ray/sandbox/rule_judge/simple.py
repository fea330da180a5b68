"""A rule judge of one's own in a few lines: criteria with a check each, and the five phases that follow from them.

It stands in for a judge model where an environment is tried without one; `judge.rule_judge.use` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.phases.union import Union
from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import JudgePrompt, Run, Step, read_prompt, reply

Check = Callable[[str, tuple[Step, ...]], tuple[Verdict, Sequence[int]]]
"""(the task's text, the steps of a run) -> verdict, and the numbers of the steps responsible; for a pass or a fail none
stands for the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleRule:
    """One criterion."""

    title: str
    instruction: str
    """What a judge would be told to look for."""
    check: Check


def rule_judge(rules: Sequence[SimpleRule]) -> Callable[[str], tuple[str | None, str]]:
    """A judge that proposes every rule, keeps those that some run fails, and verifies runs by the checks.

    Returns: what answers a judge's prompt, for ``judge.rule_judge.use``.
    """
    by_title = {rule.title: rule for rule in rules}

    def answer(prompt: str) -> tuple[str | None, str]:
        read = read_prompt(prompt)
        if read is None:
            return None, "OK"
        return read.phase, reply(_entries(read, by_title))

    return answer


def _entries(read: JudgePrompt, rules: dict[str, SimpleRule]) -> list[dict[str, Any]]:
    known = [(rubric, rules[rubric.title]) for rubric in read.rubrics if rubric.title in rules]
    if read.phase == Stage1.name:
        return [_criterion(rule) for rule in rules.values()]
    if read.phase == Stage2.name:
        return []
    if read.phase == Union.name:
        proposed = {rule.title: rule for _, rule in known}
        return [
            _criterion(rule)
            for rule in proposed.values()
            # A merge across tasks shows no run: of each task some run has failed what is left.
            if not read.runs or any(_judged(rule, read.task, run)[0] is Verdict.FAIL for run in read.runs)
        ]
    entries = []
    for rubric in read.rubrics:
        rule = rules.get(rubric.title)
        verdict, steps = (
            (Verdict.NOT_APPLICABLE, ()) if rule is None else _judged(rule, read.task or rubric.evidence, read.runs[0])
        )
        entry: dict[str, Any] = {"rubric_index": rubric.index, "rubric_title": rubric.title}
        if read.phase == Score.name:
            # The credit prompt shows no task: the checks find it in what the scoring call noted.
            entry |= {"evidence": read.task, "justification": f"steps {list(steps)}", "score": int(verdict)}
        else:
            entry |= {"explanation": "the rule's check", "relevant_steps": list(steps), "verdict": verdict.name}
        entries.append(entry)
    return entries


def _judged(rule: SimpleRule, task: str, run: Run) -> tuple[Verdict, tuple[int, ...]]:
    if not run.steps:
        return Verdict.FAIL, ()
    verdict, steps = rule.check(task, run.steps)
    if verdict is not Verdict.NOT_APPLICABLE and not steps:
        steps = [run.steps[-1].number]
    return verdict, tuple(steps)


def _criterion(rule: SimpleRule) -> dict[str, Any]:
    return {"title": rule.title, "description": rule.instruction, "evaluator_instruction": rule.instruction}
