"""Judges' step labels against people's: the share of the push that the credit rule puts on steps people call bad.

A labels file is JSON and holds no text: ``trajectories``, each with its question ``q``, people's label of every step
(``human``: 1 right, 0 neutral, -1 wrong), whether the task was solved (``final``: 1 or -1) and, if known, which steps
call a tool (``call``); and ``judges``, a map from name to the labels of every trajectory in the same order, with null
for a step without a label.

The paper's rule sees each label as citations of its step: 1 is a pass, -1 a fail, 0 a pass and a fail (Q 1/2); a step
without a label is uncited. Every step counts as one token, so that the push does not depend on a step's length. The
measure is the bad steps' share of the push in trajectories with both bad and other steps. It should be high for losers
(A < 0) and low for winners (A > 0). Intervals are percentiles of a bootstrap over questions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from draco_ray.algorithm.credit import step_advantages, step_quality
from draco_ray.algorithm.distributions import student_quantile
from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.columns import columns
from draco_ray.lab.analysis.credit import push_shares
from draco_ray.records import Attribution, BoolArray, FloatArray, IntArray, Verdict

Label = Literal[-1, 0, 1]
StepLabels = Sequence[Label | None]
LEVEL = 0.95
DRAWS = 2000
"""Number of bootstrap resamples."""
TOLERANCE = 0.02
"""How far below uniform GRPO the share of a calibrated judge may be."""
PEOPLE, UNIFORM, LAST_STEP = "people's own labels", "uniform GRPO", "last step"
"""Baseline rows: people's labels under the same rule, no step credit, and all of the push on the last step."""
EVERYTHING, BEFORE_ANSWER = "all", "before the answer"
"""Scopes; the second leaves out trajectories whose only bad step is the final answer."""
VERDICTS: dict[Label | None, tuple[Verdict, ...]] = {
    1: (Verdict.PASS,),
    -1: (Verdict.FAIL,),
    0: (Verdict.PASS, Verdict.FAIL),
    None: (),
}
LABELS = columns("string: judge scope measure", "int64: trajectories questions", "float64: value low high")
CALIBRATION = columns(
    "string: judge", "float64: reliability mean_reliability uniform draco calibrated within_tolerance low"
)
"""``reliability`` is the recommended value, from all labels. The other columns are over splits: means of the
reliability and of the push on losers' bad steps in the test half, the share of splits with ``calibrated`` at least
``uniform`` - `TOLERANCE`, and the 5th percentile of ``calibrated``."""


class LabelledTrajectory(BaseModel):
    """One trajectory, without its text."""

    q: int | str
    """Question; trajectories of the same question are resampled and split together."""
    human: list[Label]
    final: Literal[-1, 1]
    call: list[bool] | None = None

    @property
    def bad_M(self) -> BoolArray:
        """Steps that people call wrong."""
        return np.array(self.human) == -1

    @property
    def answer_alone(self) -> bool:
        """Whether the only bad step is the final answer (a last step without a tool call)."""
        last_calls = self.call is not None and self.call[-1]
        return bool(self.bad_M.sum() == 1 and self.bad_M[-1] and not last_calls)


class StepLabelFile(BaseModel):
    """A labels file."""

    trajectories: list[LabelledTrajectory]
    judges: dict[str, list[list[Label | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """N trajectories with both bad and other steps: each one's question, and its push under every judge."""

    question_N: IntArray
    """Index of each trajectory's question."""
    uniform_N: FloatArray
    """Share of the push on bad steps without step credit."""
    share_N: Mapping[str, FloatArray]
    """The same share under the paper's rule, by judge (and for the baseline rows)."""
    first_error_N: Mapping[str, FloatArray]
    """Whether the judge's first bad step equals people's; for `UNIFORM`, the probability by chance."""
    first_push_N: Mapping[str, FloatArray]
    """Share on bad steps if the judge's first bad step got all of the push; uniform if it labels no step bad."""

    @property
    def questions(self) -> int:
        """Number of questions."""
        return len(np.unique(self.question_N))


def read_step_labels(path: Path) -> StepLabelFile:
    """Read a labels file. Raises: ConfigError, in one line, if it is invalid or a judge's labels do not fit."""
    try:
        found = StepLabelFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--labels {path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"--labels {path}: not JSON: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"--labels {path}: {where}: {first['msg']}") from None
    steps = [len(each.human) for each in found.trajectories]
    calls = [len(each.human if each.call is None else each.call) for each in found.trajectories]
    if not all(steps) or calls != steps:
        raise ConfigError(
            f"--labels {path}: a trajectory has no steps, or human and call have different numbers of steps"
        )
    for judge, labels in found.judges.items():
        if [len(each) for each in labels] != steps:
            raise ConfigError(
                f"--labels {path}: judge {judge!r}: expected one label for every step of every trajectory"
            )
    if not found.judges:
        raise ConfigError(f"--labels {path}: has no judges")
    return found


def sample(found: StepLabelFile, *, winners: bool, scope: str = EVERYTHING) -> Sample:
    """The push on bad steps, for the winners or the losers of a scope."""
    kept = [
        index
        for index, each in enumerate(found.trajectories)
        if (each.final == 1) is winners
        and each.bad_M.any()
        and not each.bad_M.all()
        and not (scope == BEFORE_ANSWER and each.answer_alone)
    ]
    chosen = [found.trajectories[index] for index in kept]
    advantage = 1.0 if winners else -1.0
    labels: dict[str, list[StepLabels]] = {
        judge: [given[index] for index in kept] for judge, given in found.judges.items()
    }
    labels[PEOPLE] = [each.human for each in chosen]
    uniform_N = np.array([each.bad_M.mean() for each in chosen])
    shares = {judge: _pushes(advantage, given, chosen) for judge, given in labels.items()}
    firsts = {
        judge: np.array([_first(own) == _first(each.human) for own, each in zip(given, chosen, strict=True)], float)
        for judge, given in labels.items()
    }
    pushes = {
        judge: np.array(
            [
                each.bad_M.mean() if (first := _first(own)) is None else float(each.bad_M[first])
                for own, each in zip(given, chosen, strict=True)
            ]
        )
        for judge, given in labels.items()
    }
    last_N = np.array([float(each.bad_M[-1]) for each in chosen])
    last_first_N = np.array([float(_first(each.human) == len(each.human) - 1) for each in chosen])
    chance_N = np.array([1.0 / len(each.human) for each in chosen])
    return Sample(
        question_N=np.unique([str(each.q) for each in chosen], return_inverse=True)[1],
        uniform_N=uniform_N,
        share_N={UNIFORM: uniform_N, LAST_STEP: last_N, **shares},
        first_error_N={UNIFORM: chance_N, LAST_STEP: last_first_N, **firsts},
        first_push_N={UNIFORM: uniform_N, LAST_STEP: last_N, **pushes},
    )


def label_rows(found: StepLabelFile, *, seed: int = 0) -> pa.Table:
    """Every measure by judge and scope, with bootstrap intervals; judges in descending order of the share on losers."""
    rows: list[dict[str, Any]] = []
    for scope in (EVERYTHING, BEFORE_ANSWER):
        losers, winners = sample(found, winners=False, scope=scope), sample(found, winners=True, scope=scope)
        measured = {
            "losers": (losers, losers.share_N),
            "first_error": (losers, losers.first_error_N),
            "first_push": (losers, losers.first_push_N),
            "winners": (winners, winners.share_N),
        }
        for judge in sorted(losers.share_N, key=lambda name: -float(np.sum(losers.share_N[name]))):
            rows += [
                {
                    "judge": judge,
                    "scope": scope,
                    "measure": measure,
                    "trajectories": len(of.uniform_N),
                    "questions": of.questions,
                    **_interval(values[judge], of.question_N, seed),
                }
                for measure, (of, values) in measured.items()
            ]
    return pa.Table.from_pylist(rows, schema=LABELS)


def reliability(gain_N: FloatArray, question_N: IntArray) -> float:
    """Recommended `algorithm.reliability`: 1 - (t s / g)², at least 0; 0 if the gain g is not positive.

    g is the mean gain of step credit over uniform GRPO, in share of the push on losers' bad steps; s is its standard
    error over questions; t is Student's one-sided 95 % quantile. So a judge is trusted only as far as its gain exceeds
    chance, and not at all if the gain is not significant in a one-sided test.

    >>> reliability(np.array([0.2, 0.4, 0.3, 0.3]), np.arange(4)).__round__(2)
    0.9
    """
    questions, index_N = np.unique(question_N, return_inverse=True)
    many = len(questions)
    if many < 2 or (gain := float(gain_N.mean())) <= 0.0:
        return 0.0
    off_Q = np.bincount(index_N, weights=gain_N - gain)
    variance = float(off_Q @ off_Q) * many / (many - 1) / len(gain_N) ** 2
    return max(0.0, 1.0 - variance * student_quantile(many - 1, LEVEL) ** 2 / gain**2)


def calibration_rows(found: StepLabelFile, *, splits: int, seed: int = 0) -> tuple[pa.Table, FloatArray]:
    """The reliability of every judge, and its effect on held-out questions.

    A split divides the losers' questions at random into two halves: the reliability is measured on one half, and
    ``draco_calibrated`` with this reliability is applied to the other. Its share of the push is a mix of both rules'
    shares, as both have the same total.

    Returns: a row per judge, by descending ``draco``; and for each split, the smallest margin of a judge over uniform
        GRPO.
    Raises: ConfigError if fewer than four questions have a loser with mixed labels.
    """
    losers = sample(found, winners=False)
    questions = np.unique(losers.question_N)
    if len(questions) < 4:
        raise ConfigError(
            f"--labels: {len(questions)} questions have a failed trajectory with both bad and other steps; expected "
            "at least 4, for calibration and test"
        )
    random = np.random.default_rng(seed)
    calibrating_SN = np.array(
        [np.isin(losers.question_N, random.permutation(questions)[: len(questions) // 2]) for _ in range(splits)]
    )
    uniform_S = np.array([losers.uniform_N[~half_N].mean() for half_N in calibrating_SN])
    rows: list[dict[str, Any]] = []
    margins: list[FloatArray] = []
    for judge in found.judges:
        gain_N = losers.share_N[judge] - losers.uniform_N
        trusted_S = np.array([reliability(gain_N[half_N], losers.question_N[half_N]) for half_N in calibrating_SN])
        test_gain_S = np.array([gain_N[~half_N].mean() for half_N in calibrating_SN])
        calibrated_S = uniform_S + trusted_S * test_gain_S
        margins.append(calibrated_S - uniform_S)
        rows.append(
            {
                "judge": judge,
                "reliability": reliability(gain_N, losers.question_N),
                "mean_reliability": float(trusted_S.mean()),
                "uniform": float(uniform_S.mean()),
                "draco": float((uniform_S + test_gain_S).mean()),
                "calibrated": float(calibrated_S.mean()),
                "within_tolerance": float(np.mean(margins[-1] >= -TOLERANCE)),
                "low": float(np.quantile(calibrated_S, 1 - LEVEL)),
            }
        )
    rows.sort(key=lambda row: -row["draco"])
    return pa.Table.from_pylist(rows, schema=CALIBRATION), np.min(margins, axis=0)


def _pushes(advantage: float, labels: Sequence[StepLabels], chosen: Sequence[LabelledTrajectory]) -> FloatArray:
    """The share of each trajectory's push that falls on its bad steps, under the paper's rule."""
    found = []
    for given, each in zip(labels, chosen, strict=True):
        cited = [(step, verdict) for step, label in enumerate(given, 1) for verdict in VERDICTS[label]]
        attributions = [
            Attribution(criterion=criterion, verdict=verdict, steps=(step,))
            for criterion, (step, verdict) in enumerate(cited)
        ]
        quality = step_quality(attributions, np.ones(len(cited), dtype=np.bool_), len(given))
        tokens_M = np.ones(len(given), dtype=np.int64)
        pushed_M = np.array(
            push_shares(step_advantages(advantage, quality.quality_M, tokens_M).tolist(), tokens_M.tolist())
        )
        found.append(float(pushed_M[each.bad_M].sum()))
    return np.array(found)


def _first(labels: StepLabels) -> int | None:
    """The first step labelled bad, 0-based; None if there is none."""
    return next((step for step, label in enumerate(labels) if label == -1), None)


def _interval(value_N: FloatArray, question_N: IntArray, seed: int) -> dict[str, float | None]:
    """The mean and its percentile bootstrap interval over questions; None if there are too few."""
    if not len(value_N):
        return {"value": None, "low": None, "high": None}
    index_N = np.unique(question_N, return_inverse=True)[1]
    count_Q, sum_Q = np.bincount(index_N), np.bincount(index_N, weights=value_N)
    low = high = None
    if len(count_Q) > 1:
        drawn_DQ = np.random.default_rng(seed).integers(0, len(count_Q), (DRAWS, len(count_Q)))
        mean_D = sum_Q[drawn_DQ].sum(axis=1) / count_Q[drawn_DQ].sum(axis=1)
        low, high = map(float, np.quantile(mean_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return {"value": float(value_N.mean()), "low": low, "high": high}
