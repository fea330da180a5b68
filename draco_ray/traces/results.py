"""Results of judging a group of traces, as dataclasses and as JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from draco_ray.judging.phases import Credit, Score, Verdicts
from draco_ray.records import Attribution, Criterion, ScoredCriterion, Verdict
from draco_ray.traces.judging import SINGLE, GroupJudgement


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedVerdict:
    """A criterion's verdict on one trace."""

    criterion: int
    """Index into the rubric."""
    title: str
    verdict: str
    """``PASS``, ``FAIL`` or ``NOT_APPLICABLE``, from the scoring call."""
    evidence: str
    justification: str
    counts: bool
    """Whether the criterion survived dropout; true for a single trace. False if the group has no rewards."""
    steps: tuple[int, ...] = ()
    """Numbers, 1-based, of the steps that the credit call holds responsible; empty if it names none or was not made."""
    credited_verdict: str | None = None
    """The credit call's verdict, from which step quality is computed; None if there was no credit call."""
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStep:
    """One step and its share of the advantage."""

    step: int
    """Number of the step, 1-based, as the judge numbers steps."""
    action: str
    tokens: int
    """n_j, the number of tokens of the step: counted in the trace, or estimated from the length of its text."""
    quality: float | None
    """Q_j in [0, 1]; None if no step is cited."""
    advantage: float | None
    """a_j, the advantage of every token of the step; None for a single trace."""
    cited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTrace:
    """One trace of a group."""

    task_id: str
    trace_id: str
    rollout: int
    """Index of the trace in its group."""
    source: str
    format: str
    pass_share: float | None
    """passes / (passes + fails) over all criteria; None if the trace was not scored or no criterion applies."""
    reward: float | None
    """R_i in [-1, 1], for training: counts only criteria that some trace of the group failed. None if the trace could
    not be scored."""
    advantage: float | None
    """A_i; None for a single trace, or without a reward."""
    verdicts: tuple[JudgedVerdict, ...]
    steps: tuple[JudgedStep, ...]
    error: str | None = None
    """Why there is no reward."""
    notes: tuple[str, ...] = ()
    left_out: int = 0
    """Characters of the trace that were truncated in the judge's prompt."""
    tokens_counted: bool = False
    """Whether the steps' token counts come from the trace; otherwise they are estimates."""
    fallback: str = ""
    """Why the advantage is spread evenly over the steps (`draco_ray.records.CreditFallback`); ``none`` if it is not."""
    outcome: float | None = None
    """A score in the trace itself, never shown to a judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """The traces of one task, judged together."""

    task_id: str
    rubric: tuple[Criterion, ...]
    survived: tuple[bool, ...]
    """For each criterion, whether it survived dropout, so that it counts; all do in a group of one trace. Empty if the
    group has no rewards."""
    rollouts: tuple[JudgedTrace, ...]
    dollars: float
    error: str | None = None
    """Why the group has no rewards."""
    notes: tuple[str, ...] = ()


GROUP_ADAPTER = TypeAdapter(JudgedGroup)


def judged_group(state: GroupJudgement) -> JudgedGroup:
    """Convert a finished `GroupJudgement` to a `JudgedGroup`."""
    survived = () if state.advantages is None else tuple(map(bool, state.advantages.surviving_K))
    notes = [*state.notes, *([SINGLE] if state.single else [])]
    return JudgedGroup(
        task_id=state.task_id,
        rubric=state.rubric,
        survived=survived,
        rollouts=tuple(_trace(state, rollout, survived) for rollout in range(len(state.traces))),
        dollars=math.fsum(call.dollars for call in state.calls),
        error=state.row["reason"],
        notes=tuple(notes),
    )


def rubric_digest(rubric: Sequence[Criterion]) -> str:
    """A digest of the texts of the criteria, in any order."""
    texts = sorted((each.title, each.description, each.evaluator_instruction) for each in rubric)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def json_lines(group: JudgedGroup) -> Iterator[dict[str, Any]]:
    """The lines of a group in ``judged.jsonl``, one per trace."""
    for trace in group.rollouts:
        line = asdict(trace) | {"rubric": rubric_digest(group.rubric)}
        line["error"] = trace.error or (group.error if trace.reward is None else None)
        line["notes"] = [*group.notes, *trace.notes]
        yield line


def _trace(state: GroupJudgement, rollout: int, survived: Sequence[bool]) -> JudgedTrace:
    trace, share = state.traces[rollout], state.share(rollout)
    scored, credit = state.found(rollout, Score, Verdicts), state.found(rollout, Credit)
    scores = scored.value or ()
    attributions = credit.value or Attribution.of_scores(state.found(rollout, Verdicts).value or ())
    cited = {each.criterion: each for each in attributions}
    notes = list(trace.notes)
    notes += [f"{name}: {note}" for name, judged in (("score", scored), ("credit", credit)) for note in judged.notes]
    if not credit.ok:
        notes.append(f"no step credit: {credit.error}")
    advantage = None if share is None or state.single else share.advantage
    return JudgedTrace(
        task_id=state.task_id,
        trace_id=trace.trace_id,
        rollout=rollout,
        source=trace.source,
        format=trace.format,
        pass_share=_pass_share(scores),
        reward=None if share is None else share.reward,
        advantage=advantage,
        verdicts=tuple(_verdict(state, index, score, cited.get(index), survived) for index, score in enumerate(scores)),
        steps=tuple(_steps(state, rollout)),
        error=scored.error,
        notes=tuple(notes),
        left_out=scored.left_out,
        tokens_counted=trace.tokens_counted,
        fallback="" if share is None else share.fallback.value,
        outcome=trace.outcome,
    )


def _pass_share(scores: Sequence[ScoredCriterion]) -> float | None:
    passes, fails = (sum(score.verdict is each for score in scores) for each in (Verdict.PASS, Verdict.FAIL))
    return passes / (passes + fails) if passes + fails else None


def _verdict(
    state: GroupJudgement, index: int, score: ScoredCriterion, cited: Attribution | None, survived: Sequence[bool]
) -> JudgedVerdict:
    return JudgedVerdict(
        criterion=index,
        title=state.rubric[index].title,
        verdict=Verdict(score.verdict).name,
        evidence=score.evidence,
        justification=score.justification,
        counts=survived[index] if survived else False,
        steps=() if cited is None else cited.steps,
        credited_verdict=None if cited is None else cited.verdict.name,
        explanation="" if cited is None else cited.explanation,
    )


def _steps(state: GroupJudgement, rollout: int) -> Iterator[JudgedStep]:
    trace, share = state.traces[rollout], state.share(rollout)
    for index, turn in enumerate(trace.steps):
        quality = float("nan") if share is None else float(share.quality_M[index])
        yield JudgedStep(
            step=index + 1,
            action=turn.text if turn.action is None else turn.action,
            tokens=trace.tokens(turn),
            quality=None if math.isnan(quality) else quality,
            advantage=None if share is None or state.single else float(share.step_advantage_M[index]),
            cited=share is not None and bool(share.cited_M[index]),
        )
