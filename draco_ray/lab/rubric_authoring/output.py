"""The authored rubric: a YAML file that `draco_ray.judging.prompts.load_static_rubric` reads, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from draco_ray.config import plain_yaml
from draco_ray.lab.files import whole_file
from draco_ray.lab.rubric_authoring.statistics import MeasuredCriterion


def write_rubric(path: Path, kept: Sequence[MeasuredCriterion], provenance: str) -> None:
    """Write the criteria in their order, each below a comment with its figures; ``provenance`` is one line."""
    parts = [f"# {' '.join(provenance.split())}\n"]
    for each in kept:
        criterion = each.criterion
        entry = {
            "title": criterion.title,
            "description": criterion.description,
            "evaluator_instruction": criterion.evaluator_instruction,
        }
        figures = (
            f"failed {each.failure_rate:.1%} of {each.passed + each.failed} applicable rollouts of {each.rollouts}"
            f" ({each.applicability:.1%}), told apart the rollouts of {each.discriminated} of {each.tasks} tasks"
        )
        parts.append(f"# {figures}\n{plain_yaml.dump([entry], width=110)}")
    with whole_file(path) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


def rubric_table(kept: Sequence[MeasuredCriterion], pruned: Sequence[MeasuredCriterion]) -> Table:
    """Title, failure rate, applicability and discrimination, by descending failure rate; pruned criteria last."""
    table = Table(box=None, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("title")
    for name in ("failed", "applicable", "discriminates"):
        table.add_column(name, justify="right")
    table.add_column("")
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
