"""The course of a run, step by step: terminations, judge cost, success rates and time per stage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from draco_ray.judging.phases import PHASES
from draco_ray.lab.evaluation.measures import pass_k_measure
from draco_ray.lab.rows import collect_table
from draco_ray.lab.runs.cost import phase_costs, read_calls
from draco_ray.records import Termination
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import (
    judged_rates,
    read_evaluations,
    read_judged,
    scenario_goal_completion,
    task_goal_completion,
)
from draco_ray.runs.rows import Row
from draco_ray.training.overlap import seconds_together


@collect_table(
    "string: run",
    "int64: training_step",
    "string: ended",
    "int64: rollouts",
    "float64: share",
    "int64: retried",
)
def terminations(run: RunDirectory) -> Iterator[Row]:
    """One row per training step and termination mode; ``share`` is of the step's rollouts, lost ones included.

    ``retried`` is 0 except in the row of server errors, where it counts the step's retries: all retries of a lost
    rollout, and the attempts of a finished one before its last.
    """
    retries = int(run.setting("environment.rollout_retries"))
    for step in run.steps():
        played = run.table("trajectories", step, ["attempt", "termination"]).to_pylist()
        ended = Counter(row["termination"] for row in played)
        if None in ended:
            # Imported traces have no termination mode.
            continue
        lost = sum(run.table("groups", step, ["lost"]).column("lost").to_pylist())
        ended[Termination.SERVER_ERROR] += lost
        retried = sum(row["attempt"] for row in played) + lost * retries
        total = ended.total()
        for mode in Termination.shown(map(Termination, +ended)) if total else ():
            yield {
                "training_step": step,
                "ended": mode.value,
                "rollouts": ended[mode.value],
                "share": ended[mode.value] / total,
                "retried": retried if mode is Termination.SERVER_ERROR else 0,
            }


@collect_table(
    "string: run",
    "int64: training_step",
    "string: phase",
    "int64: calls replayed requests failures input_tokens cached_tokens output_tokens",
    "float64: dollars",
)
def judge_cost(run: RunDirectory) -> Iterator[Row]:
    """One row per training step and judge phase; replies from the durable cache (``replayed``) are free."""
    for step, calls in read_calls(run).items():
        for phase, cost in phase_costs(calls).items():
            yield {"training_step": step, "phase": phase, **cost}


@collect_table(
    "string: run",
    "int64: training_step",
    "string: split",
    "int64: rollouts lost",
    "float64: tgc tgc_low tgc_high sgc",
)
def success(run: RunDirectory) -> Iterator[Row]:
    """One row per evaluation: task and scenario goal completion (TGC, SGC) in [0, 1].

    Lost rollouts count as failures; step 0 is the untrained policy. TGC has a 95 % interval over scenarios
    that covers any outcome of lost rollouts; null if there is one scenario.
    """
    for (step, split), evaluations in read_evaluations(run).items():
        runs = max(Counter(each.task_id for each in evaluations).values())
        interval = pass_k_measure([[evaluations]], runs, scenarios=True).interval()
        yield {
            "training_step": step,
            "split": split,
            "rollouts": len(evaluations),
            "lost": sum(evaluation.lost for evaluation in evaluations),
            "tgc": task_goal_completion(evaluations),
            "tgc_low": interval.low,
            "tgc_high": interval.high,
            "sgc": scenario_goal_completion(evaluations),
        }


@collect_table(
    "string: run",
    "int64: training_step",
    "string: split",
    "int64: tasks rollouts unscored",
    "float64: pass_rate pass_rate_low pass_rate_high agreement",
)
def judged(run: RunDirectory) -> Iterator[Row]:
    """One row per measurement by the judge, for environments without an evaluator: pass rate with a 95 % interval.

    ``agreement`` is how often two scoring calls give the same verdict; step 0 is the untrained policy.
    """
    for (step, split), rollouts in read_judged(run).items():
        found = judged_rates(rollouts)
        yield {
            "training_step": step,
            "split": split,
            "tasks": found.tasks,
            "rollouts": found.rollouts,
            "unscored": found.unscored,
            "pass_rate": found.pass_rate and found.pass_rate.mean,
            "pass_rate_low": found.pass_rate and found.pass_rate.low,
            "pass_rate_high": found.pass_rate and found.pass_rate.high,
            "agreement": found.agreement and found.agreement.mean,
        }


STAGES = (
    "generation",
    "generation and judging",
    "judging",
    "learning beside others",
    "learning",
    "weight sync",
    "checkpoint",
    "other",
)
"""Stages of `stage_seconds`, in order; some combinations of stages that overlap are stages of their own."""


@collect_table(
    "string: run",
    "int64: training_step",
    "string: stage",
    "float64: seconds",
)
def stage_seconds(run: RunDirectory) -> Iterator[Row]:
    """Wall time of each finished step by stage; a step's rows add up to its time, with no second counted twice.

    Returns: a row per step and stage of `STAGES`. Work that was done ahead, before its step began, counts as ``other``
        in the step during which it was done.
    """
    for line in run.metrics():
        step = int(line["step"])
        spans = run.table("spans", step, ["stage", "started_at", "ended_at"]).to_pylist()
        for stage, seconds in _of_step(spans, line).items():
            yield {"training_step": step, "stage": stage, "seconds": seconds}


def _of_step(spans: Sequence[Row], line: Row) -> dict[str, float]:
    total = line.get("seconds")
    ends = max((span["ended_at"] for span in spans), default=0.0)
    begins = min((span["started_at"] for span in spans), default=0.0) if total is None else ends - total
    lanes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        kind = "judging" if span["stage"] in PHASES else _KINDS.get(span["stage"])
        start, end = max(span["started_at"], begins), span["ended_at"]
        if kind is not None and end > start:
            lanes[kind].append((start, end))
    seconds = dict.fromkeys(STAGES, 0.0)
    for together, value in seconds_together(lanes).items():
        seconds[_stage(together)] += value
    seconds["other"] = 0.0 if total is None else max(0.0, total - sum(seconds.values()))
    return seconds


_KINDS = {"rollout": "generation", "learning": "learning", "sync": "weight sync", "checkpoint": "checkpoint"}


def _stage(together: frozenset[str]) -> str:
    """The stage for a set of kinds of work that run at the same time."""
    if together == {"generation", "judging"}:
        return "generation and judging"
    if "learning" in together and len(together) > 1:
        return "learning beside others"
    return next(kind for kind in ("weight sync", "checkpoint", "learning", "judging", "generation") if kind in together)
