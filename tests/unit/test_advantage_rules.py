"""Advantage rules by name, and one of a user's own: what trains is what replays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from draco_ray.algorithm.rules import RULES, AdvantageRule, CreditSkipReason, find_rule, group_advantages
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.records import Attribution, CreditFallback, Verdict

VERDICTS = np.array([[1, 1], [1, -1], [-1, -1]])
PASS, FAIL = Verdict.PASS, Verdict.FAIL
CITED = (
    (Attribution(criterion=0, verdict=PASS, steps=(1,)), Attribution(criterion=1, verdict=PASS, steps=(2,))),
    (Attribution(criterion=0, verdict=PASS, steps=(1,)), Attribution(criterion=1, verdict=FAIL, steps=(2,))),
    CreditSkipReason.UNANIMOUS,
)
TOKENS = [np.array([2, 4])] * 3

OWN = """
import numpy as np
from draco_ray.algorithm.rules import AdvantageRule

class LastStep(AdvantageRule):
    def spread(self, advantage, quality_M, tokens_M):
        last_M = np.arange(len(tokens_M)) == len(tokens_M) - 1
        return np.where(last_M, advantage * tokens_M.sum() / np.maximum(tokens_M, 1), 0.0)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:LastStep"


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_keeps_the_total_push(name: str) -> None:
    rule = find_rule(name, reliability=0.6)
    for share in group_advantages("g", VERDICTS, CITED, TOKENS, range(3), rule=rule).rollouts:
        assert share.step_advantage_M @ TOKENS[0] == pytest.approx(share.advantage * 6)
        assert (share.fallback is CreditFallback.CREDIT_OFF) == (not rule.cites)


def test_a_rule_of_ones_own_is_named_by_its_file(own: str) -> None:
    for share in group_advantages("g", VERDICTS, CITED, TOKENS, range(3), rule=find_rule(own)).rollouts:
        assert share.step_advantage_M == pytest.approx([0.0, share.advantage * 6 / 4])


def test_a_failed_credit_call_is_uniform_whatever_the_rule(own: str) -> None:
    shares = group_advantages("g", VERDICTS, (None, *CITED[1:]), TOKENS, range(3), rule=find_rule(own)).rollouts
    assert shares[0].fallback is CreditFallback.CREDIT_CALL_FAILED
    assert shares[0].step_advantage_M.tolist() == [shares[0].advantage] * 2


def test_a_relative_file_is_the_same_one_in_a_worker(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = load_config(None, ["algorithm.rule=own.py:LastStep"]).algorithm.rule
    assert name == own
    code = f"from draco_ray.algorithm.rules import find_rule; print(type(find_rule({name!r})).__name__)"
    told = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "LastStep"


def test_unanimous_verdicts_without_a_call_give_equal_totals() -> None:
    share = group_advantages("g", VERDICTS, CITED, TOKENS, range(3), rule=AdvantageRule()).rollouts[2]
    totals = share.step_advantage_M * TOKENS[2]
    assert totals[0] == pytest.approx(totals[1])
    assert share.inert


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dracos", "algorithm.rule='dracos': unknown (did you mean 'draco'?); expected draco, draco_calibrated, grpo"),
        ("json:nothing", "json has no 'nothing'"),
        ("no_such_module:X", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("nowhere.py:X", "cannot be imported: FileNotFoundError: no such file"),
    ],
)
def test_a_rule_that_is_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        find_rule(name)
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)


def test_what_is_no_rule_at_all_is_told_what_it_should_be() -> None:
    for name in ("json:loads", "json:JSONDecoder"):
        with pytest.raises(ConfigError) as problem:
            find_rule(name)
        expected = "expected a subclass of draco_ray.algorithm.rules.AdvantageRule"
        assert str(problem.value) == f"algorithm.rule={name!r} is not an advantage rule; {expected}"


def test_a_file_that_breaks_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import numpy as np\n1 / 0\n")
    with pytest.raises(ConfigError, match=r"broken.py cannot be imported: ZeroDivisionError: division by zero"):
        find_rule(f"{tmp_path / 'broken.py'}:Rule")


def test_only_criteria_that_some_pass_and_others_fail_are_mixed() -> None:
    verdict_GK = np.array([[1, 1, -1, 0], [1, -1, -1, -1]])
    assert find_rule("mixed_only").surviving(verdict_GK).tolist() == [False, True, False, False]


def test_without_the_deviation_rewards_keep_their_scale() -> None:
    rule = find_rule("no_std")
    assert rule.advantages(np.array([1.0, 0.0, 0.5])).tolist() == [0.5, -0.5, 0.0]
    # Their mean is not 0.1 to the last digit.
    assert rule.advantages(np.array([0.1] * 3)).tolist() == [0.0] * 3


def test_scoring_verdicts_overrule_those_of_the_credit_call() -> None:
    cited = (Attribution(criterion=1, verdict=PASS, steps=(2,)), Attribution(criterion=0, verdict=FAIL, steps=(1, 3)))
    ruled = find_rule("score_verdicts").attributions(cited, np.array([1, -1]))
    assert [(each.criterion, each.verdict, each.steps) for each in ruled] == [(1, FAIL, (2,)), (0, PASS, (1, 3))]


def test_reliability_goes_from_uniform_grpo_to_the_papers_rule() -> None:
    def pushed(name: str, reliability: float | None = None) -> list[list[float]]:
        found = group_advantages("g", VERDICTS, CITED, TOKENS, range(3), rule=find_rule(name, reliability))
        return [share.step_advantage_M.tolist() for share in found.rollouts]

    assert pushed("draco_calibrated", 1.0) == pushed("draco")
    assert pushed("draco_calibrated", 0.0) == pushed("grpo")
    assert not find_rule("draco_calibrated", 0.0).cites
    mixed = 0.25 * np.array(pushed("draco")) + 0.75 * np.array(pushed("grpo"))
    assert np.array(pushed("draco_calibrated", 0.25)) == pytest.approx(mixed)


def test_reliability_keeps_sign_scale_and_mirror_and_order_among_equal_lengths() -> None:
    rule, rng = find_rule("draco_calibrated", 0.4), np.random.default_rng(0)
    for _ in range(100):
        steps = int(rng.integers(1, 8))
        advantage, quality_M, tokens_M = rng.normal(), rng.random(steps), rng.integers(0, 50, steps)
        pushed_M = rule.spread(advantage, quality_M, tokens_M)
        assert (pushed_M * np.sign(advantage) >= 0).all()
        assert pushed_M @ tokens_M == pytest.approx(advantage * tokens_M.sum())
        assert rule.spread(3 * advantage, quality_M, tokens_M) == pytest.approx(3 * pushed_M)
        assert rule.spread(-advantage, 1 - quality_M, tokens_M) == pytest.approx(-pushed_M)
        equal_M = rule.spread(advantage, quality_M, np.full(steps, 5))
        assert (np.argsort(equal_M) == np.argsort(quality_M)).all()


def test_a_calibrated_rule_has_to_be_told_the_reliability() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.rule=draco_calibrated: needs algorithm.reliability, a number"):
        find_rule("draco_calibrated")
