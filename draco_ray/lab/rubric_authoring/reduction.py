"""Reduce one set of criteria per task to one set for all tasks: choice of the sets to merge, and the judge's prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draco_ray.config.load import project_file
from draco_ray.judging import render
from draco_ray.judging.phases import Union
from draco_ray.judging.prompts import Prompts
from draco_ray.records import Criterion, Message

PROMPT_FILE = Path("prompts/reduce_rubrics.txt")
_PLACEHOLDER = re.compile(r"\{\{ (tasks|candidate_rubrics|environment_facts) \}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionSet:
    """Criteria, and the tasks they were written for."""

    name: str
    """The task's id, or ``reduction<level>.<number>``."""
    prompts: tuple[tuple[Message, ...], ...]
    """The agent's prompt of each task."""
    criteria: tuple[Criterion, ...]


@dataclass(frozen=True, slots=True)
class Reduction(Union):
    """A union call that merges criteria across tasks: the judge sees no rollouts, only `reduction_prompt`'s text."""

    text: str

    @property
    def identity(self) -> str:
        """The whole prompt, from which the evidence code is derived; it differs between merges."""
        return self.text

    def prompt(self, prompts: Prompts) -> str:
        """The prompt is ``text``; the configured prompt set is not used."""
        return self.text


def merge_batches(sets: Sequence[CriterionSet], max_candidates: int) -> list[list[CriterionSet]]:
    """Split a level of the reduction into merges of neighbouring sets (tasks of one scenario are neighbours).

    A merge has at most ``max_candidates`` criteria, but at least two sets, so that every level reduces their number.
    """
    cut: list[list[CriterionSet]] = []
    for each in sets:
        candidates = sum(len(other.criteria) for other in cut[-1]) if cut else 0
        if cut and (len(cut[-1]) < 2 or candidates + len(each.criteria) <= max_candidates):
            cut[-1].append(each)
        else:
            cut.append([each])
    if len(cut) > 1 and len(cut[-1]) == 1:
        # A merge of a single set would only reword it.
        cut[-2].extend(cut.pop())
    return cut


def candidates(batch: Sequence[CriterionSet]) -> list[Criterion]:
    """The criteria of a merge, each with its set's name as source."""
    return [replace(criterion, source=each.name) for each in batch for criterion in each.criteria]


def reduction_prompt(batch: Sequence[CriterionSet], template: str, facts: str) -> str:
    """The judge's prompt for a merge across tasks.

    Args:
        template: the text of `PROMPT_FILE`.
        facts: facts about the environment.
    """
    prompts = [prompt for each in batch for prompt in each.prompts]
    # No policy wrote the tasks, so the evidence code need not be secret; it must merely not occur in them.
    code = render.evidence_code(b"", repr(prompts))
    tasks = [f"<task>\n{render.task(prompt, code)}\n</task>" for prompt in prompts]
    values = {
        "tasks": "\n\n".join(tasks),
        "candidate_rubrics": render.candidate_rubrics(candidates(batch)),
        "environment_facts": facts,
    }
    # Replace all in one pass, so that a placeholder inside a draft stays text.
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def reduction_template() -> str:
    """The text of `PROMPT_FILE`.

    Raises:
        ConfigError: it is missing.
    """
    return project_file(PROMPT_FILE).read_text(encoding="utf-8")
