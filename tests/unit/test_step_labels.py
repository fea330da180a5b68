"""Step labels of judges against people's, on a small made-up file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from draco_ray.algorithm.rules import find_rule
from draco_ray.cli import main
from draco_ray.commands.attribution_bench import attribution_labels
from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.attribution.step_labels import (
    BEFORE_ANSWER,
    EVERY_JUDGE,
    UNIFORM,
    StepLabelFile,
    bad_step_push,
    calibration_rows,
    error_rates,
    label_rows,
    read_step_labels,
    reliability,
)


def trajectory(question: int, human: list[Any], final: int = -1) -> dict[str, Any]:
    return {"q": question, "human": human, "final": final, "call": [True] * (len(human) - 1) + [False]}


def made_up(questions: int = 24) -> dict[str, Any]:
    """Losers and winners; one judge is right, one blames the opposite steps, one guesses."""
    rng = np.random.default_rng(0)
    trajectories = []
    for question in range(questions):
        for final in (-1, 1):
            human = [1, *rng.choice([-1, 1], size=int(rng.integers(1, 5))).tolist(), -1]
            trajectories.append(trajectory(question, human, final))
    judges = {
        "right": [each["human"] for each in trajectories],
        "opposite": [[-label for label in each["human"]] for each in trajectories],
        "guess": [rng.choice([-1, 0, 1], size=len(each["human"])).tolist() for each in trajectories],
    }
    return {"source": "made up", "trajectories": trajectories, "judges": judges}


@pytest.mark.parametrize(
    ("labels", "final", "share"),
    [
        ([1, -1, 1], -1, 1.0),
        ([0, -1, 1], -1, 1 / 1.5),
        ([None, -1, 1], -1, 1 / 1.5),
        ([-1, 1, 1], -1, 0.0),
        ([1, 1, 1], -1, 1 / 3),  # it blames nothing: uniform
        ([None, None, None], -1, 1 / 3),
        ([1, -1, 1], 1, 0.0),
        ([0, 0, 1], 1, 0.25),
    ],
)
def test_labels_go_through_the_papers_rule(labels: list[int | None], final: int, share: float) -> None:
    given = {"trajectories": [trajectory(0, [1, -1, 0], final)], "judges": {"a": [labels]}}
    found = bad_step_push(StepLabelFile.model_validate(given), winners=final == 1)
    assert found.share_N["a"].tolist() == pytest.approx([share])
    assert found.share_N[UNIFORM].tolist() == pytest.approx([1 / 3])


def test_trajectories_without_bad_or_without_other_steps_are_left_out() -> None:
    trajectories = [trajectory(0, [1, 1]), trajectory(1, [-1, -1]), trajectory(2, [-1, 1, -1]), trajectory(3, [1, -1])]
    given = {"trajectories": trajectories, "judges": {"a": [each["human"] for each in trajectories]}}
    found = StepLabelFile.model_validate(given)
    assert len(bad_step_push(found, winners=False).uniform_N) == 2
    assert bad_step_push(found, winners=False, scope=BEFORE_ANSWER).uniform_N.tolist() == pytest.approx([2 / 3])
    assert not len(bad_step_push(found, winners=True).uniform_N)


def test_first_errors_and_all_of_the_push_on_them() -> None:
    trajectories = [trajectory(question, [1, -1, -1]) for question in range(3)]
    given = {"trajectories": trajectories, "judges": {"a": [[1, -1, 1], [1, 1, -1], [1, 1, 1]]}}
    found = bad_step_push(StepLabelFile.model_validate(given), winners=False)
    assert found.first_error_N["a"].tolist() == [1.0, 0.0, 0.0]
    assert found.first_push_N["a"].tolist() == pytest.approx([1.0, 1.0, 2 / 3])
    assert found.first_error_N[UNIFORM].tolist() == pytest.approx([1 / 3] * 3)


def test_intervals_are_over_questions() -> None:
    once = made_up()
    twice = {
        "trajectories": once["trajectories"] * 2,
        "judges": {judge: labels * 2 for judge, labels in once["judges"].items()},
    }
    one, other = (label_rows(StepLabelFile.model_validate(each)).to_pylist() for each in (once, twice))
    for row, doubled in zip(one, other, strict=True):
        assert (doubled["judge"], doubled["measure"]) == (row["judge"], row["measure"])
        assert doubled["trajectories"] == 2 * row["trajectories"]
        assert [doubled[name] for name in ("value", "low", "high")] == pytest.approx(
            [row[name] for name in ("value", "low", "high")]
        )
        assert row["low"] <= row["value"] + 1e-9 <= row["high"] + 2e-9


def test_reliability_is_zero_unless_the_gain_stands_out() -> None:
    question_N = np.arange(20)
    noise_N = np.where(question_N % 2, 0.3, -0.3)
    assert reliability(noise_N + 0.05, question_N) == 0.0
    assert reliability(noise_N - 1.0, question_N) == 0.0
    little, more = (reliability(noise_N + gain, question_N) for gain in (0.2, 0.4))
    assert little is not None
    assert more is not None
    assert 0.0 < little < more < 1.0
    assert reliability(np.full(20, 0.1), question_N) == pytest.approx(1.0)
    # Many trajectories of one question are one piece of evidence.
    assert reliability(np.full(20, 0.1), np.zeros(20, dtype=np.int64)) == 0.0
    repeated = reliability(np.repeat(noise_N + 0.2, 5), np.repeat(question_N, 5))
    assert repeated == pytest.approx(reliability(noise_N + 0.2, question_N))


def test_only_a_judge_that_beats_uniform_is_trusted() -> None:
    table = calibration_rows(StepLabelFile.model_validate(made_up()), splits=50)
    rows = {row["judge"]: row for row in table.to_pylist()}
    assert rows["right"]["reliability"] > 0.9
    assert rows["opposite"]["reliability"] == 0.0
    assert rows["guess"]["reliability"] < 0.5
    # On other questions the opposite judge is shrunk to uniform.
    assert rows["right"]["calibrated"] > rows["right"]["uniform"] + 0.2
    assert rows["opposite"]["draco"] < rows["opposite"]["uniform"] - 0.2
    assert rows["opposite"]["shrunk"] == 1.0
    assert rows["opposite"]["calibrated"] == pytest.approx(rows["opposite"]["uniform"])
    assert all(row["within_tolerance"] >= 0.95 for row in rows.values())
    assert rows[EVERY_JUDGE]["within_tolerance"] <= min(row["within_tolerance"] for row in rows.values())


def test_each_mistake_counts_as_one_error() -> None:
    people = [[1, -1, 1], [1, -1, -1], [-1, 1], [0, 1], [1, 1, 1], [1, -1]]
    # A fault called neutral, one of two steps misplaced, a wrong place, none, a false alarm, and a step left out.
    judge = [[1, 0, 1], [-1, -1, 0], [1, -1], [0, 0], [1, -1, -1], [-1, None]]
    given = {"trajectories": [trajectory(0, human) for human in people], "judges": {"a": judge, "b": people}}
    found = StepLabelFile.model_validate(given)
    assert error_rates(found, "a") == pytest.approx({"false_pass": 1 / 3, "false_fail": 1 / 2, "wrong_step": 2 / 3})
    assert error_rates(found, "b") == {"false_pass": 0.0, "false_fail": 0.0, "wrong_step": 0.0}


def test_a_rate_without_cases_is_null() -> None:
    given = {"trajectories": [trajectory(0, [1, -1])], "judges": {"a": [[1, 1]], "b": [[None, None]]}}
    found = StepLabelFile.model_validate(given)
    assert error_rates(found, "a") == {"false_pass": 1.0, "false_fail": None, "wrong_step": None}
    assert set(error_rates(found, "b").values()) == {None}


def test_three_questions_are_too_few_to_split() -> None:
    rows = calibration_rows(StepLabelFile.model_validate(made_up(3)), splits=50).to_pylist()
    assert [(row["judge"], row["uniform"]) for row in rows] == [("right", None), ("opposite", None), ("guess", None)]


def test_without_a_failed_trajectory_no_reliability_is_recommended() -> None:
    won = [each | {"final": 1} for each in made_up(4)["trajectories"]]
    rows = calibration_rows(StepLabelFile.model_validate(made_up(4) | {"trajectories": won}), splits=5).to_pylist()
    assert [row["reliability"] for row in rows] == [None, None, None]


def test_whole_numbers_may_be_written_with_a_point_and_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    given = {"trajectories": [trajectory(0, [1.0, -1.0])], "judges": {"a": [[0.0, None]]}}
    (tmp_path / "labels.json").write_text(f"\ufeff{json.dumps(given)}", encoding="utf-8")
    found = read_step_labels(tmp_path / "labels.json")
    assert (found.trajectories[0].human, found.judges["a"]) == ([1, -1], [[0, None]])


def test_the_share_of_a_calibrated_rule_is_the_mix_of_both_shares() -> None:
    quality_M, tokens_M, bad_M = np.array([1.0, 0.5, 0.0]), np.ones(3, dtype=np.int64), np.array([False, True, True])

    def share(rule: str, trusted: float | None = None) -> float:
        pushed_M = find_rule(rule, trusted).spread(-0.7, quality_M, tokens_M)
        return float(pushed_M[bad_M].sum() / pushed_M.sum())

    assert share("draco_calibrated", 0.3) == pytest.approx(0.3 * share("draco") + 0.7 * bad_M.mean())


def test_the_command_prints_and_writes_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "labels.json").write_text(json.dumps(made_up()))
    with pytest.raises(SystemExit) as ended:
        main(["attribution-bench", "--labels", str(tmp_path / "labels.json"), "--out", str(tmp_path)])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for expected in (
        "24 losers (24 questions)",
        "opposite",
        "uniform GRPO",
        "last step",
        "200 splits by question",
        "wrong_step",
    ):
        assert expected in printed
    judges = {row["judge"]: row for row in pq.read_table(tmp_path / "reliability.parquet").to_pylist()}
    assert len(judges) == 3 + 1
    assert (judges["right"]["false_pass"], judges[EVERY_JUDGE]["false_pass"]) == (0.0, None)
    assert pq.read_table(tmp_path / "labels.parquet").num_rows == 2 * 4 * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nothing", "the file: Invalid JSON"),
        ("", "the file: Invalid JSON"),
        (json.dumps(made_up()).replace('"opposite"', '"right"'), "the name 'right' is given twice"),
        ({"judges": {}}, "has no judges"),
        (
            {"judges": {"a": [[1]]}},
            "judge 'a': expected one label for every step of every trajectory, found trajectory 0",
        ),
        ({"judges": {"a": made_up()["judges"]["guess"][:47]}}, "every trajectory, found 47 trajectories for 48"),
        (
            {"judges": {"last step": made_up()["judges"]["guess"]}},
            "judge 'last step': this name is reserved for a row of the table",
        ),
        ({"judges": {"a": [[2]]}}, "judges.a.0.0: Input should be -1, 0 or 1"),
        ({"judges": {"a": [[False]]}}, "judges.a.0.0: Input should be -1, 0 or 1"),
        ({"trajectories": [{"q": 0, "human": [True, False], "final": -1}]}, "trajectories.0.human.0: Input should be"),
        ({"trajectories": [{"q": 0, "human": [1], "final": True}]}, "trajectories.0.final: Input should be -1 or 1"),
        ("[" * 100_000, "the file: Invalid JSON"),
        ('{"judges": {"\\ud800": [[1]]}, "trajectories": [{"q": 0, "human": [1], "final": 1}]}', "Invalid JSON"),
        (
            f'{{"judges": {{"a": [[1]]}}, "trajectories": [{{"q": 0, "human": [{"9" * 5000}], "final": 1}}]}}',
            "number out of range",
        ),
        ({"trajectories": [{"q": 1, "human": []}]}, "trajectories.0.final: Field required"),
        ({"trajectories": [{"q": 0, "human": [], "final": 1}]}, "a trajectory has no steps"),
        (
            {"trajectories": [trajectory(0, [1]) | {"call": [True, True]}]},
            "the lists human and call of a trajectory differ in length",
        ),
    ],
)
def test_what_is_no_labels_file_is_one_line(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.json"
    path.write_text(change if isinstance(change, str) else json.dumps(made_up() | change))
    with pytest.raises(ConfigError) as problem:
        attribution_labels(path, out=tmp_path / "out")
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--labels", "x.json", "--judge", "rules"], "--judge: no effect with --labels FILE"),
        (["--labels", "x.json"], "--labels x.json: cannot be read"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["attribution-bench", *options])
    assert message in capsys.readouterr().err
