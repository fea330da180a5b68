"""Rewards and advantages of a run recomputed from its recorded verdicts and citations, in plain loops.

`draco_ray.algorithm` is not used: this implements the paper's equations again, on the rows of the tables.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import pytest

from draco_ray.runs.directory import RunDirectory

Key = tuple[int, str]
"""Training step and task: a group."""


def check_rubric_run(run: RunDirectory, *, credit: bool) -> dict[Key, list[float]]:
    """Check every row of the run's advantages against its verdicts; returns the rewards by group."""
    verdicts: dict[Key, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for row in run.table("verdicts").to_pylist():
        verdicts[row["training_step"], row["task_id"]][row["rollout"]][row["criterion"]] = row["verdict"]
    survived = {
        (row["training_step"], row["task_id"], row["criterion"]): row["survived"]
        for row in run.table("criteria").to_pylist()
    }
    rows = _by_group(run)
    assert rows
    rewards = {}
    for key, members in rows.items():
        scored = verdicts[key]
        assert sorted(scored) == sorted(members), "a rollout without verdicts has no advantage, one with them has"
        criteria = sorted({criterion for given in scored.values() for criterion in given})
        kept = [criterion for criterion in criteria if any(given[criterion] == -1 for given in scored.values())]
        assert {criterion: survived[(*key, criterion)] for criterion in criteria} == {
            criterion: criterion in kept for criterion in criteria
        }
        rewards[key] = [_balance([scored[rollout][k] for k in kept]) for rollout in sorted(members)]
        check_group(members, rewards[key])
        if credit:
            _check_credit(run, key, members, kept)
        else:
            assert {row["fallback"] for row in members.values()} == {"credit_off"}
    return rewards


def check_given_rewards(run: RunDirectory, expected: dict[Key, list[float]]) -> None:
    """Check every row of the run's advantages against vanilla GRPO on these rewards (in the order of the rollouts)."""
    rows = _by_group(run)
    assert rows.keys() == expected.keys()
    for key, members in rows.items():
        check_group(members, expected[key])
        assert {row["fallback"] for row in members.values()} == {"credit_off"}


def check_group(members: dict[int, dict[str, Any]], rewards: list[float]) -> None:
    """Check each member's reward and group-standardised advantage, and without credit its equal steps."""
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    for rollout, reward in zip(sorted(members), rewards, strict=True):
        row = members[rollout]
        advantage = 0.0 if max(rewards) == min(rewards) else (reward - mean) / (deviation + 1e-6)
        assert row["reward"] == pytest.approx(reward)
        assert row["advantage"] == pytest.approx(advantage)
        if row["fallback"] == "credit_off":
            assert row["step_advantage"] == pytest.approx([advantage if n else 0.0 for n in row["step_tokens"]])


def voted(run: RunDirectory, votes: int) -> dict[tuple[int, str, int], int]:
    """The verdict on each rollout's first criterion from its scoring replies: a pass only if all of them pass it."""
    scores: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for call in run.table("judge_calls").to_pylist():
        if call["phase"] == "score":
            rollout = call["training_step"], call["task_id"], call["rollout"]
            scores[rollout].append(json.loads(call["reply"])[0]["score"])
    assert scores
    assert {len(given) for given in scores.values()} == {votes}
    return {key: 1 if set(given) == {1} else -1 for key, given in scores.items()}


def _by_group(run: RunDirectory) -> dict[Key, dict[int, dict[str, Any]]]:
    found: dict[Key, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in run.table("advantages").to_pylist():
        found[row["training_step"], row["task_id"]][row["rollout"]] = row
    return dict(found)


def _balance(verdicts: list[int]) -> float:
    passed, failed = verdicts.count(1), verdicts.count(-1)
    return (passed - failed) / (passed + failed) if passed + failed else 0.0


def _check_credit(run: RunDirectory, key: Key, members: dict[int, dict[str, Any]], kept: list[int]) -> None:
    citing: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in run.table("citations").to_pylist():
        if (row["training_step"], row["task_id"]) == key and row["criterion"] in kept and row["step"] is not None:
            citing[row["rollout"], row["step"]].append(row["verdict"])
    for rollout, row in members.items():
        steps = range(1, len(row["step_tokens"]) + 1)
        given = {step: citing[rollout, step] for step in steps if citing[rollout, step]}
        quality = {step: cited.count(1) / len(cited) for step, cited in given.items()}
        mean = sum(quality.values()) / len(quality) if quality else 0.0
        weights = [quality.get(step, mean) for step in steps]
        if row["advantage"] < 0:
            weights = [1 - weight for weight in weights]
        if not quality and row["fallback"] == "none":
            # No credit call: all verdicts agree, so every step gets the same total whatever is cited.
            weights = [1.0] * len(steps)
        tokens = row["step_tokens"]
        if row["fallback"] == "none":
            pushes = [row["advantage"] * sum(tokens) * w / sum(weights) for w in weights]
            expected = [push / n for push, n in zip(pushes, tokens, strict=True)]
        else:
            assert not quality or not sum(weights), "a fallback where credit could be divided"
            expected = [row["advantage"]] * len(tokens)
        assert row["step_advantage"] == pytest.approx(expected, abs=1e-9)
