"""A rule judge with known error rates: how wrong may a judge be before training with it stops working?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from draco_ray.judging.phases import Credit, Proposals, Score, Stage1, Stage2, Verdicts
from draco_ray.judging.reply import ENTRIES_KEY, TAG
from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.reading import JudgePrompt, Run, format_reply, read_prompt

Answer = Callable[[str], tuple[str | None, str]]
"""A prompt -> its phase (None: not a judge's prompt) and the reply."""
ANSWER_FUNCTIONS = {"sandbox": "draco_ray.sandbox.rule_judge.answering:answer"}
"""Built-in rules by their name in ``judge.rule_judge.use``."""


class Noise(BaseModel):
    """Error rates of a judge, each drawn independently.

    A draw depends on the seed, the criterion and the rollout, not on the call: scoring and credit see the same wrong
    verdict, and a question that is asked again gets the same answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    false_pass: float = Field(0.0, ge=0, le=1)
    """Share of FAIL verdicts that are turned into PASS."""
    false_fail: float = Field(0.0, ge=0, le=1)
    """Share of PASS verdicts that are turned into FAIL."""
    wrong_step: float = Field(0.0, ge=0, le=1)
    """Share of the cited steps that are replaced by another step of the rollout."""
    missed_criterion: float = Field(0.0, ge=0, le=1)
    """Share of the criteria of stage 1 and stage 2 that are left out."""
    seed: int = 0

    def blur(self, answer: Answer) -> Answer:
        """``answer`` with this noise in its replies; replies to prompts that are not a judge's are unchanged."""

        def noisy(prompt: str) -> tuple[str | None, str]:
            phase, text = answer(prompt)
            read = read_prompt(prompt) if phase is not None else None
            if read is None:
                return phase, text
            said = json.loads(text)
            return phase, format_reply(self._blurred(read, said[ENTRIES_KEY]), said.get(TAG, ""))

        rates = (self.false_pass, self.false_fail, self.wrong_step, self.missed_criterion)
        return noisy if any(rates) else answer

    def _blurred(self, read: JudgePrompt, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        about = _fingerprint(read.runs[0]) if read.runs else read.task
        if read.phase in (Stage1.name, Stage2.name, Proposals.name):
            kept = [entry for entry in entries if self._draw("missed", about, entry["title"]) >= self.missed_criterion]
            # Stage 1 must propose at least one criterion.
            return kept or entries[:1] if read.phase == Stage1.name else kept
        titles = {rubric.index: rubric.title for rubric in read.rubrics}
        for entry in entries:
            title = titles.get(entry.get("rubric_index", -1), "")
            if read.phase in (Score.name, Verdicts.name):
                entry["score"] = int(self._verdict(Verdict(entry["score"]), about, entry["rubric_title"]))
            elif read.phase == Credit.name:
                entry["verdict"] = self._verdict(Verdict[entry["verdict"]], about, title).name
            if read.phase in (Verdicts.name, Credit.name):
                cited = entry["relevant_steps"]
                others = [step.number for step in read.runs[0].steps if step.number not in cited]
                entry["relevant_steps"] = sorted({self._step(step, others, about, title) for step in cited})
        return entries

    def _verdict(self, verdict: Verdict, about: str, title: str) -> Verdict:
        share = {Verdict.FAIL: self.false_pass, Verdict.PASS: self.false_fail}.get(verdict, 0.0)
        return Verdict(-verdict) if self._draw("verdict", about, title) < share else verdict

    def _step(self, step: int, others: list[int], about: str, title: str) -> int:
        if others and self._draw("step", about, title, step) < self.wrong_step:
            return others[int(self._draw("other", about, title, step) * len(others))]
        return step

    def _draw(self, *words: object) -> float:
        """Uniform in [0, 1), the same for the same words."""
        digest = hashlib.sha256("\n".join(map(str, (self.seed, *words))).encode()).digest()
        return int.from_bytes(digest[:7]) / 2**56


def _fingerprint(run: Run) -> str:
    """A digest of what a rollout did, independent of how a prompt delimits it."""
    parts = [part for step in run.steps for part in (step.code, step.output or "")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
