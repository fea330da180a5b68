"""docs/method-explained.md: the numbers worked by hand are those of the code."""

from __future__ import annotations

import doctest
import re
from fractions import Fraction

import numpy as np
import pytest

import draco_ray as draco
from draco_ray.algorithm.equations import step_weights
from draco_ray.records import Attribution, BoolArray, FloatArray, Verdict
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "method-explained.md"
TEXT = PAGE.read_text(encoding="utf-8")
PICTURE = (REPOSITORY / "docs" / "images" / "method.svg").read_text(encoding="utf-8")
CITATIONS: list[dict[int, list[int]] | None] = [{0: [1, 2], 1: [3], 2: [3, 4]}, {0: [1], 1: [2, 3], 2: [3]}, None]
WORDS = {"pass": Verdict.PASS, "fail": Verdict.FAIL, "not applicable": Verdict.NOT_APPLICABLE}
ADVANTAGES = {"A": 1.0, "B": -1.0, "C": 0.0}
VERDICT_GK = np.array(
    [
        [WORDS[word] for word in row]
        for row in re.findall(r"\| \d\. .+? \| ([a-z ]+) \| ([a-z ]+) \| ([a-z ]+) \|", TEXT)
    ]
).T


def numbers(pattern: str, text: str = TEXT) -> list[float]:
    return [float(Fraction(found)) for found in re.findall(pattern, text)]


def surviving() -> BoolArray:
    return draco.surviving_criteria(VERDICT_GK)


def test_its_code_runs_as_printed() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert (result.failed, result.attempted > 2) == (0, True)


def step_advantages() -> list[FloatArray]:
    return draco.step_advantages(
        verdicts=[[1, 1, -1, 1], [-1, -1, 1, 1], [1, -1, 0, 1]],
        citations=CITATIONS,
        tokens=[[10, 20, 10, 20], [10, 10, 20, 20], [15, 15, 15, 15]],
        std_epsilon=0,
    )


def test_its_tables_are_what_the_rule_gives() -> None:
    winner, loser, _ = step_advantages()
    for run, advantages, sign in (("A", winner, 1), ("B", loser, -1)):
        table = TEXT.partition(f"| run {run}, A = ")[2].partition("\n\n")[0]
        rows = re.findall(r"\| step \d \| (\d+) \| \S+ \| .*?\*\*(\S+)\*\* \| (\S+) \|", table)
        assert [float(a) for _, a, _ in rows] == [round(float(each), 2) for each in advantages]
        assert [float(total) for *_, total in rows] == [float(n) * float(a) for n, a, _ in rows]
        assert sum(float(total) for *_, total in rows) == sign * 60
    assert numbers(r"add up to \+(\d+) and -\d+:") == numbers(r"add up to \+\d+ and -(\d+):") == [60]
    assert numbers(r"every token of\s+run [AB] (?:up|down) by (\S+?)\b") == [abs(ADVANTAGES[run]) for run in "AB"]


@pytest.mark.parametrize("run", ["A", "B"])
def test_its_picture_shows_these_step_advantages(run: str) -> None:
    """A bar is 4 pixels wide per token and 30 high per unit; all bars have the area of plain GRPO's advantage."""
    half = PICTURE.partition(f">run {run} (")[2].partition(">GRPO<")[0]
    bars = [(float(width), float(height)) for width, height in re.findall(r' width="(\S+)" height="(\S+)"', half)]
    advantages = step_advantages()["AB".index(run)]
    assert [float(each) for each in re.findall(r">(-?[\d.]+)</text>", half)] == pytest.approx(advantages)
    assert [height / 30 for _, height in bars] == pytest.approx(abs(advantages))
    assert [width / 4 for width, _ in bars] == [[10, 20, 10, 20], [10, 10, 20, 20]]["AB".index(run)]
    axis, grpo = (float(y) for y in re.findall(r'<line .*?y1="(\S+)"', half))
    assert sum(width * height for width, height in bars) == pytest.approx(240 * abs(grpo - axis))


def test_dropout_and_the_rewards_are_those_of_the_verdicts() -> None:
    assert VERDICT_GK.shape == (3, 4)
    assert numbers(r"Criterion (\d) was passed by all") == [*np.flatnonzero(~surviving()) + 1]
    worked = re.findall(r"\b[ABC]: \((\d) - (\d)\) / (\d) = \*\*(\S+?)\*\*", TEXT)
    kept_GK = VERDICT_GK[:, surviving()]
    for (passes, fails, applicable, reward), kept_K in zip(worked, kept_GK, strict=True):
        assert [int(passes), int(fails)] == [np.sum(kept_K == 1), np.sum(kept_K == -1)]
        assert int(applicable) == np.sum(kept_K != 0)
        assert float(Fraction(reward)) == pytest.approx((int(passes) - int(fails)) / int(applicable))
    rewards = [float(Fraction(reward)) for *_, reward in worked]
    assert draco.rubric_rewards(VERDICT_GK, surviving()).tolist() == pytest.approx(rewards)


def test_the_advantages_are_those_of_the_rewards() -> None:
    reward_G = draco.rubric_rewards(VERDICT_GK, surviving())
    assert numbers(r"subtract the mean \((\S+?)\)") == [pytest.approx(reward_G.mean())]
    assert numbers(r"standard deviation \((\S+?)\)") == [pytest.approx(reward_G.std(ddof=1))]
    advantages = numbers(r"\b[ABC]: \*\*([+-]?\d+)\*\*")
    assert draco.group_advantages_G(reward_G, std_epsilon=0).tolist() == pytest.approx(advantages)
    assert advantages == [*ADVANTAGES.values()]


def quality(run: str) -> FloatArray:
    """Q of the page's citations; the verdicts beside them are those of the first table."""
    cited: dict[int, list[int]] = {}
    for step, by in re.findall(rf"\| {run}, step (\d) \| ([^|]+) \|", TEXT):
        for criterion, word in re.findall(r"(\d) (pass|fail)", by):
            assert VERDICT_GK["AB".index(run), int(criterion) - 1] == WORDS[word]
            cited.setdefault(int(criterion) - 1, []).append(int(step))
    assert {criterion: sorted(steps) for criterion, steps in cited.items()} == CITATIONS["AB".index(run)]
    attributions = [
        Attribution(criterion=criterion, verdict=Verdict(VERDICT_GK["AB".index(run), criterion]), steps=tuple(steps))
        for criterion, steps in cited.items()
    ]
    return draco.step_quality(attributions, surviving(), 4).quality_M


@pytest.mark.parametrize("run", ["A", "B"])
def test_qualities_weights_and_step_advantages_follow_from_the_citations(run: str) -> None:
    quality_M = quality(run)
    assert quality_M.tolist() == pytest.approx(numbers(rf"\| {run}, step \d \| [^|]+ \| (\S+) \|"))
    head, table = re.findall(rf"\| (run {run}, A = [^|]+) \|.*?\n\|[-|]+\n(.*?)\n\n", TEXT, re.DOTALL)[0]
    (advantage,), (total,) = numbers(r"A = ([+-]\d+)", head), numbers(r"N = (\d+)", head)
    assert advantage == ADVANTAGES[run]
    tokens = numbers(r"step \d \| (\d+)", table)
    assert total == sum(tokens)
    weight_M = step_weights(advantage, quality_M)
    assert weight_M.tolist() == pytest.approx(numbers(r"step \d \| \d+ \| (\S+)", table))
    for n, w, a in zip(tokens, weight_M, numbers(r"\*\*(\S+)\*\*", table), strict=True):
        assert a == pytest.approx(advantage * total * w / (n * weight_M.sum()))
    for worked in re.findall(r"(\S+) \* (\S+) / \((\S+) \* (\S+)\)", table):
        assert [*map(float, worked)] == [total, weight_M[0], tokens[0], weight_M.sum()]
