"""The rule of the paper as one function: what it is given, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draco_ray.algorithm.closed_form import step_advantages
from draco_ray.records import Attribution, Verdict

VERDICTS = [[1, 1, -1], [-1, -1, 1]]
TOKENS = [[20, 10], [10, 10, 10]]


def cited(criterion: float, step: float = 1, verdict: int = Verdict.FAIL) -> Attribution:
    """What a credit call says, with values that it may not have."""
    return Attribution(criterion=criterion, verdict=verdict, steps=(step,))  # type: ignore[arg-type]


def test_a_reward_from_elsewhere_takes_the_place_of_the_rubrics() -> None:
    uncited: list[None] = [None, None]
    rubric = step_advantages(verdicts=VERDICTS, citations=uncited, tokens=TOKENS)
    reward = step_advantages(verdicts=VERDICTS, citations=uncited, tokens=TOKENS, reward=[0, 1], std_epsilon=0.0)
    assert [a[0] for a in reward] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-15)
    # Both are standardised; the rubric says who won, and the reward says the opposite.
    assert [np.sign(a).tolist() for a in rubric] == [[1, 1], [-1, -1, -1]]
    assert [np.sign(a).tolist() for a in reward] == [[-1, -1], [1, 1, 1]]
    damped = step_advantages(verdicts=VERDICTS, citations=uncited, tokens=TOKENS, reward=[0, 1], std_epsilon=0.5**0.5)
    assert [a[0] for a in damped] == pytest.approx([a[0] / 2 for a in reward])


def test_without_a_criterion_there_is_no_reward_and_no_push() -> None:
    empty: tuple[list[list[int]], ...] = ([], [[], []])
    for verdicts in empty:
        pushes = step_advantages(verdicts=verdicts, citations=[None, {}], tokens=TOKENS)
        assert [push.tolist() for push in pushes] == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    pushes = step_advantages(verdicts=[], citations=[None, None], tokens=TOKENS, reward=[1, 0])
    assert pushes[0][0] > 0 > pushes[1][0]


def test_citations_are_steps_by_criterion_or_the_credit_calls_own() -> None:
    by_criterion = step_advantages(verdicts=VERDICTS, citations=[None, {0: [3, 3], 2: [1]}], tokens=TOKENS)
    attributed = [
        Attribution(criterion=0, verdict=Verdict.FAIL, steps=(3,)),
        Attribution(criterion=2, verdict=Verdict.PASS, steps=(1,)),
    ]
    given = step_advantages(verdicts=VERDICTS, citations=[(), attributed], tokens=TOKENS)
    assert [a.tolist() for a in by_criterion] == [a.tolist() for a in given]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"citations": [None]},
            "2 rows of verdicts, 1 of citations and 2 of tokens; expected one of each per rollout",
        ),
        ({"reward": [1.0]}, r"reward has shape (1,), expected (2,)"),
        (
            {"citations": [], "verdicts": [], "tokens": []},
            "0 rows of verdicts, 0 of citations and 0 of tokens; expected one of each per rollout",
        ),
        ({"citations": [{3: [1]}, None]}, "rollout 0: criterion 3 is cited, but the rubric has 3 criteria"),
        ({"citations": [None, {-1: [1]}]}, "rollout 1: criterion -1 is cited, but the rubric has 3 criteria"),
        ({"citations": [None, [cited(3)]]}, "rollout 1: criterion 3 is cited, but the rubric has 3 criteria"),
        ({"citations": [[cited(-1)], None]}, "rollout 0: criterion -1 is cited, but the rubric has 3 criteria"),
        ({"citations": [[cited(0), cited(0)], None]}, "rollout 0: criterion 0 is attributed twice"),
        ({"citations": [[cited(0.5)], None]}, "rollout 0: a criterion is 0.5, expected a whole number"),
        ({"citations": [{"0": [1]}, None]}, "rollout 0: a criterion is '0', expected a whole number"),
        ({"citations": [[cited(0, 3)], None]}, "rollout 0: criterion 0 cites step 3, but the trajectory has 2 steps"),
        ({"citations": [{0: [0]}, None]}, "rollout 0: criterion 0 cites step 0, but the trajectory has 2 steps"),
        ({"citations": [{0: [1.5]}, None]}, "rollout 0: a step is 1.5, expected a whole number"),
        ({"citations": [[cited(0, 1.5)], None]}, "rollout 0: a step is 1.5, expected a whole number"),
        (
            {"citations": [{0: 1}, None]},
            "rollout 0: citation of criterion 0: the steps are 1, expected a list of numbers",
        ),
        (
            {"citations": [{0: "12"}, None]},
            "rollout 0: citation of criterion 0: the steps are '12', expected a list of numbers",
        ),
        (
            {"citations": [[1, 2], None]},
            "rollout 0: citations are [1, 2], expected a mapping from criterion to steps, or attributions",
        ),
        (
            {"citations": [0, None]},
            "rollout 0: citations are 0, expected a mapping from criterion to steps, or attributions",
        ),
        (
            {"citations": [5, None]},
            "rollout 0: citations are 5, expected a mapping from criterion to steps, or attributions",
        ),
        ({"citations": [[cited(0, verdict=7)], None]}, "rollout 0: 7 is not a valid Verdict"),
        ({"tokens": [[20, 10], [10, 10.5]]}, "rollout 1: tokens are [10, 10.5], expected a whole number per step"),
        ({"tokens": [[[20, 10]], [10]]}, "rollout 0: tokens are [[20, 10]], expected a whole number per step"),
        ({"tokens": [[20, -1], [10]]}, "rollout 0: a step has a negative number of tokens: [20 -1]"),
        (
            {"verdicts": [[True, False], [True, True]]},
            "verdicts are booleans: expected +1 (pass), -1 (fail) or 0 (not applicable)",
        ),
        ({"citations": [{0: [True]}, None]}, "rollout 0: a step is True, expected a whole number"),
        ({"citations": [{True: [1]}, None]}, "rollout 0: a criterion is True, expected a whole number"),
        ({"tokens": [[True, True], [10]]}, "rollout 0: tokens are [True, True], expected a whole number per step"),
        ({"std_epsilon": math.nan}, "std_epsilon is nan, expected a number of at least 0"),
        ({"std_epsilon": -1.0}, "std_epsilon is -1.0, expected a number of at least 0"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, object], message: str) -> None:
    given = {"verdicts": VERDICTS, "citations": [None, None], "tokens": TOKENS} | changed
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared whole
        step_advantages(**given)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1.0, 1e200, 1e308])
def test_rewards_of_any_size_are_standardised(scale: float) -> None:
    found = step_advantages(
        verdicts=VERDICTS, citations=[None, None], tokens=TOKENS, reward=[-scale, scale], std_epsilon=0.0
    )
    assert found[0] == pytest.approx([-(0.5**0.5)] * 2)
    assert found[1] == pytest.approx([0.5**0.5] * len(TOKENS[1]))


@pytest.mark.parametrize(("near", "far"), [(0.3, 0.1 + 0.2), (1.0, 1.0 + 2**-52), (1e200, 1e200 * (1 + 1e-15))])
def test_rewards_that_differ_by_one_rounding_are_standardised(near: float, far: float) -> None:
    verdicts, tokens = [[1], [1], [-1]], [[1], [1], [1]]
    found = step_advantages(
        verdicts=verdicts, citations=[None] * 3, tokens=tokens, reward=[near, far, near], std_epsilon=0.0
    )
    assert np.concatenate(found) == pytest.approx([-(3**-0.5), 2 * 3**-0.5, -(3**-0.5)])


def test_epsilon_hides_what_is_far_below_it() -> None:
    found = step_advantages(verdicts=VERDICTS, citations=[None, None], tokens=TOKENS, reward=[0.0, 5e-324])
    assert not np.any(np.concatenate(found))
