"""Dropout, reward, standardisation, and the chain from a group's verdicts to the learner's tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from draco_ray.algorithm.computer import training_samples
from draco_ray.algorithm.equations import (
    group_advantages_G,
    random_rewards,
    rubric_rewards,
    surviving_criteria,
    unanimous_attributions,
)
from draco_ray.algorithm.rules import (
    AdvantageRule,
    CreditSkipReason,
    Grpo,
    group_advantages,
    group_advantages_from_rewards,
)
from draco_ray.records import Attribution, CreditFallback, EpisodeEnd, Message, Trajectory, Turn, Verdict

verdict_arrays = hnp.arrays(
    np.int8, st.tuples(st.integers(1, 8), st.integers(0, 24)), elements=st.sampled_from([-1, 0, 1])
)
DRACO, GRPO = AdvantageRule(), Grpo()


@given(verdict_arrays)
def test_a_criterion_survives_exactly_when_some_member_failed_it(verdict_GK: np.ndarray) -> None:
    assert surviving_criteria(verdict_GK).tolist() == [-1 in column for column in verdict_GK.T.tolist()]


@given(verdict_arrays)
def test_the_reward_is_the_balance_of_applicable_surviving_verdicts(verdict_GK: np.ndarray) -> None:
    surviving_K = surviving_criteria(verdict_GK)
    for row, reward in zip(verdict_GK[:, surviving_K].tolist(), rubric_rewards(verdict_GK, surviving_K), strict=True):
        passed, failed = row.count(1), row.count(-1)
        assert reward == ((passed - failed) / (passed + failed) if passed + failed else 0.0)


def test_the_traced_rollout_has_reward_minus_a_fifth() -> None:
    assert rubric_rewards(np.array([[-1, -1, -1, 1, 1]]), np.ones(5, dtype=bool)).tolist() == [-0.2]


def test_no_applicable_criterion_is_reward_zero() -> None:
    verdict_GK = np.array([[0, 0], [-1, 1]])
    assert rubric_rewards(verdict_GK, np.array([True, True]))[0] == 0.0


def test_all_dropped_is_reward_zero_and_advantage_zero() -> None:
    verdict_GK = np.array([[1, 0], [1, 1], [0, 1]])
    result = group_advantages("g", verdict_GK, [()] * 3, [np.array([4])] * 3, [0, 1, 2], rule=DRACO)
    assert not result.surviving_K.any()
    assert [member.reward for member in result.rollouts] == [0.0] * 3
    assert [member.advantage for member in result.rollouts] == [0.0] * 3
    assert all(member.inert for member in result.rollouts)


@pytest.mark.parametrize(
    ("verdict_GK", "message"),
    [
        (np.array([[2]]), "^verdict_GK contains a value outside {-1, 0, \\+1}$"),
        (np.array([1, -1]), "^verdict_GK has 1 dimensions"),
    ],
)
def test_what_is_no_verdict_matrix_is_refused(verdict_GK: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        surviving_criteria(verdict_GK)
    with pytest.raises(ValueError, match=message):
        rubric_rewards(verdict_GK, np.array([True]))


def test_a_mask_of_another_rubric_is_refused() -> None:
    with pytest.raises(ValueError, match="^surviving_K has shape \\(1,\\), expected \\(2,\\)$"):
        rubric_rewards(np.array([[1, -1], [1, 1], [0, 0]]), np.array([True]))


def test_random_rewards_are_coin_flips_of_their_own_for_every_group() -> None:
    """Seed, step and place in the step all matter: groups that shared their noise would be pushed alike."""
    keys = [(seed, step, index) for seed in range(3) for step in range(1, 5) for index in range(8)]
    drawn = {key: random_rewards(key, 64) for key in keys}
    assert all(set(reward_G.tolist()) == {0.0, 1.0} for reward_G in drawn.values())
    assert len({reward_G.tobytes() for reward_G in drawn.values()}) == len(keys)
    assert all((random_rewards(key, 64) == reward_G).all() for key, reward_G in drawn.items())
    heads = float(np.mean(list(drawn.values())))
    assert heads == pytest.approx(0.5, abs=0.03)  # 6,144 flips: four standard deviations are 0.026


rewards = hnp.arrays(np.float64, st.integers(2, 8), elements=st.floats(-1, 1, width=16))


@given(rewards)
def test_advantages_are_the_bessel_standardised_rewards(reward_G: np.ndarray) -> None:
    advantage_G = group_advantages_G(reward_G)
    if len(set(reward_G.tolist())) == 1:
        assert advantage_G.tolist() == [0.0] * len(reward_G)
    else:
        mean = sum(reward_G) / len(reward_G)
        deviation = (sum((r - mean) ** 2 for r in reward_G) / (len(reward_G) - 1)) ** 0.5
        assert advantage_G == pytest.approx(np.array([(r - mean) / (deviation + 1e-6) for r in reward_G]), abs=1e-9)


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_zero_spread_is_exactly_zero_whatever_rounding_says(size: int) -> None:
    assert group_advantages_G(np.full(size, 0.1)).tolist() == [0.0] * size  # 0.1 has an inexact mean at some sizes


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages_G(np.array([0.8])).tolist() == [0.0]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages_G(np.array([0.1, np.nan]))


# Three scored rollouts (0, 2, 5) over four criteria; the last is passed by all and dropped.
VERDICTS = np.array([[1, 1, 0, 1], [1, -1, -1, 1], [-1, -1, -1, 1]], dtype=np.int8)
TOKENS = [np.array([2, 4]), np.array([3, 3]), np.array([5])]


def test_a_group_from_verdicts_to_step_advantages() -> None:
    attributions = [
        [
            Attribution(criterion=0, verdict=Verdict.PASS, steps=(1, 2)),
            Attribution(criterion=1, verdict=Verdict.FAIL, steps=(1,)),
        ],
        [
            Attribution(criterion=0, verdict=Verdict.PASS, steps=(1,)),
            Attribution(criterion=3, verdict=Verdict.FAIL, steps=(1, 2)),
        ],
        None,
    ]
    result = group_advantages("step3/t_1", VERDICTS, attributions, TOKENS, [0, 2, 5], rule=DRACO, std_epsilon=0.0)
    assert result.group == "step3/t_1"
    assert result.surviving_K.tolist() == [True, True, True, False]
    winner, loser, failed = result.rollouts
    assert [member.rollout for member in result.rollouts] == [0, 2, 5]
    assert [member.reward for member in result.rollouts] == pytest.approx([1.0, -1 / 3, -1.0])
    deviation = np.std([1.0, -1 / 3, -1.0], ddof=1)
    assert [member.advantage for member in result.rollouts] == pytest.approx(
        [(1 + 1 / 9) / deviation, (-1 / 3 + 1 / 9) / deviation, (-1 + 1 / 9) / deviation]
    )

    wider = group_advantages("g", VERDICTS, attributions, TOKENS, [0, 2, 5], rule=DRACO, std_epsilon=1.0).rollouts
    assert [member.advantage * (deviation + 1) for member in wider] == pytest.approx([10 / 9, -2 / 9, -8 / 9])

    # The credit call's own verdict counts: criterion 1 passed in scoring and fails here, so Q = (1/2, 1).
    assert winner.quality_M.tolist() == [0.5, 1.0]
    assert winner.step_advantage_M == pytest.approx(winner.advantage * np.array([1.0, 1.0]))
    assert (winner.fallback, winner.inert) == (CreditFallback.NONE, False)

    # A loser whose surviving citations all pass: the citation of the dropped criterion does not save it.
    assert loser.quality_M.tolist() == [1.0, 1.0]
    assert loser.cited_M.tolist() == [True, False]
    assert loser.step_advantage_M.tolist() == [loser.advantage] * 2
    assert (loser.fallback, loser.inert) == (CreditFallback.VANISHING_NORMALISER, True)

    assert failed.step_advantage_M.tolist() == [failed.advantage]
    assert (failed.fallback, failed.inert) == (CreditFallback.CREDIT_CALL_FAILED, True)


def test_without_credit_every_step_takes_the_advantage() -> None:
    cited = [[Attribution(criterion=1, verdict=Verdict.FAIL, steps=(1,))]] * 3
    result = group_advantages("g", VERDICTS, cited, TOKENS, [0, 2, 5], rule=GRPO)
    for member, tokens_M in zip(result.rollouts, TOKENS, strict=True):
        assert member.step_advantage_M.tolist() == [member.advantage] * len(tokens_M)
        assert member.fallback is CreditFallback.CREDIT_OFF
        assert np.isnan(member.quality_M).all()
        assert (member.quality_M.shape, member.cited_M.tolist()) == (tokens_M.shape, [False] * len(tokens_M))
        assert member.cited_M.dtype == np.bool_
        assert member.inert
    assert [member.rollout for member in result.rollouts] == [0, 2, 5]
    assert [member.reward for member in result.rollouts] == pytest.approx([1.0, -1 / 3, -1.0])


def test_given_rewards_are_vanilla_grpo() -> None:
    result = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0, 0.0]), TOKENS, [0, 2, 5], std_epsilon=0.0, rule=GRPO
    )
    assert [member.advantage for member in result.rollouts] == pytest.approx(np.array([2, -1, -1]) / 3**0.5)
    assert [member.reward for member in result.rollouts] == [1.0, 0.0, 0.0]
    assert result.group == "g"
    wider = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0, 0.0]), TOKENS, [0, 2, 5], std_epsilon=1.0, rule=GRPO
    ).rollouts
    assert wider[0].advantage == pytest.approx(2 / 3 / (3**-0.5 + 1))
    assert (result.surviving_K.shape, result.surviving_K.dtype) == ((0,), np.bool_)
    assert {member.fallback for member in result.rollouts} == {CreditFallback.CREDIT_OFF}


def test_rows_that_do_not_match_are_refused() -> None:
    none = [None] * 3
    for verdict_GK, attributions, tokens_GM, found in (
        (VERDICTS, none[:2], TOKENS[:2], "{'verdicts': 3}"),
        (VERDICTS[:2], none, TOKENS[:2], "{'attributions': 3}"),
        (VERDICTS[:2], none[:2], TOKENS, "{'tokens': 3}"),
    ):
        with pytest.raises(ValueError, match=f"^group g: expected 2 rows, one per rollout, found {re.escape(found)}$"):
            group_advantages("g", verdict_GK, attributions, tokens_GM, [0, 1], rule=DRACO)
    for reward_G, tokens_GM, found in ((np.zeros(3), TOKENS[:2], "{'rewards': 3}"), (np.zeros(2), TOKENS, "{'tokens'")):
        with pytest.raises(ValueError, match=f"^group g: expected 2 rows, one per rollout, found {re.escape(found)}"):
            group_advantages_from_rewards("g", reward_G, tokens_GM, [0, 1], rule=GRPO)
    for unordered in ([1, 0], [1, 1]):
        with pytest.raises(ValueError, match="^group g: rollout indices must ascend"):
            group_advantages_from_rewards("g", np.zeros(2), TOKENS[:2], unordered, rule=GRPO)


def trajectory() -> Trajectory:
    """Two steps of 2 and 1 tokens, tool output between, and a sampled closing turn without code."""
    step_T = np.array([-1, -1, 0, 0, -1, 1, -1, -1])
    sampled_T = np.array([0, 0, 1, 1, 0, 1, 0, 1], dtype=bool)
    return Trajectory(
        task_id="t_1",
        group="step0/t_1",
        rollout=4,
        attempt=0,
        policy_version=3,
        prompt=(Message(role="user", content="do it"),),
        turns=(
            Turn(text="a", action="a", observation="out", first_token=2, last_token=4),
            Turn(text="b", action="b", observation="out", first_token=5, last_token=6),
            Turn(text="bye", action=None, observation=None, first_token=7, last_token=8),
        ),
        token_ids_T=np.arange(8),
        sampled_T=sampled_T,
        logprob_T=np.where(sampled_T, -0.5, 0.0),
        step_T=step_T,
        prompt_length=2,
        ended=EpisodeEnd.FINISHED,
        started_at=0.0,
        ended_at=1.0,
    )


def test_credit_reaches_step_tokens_and_leaves_gaps_alone() -> None:
    played = trajectory()
    cited = [
        [
            Attribution(criterion=0, verdict=Verdict.PASS, steps=(1, 2)),
            Attribution(criterion=1, verdict=Verdict.FAIL, steps=(2,)),
        ],
        [],
    ]
    member = group_advantages(
        "step0/t_1", np.array([[1, 1], [-1, -1]]), cited, [played.tokens_M, np.array([3])], [4, 5], rule=DRACO
    ).rollouts[0]
    sample = training_samples(played, member, credit=True)[0]
    first, second = member.step_advantage_M
    assert first * 2 == pytest.approx(2 * second)  # Q = (1, 1/2): twice the total on twice the tokens
    assert sample.advantage_T == pytest.approx(np.array([0, 0, first, first, 0, second, 0, 0]), rel=1e-6)
    assert sample.advantage_T.sum() == pytest.approx(member.advantage * 3)
    assert sample.loss_mask_T.tolist() == played.sampled_T.tolist()
    assert (sample.policy_version, sample.prompt_length, sample.rollout) == (3, 2, 4)
    assert (sample.group, sample.task_id) == (played.group, played.task_id)
    assert sample.advantage_T.dtype == np.float32
    assert np.shares_memory(sample.token_ids_T, played.token_ids_T)
    assert np.shares_memory(sample.logprob_T, played.logprob_T)


def test_a_uniform_fallback_under_credit_covers_step_tokens_only() -> None:
    played = trajectory()
    member = group_advantages(
        "g", np.array([[1], [-1]]), [None, None], [played.tokens_M, np.array([3])], [4, 5], rule=DRACO
    ).rollouts[0]
    advantage_T = training_samples(played, member, credit=True)[0].advantage_T
    assert advantage_T == pytest.approx(member.advantage * np.array([0, 0, 1, 1, 0, 1, 0, 0]))


def without_steps(rollout: int) -> Trajectory:
    """One turn, cut before its code closed."""
    played = trajectory()
    return replace(
        played,
        rollout=rollout,
        turns=(Turn(text="a and a", action=None, observation=None, first_token=2, last_token=8),),
        sampled_T=np.array([0, 0, 1, 1, 1, 1, 1, 1], dtype=bool),
        step_T=np.full(8, -1),
        ended=EpisodeEnd.RESPONSE_LIMIT,
    )


@pytest.mark.parametrize("attributed", [(), None, CreditSkipReason.UNANIMOUS])
def test_a_rollout_without_a_step_takes_the_advantage_on_all_it_sampled(
    attributed: tuple[Attribution, ...] | CreditSkipReason | None,
) -> None:
    played, idle = trajectory(), without_steps(5)
    cited = [[Attribution(criterion=0, verdict=Verdict.PASS, steps=(1,))], attributed]
    acted, idled = group_advantages(
        "g", np.array([[1], [-1]]), cited, [played.tokens_M, idle.tokens_M], [4, 5], rule=DRACO
    ).rollouts
    if attributed is not None:
        assert (idled.fallback, idled.inert) == (CreditFallback.NO_STEP, True)
    assert idled.advantage == pytest.approx(-(0.5**0.5))
    advantage_T = training_samples(idle, idled, credit=True)[0].advantage_T
    assert advantage_T == pytest.approx(idled.advantage * idle.sampled_T)
    # Its neighbour in the group is credited as ever, its closing turn with nothing.
    assert acted.fallback is CreditFallback.NONE
    assert training_samples(played, acted, credit=True)[0].advantage_T[-1] == 0.0


def test_a_turn_that_was_cut_before_its_code_takes_nothing_beside_steps() -> None:
    played = trajectory()
    cut = replace(
        played,
        turns=(*played.turns[:2], replace(played.turns[2], text="<code>x = ")),
        ended=EpisodeEnd.RESPONSE_LIMIT,
    )
    member = group_advantages("g", np.array([[-1], [1]]), [(), ()], [cut.tokens_M] * 2, [4, 5], rule=DRACO).rollouts[0]
    sample = training_samples(cut, member, credit=True)[0]
    assert sample.advantage_T == pytest.approx(member.advantage * np.array([0, 0, 1, 1, 0, 1, 0, 0]))
    assert sample.loss_mask_T[-1]


def test_a_rollout_without_a_token_is_counted_and_not_trained_on() -> None:
    played = trajectory()
    none: dict[str, Any] = dict.fromkeys(("token_ids_T", "step_T"), np.zeros(0, dtype=np.int32))
    none |= {"sampled_T": np.zeros(0, dtype=np.bool_), "logprob_T": np.zeros(0, dtype=np.float32), "turns": ()}
    mute = replace(played, rollout=5, prompt_length=0, **none)
    acted, said_nothing = group_advantages(
        "g", np.array([[1], [-1]]), [[], []], [played.tokens_M, mute.tokens_M], [4, 5], rule=DRACO
    ).rollouts
    assert acted.advantage > 0 > said_nothing.advantage
    assert training_samples(mute, said_nothing, credit=True) == []


def test_vanilla_grpo_covers_every_sampled_token() -> None:
    played = trajectory()
    member = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0]), [played.tokens_M] * 2, [4, 5], rule=GRPO
    ).rollouts[0]
    advantage_T = training_samples(played, member, credit=False)[0].advantage_T
    assert advantage_T == pytest.approx(member.advantage * np.array([0, 0, 1, 1, 0, 1, 0, 1]))


def test_advantages_of_another_rollout_are_refused() -> None:
    played = trajectory()
    members = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0]), [played.tokens_M, np.array([3])], [4, 5], rule=GRPO
    ).rollouts
    with pytest.raises(ValueError, match="trajectory t_1/4 of step0/t_1: expected its own advantages, got rollout 5's"):
        training_samples(played, members[1], credit=True)
    with pytest.raises(ValueError, match="2 steps, but advantages for 1"):
        training_samples(replace(played, rollout=5), members[1], credit=True)
    # As many steps as advantages, but a token of a step beyond them, and the other way round.
    beyond = replace(played, step_T=np.array([-1, -1, 0, 0, -1, 2, -1, -1]))
    with pytest.raises(ValueError, match="2 steps, but advantages for 2"):
        training_samples(beyond, members[0], credit=True)
    shorter = replace(played, step_T=np.array([-1, -1, 0, 0, -1, -1, -1, -1]), rollout=5)
    with pytest.raises(ValueError, match="2 steps, but advantages for 1"):
        training_samples(shorter, members[1], credit=True)


def test_a_step_token_that_was_not_sampled_is_refused() -> None:
    played = replace(trajectory(), step_T=np.array([-1, -1, 0, 0, 0, 1, -1, -1]))
    member = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0]), [played.tokens_M] * 2, [4, 5], rule=GRPO
    ).rollouts[0]
    with pytest.raises(ValueError, match="a step contains a token that was not sampled"):
        training_samples(played, member, credit=True)


def test_the_algorithm_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, draco_ray.algorithm.rules\n"
        "print([m for m in ('ray', 'torch', 'transformers', 'pyarrow', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unanimous_verdicts_need_no_citations() -> None:
    """Whatever a credit call would have cited, unanimous verdicts give every step the same total."""
    verdict_GK = np.array([[1, 1, 0], [-1, -1, 1], [1, -1, 1]])
    tokens = [np.array([3, 5, 2]), np.array([4, 4]), np.array([6, 1])]
    called = [
        [
            Attribution(criterion=0, verdict=Verdict.PASS, steps=(2, 3)),
            Attribution(criterion=1, verdict=Verdict.PASS, steps=(3,)),
        ],
        [Attribution(criterion=0, verdict=Verdict.FAIL, steps=(1,))],
        [Attribution(criterion=1, verdict=Verdict.FAIL, steps=(2,))],
    ]
    replaced = [unanimous_attributions(np.array([1, 1, 0])), *called[1:]]
    first, second = (
        group_advantages("g", verdict_GK, cited, tokens, [0, 1, 2], rule=DRACO).rollouts[0]
        for cited in (called, replaced)
    )
    assert first.advantage != 0
    np.testing.assert_allclose(first.step_advantage_M, second.step_advantage_M)
    assert first.inert
    assert second.inert
    assert unanimous_attributions(np.array([0, 0])) == ()
    assert unanimous_attributions(np.array([0, -1])) == (Attribution(criterion=1, verdict=Verdict.FAIL, steps=(1,)),)
    with pytest.raises(ValueError, match="not unanimous"):
        unanimous_attributions(np.array([1, -1]))


def test_without_a_credit_call_the_scoring_verdicts_say_what_is_inert() -> None:
    """Nobody is better than the other, so no call is made; the verdicts of both are mixed all the same."""
    verdict_GK = np.array([[1, -1, 1], [-1, 1, 0], [0, 0, 1]])
    members = group_advantages("g", verdict_GK, [(), (), ()], TOKENS, [0, 1, 2], rule=DRACO).rollouts
    assert [member.advantage for member in members] == [0, 0, 0]
    assert [member.inert for member in members] == [False, False, True]


def branched() -> Trajectory:
    """A main line of two steps and a sub-agent between them: three tokens of context, one step of three tokens."""
    return replace(
        trajectory(),
        turns=(
            Turn(text="a", action="a", observation="out", first_token=2, last_token=4),
            Turn(text="sub", action="sub", observation=None, first_token=10, last_token=13, branch=1),
            Turn(text="b", action="b", observation="out", first_token=5, last_token=6),
        ),
        token_ids_T=np.arange(13),
        sampled_T=np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1], dtype=bool),
        logprob_T=np.arange(13) / -10,
        step_T=np.array([-1, -1, 0, 0, -1, 2, -1, -1, -1, -1, 1, 1, 1]),
        branches=(0, 7),
    )


def test_the_branches_of_a_rollout_share_its_advantage_and_are_samples_of_their_own() -> None:
    played = branched()
    assert played.tokens_M.tolist() == [2, 3, 1]
    cited = [[Attribution(criterion=0, verdict=Verdict.PASS, steps=(2,))], []]
    member = group_advantages(
        "g", np.array([[1], [-1]]), cited, [played.tokens_M, np.array([3])], [4, 5], rule=DRACO
    ).rollouts[0]
    main, sub = training_samples(played, member, credit=True)
    assert (main.branch, sub.branch, main.rollout, sub.rollout) == (0, 1, 4, 4)
    assert main.token_ids_T.tolist() == list(range(7))
    assert sub.token_ids_T.tolist() == list(range(7, 13))
    assert (main.prompt_length, sub.prompt_length) == (2, 3)
    # Of its main line a rollout has recorded it.
    assert training_samples(replace(played, prompt_length=1), member, credit=True)[0].prompt_length == 1
    assert sub.logprob_T.tolist() == played.logprob_T[7:].tolist()
    assert sub.loss_mask_T.tolist() == [False] * 3 + [True] * 3
    # The total over all branches is the rollout's, each token taking its own step's part.
    assert main.advantage_T.sum() + sub.advantage_T.sum() == pytest.approx(member.advantage * 6)
    a_M = member.step_advantage_M
    assert main.advantage_T.tolist() == pytest.approx([0, 0, a_M[0], a_M[0], 0, a_M[2], 0])
    assert sub.advantage_T.tolist() == pytest.approx([0, 0, 0, a_M[1], a_M[1], a_M[1]])
    plain = training_samples(played, member, credit=False)
    assert [sample.advantage_T.sum() for sample in plain] == pytest.approx([3 * member.advantage] * 2)


def test_a_branch_in_which_nothing_was_sampled_is_all_prompt() -> None:
    played = branched()
    silent = replace(
        played,
        turns=played.turns[::2],
        sampled_T=played.sampled_T & (np.arange(13) < 7),
        step_T=np.array([-1, -1, 0, 0, -1, 1, *[-1] * 7]),
    )
    member = group_advantages_from_rewards(
        "g", np.array([1.0, 0.0]), [silent.tokens_M] * 2, [4, 5], rule=GRPO
    ).rollouts[0]
    assert [sample.prompt_length for sample in training_samples(silent, member, credit=True)] == [2, 6]


@pytest.mark.parametrize("branches", [(), (1,), (0, 0), (0, 9, 7), (0, 13)])
def test_branches_that_are_none_are_refused(branches: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="trajectory t_1/4: branch"):
        replace(branched(), branches=branches)
