"""Statistics of criteria on the rollouts they are measured on, the choice of criteria to keep, and the rubric file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from draco_ray.config import plain_yaml
from draco_ray.lab.files import atomic_output_file
from draco_ray.records import Criterion, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCriterion:
    """A criterion with counts of its verdicts."""

    criterion: Criterion
    rollouts: int
    """Number of scored rollouts."""
    passed: int
    failed: int
    tasks: int
    """Number of tasks with at least one scored rollout."""
    discriminated: int
    """Number of tasks on which some rollouts pass the criterion and others fail it, which separates their rewards."""

    @property
    def applicability(self) -> float:
        """Share of rollouts with a verdict other than not applicable, 0 .. 1."""
        return (self.passed + self.failed) / self.rollouts if self.rollouts else 0.0

    @property
    def failure_rate(self) -> float:
        """Share of the applicable verdicts that are fails, 0 .. 1; 0 if none is applicable."""
        applicable = self.passed + self.failed
        return self.failed / applicable if applicable else 0.0

    @property
    def discrimination(self) -> float:
        """Share of tasks on which some rollouts pass the criterion and others fail it, 0 .. 1."""
        return self.discriminated / self.tasks if self.tasks else 0.0


def measure(
    rubric: Sequence[Criterion], verdicts: Mapping[str, Sequence[Sequence[Verdict]]]
) -> tuple[MeasuredCriterion, ...]:
    """Count the verdicts on each criterion.

    Args:
        rubric: K criteria.
        verdicts: task id -> for each scored rollout its K verdicts; rollouts without a usable score are left out.

    Raises:
        ValueError: a rollout does not have K verdicts.
    """
    scored = [verdicts_GK for verdicts_GK in verdicts.values() if verdicts_GK]
    if any(len(verdicts_K) != len(rubric) for verdicts_GK in scored for verdicts_K in verdicts_GK):
        raise ValueError(f"a rollout does not have exactly one verdict per criterion ({len(rubric)})")
    measured = []
    for index, criterion in enumerate(rubric):
        columns = [[verdicts_K[index] for verdicts_K in verdicts_GK] for verdicts_GK in scored]
        measured.append(
            MeasuredCriterion(
                criterion=criterion,
                rollouts=sum(len(column) for column in columns),
                passed=sum(column.count(Verdict.PASS) for column in columns),
                failed=sum(column.count(Verdict.FAIL) for column in columns),
                tasks=len(columns),
                discriminated=sum({Verdict.PASS, Verdict.FAIL} <= set(column) for column in columns),
            )
        )
    return tuple(measured)


def prune(
    measured: Sequence[MeasuredCriterion], *, min_applicability: float, min_discrimination: float
) -> tuple[tuple[MeasuredCriterion, ...], tuple[MeasuredCriterion, ...]]:
    """Split the criteria into those that apply and discriminate often enough, and the rest.

    Returns: (kept, pruned), each by descending failure rate; ties keep the rubric's order.
    """
    ordered = sorted(measured, key=lambda each: -each.failure_rate)
    kept = tuple(
        each
        for each in ordered
        if each.applicability >= min_applicability and each.discrimination >= min_discrimination
    )
    return kept, tuple(each for each in ordered if each not in kept)


def write_rubric(path: Path, kept: Sequence[MeasuredCriterion], provenance: str) -> None:
    """Write the criteria in their order, each below a comment with its figures; ``provenance`` is one line."""
    parts = [f"# {' '.join(provenance.split())}\n"]
    for each in kept:
        entry = {name: getattr(each.criterion, name) for name in ("title", "description", "evaluator_instruction")}
        figures = (
            f"failed {each.failure_rate:.1%} of {each.passed + each.failed} applicable rollouts of {each.rollouts}"
            f" ({each.applicability:.1%}), told apart the rollouts of {each.discriminated} of {each.tasks} tasks"
        )
        parts.append(f"# {figures}\n{plain_yaml.dump([entry], width=110)}")
    with atomic_output_file(path) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


def rubric_table(kept: Sequence[MeasuredCriterion], pruned: Sequence[MeasuredCriterion]) -> Table:
    """Title, failure rate, applicability and discrimination, by descending failure rate; pruned criteria last."""
    table = Table(box=None, pad_edge=False)
    for name in ("#", "title", "failed", "applicable", "discriminates", ""):
        table.add_column(name, justify="left" if name in ("title", "") else "right")
    for number, each in enumerate((*kept, *pruned), start=1):
        stays = number <= len(kept)
        table.add_row(
            str(number) if stays else "-",
            each.criterion.title,
            f"{each.failure_rate:.1%}",
            f"{each.applicability:.1%}",
            f"{each.discrimination:.1%}",
            "" if stays else "pruned",
        )
    return table
