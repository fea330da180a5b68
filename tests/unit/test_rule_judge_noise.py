"""A judge that is wrong in known shares is wrong in just these, in every phase alike, and the same when asked again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.judge import Judge
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.analysis.judges import RuleCompleter
from draco_ray.records import Attribution, Criterion, ScoredCriterion, Trajectory, Verdict
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.noise import Noise
from draco_ray.sandbox.world.scripts import families
from tests.support.rule_judge_runs import instruction, judge_in_phases, scripted_run, trajectory_of

FAMILY = "pin_tagged_notes"
Found = tuple[list[Criterion], list[tuple[ScoredCriterion, ...]], list[tuple[Attribution, ...]]]


def group() -> list[Trajectory]:
    """A good run and one for each fatal fault."""
    runs = [scripted_run(FAMILY), *(scripted_run(FAMILY, fault) for fault in sorted(families()[FAMILY].fatal))]
    return [trajectory_of(run, instruction(FAMILY), number) for number, run in enumerate(runs)]


async def with_noise(noise: Noise) -> Found:
    prompts = load_prompts(Path("prompts/judge"))
    return await judge_in_phases(group(), Judge(RuleCompleter(noise.blur(answer)), prompts, JudgeConfig(reasks=0)))


def verdicts(found: Found) -> dict[tuple[int, str], Verdict]:
    """By rollout and criterion; scoring and credit say the same."""
    rubric, scores, credits = found
    for score, credit in zip(scores, credits, strict=True):
        assert [one.verdict for one in score] == [one.verdict for one in credit]
    return {
        (rollout, criterion.title): one.verdict
        for rollout, row in enumerate(scores)
        for criterion, one in zip(rubric, row, strict=True)
    }


async def test_without_noise_nothing_changes() -> None:
    assert await with_noise(Noise(seed=7)) == await with_noise(Noise())


@pytest.mark.parametrize(
    ("name", "what", "becomes"),
    [
        ("false_pass", Verdict.FAIL, Verdict.PASS),
        ("false_fail", Verdict.PASS, Verdict.FAIL),
    ],
)
async def test_verdicts_flip_in_the_share_asked_for(name: str, what: Verdict, becomes: Verdict) -> None:
    clean = verdicts(await with_noise(Noise()))
    whole = verdicts(await with_noise(Noise.model_validate({name: 1.0})))
    assert whole == {key: becomes if verdict is what else verdict for key, verdict in clean.items()}
    share, seeds, flipped, asked = 0.3, 40, 0, 0
    for seed in range(seeds):
        noisy = verdicts(await with_noise(Noise.model_validate({name: share, "seed": seed})))
        changed = {key for key in clean if noisy[key] is not clean[key]}
        assert {clean[key] for key in changed} <= {what}
        flipped += len(changed)
        asked += sum(verdict is what for verdict in clean.values())
    assert asked > 200
    assert abs(flipped / asked - share) < 4 * math.sqrt(share * (1 - share) / asked)


async def test_wrong_steps_are_other_steps_of_the_rollout() -> None:
    _, _, clean = await with_noise(Noise())
    _, _, noisy = await with_noise(Noise(wrong_step=1.0))
    moved = 0
    for trajectory, before, after in zip(group(), clean, noisy, strict=True):
        for one, other in zip(before, after, strict=True):
            assert set(other.steps) <= set(range(1, len(trajectory.steps) + 1))
            if one.steps and len(one.steps) < len(trajectory.steps):
                assert not set(one.steps) & set(other.steps)
                moved += 1
    assert moved > 5


async def test_criteria_are_missed_and_a_rubric_stays() -> None:
    rubric, *_ = await with_noise(Noise())
    fewer, *_ = await with_noise(Noise(missed_criterion=0.5))
    assert {criterion.title for criterion in fewer} < {criterion.title for criterion in rubric}
    least, *_ = await with_noise(Noise(missed_criterion=1.0))
    assert len(least) <= 1


def test_what_is_no_judges_prompt_is_answered_as_before() -> None:
    assert Noise(false_pass=1.0).blur(answer)("hello") == answer("hello")
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Noise(wrong_step=1.1)
