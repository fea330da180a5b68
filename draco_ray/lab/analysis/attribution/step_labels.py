"""Judges' step labels against people's: the share of the advantage mass that the credit rule puts on bad steps.

A step's push is its part of the trajectory's advantage mass, |a_j| n_j. Bad steps are those that people call wrong.

A labels file is JSON and holds no text: ``trajectories``, each with its question ``q``, people's label of every step
(``human``: 1 right, 0 neutral, -1 wrong), whether the task was solved (``final``: 1 or -1) and, if known, which steps
call a tool (``call``); and ``judges``, a map from name to the labels of every trajectory in the same order, with null
for a step without a label.

Each label becomes citations of its step for the paper's rule: 1 a pass, -1 a fail, 0 a pass and a fail (Q 1/2); a step
without a label is uncited. Every step counts as one token, so that the push does not depend on a step's length. The
measure is the bad steps' share of the push in trajectories with both bad and other steps. It should be high for losers
(A < 0) and low for winners (A > 0). Intervals are percentiles of a bootstrap over questions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, ValidationError

from draco_ray.algorithm.distributions import student_quantile
from draco_ray.algorithm.equations import step_advantages, step_quality
from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.credit import push_shares
from draco_ray.lab.rows import collect_table, mean
from draco_ray.records import Attribution, BoolArray, FloatArray, IntArray, Verdict
from draco_ray.runs.evaluations import mean_share
from draco_ray.runs.rows import Row

NO_BOOLEAN = BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)
"""Refuses a boolean as a label. Otherwise false would be read as 0, a neutral label, and true as 1."""
Label = Annotated[Literal[-1, 0, 1], NO_BOOLEAN]
StepLabels = Sequence[Label | None]
CONFIDENCE_LEVEL = 0.95
TOLERANCE = 0.02
"""How far a calibrated judge may fall below uniform GRPO in the bad steps' share of the push |a_j| n_j."""
EVERYTHING, BEFORE_ANSWER = "all", "before the answer"
"""Scopes; the second leaves out trajectories whose only bad step is the final answer."""
EVERY_JUDGE = "all judges at once"
PEOPLE, UNIFORM, LAST_STEP = "people's own labels", "uniform GRPO", "last step"
"""Baseline rows: people's labels under the paper's rule, no step credit, and all of the push on the last step."""
LABEL_VERDICTS: dict[Label | None, tuple[Verdict, ...]] = {
    1: (Verdict.PASS,),
    -1: (Verdict.FAIL,),
    0: (Verdict.PASS, Verdict.FAIL),
    None: (),
}


class LabelledTrajectory(BaseModel):
    """One trajectory, without its text."""

    q: int | str
    """Question; trajectories of the same question are resampled and split together."""
    human: list[Label]
    final: Annotated[Literal[-1, 1], NO_BOOLEAN]
    call: list[bool] | None = None

    @property
    def bad_M(self) -> BoolArray:
        """Steps that people call wrong."""
        return np.array(self.human) == -1

    @property
    def before_answer(self) -> bool:
        """Whether any step but the final answer is bad; the final answer is a last step without a tool call."""
        acts = self.call is not None and self.call[-1]
        return bool(self.bad_M[: None if acts else -1].any())


class StepLabelFile(BaseModel):
    """A labels file."""

    trajectories: list[LabelledTrajectory]
    judges: dict[str, list[list[Label | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStepPush:
    """Bad steps' share of the push (|a_j| n_j), for N trajectories with both bad and other steps."""

    question_N: IntArray
    """Index of each trajectory's question."""
    uniform_N: FloatArray
    """Bad steps' share of the push, without step credit."""
    share_N: Mapping[str, FloatArray]
    """Bad steps' share of the push under the paper's rule, by judge (and for the baseline rows)."""
    first_push_N: Mapping[str, FloatArray]
    """What the bad steps' share of the push would be if all push were on the first step that the judge calls bad, by
    judge. If the judge calls no step bad, the push is uniform over the steps."""
    first_error_N: Mapping[str, FloatArray]
    """Whether the judge's first bad step is also people's first; for `UNIFORM` the probability of that."""

    @property
    def questions(self) -> int:
        """Number of questions."""
        return len(np.unique(self.question_N))


def read_step_labels(path: Path) -> StepLabelFile:
    """Read a labels file.

    Raises:
        ConfigError: the file is unreadable or invalid, has a name twice, or a judge does not have one label for every
            step.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = StepLabelFile.model_validate_json(text)
        json.loads(text, object_pairs_hook=_without_duplicates)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--labels {path}: cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        keys = ", ".join(StepLabelFile.model_fields)
        raise ConfigError(f"--labels {path}: {where}: {first['msg']}; expected an object with {keys}") from None
    except ValueError as error:
        raise ConfigError(f"--labels {path}: {error}") from None
    steps = [len(each.human) for each in found.trajectories]
    if not all(steps):
        raise ConfigError(f"--labels {path}: a trajectory has no steps")
    if any(each.call is not None and len(each.call) != len(each.human) for each in found.trajectories):
        raise ConfigError(f"--labels {path}: the lists human and call of a trajectory differ in length")
    for judge, labels in found.judges.items():
        if judge in (PEOPLE, UNIFORM, LAST_STEP, EVERY_JUDGE):
            raise ConfigError(
                f"--labels {path}: judge {judge!r}: this name is reserved for a row of the table; expected another name"
            )
        given = [len(each) for each in labels]
        if given != steps:
            wrong = (
                f"trajectory {n} has {g} for {s}" for n, (g, s) in enumerate(zip(given, steps, strict=False)) if g != s
            )
            raise ConfigError(
                f"--labels {path}: judge {judge!r}: expected one label for every step of every trajectory, found "
                f"{next(wrong, f'{len(given)} trajectories for {len(steps)}')}"
            )
    if not found.judges:
        raise ConfigError(f"--labels {path}: the file has no judges")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is given twice; rename one of them, or merge their labels")
        found[name] = value
    return found


def bad_step_push(found: StepLabelFile, *, winners: bool, scope: str = EVERYTHING) -> BadStepPush:
    """The bad steps' share of the push |a_j| n_j, in the trajectories of a scope with both bad and other steps.

    ``winners``: True for the trajectories that solved their task (A > 0), False for the others (A < 0).
    """
    kept = [
        index
        for index, each in enumerate(found.trajectories)
        if (each.final == 1) is winners
        and each.bad_M.any()
        and not each.bad_M.all()
        and (scope == EVERYTHING or each.before_answer)
    ]
    chosen = [found.trajectories[index] for index in kept]
    advantage = 1.0 if winners else -1.0
    labels: dict[str, list[StepLabels]] = {
        judge: [given[index] for index in kept] for judge, given in found.judges.items()
    }
    labels[PEOPLE] = [each.human for each in chosen]
    # Without citations the rule falls back to uniform GRPO.
    labels[UNIFORM] = [[None] * len(each.human) for each in chosen]
    shares = {judge: _pushes(advantage, given, chosen) for judge, given in labels.items()}
    firsts = {judge: [_first(own) for own in given] for judge, given in labels.items()}
    shares[LAST_STEP] = np.array([float(each.bad_M[-1]) for each in chosen])
    firsts[LAST_STEP] = [len(each.human) - 1 for each in chosen]
    first_pushes, first_errors = {}, {}
    for judge, own in firsts.items():
        pushes = [e.bad_M.mean() if n is None else e.bad_M[n] for n, e in zip(own, chosen, strict=True)]
        first_pushes[judge] = np.array(pushes, float)
        first_errors[judge] = np.array([a == b for a, b in zip(own, firsts[PEOPLE], strict=True)], float)
    first_errors[UNIFORM] = np.array([1 / len(each.human) for each in chosen])
    return BadStepPush(
        question_N=np.unique([str(each.q) for each in chosen], return_inverse=True)[1],
        uniform_N=shares[UNIFORM],
        share_N=shares,
        first_push_N=first_pushes,
        first_error_N=first_errors,
    )


@collect_table("string: scope judge measure", "int64: trajectories questions", "float64: value low high")
def label_rows(found: StepLabelFile) -> Iterator[Row]:
    """A row for each scope, judge and measure, with a bootstrap interval.

    Judges are in descending order of ``losers``, the bad steps' share of the push in unsolved trajectories.
    """
    for scope in (EVERYTHING, BEFORE_ANSWER):
        losers, winners = (bad_step_push(found, winners=won, scope=scope) for won in (False, True))
        measures = {
            "losers": (losers, losers.share_N),
            "first_error": (losers, losers.first_error_N),
            "first_push": (losers, losers.first_push_N),
            "winners": (winners, winners.share_N),
        }
        for judge in sorted(losers.share_N, key=lambda name: -float(np.sum(losers.share_N[name]))):
            for measure, (of, values) in measures.items():
                about: Row = {"scope": scope, "judge": judge, "measure": measure}
                about |= {"trajectories": len(of.uniform_N), "questions": of.questions}
                share = mean_share(values[judge], of.question_N)
                yield about | ({} if share is None else {"value": share.mean, "low": share.low, "high": share.high})


def reliability(gain_N: FloatArray, question_N: IntArray) -> float | None:
    """The recommended `algorithm.reliability`: 1 - (t s / g)², and at least 0.

    g is the mean gain, s its standard error over questions, and t Student's one-sided 95 % quantile. So a judge is
    trusted only as far as its gain exceeds chance, and not at all if the gain is not significant in a one-sided test.

    Args:
        gain_N: gain of step credit over uniform GRPO in each trajectory, such as the increase in the bad steps' share
            of the push |a_j| n_j.
        question_N: index of each trajectory's question.
    Returns: the reliability; 0 if g is not positive or there is only one question; None without trajectories.

    >>> reliability(np.array([0.2, 0.4, 0.3, 0.3]), np.arange(4)).__round__(2)
    0.9
    """
    if not len(gain_N):
        return None
    questions, index_N = np.unique(question_N, return_inverse=True)
    many = len(questions)
    if many < 2 or (gain := float(gain_N.mean())) <= 0.0:
        return 0.0
    off_Q = np.bincount(index_N, weights=gain_N - gain)
    variance = float(off_Q @ off_Q) * many / (many - 1) / len(gain_N) ** 2
    return max(0.0, 1.0 - variance * student_quantile(many - 1, CONFIDENCE_LEVEL) ** 2 / gain**2)


class Cited(NamedTuple):
    """The steps that a judge cites for a verdict, and the steps that are right."""

    cited: Collection[int]
    right: Collection[int]
    steps: int
    """Number of steps of the rollout."""
    group: object


def citation_reliability(citations: Sequence[Cited]) -> float | None:
    """The `reliability` that citations support, with groups in place of questions; None without citations.

    A citation's gain is the share of right steps among its cited steps, minus their share among all steps of the
    rollout. If steps have equal length, the latter is the part of the update that right steps get without step credit.
    Each citation is one observation. A group of average size without gain is added, because a few citations that are
    all right have no variance, and would recommend 1.

    >>> found = citation_reliability([Cited([2], [2], 4, 1), Cited([3], [3], 5, 2), Cited([1, 3], [1], 8, 3)])
    >>> round(found, 2)
    0.17
    """
    gain_N = np.array([len({*c.cited} & {*c.right}) / len(c.cited) - len(c.right) / c.steps for c in citations])
    groups, index_N = np.unique([repr(c.group) for c in citations], return_inverse=True)
    added = round(len(gain_N) / max(1, len(groups)))
    return reliability(np.append(gain_N, [0.0] * added), np.append(index_N, [len(groups)] * added))


def error_rates(found: StepLabelFile, judge: str) -> Row:
    """A judge's error rates against people's labels, defined as in `draco_ray.sandbox.rule_judge.noise.Noise`.

    The noise flips verdicts of whole rollouts, and replaces cited steps independently of them. So a trajectory's
    verdict here is FAIL if any of its steps is labelled -1:

    - ``false_pass``: share of the trajectories that people fail in which the judge labels no step -1;
    - ``false_fail``: share of the trajectories that people pass in which the judge labels a step -1;
    - ``wrong_step``: of the steps that the judge labels -1 in trajectories that people fail, the share that people do
      not label -1.

    A misplaced -1 counts once; with verdicts by step it would be a false pass, a false fail and a wrong step.
    Trajectories with a step that the judge did not label are left out. None if the denominator is 0.
    """
    pairs = [
        (each.bad_M, np.array(given) == -1)
        for each, given in zip(found.trajectories, found.judges[judge], strict=True)
        if None not in given
    ]
    failed = [(bad_M, blamed_M) for bad_M, blamed_M in pairs if bad_M.any()]
    return {
        "false_pass": mean(float(not blamed_M.any()) for _, blamed_M in failed),
        "false_fail": mean(float(blamed_M.any()) for bad_M, blamed_M in pairs if not bad_M.any()),
        "wrong_step": mean(float(not bad) for bad_M, blamed_M in failed for bad in bad_M[blamed_M]),
    }


@collect_table(
    "string: judge",
    "float64: reliability uniform draco calibrated low shrunk within_tolerance false_pass false_fail wrong_step",
)
def calibration_rows(found: StepLabelFile, *, splits: int, seed: int = 0) -> Iterator[Row]:
    """A row for each judge: its recommended reliability (highest first), and what that achieves on other questions.

    The questions of unsolved trajectories are divided at random into two halves, ``splits`` times. The reliability
    measured on one half is applied to the other, where the bad steps' share of the push |a_j| n_j is computed under
    three rules: ``uniform`` GRPO, ``draco`` (the paper's rule) and ``calibrated``. The calibrated share is a weighted
    mean of the other two, because the total push is the same under all rules.

    ``uniform``, ``draco``, ``calibrated`` and ``shrunk`` (1 - reliability) are means over splits, and ``low`` is the
    5th percentile of ``calibrated``. ``within_tolerance`` is the share of splits in which ``calibrated`` is at least
    ``uniform`` - `TOLERANCE`; the last row, `EVERY_JUDGE`, has the share of splits in which that holds for every judge.
    With fewer than four questions, these columns are null and the last row is missing. Error columns: `error_rates`.
    """
    losers = bad_step_push(found, winners=False)
    gains = {judge: losers.share_N[judge] - losers.uniform_N for judge in found.judges}
    trusted = {judge: reliability(gain_N, losers.question_N) for judge, gain_N in gains.items()}
    random = np.random.default_rng(seed)
    halves = [
        np.isin(losers.question_N, random.permutation(losers.questions)[: losers.questions // 2])
        for _ in range(splits if losers.questions >= 4 else 0)
    ]
    uniform_S = np.array([losers.uniform_N[~half_N].mean() for half_N in halves])
    within_S = np.ones(len(halves), dtype=np.bool_)
    for judge in sorted(trusted, key=lambda name: -(trusted[name] or 0.0)):
        row: Row = {"judge": judge, "reliability": trusted[judge], **error_rates(found, judge)}
        if halves:
            gain_N = gains[judge]
            trusted_S = np.array([reliability(gain_N[half_N], losers.question_N[half_N]) for half_N in halves])
            gain_S = np.array([gain_N[~half_N].mean() for half_N in halves])
            calibrated_S = uniform_S + trusted_S * gain_S
            good_S = calibrated_S >= uniform_S - TOLERANCE
            within_S &= good_S
            row |= {
                "uniform": uniform_S.mean(),
                "draco": (uniform_S + gain_S).mean(),
                "calibrated": calibrated_S.mean(),
                "low": np.quantile(calibrated_S, 1 - CONFIDENCE_LEVEL),
                "shrunk": 1 - trusted_S.mean(),
                "within_tolerance": good_S.mean(),
            }
        yield row
    if halves:
        yield {"judge": EVERY_JUDGE, "within_tolerance": within_S.mean()}


def _first(labels: StepLabels) -> int | None:
    """The first step labelled bad, 0-based; None if there is none."""
    return next((step for step, label in enumerate(labels) if label == -1), None)


def _pushes(advantage: float, labels: Sequence[StepLabels], chosen: Sequence[LabelledTrajectory]) -> FloatArray:
    """The share of each trajectory's push that falls on its bad steps, under the paper's rule."""
    found = []
    for given, each in zip(labels, chosen, strict=True):
        cited = [(step, verdict) for step, label in enumerate(given, 1) for verdict in LABEL_VERDICTS[label]]
        attributions = [
            Attribution(criterion=criterion, verdict=verdict, steps=(step,))
            for criterion, (step, verdict) in enumerate(cited)
        ]
        quality = step_quality(attributions, np.ones(len(cited), dtype=np.bool_), len(given))
        tokens_M = np.ones(len(given), dtype=np.int64)
        pushed_M = push_shares(step_advantages(advantage, quality.quality_M, tokens_M), tokens_M)
        found.append(float(pushed_M[each.bad_M].sum()))
    return np.array(found)
