"""The five phases (and the comparison of criteria): a prompt in, the reply it asks for out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draco_ray.judging.phases.credit import Credit
from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.phases.union import Union
from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import Case, Finding, not_applicable
from draco_ray.sandbox.rule_judge.catalogue import RULES, Rule, discoveries, proposals
from draco_ray.sandbox.rule_judge.demands import read_demands
from draco_ray.sandbox.rule_judge.matching import find_rule
from draco_ray.sandbox.rule_judge.pairing import answer_pairing
from draco_ray.sandbox.rule_judge.reading import TASK_MARK, JudgePrompt, Rubric, read_prompt, reply
from draco_ray.sandbox.rule_judge.traces import number_in

MOST_PROPOSED = 15
MOST_ADDED = 10
MOST_MERGED = 24
"""The prompts' limits."""
_UNKNOWN = "No rule of this judge covers this criterion."


def answer(prompt: str) -> tuple[str | None, str]:
    """The phase of a prompt and the reply to it; no phase for a comparison of criteria, nor for any other (``OK``)."""
    read = read_prompt(prompt)
    if read is None:
        return None, answer_pairing(prompt) or "OK"
    entries = {
        Stage1.name: _propose,
        Stage2.name: _add,
        Union.name: _merge,
        Score.name: _score,
        Credit.name: _attribute,
    }[read.phase](read)
    return read.phase, reply(entries)


def _propose(prompt: JudgePrompt) -> list[dict[str, Any]]:
    demands = read_demands(prompt.task)
    grounds = {"grounding_references": [f"The task: {prompt.task}"]}
    return [rule.criterion(demands) | grounds for rule in proposals(demands)[:MOST_PROPOSED]]


def _add(prompt: JudgePrompt) -> list[dict[str, Any]]:
    case = Case(prompt.runs[0], prompt.task)
    covered = {rule.key for rubric in prompt.rubrics if (rule := _rule_of(rubric))}
    added = []
    for rule in discoveries():
        if rule.key in covered:
            continue
        finding = rule.judge(case)
        if finding.verdict is Verdict.FAIL:
            evidence = {"trajectory_evidence": _evidence(finding), "grounding_references": [f"The task: {prompt.task}"]}
            added.append(rule.criterion(case.demands) | evidence)
    return added[:MOST_ADDED]


def _merge(prompt: JudgePrompt) -> list[dict[str, Any]]:
    """One criterion a rule, and only if it tells the runs apart: at least one of them fails it.

    Where no runs are shown the drafts come from several tasks: every rule stays, in words that name no task.
    """
    candidates: dict[str, Rubric] = {}
    for rubric in prompt.rubrics:
        rule = _rule_of(rubric)
        if rule is not None and rule.key not in candidates:
            candidates[rule.key] = rubric
    cases = [Case(run, prompt.task) for run in prompt.runs]
    merged = []
    for rule in RULES:
        rubric_of_rule = candidates.get(rule.key)
        if rubric_of_rule is None:
            continue
        if not cases and rule.draft:
            merged.append(rule.criterion(read_demands("")))
            continue
        if cases and not any(rule.judge(case).verdict is Verdict.FAIL for case in cases):
            continue
        merged.append(
            {
                "title": rubric_of_rule.title,
                "description": rubric_of_rule.description,
                "evaluator_instruction": rubric_of_rule.instruction,
            }
        )
    return merged[:MOST_MERGED]


def _score(prompt: JudgePrompt) -> list[dict[str, Any]]:
    case = Case(prompt.runs[0], prompt.task)
    entries = []
    for rubric in prompt.rubrics:
        rule = _rule_of(rubric)
        finding = not_applicable(_UNKNOWN) if rule is None else rule.judge(case)
        entries.append(
            {
                "rubric_index": rubric.index,
                "rubric_title": rubric.title,
                "evidence": _evidence(finding),
                "justification": finding.because,
                "score": int(finding.verdict),
            }
        )
    return entries


def _attribute(prompt: JudgePrompt) -> list[dict[str, Any]]:
    """The rule's own verdict and steps where it can be applied again, else the grader's, on the steps it noted."""
    run = prompt.runs[0]
    cases: dict[str, Case] = {}
    entries = []
    for rubric in prompt.rubrics:
        rule = _rule_of(rubric)
        task = prompt.task or rubric.instruction.partition(TASK_MARK)[2]
        finding = None
        if rule is not None and (task or not rule.needs_task):
            if task not in cases:
                cases[task] = Case(run, task)
            finding = rule.judge(cases[task])
        if finding is None:
            finding = _noted(rubric, [step.number for step in run.steps])
        entries.append(
            {
                "rubric_index": rubric.index,
                "rubric_title": rubric.title,
                "explanation": finding.because,
                "relevant_steps": list(finding.steps),
                "verdict": finding.verdict.name,
            }
        )
    return entries


def _noted(rubric: Rubric, steps: Sequence[int]) -> Finding:
    """What the scoring call wrote down."""
    verdict = Verdict[rubric.verdict] if rubric.verdict in Verdict.__members__ else Verdict.NOT_APPLICABLE
    if verdict is Verdict.NOT_APPLICABLE:
        return not_applicable(_UNKNOWN)
    named = [number for word in rubric.evidence.replace(",", " ").split() if (number := number_in(word)) is not None]
    cited = tuple(sorted(set(named) & set(steps))) or tuple(steps[-1:])
    return Finding(verdict, cited, "These are the steps that the grader's evidence names.")


def _rule_of(rubric: Rubric) -> Rule | None:
    return find_rule(rubric.title, rubric.description, rubric.instruction)


def _evidence(finding: Finding) -> str:
    if not finding.steps:
        return "No step bears on it."
    return f"Step{'s' if len(finding.steps) > 1 else ''} {', '.join(map(str, finding.steps))}"
