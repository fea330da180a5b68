"""How often a judge contradicts itself: a sample of its justifications is read again without their scores.

One more call for some rollouts (``judge.second_look``) asks which verdict the notes of each criterion argue for. The
result is a rate in the metrics and the report; no verdict is changed by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from draco_ray.config.load import project_file
from draco_ray.judging.completion import Request
from draco_ray.judging.escaping import json_text
from draco_ray.judging.reply import RubricEntry, align, read_entries
from draco_ray.judging.structured import reply_schema, with_tag
from draco_ray.records import Criterion, Message, ScoredCriterion

NAME = "second_look"
"""Of these calls in the archive and in cost tables."""
PROMPT = Path("prompts/second_look.txt")


class LookEntry(RubricEntry):
    """The verdict that a criterion's notes argue for."""

    decides = ("verdict",)
    verdict: Literal["PASS", "FAIL", "NOT_APPLICABLE", "UNCLEAR"]


def sampled(share: float, group: str, rollout: int | None) -> bool:
    """Whether a rollout belongs to the sample: the same again for the same rollout.

    Args:
        share: of all rollouts, 0 .. 1.
        group: the rollout's.
        rollout: its number in there.
    """
    digest = hashlib.blake2b(f"{group}/{rollout}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") < share * 2**56


def request(rubric: Sequence[Criterion], scores: Sequence[ScoredCriterion], group: str) -> Request:
    """What is asked about the notes on a rubric, one score a criterion."""
    template = project_file(PROMPT).read_text(encoding="utf-8")
    notes = [
        {
            "rubric_index": index,
            "rubric_title": criterion.title,
            "evaluator_instruction": criterion.evaluator_instruction,
            "evidence": score.evidence,
            "justification": score.justification,
        }
        for index, (criterion, score) in enumerate(zip(rubric, scores, strict=True))
    ]
    prompt = with_tag(template.replace("{{ notes }}", json_text(notes)))
    schema = reply_schema(LookEntry, template, least=len(rubric), most=len(rubric))
    return Request(messages=(Message(role="user", content=prompt),), schema=schema, phase=NAME, group=group)


def contradictions(text: str, rubric: Sequence[Criterion], scores: Sequence[ScoredCriterion]) -> int:
    """The number of scores whose own notes argue for another verdict; unclear notes contradict nothing.

    Raises:
        ReplyError: not exactly one entry per criterion.
    """
    entries, _ = align(read_entries(text, LookEntry, len(rubric), last=True).value, rubric)
    return sum(
        entry.verdict not in ("UNCLEAR", score.verdict.name) for entry, score in zip(entries, scores, strict=True)
    )
