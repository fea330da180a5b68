"""The judge's phases, and the comparison of two judges' criteria, for any set of rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from draco_ray.judging.phases import Credit, Proposals, Stage1, Stage2, Union, Verdicts
from draco_ray.judging.reply import tag_of
from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import Finding, first_failure, named_or_last, not_applicable
from draco_ray.sandbox.rule_judge.reading import (
    JudgePrompt,
    PromptCriterion,
    Run,
    format_reply,
    read_pairing,
    read_prompt,
)

Entries = list[dict[str, Any]]


class Rule(Protocol):
    """A criterion and its check."""

    @property
    def discovered(self) -> bool:
        """Whether stage2 proposes the rule when a run fails it; such a rule's verdict does not depend on the task."""

    def applies(self, task: str) -> bool:
        """Whether stage1 proposes the rule for a task."""

    def criterion(self, task: str) -> dict[str, str]:
        """Title, description and instruction for a task; if ``task`` is empty, in words that fit any task."""

    def judge(self, run: Run, task: str) -> Finding:
        """The verdict on a run."""


class RuleJudge:
    """Answers a judge's prompts by rules."""

    def __init__(self, rules: Sequence[Rule], find: Callable[[PromptCriterion], Rule | None]) -> None:
        """``rules``: the one with the strongest signal first; ``find`` returns the rule for a criterion."""
        self._rules, self._find = rules, find

    def __call__(self, prompt: str) -> tuple[str | None, str]:
        """The phase of a prompt, and the reply.

        The phase is None for a comparison of criteria, and for any other text, which is answered with ``OK``.
        """
        read = read_prompt(prompt)
        if read is None:
            lists = read_pairing(prompt)
            return None, "OK" if lists is None else format_reply(self._pair(*lists))
        phases = {
            Stage1.name: self._propose,
            Stage2.name: self._add,
            Proposals.name: self._add,
            Union.name: self._merge,
        }
        return read.phase, format_reply(phases.get(read.phase, self._verify)(read), tag_of(prompt))

    def _propose(self, prompt: JudgePrompt) -> Entries:
        grounds = {"grounding_references": [f"The task: {prompt.task}"]}
        return [rule.criterion(prompt.task) | grounds for rule in self._rules if rule.applies(prompt.task)]

    def _add(self, prompt: JudgePrompt) -> Entries:
        covered = [self._find(rubric) for rubric in prompt.rubrics]
        added: Entries = []
        for rule in self._rules:
            wanted = rule.discovered and rule not in covered
            if wanted and (finding := first_failure([rule.judge(run, prompt.task) for run in prompt.runs])):
                grounds = {"grounding_references": [f"The task: {prompt.task}"]}
                added.append(rule.criterion(prompt.task) | {"trajectory_evidence": _evidence(finding)} | grounds)
        return added

    def _merge(self, prompt: JudgePrompt) -> Entries:
        """The reply to a union prompt: the first candidate of each rule that at least one of the runs fails.

        A prompt without runs asks to merge the criteria of several tasks. Its reply has a criterion for every rule that
        has a candidate, in words that fit any task.
        """
        candidates: dict[Rule | None, PromptCriterion] = {}
        for rubric in prompt.rubrics:
            candidates.setdefault(self._find(rubric), rubric)
        kept = [rule for rule in self._rules if rule in candidates]
        if not prompt.runs:
            return [rule.criterion("") for rule in kept]
        failed = [rule for rule in kept if first_failure(rule.judge(run, prompt.task) for run in prompt.runs)]
        return [
            {"title": rubric.title, "description": rubric.description, "evaluator_instruction": rubric.instruction}
            for rubric in map(candidates.__getitem__, failed)
        ]

    def _verify(self, prompt: JudgePrompt) -> Entries:
        """The reply to a score, verdicts or credit prompt.

        The verdict on each criterion is that of its rule; if there is no usable rule, the prompt's scoring verdict.
        """
        run, entries = prompt.runs[0], Entries()
        for rubric in prompt.rubrics:
            rule = self._find(rubric)
            usable = rule is not None and (rule.discovered or prompt.task)
            finding = rule.judge(run, prompt.task) if rule and usable else _noted(rubric, run)
            steps, because = {"relevant_steps": list(finding.steps)}, finding.because
            fields = {"evidence": _evidence(finding), "justification": because, "score": int(finding.verdict)}
            if prompt.phase == Credit.name:
                fields = {"explanation": because, **steps, "verdict": finding.verdict.name}
            elif prompt.phase == Verdicts.name:
                fields |= steps
            entries.append({"rubric_index": rubric.index, "rubric_title": rubric.title, **fields})
        return entries

    def _pair(self, first: tuple[PromptCriterion, ...], second: tuple[PromptCriterion, ...]) -> Entries:
        """Pairs of criteria that are the same check: first those with equal titles, then those with the same rule."""
        pairs: Entries = []
        for key_of in (lambda rubric: re.findall(r"\w+", rubric.title.casefold()), self._find):
            for rubric in first:
                if any(pair["first"] == rubric.index for pair in pairs) or not (key := key_of(rubric)):
                    continue
                free = [each for each in second if all(pair["second"] != each.index for pair in pairs)]
                if partner := next((each for each in free if key_of(each) == key), None):
                    pairs.append({"shared_check": rubric.title, "first": rubric.index, "second": partner.index})
        return sorted(pairs, key=lambda pair: int(pair["first"]))


def _noted(rubric: PromptCriterion, run: Run) -> Finding:
    """The scoring verdict in the prompt, citing the steps that its evidence names; not applicable if there is none."""
    if rubric.verdict not in (Verdict.PASS.name, Verdict.FAIL.name):
        return not_applicable("No rule of this judge covers this criterion.")
    named = {int(number) for number in re.findall(r"\b\d{1,6}\b", rubric.evidence)}
    because = "These are the steps that the grader's evidence names."
    return Finding(Verdict[rubric.verdict], named_or_last(run.steps, named), because)


def _evidence(finding: Finding) -> str:
    return f"Steps {', '.join(map(str, finding.steps))}" if finding.steps else "No step bears on it."
