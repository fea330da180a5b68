"""The metrics line: what is counted, and that nothing becomes a silent zero."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draco_ray.learner.base import UpdateMetrics
from draco_ray.pipeline import Group
from draco_ray.records import EpisodeEnd, Termination
from draco_ray.summaries import AdvantageSummary, RewardSummary
from draco_ray.training.metrics import step_metrics, step_spans, update_metrics
from draco_ray.training.progress import step_line
from tests.support.summaries import a_phase, a_rollout


def an_update(tokens: int, kl: float, grad_norm: float = 1.0, skipped: str | None = None) -> UpdateMetrics:
    return UpdateMetrics(
        update=1,
        skipped=skipped,
        grad_norm=grad_norm,
        samples=6,
        valid_tokens=tokens,
        computed_tokens=2 * tokens,
        policy_loss=0.0,
        kl=kl,
        entropy=0.0,
        clip_fraction=0.0,
        dual_clip_fraction=0.0,
        engine_gap=0.0,
        learning_rate=1e-4,
    )


@pytest.fixture
def groups() -> list[Group]:
    good = Group(step=1, index=0, task_id="t_1", prompt=())
    good.rollouts = [a_rollout(0, 0, 10), a_rollout(1, 2, 12, EpisodeEnd.TURN_LIMIT)]
    good.phases = [
        a_phase("stage1", 0, 2),
        a_phase("score", 11, 13),
        a_phase("score", 12, 14, error="cannot be parsed"),
    ]
    good.reward = RewardSummary(
        criteria=4, surviving=(0, 3), unanimous=(0,), scored=(0, 1), rewards=(1.0, 0.0), applicable=6, passed=3
    )
    good.advantage = AdvantageSummary(
        rollouts=(0, 1),
        rewards=(1.0, 0.0),
        inert=1,
        fallbacks={"none": 1, "no_citation": 1},
        active_spreads=(0.2,),
        inert_spreads=(0.0,),
    )
    lost = Group(step=1, index=1, task_id="u_1", prompt=())
    lost.reason = "0 of 2 rollouts finished; a group needs at least 2"
    return [good, lost]


def test_words_of_a_kind_of_agent_are_shown_if_one_of_them_occurs() -> None:
    common = ["no_action", "response_limit", "turn_limit", "crashed", "server_error"]
    # Which agent it was that always reached the limit is not known.
    assert Termination.shown([Termination.TURN_LIMIT]) == common
    assert Termination.shown([]) == common
    assert Termination.shown([Termination.GAVE_UP]) == ["submitted", "gave_up", *common]
    assert Termination.shown([Termination.FINISHED]) == [*common, "finished"]
    assert Termination.shown([Termination.FINISHED, Termination.SUBMITTED]) == list(Termination)


def test_a_step_counts_what_its_groups_report(groups: list[Group]) -> None:
    metrics = step_metrics(1, groups, group_size=2)
    assert metrics["reward"] == pytest.approx(0.5)
    assert metrics["pass_rate"] == pytest.approx(0.5)
    assert metrics["inert_share"] == pytest.approx(0.5)
    assert (metrics["groups"], metrics["groups_with_signal"], metrics["groups_failed"]) == (2, 1, 1)
    assert (metrics["rollouts"], metrics["rollouts_lost"]) == (2, 2)
    # Of the two rollouts of the group that was lost nothing is known but that their environments failed.
    assert metrics["ended"] == {
        "submitted": 1,
        "gave_up": 0,
        "no_action": 0,
        "response_limit": 0,
        "turn_limit": 1,
        "crashed": 0,
        "server_error": 2,
    }
    assert metrics["rollouts_retried"] == 0
    assert (metrics["quality_spread"], metrics["quality_spread_active"]) == (pytest.approx(0.1), 0.2)
    assert metrics["judge"]["score"]["phases"] == 2
    assert metrics["judge"]["score"]["failed"] == 1
    assert metrics["judge_dollars"] == pytest.approx(0.75)


def test_a_server_error_that_another_try_made_good_is_counted(groups: list[Group]) -> None:
    groups[0].rollouts[1] = replace(groups[0].rollouts[1], attempt=2)
    metrics = step_metrics(1, groups, group_size=2)
    assert (metrics["rollouts_retried"], metrics["ended"]["server_error"]) == (2, 2)


def test_the_spread_is_a_mean_over_rollouts_not_over_groups(groups: list[Group]) -> None:
    groups[1].advantage = replace(groups[0].advantage, active_spreads=(0.4, 0.4, 0.4), inert_spreads=())  # type: ignore[type-var]
    assert step_metrics(1, groups, group_size=2)["quality_spread_active"] == pytest.approx(0.35)


def test_settings_without_a_rubric_have_rewards_and_signal_too() -> None:
    groups = []
    for index, rewards in enumerate([(1.0, 0.0, 0.0), (1.0, 1.0, 1.0)]):
        group = Group(step=1, index=index, task_id=f"t_{index}", prompt=())
        group.advantage = AdvantageSummary(
            rollouts=(0, 1, 2), rewards=rewards, inert=0, fallbacks={}, active_spreads=(), inert_spreads=()
        )
        groups.append(group)
    metrics = step_metrics(1, groups, group_size=3)
    assert metrics["reward"] == pytest.approx(4 / 6)
    assert (metrics["groups"], metrics["groups_with_signal"]) == (2, 1)
    assert metrics["pass_rate"] is None
    assert metrics["quality_spread"] is None


def test_judging_is_hidden_where_a_rollout_runs_at_the_same_time(groups: list[Group]) -> None:
    metrics = step_metrics(1, groups, group_size=2)
    assert metrics["seconds_generation"] == 12
    assert metrics["judge_seconds"] == 6
    assert metrics["judge_hidden_share"] == pytest.approx(3 / 6)


def test_a_mean_over_nothing_is_null_not_zero() -> None:
    metrics = step_metrics(1, [], group_size=6)
    assert metrics["reward"] is None
    assert metrics["pass_rate"] is None
    assert metrics["judge_hidden_share"] is None
    assert update_metrics([])["kl"] is None


def test_updates_are_weighted_by_their_tokens() -> None:
    metrics = update_metrics([an_update(100, kl=0.0), an_update(300, kl=0.4, grad_norm=2.0, skipped="norm is nan")])
    assert metrics["kl"] == pytest.approx(0.3)
    assert metrics["grad_norm"] == 2.0
    assert (metrics["updates"], metrics["updates_skipped"]) == (1, ["norm is nan"])
    broken = an_update(100, kl=0.0, grad_norm=float("nan"), skipped="norm is nan")
    assert update_metrics([broken, an_update(100, kl=0.0, grad_norm=2.0)])["grad_norm"] == 2.0
    assert update_metrics([broken])["grad_norm"] is None


def test_spans_name_every_stage(groups: list[Group]) -> None:
    rows = step_spans(groups, {"learning": [(50.0, 51.0), (60.0, 62.0)], "sync": [(62.0, 63.0)]})
    stages = ["rollout", "rollout", "stage1", "score", "score", "learning", "learning", "sync"]
    assert [row["stage"] for row in rows] == stages
    last = {"task_id": None, "rollout": None, "stage": "sync", "started_at": 62.0, "ended_at": 63.0}
    assert rows[-1] == last


def test_the_line_of_a_step_says_what_was_lost(groups: list[Group]) -> None:
    metrics = {
        **step_metrics(1, groups, group_size=2),
        **update_metrics([an_update(100, kl=0.01)]),
        "seconds": 30.0,
        "seconds_learning": 2.0,
        "seconds_sync": 0.5,
        "canary_gap": None,
    }
    line = step_line(metrics, steps=3)
    assert line.startswith("step 1/3 30s | reward +0.50 | pass_rate 50%")
    assert "ended: submitted 1 turn_limit 1 server_error 2" in line
    assert "gap -" in line
    assert line.endswith("lost 2 rollouts, 1 groups")
