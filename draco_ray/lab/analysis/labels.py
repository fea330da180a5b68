"""A judge measured against people's labels (`draco_ray.judging.labels`): as it judged, and with corrected examples.

The reference is what people say. A judge that is shown examples is measured on labels of other scenarios than theirs:
scenarios are dealt to folds, and each fold is judged with the corrections of the others.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from draco_ray.errors import ConfigError
from draco_ray.judging.completion import Completer
from draco_ray.judging.labels import Label, corrected, examples_text
from draco_ray.judging.phases import Score
from draco_ray.lab.analysis.agreement import clustered_interval
from draco_ray.lab.analysis.replay import REPLAYED, ArchivedCall, agreement_table, archived_calls
from draco_ray.lab.analysis.replay import replay as ask_again
from draco_ray.lab.evaluation.intervals import Interval, clustered_mean, rate_difference
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import training_scenarios

Row = dict[str, Any]
PEOPLE = "labels"
"""What stands for the run in tables of labels, which may be of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Citations:
    """What people say of the steps that a judge cites."""

    labelled: int
    right: Interval
    """Share marked right."""
    corrected: int
    """Of those marked wrong, how many say which steps are the right ones."""
    overlap: Interval | None
    """Mean Jaccard index of the steps cited with the right ones, over citations marked right or corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """One judge on the same labelled verdicts, without and with examples of other scenarios."""

    agreement: pa.Table
    """`agreement_table`, by the column ``phase``: ``without examples`` and ``with examples``."""
    asked: pa.Table
    """Of both: one row a labelled verdict, `REPLAYED`."""
    gain: Interval
    """Share of verdicts as people gave them, with examples minus without, over the choice of groups."""
    shown: tuple[int, ...]
    """Examples shown to each fold."""
    dollars: float


def against_people(labels: Sequence[Label]) -> pa.Table:
    """The judge's recorded verdicts beside people's: `agreement_table` over all labels, then a training step each.

    A verdict that two people labelled counts twice. Intervals are over groups.
    """
    return agreement_table(_table([_row(label, label.judge, "verdicts") for label in _of_verdicts(labels)]))


def between_people(labels: Sequence[Label]) -> pa.Table:
    """`agreement_table` of every two people over the verdicts that both labelled; the column ``phase`` names them."""
    said: dict[str, dict[tuple[object, ...], Label]] = defaultdict(dict)
    for label in _of_verdicts(labels):
        said[label.by][label.judgment] = label
    rows = []
    for one, other in itertools.combinations(sorted(said), 2):
        pair = f"{one or '-'} / {other or '-'}"
        both = sorted(said[one].keys() & said[other].keys(), key=repr)
        rows += [_row(said[one][judgment], said[other][judgment].verdict, pair) for judgment in both]
    return agreement_table(_table(rows))


def citations(labels: Sequence[Label]) -> Citations | None:
    """What people say of citations; None where none is labelled."""
    mine = [label for label in labels if label.citation is not None]
    if not mine:
        return None
    groups: dict[str, list[Label]] = defaultdict(list)
    for label in mine:
        groups[repr(label.group)].append(label)

    def right(found: Sequence[Label]) -> float:
        return float(np.mean([bool(label.citation) for label in found])) if found else float("nan")

    known = {
        name: [each for each in found if each.citation or each.steps is not None] for name, found in groups.items()
    }
    return Citations(
        labelled=len(mine),
        right=clustered_interval(groups, right),
        corrected=sum(label.citation is False and label.steps is not None for label in mine),
        overlap=clustered_interval(known, _overlap) if any(known.values()) else None,
    )


def labelled_calls(run: RunDirectory, labels: Sequence[Label]) -> list[ArchivedCall]:
    """The archived scoring prompts of the labelled verdicts, each with these criteria only as its reference.

    Raises:
        ConfigError: a label is not about what the run recorded, or its prompt was not kept.
    """
    if run.setting("judge.examples") is not None:
        raise ConfigError(f"{run.path}: its judge was shown examples already (judge.examples); take a run without")
    kept = {(call.training_step, call.task_id, call.rollout): call for call in archived_calls(run, None, [Score.name])}
    calls: dict[tuple[int, str, int], ArchivedCall] = {}
    for label in _of_verdicts(labels):
        place = (label.training_step, label.task_id, label.rollout)
        about = f"step {label.training_step}, {label.task_id}, rollout {label.rollout}, criterion {label.criterion}"
        call = kept.get(place)
        if call is None or label.criterion not in call.criteria:
            raise ConfigError(f"{run.path}: no scoring call with a verdict on {about}; give the run that was labelled")
        index = call.criteria.index(label.criterion)
        if (call.rubric[index].title, int(call.reference[index])) != (label.title, label.judge):
            raise ConfigError(
                f"{run.path}: {about} is {call.rubric[index].title[:80]!r}, verdict {int(call.reference[index]):+d}; "
                f"labelled was {label.title[:80]!r} with {label.judge:+d}; give the run that was labelled"
            )
        calls[place] = call
    return [calls[place] for place in sorted(calls)]


async def with_examples(
    run: RunDirectory, labels: Sequence[Label], complete: Completer, judge: str, *, most: int, folds: int, seed: int = 0
) -> Examples:
    """Ask a judge the labelled verdicts again, without and with examples.

    Args:
        run: whose prompts.
        labels: of that run.
        complete: the judge.
        judge: its name.
        most: corrected verdicts that are shown.
        folds: into how many the scenarios are dealt, at least 2.
        seed: of the dealing.

    Raises:
        ConfigError: as `labelled_calls`, or labels of fewer than two scenarios, or nothing that was corrected.
        JudgeUnavailable: the judge answers no call at all.
    """
    labels = _of_verdicts(labels)
    if not corrected(labels, 1):
        raise ConfigError("no verdict was marked wrong: there is nothing to show as an example")
    calls = labelled_calls(run, labels)
    scenario = training_scenarios(run)
    scenarios = sorted({scenario[call.task_id] for call in calls})
    if len(scenarios) < 2:
        raise ConfigError(f"labels of {len(scenarios)} scenario: examples are tried on others than they are from")
    dealt = {str(name): place % folds for place, name in enumerate(np.random.default_rng(seed).permutation(scenarios))}
    plain = await ask_again(run, complete, calls, judge)
    tables, shown = [], []
    for fold in sorted(set(dealt.values())):
        examples = corrected([label for label in labels if dealt[scenario[label.task_id]] != fold], most)
        before = examples_text(examples)
        mine = [call for call in calls if dealt[scenario[call.task_id]] == fold]
        shown.append(len(examples))
        tables.append(
            await ask_again(run, complete, [replace(call, prompt=before + call.prompt) for call in mine], judge)
        )
    asked = pa.concat_tables([plain, *tables])
    without, after = _answers(plain), _answers(pa.concat_tables(tables))
    rows = [
        _row(label, answers.get((label.training_step, label.task_id, label.rollout, label.criterion)), name, judge)
        for name, answers in (("without examples", without), ("with examples", after))
        for label in labels
    ]
    return Examples(
        agreement=agreement_table(_table(rows)),
        asked=_table(rows),
        gain=_gain(labels, without, after),
        shown=tuple(shown),
        dollars=float(sum(asked.column("dollars").to_pylist())),
    )


_Answers = dict[tuple[int, str, int, int], int | None]


def _gain(labels: Sequence[Label], without: _Answers, after: _Answers) -> Interval:
    def agreed(answers: _Answers) -> dict[str, float]:
        return {
            f"{number}\n{label.training_step}/{label.task_id}": float(
                answers.get((label.training_step, label.task_id, label.rollout, label.criterion)) == label.verdict
            )
            for number, label in enumerate(labels)
        }

    one, other = (clustered_mean([agreed(answers)], lambda key: key.partition("\n")[2]) for answers in (after, without))
    return rate_difference(one, other)


def _answers(table: pa.Table) -> _Answers:
    return {
        (row["training_step"], row["task_id"], row["rollout"], row["criterion"]): row["verdict"]
        for row in table.to_pylist()
    }


def _of_verdicts(labels: Sequence[Label]) -> list[Label]:
    return [label for label in labels if label.verdict is not None]


def _row(label: Label, verdict: int | None, phase: str, judge: str = "judge") -> Row:
    """A row of `REPLAYED` whose reference is the person."""
    return {
        "run": PEOPLE,
        "judge": judge,
        "training_step": label.training_step,
        "task_id": repr(label.group),
        "rollout": label.rollout,
        "phase": phase,
        "criterion": label.criterion,
        "title": label.title,
        "reference": label.verdict,
        "verdict": verdict,
        "reference_steps": [],
        "steps": [],
        "dollars": 0.0,
        "error": None,
    }


def _table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=REPLAYED)


def _overlap(labels: Sequence[Label]) -> float:
    """Mean Jaccard index of the cited steps with the right ones; two empty sets are the same."""
    pairs = [(set(label.cited), set(label.cited if label.citation else label.steps or ())) for label in labels]
    return float(np.mean([len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs])) if pairs else float("nan")
