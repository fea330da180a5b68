"""The critical path of steps whose schedule can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from critical_path import LearnerTask, critical_path

from draco_ray.pipeline import Group
from tests.support.summaries import a_phase, a_rollout


def a_group(
    index: int, rollouts: Sequence[tuple[float, float]], phases: Mapping[str, float | Sequence[float]]
) -> Group:
    """Rollouts as (start, seconds); phases as seconds, one for each rollout where there is more than one.

    The recorded times of phases lie about when, not about how long: the bound must not depend on them.
    """
    group = Group(step=1, index=index, task_id=f"t_{index}", prompt=())
    group.rollouts = [a_rollout(number, start, start + took) for number, (start, took) in enumerate(rollouts)]
    for phase, took in phases.items():
        if isinstance(took, Sequence):
            group.phases += [
                a_phase(phase, 1000, 1000 + seconds, rollout=number) for number, seconds in enumerate(took)
            ]
        else:
            group.phases.append(a_phase(phase, 1000, 1000 + took))
    return group


def learned(*tasks: tuple[str, int, float]) -> list[LearnerTask]:
    """As (kind, group, seconds)."""
    return [
        LearnerTask(
            kind=kind, group="" if kind == "update" else f"step1/t_{group}", started_at=500.0, ended_at=500.0 + seconds
        )
        for kind, group, seconds in tasks
    ]


def judged(
    stage2: Sequence[float], score: Sequence[float], credit: Sequence[float] = ()
) -> dict[str, float | Sequence[float]]:
    return {"stage1": 2.0, "stage2": stage2, "union": 1.0, "score": score, "credit": credit}


def test_one_group_is_a_chain_of_its_slowest_members() -> None:
    group = a_group(0, [(0, 10), (0, 4)], judged(stage2=(1, 8), score=(3, 1), credit=(2, 5)))
    bound = critical_path([group], learned(("accumulate", 0, 6), ("update", 0, 1)), slots=2, minibatch_prompts=1)
    # The short rollout's slow stage2 ends last: 4 + 8.
    assert bound.seconds == pytest.approx(4 + 8 + 1 + 3 + 5 + 6 + 1)
    assert list(bound.by_stage) == ["rollout", "stage2", "union", "score", "credit", "accumulate", "update"]
    assert sum(bound.by_stage.values()) == pytest.approx(bound.seconds)


def test_merged_questions_wait_for_the_whole_group() -> None:
    tasks = learned(("accumulate", 0, 6), ("update", 0, 1))
    merged: dict[str, float | Sequence[float]] = {"stage1": 2.0, "proposals": 8.0, "union": 1.0, "verdicts": (3, 5)}
    first = a_group(0, [(0, 10), (0, 4)], merged)
    assert critical_path([first], tasks, slots=2, minibatch_prompts=1).seconds == pytest.approx(10 + 8 + 1 + 5 + 6 + 1)
    again = a_group(0, [(0, 10), (0, 4)], {"proposals": 8.0, "verdicts": (3, 5)})
    assert critical_path([again], tasks, slots=2, minibatch_prompts=1).seconds == pytest.approx(10 + 8 + 5 + 6 + 1)
    last = a_group(0, [(0, 10), (0, 4)], {"verdicts": (3, 5)})
    assert critical_path([last], tasks, slots=2, minibatch_prompts=1).seconds == pytest.approx(10 + 5 + 6 + 1)


def test_a_group_without_credit_or_rubric_calls() -> None:
    unspread = a_group(0, [(0, 1), (0, 1)], judged(stage2=(1, 1), score=(1, 1)))
    tasks = learned(("accumulate", 0, 1), ("update", 0, 1))
    assert critical_path([unspread], tasks, slots=2, minibatch_prompts=1).seconds == pytest.approx(2 + 1 + 1 + 1 + 2)
    plain = a_group(0, [(0, 1), (0, 3)], {})
    assert critical_path([plain], tasks, slots=2, minibatch_prompts=1).seconds == pytest.approx(3 + 2)


def test_rollouts_share_the_slots_in_the_order_in_which_they_started() -> None:
    # One slot free after 2 s takes the third rollout, the one free after 5 s the fourth.
    groups = [a_group(0, [(0, 5), (0.1, 2)], {}), a_group(1, [(9, 4), (9.5, 7)], {})]
    tasks = learned(("accumulate", 0, 1), ("accumulate", 1, 1), ("update", 0, 0))
    assert critical_path(groups, tasks, slots=2, minibatch_prompts=2).seconds == pytest.approx(5 + 7 + 1)
    assert critical_path(groups, tasks, slots=4, minibatch_prompts=2).seconds == pytest.approx(7 + 1)


def test_the_learner_does_one_thing_at_a_time_as_soon_as_it_can() -> None:
    groups = [a_group(index, [(0, ends), (0, 1)], {}) for index, ends in enumerate((9.0, 2.0, 3.0))]
    tasks = learned(("accumulate", 0, 1), ("accumulate", 1, 4), ("accumulate", 2, 4), ("update", 0, 2))
    # 2 to 6 and 6 to 10 for those that were early; the last one, there since 9, is next.
    bound = critical_path(groups, tasks, slots=6, minibatch_prompts=3)
    assert bound.seconds == pytest.approx(10 + 1 + 2)
    assert bound.by_stage["rollout"] == pytest.approx(2)


def test_later_minibatches_are_remembered_before_the_first_update_and_learned_after_it() -> None:
    groups = [a_group(index, [(0, ends), (0, 1)], {}) for index, ends in enumerate((10.0, 2.0))]
    tasks = learned(("remember", 1, 1), ("accumulate", 0, 4), ("update", 0, 2), ("accumulate", 1, 5), ("update", 1, 2))
    assert critical_path(groups, tasks, slots=4, minibatch_prompts=1).seconds == pytest.approx(10 + 4 + 2 + 5 + 2)
    late = [a_group(index, [(0, ends), (0, 1)], {}) for index, ends in enumerate((2.0, 10.0))]
    assert critical_path(late, tasks, slots=4, minibatch_prompts=1).seconds == pytest.approx(10 + 1 + 2 + 5 + 2)


def test_tasks_of_another_step_are_refused() -> None:
    group = a_group(0, [(0, 1), (0, 1)], {})
    with pytest.raises(ValueError, match="0 updates are not those of the step"):
        critical_path([group], learned(("accumulate", 0, 1)), slots=1, minibatch_prompts=1)
