"""Measures of a judge on planted faults, each compared with chance and with simple rules.

The measures of verdicts are ``accuracy``, ``kappa``, ``balanced_accuracy``, ``false_pass``, ``false_fail`` and
``unanswered`` (`draco_ray.lab.analysis.agreement`). A judgment is one criterion of one rollout: violated or not. "Not
applicable" counts as not violated.

The measures of citations and credit are means over the rollouts with a fault. Their scope is ``all``, one kind of
fault, or for hard groups ``one fault``, ``late fault`` or ``two faults``. A step is planted if the fault added or
changed it. Q is the quality of a step, a_j the advantage of its n_j tokens, and A the advantage of the rollout.

==================== ===================================================================================================
measure              mean over rollouts of
==================== ===================================================================================================
citation_precision   the share of planted steps among the steps that failed criteria cite
citation_recall      the share of the planted steps that failed criteria cite
hit_at_1             1 if the step with the lowest Q is planted, else 0; for a tie, the planted share of the tied steps
first_error          1 if the first step that failed criteria cite is the first planted step, else 0
blame_auroc          the AUROC with which 1 - Q separates planted steps from other steps
push_share           the planted steps' share of the sum of |a_j| n_j; only rollouts with A < 0
grpo_share           the planted steps' share of the tokens: push_share without step credit, for the same rollouts
==================== ===================================================================================================

Each row also has the values of three rules that need no judge, on the same rollouts. ``chance`` blames a random step,
or for ``citation_recall`` as many random steps as the judge cites. ``last_step`` blames the last step. ``first_failed``
blames the first step whose output is an error, or the last step if no output is one.

A rollout without a failed criterion that cites a step, such as one for which the judge's calls failed, counts 0 in
``citation_recall`` and ``first_error``, and is left out of ``citation_precision``. If no step of a rollout gets a Q,
``hit_at_1`` and ``blame_auroc`` have the value of chance.

``false_blame`` is the share of faultless rollouts with a failed criterion. In hard groups, a rollout that only looks
wrong is faultless. Rollouts without verdicts and criteria whose right verdict is unknown are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from operator import itemgetter

import numpy as np

from draco_ray.lab.analysis.agreement import (
    UNANSWERED_RATING,
    agreement,
    agreement_intervals,
    auroc,
    clustered_interval,
    contingency,
)
from draco_ray.lab.analysis.attribution.bench import JudgedRollout
from draco_ray.lab.analysis.attribution.rubric import UNKNOWN_VERDICT, failed
from draco_ray.lab.analysis.credit import push_shares
from draco_ray.lab.rows import collect_table, group_by
from draco_ray.records import BoolArray, FloatArray, Verdict
from draco_ray.runs.rows import Row
from draco_ray.sandbox.world.scripts import Fault

BASELINES = ("chance", "last_step", "first_failed")
"""Baselines that choose a step without a judge."""
Observation = tuple[float, ...]
"""The judge's value and the value of each of `BASELINES`; NaN if a rule has none."""
_NONE = float("nan")


@collect_table(
    "string: judge scope measure",
    "int64: observations",
    "float64: value low high",
    f"float64: {' '.join(BASELINES)}",
)
def measures(judged: Sequence[JudgedRollout], judge: str) -> list[Row]:
    """Every measure over all rollouts, then by kind of fault, with 95 % intervals over tasks."""
    rows = [*_verdict_rows("all", _judgments(judged, None))]
    rows += _step_rows("all", [rollout for rollout in judged if rollout.planted.faults])
    rows += _blame_rows(judged)
    for fault in Fault:
        rows += _verdict_rows(fault.value, _judgments(judged, fault))
    for scope in [*Fault, "one fault", "late fault", "two faults"]:
        rows += _step_rows(scope, [rollout for rollout in judged if rollout.planted.scope == scope])
    return [{"judge": judge, **row} for row in rows]


def cited_steps(rollout: JudgedRollout) -> set[int]:
    """1-based steps cited by failed criteria."""
    return {
        step
        for attribution in rollout.attributions or ()
        if attribution.verdict is Verdict.FAIL
        for step in attribution.steps
    }


def baseline_blamed_steps(rollout: JudgedRollout) -> tuple[int, int]:
    """The 0-based steps that ``last_step`` and ``first_failed`` blame."""
    last = rollout.steps - 1
    return last, next((step for step, output in enumerate(rollout.planted.outputs) if failed(output)), last)


def step_measures(rollout: JudgedRollout) -> dict[str, Observation]:
    """The measures that have a value for a rollout with planted steps, by name."""
    planted_M, cited_M = (_marked(rollout, steps) for steps in (rollout.planted.planted, cited_steps(rollout)))
    blame_M, blamed = _blame(rollout), baseline_blamed_steps(rollout)
    first, share = int(planted_M.argmax()), rollout.share
    hits = (float(planted_M.mean()), *(float(planted_M[step]) for step in blamed))
    found: dict[str, Observation] = {}
    if cited_M.any():
        found["citation_precision"] = (float(planted_M[cited_M].mean()), *hits)
    recalled = (float(planted_M[step] / planted_M.sum()) for step in blamed)
    found["citation_recall"] = (float(cited_M[planted_M].mean()), float(cited_M.mean()), *recalled)
    found["hit_at_1"] = (float(planted_M[blame_M == blame_M.max()].mean()), *hits)
    begins = bool(cited_M.any()) and int(cited_M.argmax()) == first
    found["first_error"] = (float(begins), 1 / rollout.steps, *(float(step == first) for step in blamed))
    if not planted_M.all():
        by_rule = (_auroc(np.arange(rollout.steps) == step, planted_M) for step in blamed)
        found["blame_auroc"] = (_auroc(blame_M, planted_M), 0.5, *by_rule)
    if share is not None and share.advantage < 0:
        push_M = push_shares(share.step_advantage_M, rollout.tokens_M)
        found["push_share"] = (float(push_M[planted_M].sum()), *hits)
        found["grpo_share"] = (float(rollout.tokens_M[planted_M].sum() / rollout.tokens_M.sum()), *hits)
    return found


def _auroc(blame_M: FloatArray | BoolArray, planted_M: BoolArray) -> float:
    return auroc(blame_M[planted_M].astype(float), blame_M[~planted_M].astype(float))


def _marked(rollout: JudgedRollout, steps: Collection[int]) -> BoolArray:
    """A mask of the rollout's steps that marks ``steps``, 1-based."""
    return np.isin(np.arange(1, rollout.steps + 1), list(steps))


def _blame(rollout: JudgedRollout) -> FloatArray:
    """1 - Q of every step; zeros if no step has a quality."""
    if rollout.share is None or np.isnan(rollout.share.quality_M).any():
        return np.zeros(rollout.steps)
    return np.asarray(1.0 - rollout.share.quality_M)


def _judgments(judged: Sequence[JudgedRollout], about: Fault | None) -> dict[str, list[tuple[int, int]]]:
    """Task -> (right verdict, judge's verdict) of every judgment whose right verdict is known.

    ``about``: only criteria about this fault; None takes all criteria.
    """
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rollout in judged:
        for index, fault in enumerate(rollout.planted.rubric):
            if about not in (None, fault) or rollout.truth_K[index] == UNKNOWN_VERDICT:
                continue
            said = UNANSWERED_RATING
            if rollout.verdict_K is not None:
                said = -1 if rollout.verdict_K[index] == Verdict.FAIL else 1
            found[rollout.planted.task_id].append((int(rollout.truth_K[index]), said))
    return dict(found)


def _verdict_rows(scope: str, judgments: dict[str, list[tuple[int, int]]]) -> list[Row]:
    if not judgments:
        return []
    tables = [contingency(*np.array(pairs).T) for pairs in judgments.values()]
    found, bounds = agreement(np.sum(tables, axis=0)), agreement_intervals(tables)
    chance = {"agreement": found["chance"], "kappa": 0.0, "balanced_accuracy": 0.5}
    return [
        {
            "scope": scope,
            "measure": "accuracy" if name == "agreement" else name,
            "observations": found["judgments"],
            "value": found[name],
            "low": bounds[name][0],
            "high": bounds[name][1],
            "chance": chance.get(name),
        }
        for name in (*chance, "false_pass", "false_fail", "unanswered")
    ]


def _step_rows(scope: str, rollouts: Sequence[JudgedRollout]) -> list[Row]:
    found: dict[str, list[tuple[str, Observation]]] = defaultdict(list)
    for rollout in rollouts:
        for name, observation in step_measures(rollout).items() if rollout.planted.planted else ():
            found[name].append((rollout.planted.task_id, observation))
    return [row for name, observations in found.items() for row in _mean_rows(scope, name, observations)]


def _blame_rows(judged: Sequence[JudgedRollout]) -> list[Row]:
    observed = []
    for rollout in judged:
        if not rollout.planted.faults and rollout.verdict_K is not None:
            # Criteria without a known verdict do not count.
            known = rollout.truth_K == 1 if rollout.planted.rubric else True
            blamed = float(((rollout.verdict_K == Verdict.FAIL) & known).any())
            observed.append((rollout.planted.task_id, (blamed, _NONE, _NONE, _NONE)))
    return _mean_rows("all", "false_blame", observed)


def _mean_rows(scope: str, measure: str, observations: Sequence[tuple[str, Observation]]) -> list[Row]:
    """A list with the row of a measure, from (task, observation) pairs; empty without observations."""
    if not observations:
        return []
    clusters = group_by(observations, itemgetter(0)).values()
    interval = clustered_interval([[(found[0], 1) for _, found in items] for items in clusters])
    observed = np.array([found for _, found in observations])
    about: Row = {"scope": scope, "measure": measure, "observations": len(observed)}
    about |= {"value": interval.mean, "low": interval.low, "high": interval.high}
    return [about | dict(zip(BASELINES, observed[:, 1:].mean(axis=0).tolist(), strict=True))]
