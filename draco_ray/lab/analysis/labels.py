"""Measure a judge against people's labels (`draco_ray.judging.labels`), which are the reference."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from draco_ray.judging.labels import Label
from draco_ray.lab.analysis.agreement import clustered_interval
from draco_ray.lab.analysis.attribution.step_labels import Cited, citation_reliability
from draco_ray.lab.analysis.replay import REPLAYED_SCHEMA, agreement_table
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.rows import group_by
from draco_ray.runs.rows import Row

LABELS_RUN = "labels"
"""Value of the column ``run`` in tables of labels, which may come from several runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Citations:
    """People's labels of the steps that a judge cites, summarized."""

    labelled: int
    right: Interval
    """Share of labelled citations that people marked right."""
    corrected: int
    """Number of citations marked wrong for which the right steps were given."""
    overlap: Interval | None
    """Mean Jaccard index of cited steps and right steps, over citations marked right or corrected."""


def human_agreement(labels: Sequence[Label]) -> pa.Table:
    """The judge's recorded verdicts against people's: `agreement_table` over all labels, then per training step.

    A verdict that two people labelled counts twice. Intervals are over groups.
    """
    rows = [_row(label, label.judge, "verdicts") for label in _of_verdicts(labels)]
    return agreement_table(pa.Table.from_pylist(rows, schema=REPLAYED_SCHEMA))


def inter_annotator_agreement(labels: Sequence[Label]) -> pa.Table:
    """`agreement_table` of every pair of people over verdicts that both labelled; column ``phase`` names the pair."""
    said: dict[str, dict[tuple[object, ...], Label]] = defaultdict(dict)
    for label in _of_verdicts(labels):
        said[label.by][label.judgment] = label
    rows = []
    for one, other in itertools.combinations(sorted(said), 2):
        pair = f"{one or '-'} / {other or '-'}"
        both = sorted(said[one].keys() & said[other].keys(), key=repr)
        rows += [_row(said[one][judgment], said[other][judgment].verdict, pair) for judgment in both]
    return agreement_table(pa.Table.from_pylist(rows, schema=REPLAYED_SCHEMA))


def citations(labels: Sequence[Label]) -> Citations | None:
    """Summary of people's labels of citations; None if no citation is labelled."""
    mine = [label for label in labels if label.citation is not None]
    if not mine:
        return None
    groups = group_by(mine, lambda label: repr(label.group)).values()
    overlaps = [
        [(_overlap(label), 1) for label in found if label.citation or label.steps is not None] for found in groups
    ]
    return Citations(
        labelled=len(mine),
        right=clustered_interval([[(bool(label.citation), 1) for label in found] for found in groups]),
        corrected=sum(label.citation is False and label.steps is not None for label in mine),
        overlap=clustered_interval(overlaps) if any(overlaps) else None,
    )


def labelled_reliability(labels: Sequence[Label]) -> float | None:
    """The `algorithm.reliability` that people's labels of citations recommend (`citation_reliability`).

    If a person marks a citation wrong without naming the right steps, as many steps outside the citation are assumed to
    be right. None if no label is of a citation whose steps and number of steps of the rollout are known.
    """
    return citation_reliability(
        [
            # Negative numbers stand for the steps assumed to be right, since no citation contains them.
            Cited(each.cited, _right(each, otherwise=[-step for step in each.cited]), each.rollout_steps, each.group)
            for each in labels
            if each.citation is not None and each.cited and each.rollout_steps
        ]
    )


def _right(label: Label, *, otherwise: Sequence[int] = ()) -> Sequence[int]:
    """The steps that are right according to a label; ``otherwise`` if it does not name them."""
    if label.citation:
        return label.cited
    return otherwise if label.steps is None else label.steps


def _of_verdicts(labels: Sequence[Label]) -> list[Label]:
    return [label for label in labels if label.verdict is not None]


def _row(label: Label, verdict: int | None, phase: str) -> Row:
    """A row of `REPLAYED_SCHEMA` whose reference is the person's verdict."""
    return {
        "run": LABELS_RUN,
        "judge": "judge",
        "training_step": label.training_step,
        "task_id": repr(label.group),
        "rollout": label.rollout,
        "phase": phase,
        "criterion": label.criterion,
        "title": label.title,
        "reference": label.verdict,
        "verdict": verdict,
    }


def _overlap(label: Label) -> float:
    """Jaccard index of cited steps and right steps; two empty sets have index 1."""
    cited, right = set(label.cited), set(_right(label))
    return len(cited & right) / len(cited | right) if cited | right else 1.0
