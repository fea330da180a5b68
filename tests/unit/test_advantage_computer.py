"""The advantage actor without Ray: what it makes of verdicts, of AppWorld's tests and of noise."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draco_ray.config.schema import AlgorithmConfig
from draco_ray.judging.example import example_trajectory
from draco_ray.records import Attribution, EpisodeEnd, Evaluation, Judged, ScoredCriterion, Verdict
from draco_ray.rollout.worker import Evaluated
from draco_ray.summaries import RewardSummary
from draco_ray.training.advantage_computer import AdvantageComputerActor


async def _now(value: Any) -> Any:
    return value


def scores(*verdicts: int) -> Any:
    return _now(Judged(value=tuple(ScoredCriterion(verdict=Verdict(verdict)) for verdict in verdicts)))


def credit(*cited: tuple[int, int, tuple[int, ...]]) -> Any:
    return _now(
        Judged(value=tuple(Attribution(criterion=k, verdict=Verdict(verdict), steps=at) for k, verdict, at in cited))
    )


VERDICTS = [(1, 1, 1), (0, 0, 1), (1, -1, 1), (-1, -1, 1)]
"""Unanimous, not applicable, mixed, unanimous; the last criterion is dropped."""


async def test_a_rollout_that_cannot_be_credited_unevenly_needs_no_call() -> None:
    actor: Any = AdvantageComputerActor(AlgorithmConfig())
    rewards = await actor.rewards(range(4), [scores(*row) for row in VERDICTS])
    assert rewards.unanimous == (0, 1, 3)
    assert rewards.rewards == (1.0, 0.0, 0.0, -1.0)

    asked: Any = [
        [(0, 1, (1,)), (1, 1, (2,))],
        [(0, 0, ()), (1, 0, ())],
        [(0, 1, (1,)), (1, -1, (2,))],
        [(0, -1, (2,)), (1, -1, (2,))],
    ]
    outcomes = []
    none: tuple[int, ...] = ()
    for skipped in (none, rewards.unanimous):
        called = [None if rollout in skipped else credit(*asked[rollout]) for rollout in range(4)]
        played = [_now(example_trajectory(rollout)) for rollout in range(4)]
        _, advantages, _, summary = await actor.from_verdicts(
            "step1/example_1", range(4), played, [scores(*row) for row in VERDICTS], called
        )
        assert summary.inert == 3
        outcomes.append([share.step_advantage_M for share in advantages.rollouts])
    np.testing.assert_allclose(outcomes[0], outcomes[1])


def failed() -> Any:
    return _now(Judged(value=None, error="no JSON"))


def trajectories(number: int) -> list[Awaitable[Any]]:
    return [_now(example_trajectory(rollout)) for rollout in range(number)]


async def test_a_rollout_whose_scoring_failed_is_no_row_of_the_group() -> None:
    """It gives no verdict: neither a fail that keeps a criterion, nor a reward of 0 that moves the others' baseline."""
    actor: Any = AdvantageComputerActor(AlgorithmConfig())
    asked = [scores(1, -1, 1), failed(), scores(-1, -1, 0)]
    rewards = await actor.rewards([0, 2, 5], asked)
    assert rewards == RewardSummary(
        criteria=3,
        surviving=(0, 1),
        unanimous=(5,),
        scored=(0, 5),
        rewards=(0.0, -1.0),
        applicable=5,
        passed=2,
    )
    played = [_now(example_trajectory(rollout)) for rollout in (0, 2, 5)]
    asked = [scores(1, -1, 1), failed(), scores(-1, -1, 0)]
    cited = [credit((0, 1, (1,)), (1, -1, (2,))), failed(), failed()]
    samples, advantages, tokens, summary = await actor.from_verdicts("step1/example_1", [0, 2, 5], played, asked, cited)
    assert [sample.rollout for sample in samples] == [share.rollout for share in advantages.rollouts] == [0, 5]
    winner, loser = advantages.rollouts
    assert (winner.reward, loser.reward) == (0.0, -1.0)
    assert winner.advantage == pytest.approx(2**-0.5, rel=1e-5)
    assert winner.advantage == -loser.advantage
    # All of the winner's push is on the step that passed, the loser's is uniform: its credit call failed.
    first, second = example_trajectory(0).tokens_M.tolist()
    assert winner.step_advantage_M == pytest.approx([winner.advantage * (first + second) / first, 0.0])
    assert loser.step_advantage_M.tolist() == [loser.advantage] * 2
    assert samples[0].advantage_T.sum() == pytest.approx(winner.advantage * (first + second))
    assert tokens == {0: [first, second], 5: [first, second]}
    assert (summary.rollouts, summary.rewards, summary.inert) == ((0, 5), (0.0, -1.0), 1)
    assert summary.fallbacks == {"none": 1, "credit_call_failed": 1}


async def test_no_scored_rollout_is_no_criterion_and_no_reward() -> None:
    rewards = await AdvantageComputerActor(AlgorithmConfig()).rewards([0, 1], [failed(), failed()])
    assert (rewards.criteria, rewards.scored, rewards.rewards, rewards.applicable) == (0, (), (), 0)


async def test_as_many_scores_as_rollouts_are_asked_for() -> None:
    with pytest.raises(ValueError, match="shorter"):
        await AdvantageComputerActor(AlgorithmConfig()).rewards([0, 1], [scores(1)])


async def test_without_credit_all_that_was_sampled_takes_the_advantage() -> None:
    actor: Any = AdvantageComputerActor(AlgorithmConfig(rule="grpo"))
    cited = [credit((0, 1, (1,))), credit((0, -1, (2,)))]
    samples, advantages, _, summary = await actor.from_verdicts(
        "step1/example_1", range(2), trajectories(2), [scores(1), scores(-1)], cited
    )
    for sample, share in zip(samples, advantages.rollouts, strict=True):
        assert sample.advantage_T == pytest.approx(share.advantage * sample.loss_mask_T, rel=1e-6)
    assert summary.fallbacks == {"credit_off": 2}


def evaluation(success: bool, passed: int, reward: float | None = None) -> Any:
    return _now(
        Evaluated(
            evaluation=Evaluation(
                task_id="example_1",
                run=0,
                success=success,
                passed_tests=passed,
                total_tests=3,
                turns=2,
                ended=EpisodeEnd.FINISHED,
                reward=reward,
            )
        )
    )


async def test_the_outcome_reward_is_one_for_a_solved_task_and_nothing_else() -> None:
    actor: Any = AdvantageComputerActor(AlgorithmConfig(reward="outcome", rule="grpo", std_epsilon=0.0))

    played = [_now(example_trajectory(rollout)) for rollout in (1, 3, 4)]
    evaluations = [evaluation(False, 2), evaluation(True, 3), evaluation(False, 0)]
    samples, advantages, _, summary = await actor.from_rewards("step1/example_1", [1, 3, 4], played, evaluations, ())
    assert summary.rewards == (0.0, 1.0, 0.0)
    assert [share.advantage for share in advantages.rollouts] == pytest.approx(np.array([-1, 2, -1]) / 3**0.5)
    assert [sample.rollout for sample in samples] == [1, 3, 4]
    assert advantages.group == "step1/example_1"


async def test_an_environment_that_gives_more_than_yes_or_no_is_the_reward_itself() -> None:
    actor: Any = AdvantageComputerActor(AlgorithmConfig(reward="outcome", rule="grpo"))
    given = [evaluation(True, 2, 1.5), evaluation(False, 3, -0.25), evaluation(True, 0)]
    played = [_now(example_trajectory(rollout)) for rollout in (0, 1, 2)]
    *_, summary = await actor.from_rewards("step1/example_1", [0, 1, 2], played, given, ())
    assert summary.rewards == (1.5, -0.25, 1.0)


async def test_every_group_draws_noise_of_its_own() -> None:
    actor: Any = AdvantageComputerActor(AlgorithmConfig(reward="random", rule="grpo"))
    drawn = []
    for key in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 1, 0)):
        _, advantages, _, summary = await actor.from_rewards("step1/example_1", range(16), trajectories(16), None, key)
        assert set(summary.rewards) == {0.0, 1.0}
        assert [share.advantage > 0 for share in advantages.rollouts] == [reward == 1 for reward in summary.rewards]
        drawn.append(summary.rewards)
    assert len(set(drawn)) == 4
    assert drawn[0] == drawn[-1]


@pytest.mark.parametrize(
    ("prompts", "sampled", "most", "tokens", "compared"),
    [
        # Up to the second sampled token of the rollout that comes to it first.
        ((9, 5), 2, 99, 7, 2),
        # The last of its 12 tokens stays out: an engine has room for one token behind what it scores.
        ((9, 5), 99, 99, 11, 6),
        # The prompts leave no room for two sampled tokens.
        ((9, 5), 2, 6, 6, 1),
        # Or for any: then what there is of them is compared.
        ((9, 8), 2, 6, 6, 5),
    ],
)
async def test_the_canary_compares_sampled_tokens(
    prompts: tuple[int, int], sampled: int, most: int, tokens: int, compared: int
) -> None:
    actor: Any = AdvantageComputerActor(AlgorithmConfig(reward="random", rule="grpo"))
    samples, *_ = await actor.from_rewards("step1/example_1", range(2), trajectories(2), None, (0, 1, 0))
    cut = [
        replace(sample, token_ids_T=np.arange(12) + 100 * index, loss_mask_T=np.arange(12) >= prompt)
        for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
    ]
    token_ids, compared_T = actor.probe(cut, sampled, most)
    start = 100 * int(prompts[1] == 5)
    assert token_ids == list(range(start, start + tokens))
    assert (len(compared_T), compared_T.dtype) == (tokens - 1, np.bool_)
    assert compared_T.sum() == compared


async def test_a_sample_has_to_have_a_token_between_its_first_and_its_last() -> None:
    actor: Any = AdvantageComputerActor(AlgorithmConfig(reward="random", rule="grpo"))
    samples, *_ = await actor.from_rewards("step1/example_1", range(1), trajectories(1), None, (0, 1, 0))
    unsampled = np.zeros(4, dtype=np.bool_)
    lengths = {}
    for length in (2, 3, 4):
        cut = replace(samples[0], token_ids_T=np.arange(length), loss_mask_T=unsampled[:length])
        lengths[length] = actor.probe([cut], 2, 99)
    assert lengths[2] is None
    # Of what nobody sampled all is compared, up to as many tokens as sampled ones would be enough.
    for token_ids, compared_T in (lengths[3], lengths[4]):
        assert (token_ids, compared_T.tolist()) == ([0, 1], [True])
    assert actor.probe([], 2, 99) is None


async def test_without_a_rubric_a_closing_turn_takes_the_advantage_as_well() -> None:
    """It belongs to no step, and has none to share the advantage with."""
    actor: Any = AdvantageComputerActor(AlgorithmConfig(reward="outcome"))
    given = [evaluation(True, 3), evaluation(False, 0)]
    samples, advantages, *_ = await actor.from_rewards("step1/example_1", range(2), trajectories(2), given, ())
    for sample, share in zip(samples, advantages.rollouts, strict=True):
        assert sample.advantage_T == pytest.approx(share.advantage * sample.loss_mask_T, rel=1e-6)


async def test_the_summary_tells_spreads_where_credit_acts_from_spreads_where_it_does_not() -> None:
    """The appendix compares the two; a rollout of which no step is cited has no spread."""
    actor: Any = AdvantageComputerActor(AlgorithmConfig())
    cited = [credit((0, 1, (1,)), (1, -1, (2,))), credit((0, -1, (1,)), (1, -1, (1,))), credit((0, 1, ()), (1, 0, ()))]
    asked = [scores(1, -1), scores(-1, -1), scores(1, 0)]
    *_, summary = await actor.from_verdicts("step1/example_1", range(3), trajectories(3), asked, cited)
    assert summary.active_spreads == (0.5,)
    assert summary.inert_spreads == (0.0,)
