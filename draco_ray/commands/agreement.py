"""`draco agreement`: a judge against people's labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draco_ray.commands.printing import print_overall, with_interval
from draco_ray.judging.labels import Label, count_contradicted_labels, latest_labels, read_labels
from draco_ray.lab.analysis.labels import citations, human_agreement, inter_annotator_agreement, labelled_reliability
from draco_ray.lab.analysis.tables import write_table
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.files import create_output_folder
from draco_ray.lab.rows import finite_or_none
from draco_ray.terminal import console, counted

HIDDEN_COLUMNS = ("run", "judge", "citation_overlap", "unanswered")
"""Columns that are not printed in the tables of people's labels."""


def agreement(paths: Sequence[Path], *, out: Path | None) -> list[Path]:
    """Print how far a judge agrees with people, and people with each other; returns the tables written to ``out``.

    Raises:
        ConfigError: files without labels.
    """
    said = read_labels(paths)
    labels = latest_labels(said)
    folder = None if out is None else create_output_folder(out)
    _print_size(labels)
    if contrary := count_contradicted_labels(said):
        console.print(
            f"{contrary} {'label contradicts' if contrary == 1 else 'labels contradict'} an earlier label of the same "
            "verdict by the same person; the last one counts. If several people left the name empty, give each a name"
        )
    tables = {}
    if any(label.verdict is not None for label in labels):
        tables["agreement"] = human_agreement(labels)
        print_overall("the judge against people", tables["agreement"], HIDDEN_COLUMNS)
    people = inter_annotator_agreement(labels)
    if people.num_rows:
        tables["people"] = people
        print_overall("people against each other, on verdicts that two people labelled", people, HIDDEN_COLUMNS)
    _print_citations(labels)
    return [path for name, table in tables.items() if folder for path in write_table(table, folder, name)]


def _print_size(labels: Sequence[Label]) -> None:
    people, groups = len({label.by for label in labels}), len({label.group for label in labels})
    verdicts = sum(label.verdict is not None for label in labels)
    cited = sum(label.citation is not None for label in labels)
    console.print(
        f"{verdicts} verdicts and {cited} citations labelled by {people} {'person' if people == 1 else 'people'}, in "
        f"{counted(groups, 'group')}"
    )
    if chosen := sum(not label.drawn for label in labels):
        console.print(
            f"{chosen} of {len(labels)} labels are not from a random sample, because people chose what to label: the "
            "rates below describe these labels, not necessarily the run"
        )


def _print_citations(labels: Sequence[Label]) -> None:
    found = citations(labels)
    if found is None:
        return
    console.print(f"citations marked right: {_share(found.right)} of {found.labelled}")
    if found.overlap is not None:
        console.print(
            f"mean Jaccard index of the cited and the correct steps: {_share(found.overlap)} ({found.corrected} "
            "citations corrected)"
        )
    trusted = labelled_reliability(labels)
    if trusted is None:
        console.print("no recommended algorithm.reliability: no labelled citation has steps and rollout_steps")
    else:
        console.print(f"recommended algorithm.reliability for this judge: {trusted:.3f}")


def _share(found: Interval) -> str:
    return with_interval(found.mean, finite_or_none(found.low), finite_or_none(found.high))
