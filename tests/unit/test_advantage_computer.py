"""The advantage actor without Ray: which rollouts need no credit call, and that leaving it out changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import numpy as np

from draco_ray.actors.advantage_computer import AdvantageComputerActor
from draco_ray.config import AlgorithmConfig
from draco_ray.judging.example import example_trajectory
from draco_ray.records import Attribution, Judged, ScoredCriterion, Verdict


async def _now(value: Any) -> Any:
    return value


def scores(*verdicts: int) -> Awaitable[Any]:
    return _now(Judged(value=tuple(ScoredCriterion(verdict=Verdict(verdict)) for verdict in verdicts)))


def credit(*cited: tuple[int, int, tuple[int, ...]]) -> Awaitable[Any]:
    return _now(
        Judged(value=tuple(Attribution(criterion=k, verdict=Verdict(verdict), steps=at) for k, verdict, at in cited))
    )


VERDICTS = [(1, 1, 1), (0, 0, 1), (1, -1, 1), (-1, -1, 1)]
"""Unanimous, not applicable, mixed, unanimous; the last criterion is dropped."""


async def test_a_rollout_that_cannot_be_credited_unevenly_needs_no_call() -> None:
    actor = AdvantageComputerActor(AlgorithmConfig())
    rewards = await actor.rewards(range(4), [scores(*row) for row in VERDICTS])
    assert rewards.unanimous == (0, 1, 3)
    assert rewards.rewards == (1.0, 0.0, 0.0, -1.0)

    asked = [
        [(0, 1, (1,)), (1, 1, (2,))],
        [(0, 0, ()), (1, 0, ())],
        [(0, 1, (1,)), (1, -1, (2,))],
        [(0, -1, (2,)), (1, -1, (2,))],
    ]
    outcomes = []
    for skipped in ((), rewards.unanimous):
        called = [None if rollout in skipped else credit(*asked[rollout]) for rollout in range(4)]
        played = [_now(example_trajectory(rollout)) for rollout in range(4)]
        _, advantages, _, summary = await actor.from_verdicts(
            "step1/example_1", range(4), played, [scores(*row) for row in VERDICTS], called
        )
        assert summary.inert == 3
        outcomes.append([share.step_advantage_M for share in advantages.rollouts])
    np.testing.assert_allclose(outcomes[0], outcomes[1])
