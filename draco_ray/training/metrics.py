"""The metrics line and the spans of a training step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.algorithm.drift import drift, pass_rate_fall
from draco_ray.judging.held_out import HeldOutScores
from draco_ray.judging.phases import PHASES
from draco_ray.learner.base import UpdateMetrics
from draco_ray.pipeline import Group
from draco_ray.records import Termination
from draco_ray.summaries import PhaseSummary, RolloutSummary, has_spread
from draco_ray.training.overlap import Interval, busy_seconds, hidden_share

UPDATE_MEANS = (
    *("policy_loss", "kl", "entropy", "clip_fraction", "dual_clip_fraction"),
    *("importance_weight", "truncated_fraction", "masked_fraction"),
    *("engine_gap", "engine_k1", "engine_k3", "engine_ratio_p01", "engine_ratio_p50", "engine_ratio_p99"),
)
"""Fields of `UpdateMetrics` that are averaged over a step's updates, in the order of the metrics line."""


def generation_intervals(groups: Sequence[Group]) -> list[Interval]:
    """Start and end of each finished rollout."""
    return [(rollout.started_at, rollout.ended_at) for group in groups for rollout in group.rollouts]


def judge_intervals(groups: Sequence[Group]) -> list[Interval]:
    """Start and end of each judge phase."""
    return [(phase.started_at, phase.ended_at) for group in groups for phase in group.phases]


def step_metrics(step: int, groups: Sequence[Group], group_size: int) -> dict[str, Any]:
    """Metrics of a step's rollouts, judge phases and advantages; see `update_metrics` for the learner's.

    Rates are in [0, 1], times in seconds, costs in dollars. A mean over nothing is null.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    phases = [phase for group in groups for phase in group.phases]
    rewards = [group.reward for group in groups if group.reward is not None]
    advantages = [group.advantage for group in groups if group.advantage is not None]
    # Without a rubric, the rewards are part of the advantages.
    group_rewards = [known.rewards for group in groups if (known := group.reward or group.advantage) is not None]
    shares = sum(len(advantage.rollouts) for advantage in advantages)
    generation, judging = generation_intervals(groups), judge_intervals(groups)
    lost = len(groups) * group_size - len(rollouts)
    ended = Counter(rollout.termination for rollout in rollouts)
    ended[Termination.SERVER_ERROR] += lost
    active = [spread for advantage in advantages for spread in advantage.active_spreads]
    inert = [spread for advantage in advantages for spread in advantage.inert_spreads]
    summed = ("requests", "input_tokens", "cached_tokens", "output_tokens", "dollars")
    per_phase = {
        phase: {
            "phases": len(mine),
            "failed": sum(p.error is not None for p in mine),
            "prompts_cut": sum(p.prompt_cut for p in mine),
            **{name: sum(getattr(p, name) for p in mine) for name in summed},
            "seconds": sum(p.ended_at - p.started_at for p in mine),
        }
        for phase in PHASES
        if (mine := [p for p in phases if p.phase == phase])
    }
    return {
        "step": step,
        "reward": _mean([value for values in group_rewards for value in values]),
        "pass_rate": _ratio(sum(r.passed for r in rewards), sum(r.applicable for r in rewards)),
        "criteria": _mean([r.criteria for r in rewards]),
        "surviving_criteria": _mean([len(r.surviving) for r in rewards]),
        "groups": len(groups),
        "groups_with_signal": sum(has_spread(values) for values in group_rewards),
        "groups_failed": sum(group.reason is not None for group in groups),
        "solved_tasks": [group.task_id for group in groups if solved(group, group_size)],
        "task_pass_rates": {group.task_id: rate for group in groups if (rate := group_pass_rate(group)) is not None},
        "rollouts": len(rollouts),
        "rollouts_lost": lost,
        "rollouts_retried": sum(rollout.attempt for rollout in rollouts),
        "ended": {mode.value: ended[mode] for mode in Termination.shown(+ended)},
        "turns": _mean([rollout.turns for rollout in rollouts]),
        "sampled_tokens": sum(rollout.sampled_tokens for rollout in rollouts),
        "inert_share": _ratio(sum(advantage.inert for advantage in advantages), shares),
        "quality_spread": _mean([*active, *inert]),
        "quality_spread_active": _mean(active),
        "credit_fallbacks": dict(sum((Counter(a.fallbacks) for a in advantages), Counter())),
        "judge": per_phase,
        "judge_dollars": sum(phase.dollars for phase in phases),
        "judge_failed_phases": sum(phase.error is not None for phase in phases),
        "judge_prompts_cut": sum(phase.prompt_cut for phase in phases),
        "seconds_generation": busy_seconds(generation),
        "seconds_judging": busy_seconds(judging),
        "judge_seconds": sum(end - start for start, end in judging),
        "judge_hidden_share": hidden_share(judging, behind=generation),
    }


def held_out_metrics(scored: Sequence[HeldOutScores], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the main judge's and the held-out judge's scores of the same rollouts.

    ``drift`` and ``fall``, with their bounds, are the signs that the policy exploits the main judge. ``held_out_rate``
    is the mean pass share of all rollouts that the held-out judge scored.

    Args:
        scored: both judges' scores, one item per group of the step.
        earlier: metrics lines of earlier steps.
    """
    pairs = [[each.best[0], each.middle] for each in scored if each.middle is not None]
    best = [sum(each.best) / len(each.best) for each in scored]
    trained = [sum(each.trained[: len(each.best)]) / len(each.best) for each in scored]
    found = drift([*(line.get("held_out_pairs") or [] for line in earlier), pairs])
    halves = [(line.get("held_out_best") or [], line.get("held_out_trained_best") or []) for line in earlier]
    fallen = pass_rate_fall([[*zip(*each, strict=False)] for each in (*halves, (best, trained))])
    return {
        "held_out_rollouts": sum(len(each.held_out) for each in scored),
        "held_out_trained_rate": _mean([share for each in scored for share in each.trained]),
        "held_out_rate": _mean([share for each in scored for share in each.held_out]),
        "held_out_pairs": pairs,
        "held_out_best": best,
        "held_out_trained_best": trained,
        "drift": found and found.excess,
        "drift_low": found and found.low,
        "drift_high": found and found.high,
        "drift_share": found and found.share,
        "drift_evidence": found and found.evidence,
        "drift_significant": int(found is not None and found.significant),
        "fall": fallen and fallen.size,
        "fall_low": fallen and fallen.low,
        "fall_high": fallen and fallen.high,
        "fall_significant": int(fallen is not None and fallen.significant),
    }


def solved(group: Group, group_size: int) -> bool:
    """Whether no rollout of a task failed a criterion, so that nothing is left to learn from it."""
    reward = group.reward
    # Which criteria survive dropout depends on the advantage rule, so count the verdicts on all criteria.
    if reward is None or reward.passed < reward.applicable or len(reward.scored) < group_size:
        return False
    # If there are no criteria, the union dropped all of them because every rollout passed them. If there are criteria
    # but none applies to any rollout, the verdicts say nothing about the task.
    return reward.criteria == 0 or reward.applicable > 0


def group_pass_rate(group: Group) -> float | None:
    """Share of passes among a task's applicable verdicts; None without verdicts."""
    reward = group.reward
    if reward is None or not reward.scored:
        return None
    # The union drops criteria that all rollouts pass.
    return 1.0 if reward.criteria == 0 else _ratio(reward.passed, reward.applicable)


def update_metrics(updates: Sequence[UpdateMetrics]) -> dict[str, Any]:
    """The learner's metrics: means over the step's optimizer updates, weighted by valid tokens."""
    tokens = sum(update.valid_tokens for update in updates)

    def mean(name: str) -> float | None:
        return _ratio(sum(getattr(update, name) * update.valid_tokens for update in updates), tokens)

    return {
        "updates": sum(update.skipped is None for update in updates),
        "updates_skipped": [update.skipped for update in updates if update.skipped is not None],
        "valid_tokens": tokens,
        **{name: mean(name) for name in UPDATE_MEANS},
        "engine_ratio_min": min((update.engine_ratio_min for update in updates), default=None),
        "engine_ratio_max": max((update.engine_ratio_max for update in updates), default=None),
        # The gradient norm of a skipped update may be NaN, which would make the result of `max` wrong.
        "grad_norm": max((update.grad_norm for update in updates if not math.isnan(update.grad_norm)), default=None),
    }


def step_spans(groups: Sequence[Group], rest: Mapping[str, Sequence[Interval]]) -> list[dict[str, Any]]:
    """Rows of the ``spans`` table: start and end of each activity.

    Args:
        groups: of the step; their rollouts and judge phases are spans of a task.
        rest: activities that belong to no task, by stage: learner, sync and checkpoint.
    """
    timed: list[tuple[str, RolloutSummary | PhaseSummary]] = []
    for group in groups:
        timed += [("rollout", rollout) for rollout in group.rollouts]
        timed += [(phase.phase, phase) for phase in group.phases]
    return [
        {
            "task_id": item.task_id,
            "rollout": item.rollout,
            "stage": stage,
            "started_at": item.started_at,
            "ended_at": item.ended_at,
        }
        for stage, item in timed
    ] + [
        {"task_id": None, "rollout": None, "stage": stage, "started_at": start, "ended_at": end}
        for stage, intervals in rest.items()
        for start, end in intervals
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
