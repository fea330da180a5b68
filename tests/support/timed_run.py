"""A run directory whose durations follow from known speeds.

Two slots, and two groups of two rollouts per step. The first group's rollouts run concurrently, the second group's one
after the other; nothing else waits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from draco_ray.records import Message, Trajectory, Turn
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.small_run import a_call, a_trajectory

PER_TURN, PER_SAMPLED, PER_READ, SLOWDOWN = 0.1, 0.02, 0.001, 0.5
PER_LEARNED, UPDATE = 0.01, 1.0
HEAD, OPENING, EXECUTING, TAIL = 1.0, 0.5, 1.0, 2.0
JUDGE = {"stage1": 1.0, "stage2": 2.0, "union": 3.0, "score": 4.0, "credit": 5.0}
JUDGING = sum(JUDGE.values()) - JUDGE["stage1"]
PROMPT, OBSERVATION = 50, 20

CONFIG = """\
environment: {slots: 2}
algorithm: {group_size: 2}
train: {prompts_per_step: 2}
learner: {minibatch_prompts: 2}
engine: {gpus_per_engine: 2}
"""


def idle_turn_seconds(sampled: int, read: int) -> float:
    """Duration of a turn on an otherwise idle engine, in seconds."""
    return PER_TURN + PER_SAMPLED * sampled + PER_READ * read


def timed_run(path: Path, steps: int = 5, config: str = CONFIG) -> RunDirectory:
    """The run; the steps differ in the lengths of their turns."""
    store = RunStore(RunDirectory.create(path, config))
    for step in range(1, steps + 1):
        _write_step(store, step)
    return store.directory


def step_seconds(step: int) -> float:
    """Duration of a step, computed by hand."""
    together, first, second = _lengths(step)
    side_by_side = OPENING + sum((1 + SLOWDOWN) * seconds + EXECUTING for seconds in together)
    in_turn = OPENING + first + 1.0 + second + EXECUTING
    learning = PER_LEARNED * sum(_tokens(step, group) for group in range(2))
    # The first group is learned while the second is played and judged.
    late = PER_LEARNED * _tokens(step, 1)
    assert learning - late < in_turn
    return HEAD + side_by_side + in_turn + JUDGING + late + UPDATE + TAIL


def _sampled(step: int) -> tuple[int, int, int, int]:
    """Tokens sampled in the first group's two turns, and in each turn of the second group."""
    return 100 + 37 * step, 200 - 11 * step, 150 + 23 * step, 90 + 5 * step


def _lengths(step: int) -> tuple[tuple[float, float], float, float]:
    a, b, c, d = _sampled(step)
    return (
        (idle_turn_seconds(a, PROMPT), idle_turn_seconds(b, OBSERVATION)),
        idle_turn_seconds(c, PROMPT),
        idle_turn_seconds(d, PROMPT),
    )


def _tokens(step: int, group: int) -> int:
    a, b, c, d = _sampled(step)
    return 2 * (PROMPT + a + OBSERVATION + b) if group == 0 else 2 * PROMPT + c + d


def _write_step(store: RunStore, step: int) -> None:
    began = 10_000.0 * step
    (one, two), first, second = _lengths(step)
    a, b, c, d = _sampled(step)
    at = began + HEAD
    spent = OPENING + (1 + SLOWDOWN) * (one + two) + 2 * EXECUTING
    slow = [(1 + SLOWDOWN) * one, (1 + SLOWDOWN) * two]
    ends = [_rollout(store, step, 0, number, at, OPENING, [a, b], slow) for number in range(2)]
    assert ends == [at + spent] * 2
    learned = _judged(store, step, 0, ends, at)
    ends = [
        _rollout(store, step, 1, 0, at + spent, OPENING, [c], [first]),
        _rollout(store, step, 1, 1, at + spent, OPENING + first + 1.0, [d], [second]),
    ]
    judged = _judged(store, step, 1, ends, at)
    updated = judged + PER_LEARNED * _tokens(step, 1) + UPDATE
    rest = {
        "learning": [(learned, learned + PER_LEARNED * _tokens(step, 0)), (judged, updated)],
        "sync": [(updated, updated + TAIL)],
    }
    store.write("spans", step, "policy", [_span(step, None, None, s, *span) for s, of in rest.items() for span in of])
    store.finish_step(
        step, {"step": step, "seconds": updated + TAIL - began, "seconds_sync": TAIL, "updates": 1, "rollouts": 4}
    )


def _rollout(
    store: RunStore,
    step: int,
    group: int,
    number: int,
    at: float,
    opening: float,
    sampled: list[int],
    seconds: list[float],
) -> float:
    """Write a rollout; returns its end time."""
    played = _trajectory(step, f"task{group}", number, at + opening, sampled, seconds)
    key = f"task{group}-{number}"
    store.write("trajectories", step, key, rows.trajectory_rows(step, played))
    store.write("steps", step, key, rows.step_rows(step, played))
    store.write("spans", step, key, [_span(step, played.task_id, number, "rollout", at, played.ended_at)])
    return played.ended_at


def _trajectory(
    step: int, task: str, number: int, began: float, sampled: list[int], seconds: list[float]
) -> Trajectory:
    turns, at = [], PROMPT
    for written, took in zip(sampled, seconds, strict=True):
        turns.append(
            Turn(
                text="look",
                action="look()",
                observation="seen",
                first_token=at,
                last_token=at + written,
                seconds_generating=took,
                seconds_executing=EXECUTING,
            )
        )
        at += written + OBSERVATION
    length = at - OBSERVATION
    return replace(
        a_trajectory(step, task, number),
        prompt=(Message(role="user", content="Do it."),),
        turns=tuple(turns),
        token_ids_T=np.zeros(length, dtype=np.int32),
        sampled_T=np.ones(length, dtype=bool),
        logprob_T=np.zeros(length),
        step_T=np.zeros(length, dtype=np.int32),
        prompt_length=PROMPT,
        engine="engine-0",
        started_at=began,
        ended_at=began + sum(seconds) + len(seconds) * EXECUTING,
    )


def _judged(store: RunStore, step: int, group: int, ends: list[float], began: float) -> float:
    """Write the judge's phases of a group; returns their end time."""
    task, key = f"task{group}", count()
    phases = [("stage1", None, began)] + [("stage2", number, end) for number, end in enumerate(ends)]
    at = max(ends) + JUDGE["stage2"]
    phases.append(("union", None, at))
    for phase in ("score", "credit"):
        at += JUDGE["union" if phase == "score" else "score"]
        phases += [(phase, number, at) for number in range(len(ends))]
    for phase, number, start in phases:
        call = replace(a_call(phase, step, task, number), started_at=start, seconds=JUDGE[phase])
        store.write("judge_calls", step, f"{task}-{next(key)}", rows.call_rows(step, [call]))
        span = _span(step, task, number, phase, start, start + JUDGE[phase])
        store.write("spans", step, f"{task}-judge-{next(key)}", [span])
    known = {"state": "trained", "rollouts": 2, "lost": 0, "unscored": 0, "credit_failures": 0, "reason": None}
    store.write("groups", step, task, [{"training_step": step, "task_id": task, **known}])
    return at + JUDGE["credit"]


def _span(
    step: int, task: str | None, rollout: int | None, stage: str, began: float, ended: float
) -> dict[str, object]:
    return {
        "training_step": step,
        "task_id": task,
        "rollout": rollout,
        "stage": stage,
        "started_at": began,
        "ended_at": ended,
    }
