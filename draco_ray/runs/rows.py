"""Records -> table rows (the columns of `draco_ray.runs.schema`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from draco_ray.records import (
    Attribution,
    Criterion,
    Evaluation,
    GroupAdvantages,
    JudgeCall,
    ScoredCriterion,
    Trajectory,
)

Row = dict[str, Any]


def trajectory_rows(step: int, trajectory: Trajectory) -> list[Row]:
    """The one row of ``trajectories``; arrays stay NumPy, Arrow takes them as they are."""
    return [
        {
            "training_step": step,
            "task_id": trajectory.task_id,
            "rollout": trajectory.rollout,
            "attempt": trajectory.attempt,
            "policy_version": trajectory.policy_version,
            "prompt": [{"role": message.role, "content": message.content} for message in trajectory.prompt],
            "token_ids": trajectory.token_ids_T,
            "sampled": trajectory.sampled_T,
            "logprob": trajectory.logprob_T,
            "token_step": trajectory.step_T,
            "prompt_length": trajectory.prompt_length,
            "turns": len(trajectory.turns),
            "steps": len(trajectory.steps),
            "ended": trajectory.ended.value,
            "error": trajectory.error,
            "engine": trajectory.engine,
            "started_at": trajectory.started_at,
            "ended_at": trajectory.ended_at,
            "termination": trajectory.termination and trajectory.termination.value,
            "branches": list(trajectory.branches),
        }
    ]


def step_rows(step: int, trajectory: Trajectory) -> list[Row]:
    """One row of ``steps`` per turn; ``step`` is null for a turn without an action."""
    rows: list[Row] = []
    number = 0
    for index, turn in enumerate(trajectory.turns):
        number += turn.action is not None
        rows.append(
            {
                "training_step": step,
                "task_id": trajectory.task_id,
                "rollout": trajectory.rollout,
                "turn": index + 1,
                "step": number if turn.action is not None else None,
                "text": turn.text,
                "action": turn.action,
                "observation": turn.observation,
                "first_token": turn.first_token,
                "last_token": turn.last_token,
                "seconds_generating": turn.seconds_generating,
                "seconds_executing": turn.seconds_executing,
                "role": turn.role,
                "branch": turn.branch,
                "policy_version": turn.policy_version,
            }
        )
    return rows


def criterion_rows(
    step: int, task_id: str, rubric: Sequence[Criterion], advantages: GroupAdvantages | None
) -> list[Row]:
    """One row of ``criteria`` per criterion of the group's rubric; ``survived`` is null before dropout."""
    return [
        {
            "training_step": step,
            "task_id": task_id,
            "criterion": index,
            "title": criterion.title,
            "description": criterion.description,
            "evaluator_instruction": criterion.evaluator_instruction,
            "source": criterion.source,
            "survived": None if advantages is None else bool(advantages.surviving_K[index]),
        }
        for index, criterion in enumerate(rubric)
    ]


def proposal_rows(step: int, task_id: str, proposals: Iterable[Criterion]) -> list[Row]:
    """One row of ``proposals`` per candidate that went into the union."""
    return [
        {
            "training_step": step,
            "task_id": task_id,
            "title": criterion.title,
            "description": criterion.description,
            "evaluator_instruction": criterion.evaluator_instruction,
            "source": criterion.source,
        }
        for criterion in proposals
    ]


def verdict_rows(step: int, task_id: str, rollout: int, scores: Sequence[ScoredCriterion]) -> list[Row]:
    """One row of ``verdicts`` per criterion of a scored rollout."""
    return [
        {
            "training_step": step,
            "task_id": task_id,
            "rollout": rollout,
            "criterion": index,
            "verdict": int(score.verdict),
            "evidence": score.evidence,
            "justification": score.justification,
        }
        for index, score in enumerate(scores)
    ]


def citation_rows(step: int, task_id: str, rollout: int, attributions: Sequence[Attribution]) -> list[Row]:
    """One row of ``citations`` per cited step; a criterion that cites none has one row with a null step."""
    return [
        {
            "training_step": step,
            "task_id": task_id,
            "rollout": rollout,
            "criterion": attribution.criterion,
            "verdict": int(attribution.verdict),
            "step": cited,
            "explanation": attribution.explanation,
        }
        for attribution in attributions
        for cited in (attribution.steps or (None,))
    ]


def advantage_rows(
    step: int, task_id: str, advantages: GroupAdvantages, step_tokens: dict[int, Sequence[int]]
) -> list[Row]:
    """One row of ``advantages`` per rollout that has statistics; ``step_tokens`` maps rollout to n_1..n_M."""
    return [
        {
            "training_step": step,
            "task_id": task_id,
            "rollout": share.rollout,
            "reward": share.reward,
            "advantage": share.advantage,
            "quality": share.quality_M,
            "cited": share.cited_M,
            "step_advantage": share.step_advantage_M,
            "step_tokens": list(step_tokens[share.rollout]),
            "fallback": share.fallback.value,
            "inert": share.inert,
        }
        for share in advantages.rollouts
    ]


def as_paid(call: JudgeCall, booked: set[str], requests_name: str = "") -> JudgeCall:
    """``call``; a replay as the call that paid for its reply, where a kill kept that one from the archive.

    Args:
        booked: calls in the archive; it is added to them.
        requests_name: begins the numbers of the requests that this run has paid for.
    """
    paid = call.paid
    own = call.requests == 0 and paid is not None and paid.call_id.startswith(requests_name)
    if own and paid is not None and paid.call_id not in booked:
        call = replace(call, **{field.name: getattr(paid, field.name) for field in fields(paid)})
    booked.add(call.call_id)
    return call


def call_rows(step: int, calls: Iterable[JudgeCall]) -> list[Row]:
    """One row of ``judge_calls`` per call."""
    return [
        {
            "training_step": step,
            "task_id": call.task_id,
            "rollout": call.rollout,
            "call_id": call.call_id,
            "phase": call.phase,
            "model": call.model,
            "prompt": call.prompt,
            "reply": call.reply,
            "finish_reason": call.finish_reason,
            "input_tokens": call.input_tokens,
            "cached_tokens": call.cached_tokens,
            "output_tokens": call.output_tokens,
            "dollars": call.dollars,
            "started_at": call.started_at,
            "seconds": call.seconds,
            "requests": call.requests,
            "error": call.error,
            "reasoning_tokens": call.reasoning_tokens,
            "estimated_dollars": call.estimated_dollars,
        }
        for call in calls
    ]


def evaluation_rows(step: int, split: str, evaluations: Iterable[Evaluation]) -> list[Row]:
    """One row of ``evaluations`` per evaluated rollout; ``training_step`` 0 is the untrained policy."""
    return [
        {
            "training_step": step,
            "split": split,
            "task_id": evaluation.task_id,
            "run": evaluation.run,
            "success": evaluation.success,
            "passed_tests": evaluation.passed_tests,
            "total_tests": evaluation.total_tests,
            "turns": evaluation.turns,
            "ended": evaluation.ended.value,
            "difficulty": evaluation.difficulty,
            "failures": list(evaluation.failures),
            "termination": evaluation.termination and evaluation.termination.value,
            "scenario": evaluation.scenario,
        }
        for evaluation in evaluations
    ]


def outcome_rows(step: int, rollout: int, verdict: Evaluation) -> list[Row]:
    """The one row of ``outcomes`` of a training rollout whose reward is AppWorld's verdict."""
    return [
        {
            "training_step": step,
            "task_id": verdict.task_id,
            "rollout": rollout,
            "success": verdict.success,
            "passed_tests": verdict.passed_tests,
            "total_tests": verdict.total_tests,
            "failures": list(verdict.failures),
        }
    ]
