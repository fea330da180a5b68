"""What `draco agreement` does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from draco_ray.commands.printing import print_overall
from draco_ray.commands.replay import judges_own_config, open_run
from draco_ray.errors import ConfigError
from draco_ray.judging.labels import Label, last_words, read_labels, taken_back
from draco_ray.lab.analysis.judges import POLICY, NamedJudge, asked, folder_name, judge_config, open_complete
from draco_ray.lab.analysis.labels import against_people, between_people, citations, with_examples
from draco_ray.lab.analysis.tables import write_table
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.files import check_folder

KEYS = ("run", "judge", "citation_overlap", "unanswered")
"""Columns that a table of labels leaves out."""


@dataclass(frozen=True, kw_only=True)
class HeldOutComparison:
    """The comparison with and without examples."""

    run: Path
    judge: NamedJudge
    examples: int
    """Most that are shown."""
    folds: int
    trust: bool = False


def agreement(
    paths: Sequence[Path], held: HeldOutComparison | None, *, out: Path | None, console: Console
) -> list[Path]:
    """Print how far a judge agrees with people, and with ``held`` what examples of corrected verdicts change.

    Raises:
        ConfigError: files without labels, or labels of another run than ``held`` names.
        JudgeUnavailable: the judge does not answer.
    """
    said = read_labels(paths)
    labels = last_words(said)
    folder = None if out is None else check_folder(out)
    _print_size(labels, console)
    if contrary := taken_back(said):
        console.print(
            f"{contrary} {'label says' if contrary == 1 else 'labels say'} another thing than an earlier one of the "
            "same verdict under the same name: the last counts; if several people left their name empty, give each one"
        )
    tables = {}
    if any(label.verdict is not None for label in labels):
        tables["agreement"] = against_people(labels)
        print_overall(console, "the judge against people", tables["agreement"], KEYS)
    people = between_people(labels)
    if people.num_rows:
        tables["people"] = people
        print_overall(console, "people against each other, on verdicts that both labelled", people, KEYS)
    _print_citations(labels, console)
    if held is not None:
        tables |= _examples(labels, held, folder, console)
    if folder is None:
        return []
    return [path for name, table in tables.items() for path in write_table(table, folder, name)]


def _print_size(labels: Sequence[Label], console: Console) -> None:
    people, groups = len({label.by for label in labels}), len({label.group for label in labels})
    verdicts = sum(label.verdict is not None for label in labels)
    cited = sum(label.citation is not None for label in labels)
    console.print(
        f"{verdicts} verdicts and {cited} citations labelled by {people} {'person' if people == 1 else 'people'}, in "
        f"{groups} {'group' if groups == 1 else 'groups'}"
    )
    chosen = sum(not label.drawn for label in labels)
    if chosen:
        console.print(
            f"{chosen} of {len(labels)} were chosen by whoever labelled them, not drawn at random: the rates below are "
            "of what was labelled, and of the run only as far as nobody chose by verdict"
        )


def _print_citations(labels: Sequence[Label], console: Console) -> None:
    found = citations(labels)
    if found is None:
        return
    console.print(f"citations marked right: {_share(found.right)} of {found.labelled}")
    if found.overlap is not None:
        console.print(
            f"cited steps and the right ones, mean Jaccard index: {_share(found.overlap)}, {found.corrected} corrected"
        )


def _examples(
    labels: Sequence[Label], held: HeldOutComparison, folder: Path | None, console: Console
) -> dict[str, object]:
    if held.judge.model == POLICY:
        raise ConfigError(f"--judge {POLICY}: examples are measured with a judge that stays the same; name a model")
    run = open_run(held.run, None)
    mine = [label for label in labels if label.run == run.path.name]
    if not any(label.verdict is not None for label in mine):
        raise ConfigError(
            f"--run {held.run}: no verdict of {run.path.name} is labelled; the labels are of " + _runs(labels)
        )
    own = judges_own_config(str(run.path), [held.judge], trust=held.trust).judge
    cache = None if folder is None else folder / "judge_cache"
    config = judge_config(own, held.judge, cache)
    judge = folder_name(held.judge.model)
    console.print(f"labelled verdicts to {asked(judge, config)}")
    found = asyncio.run(
        with_examples(
            run, mine, open_complete(config, run.setting("seed")), judge, most=held.examples, folds=held.folds
        )
    )
    shown = f"{min(found.shown)} to {max(found.shown)}" if min(found.shown) < max(found.shown) else f"{found.shown[0]}"
    title = f"{held.judge.model} on labels of other scenarios than its {shown} examples"
    print_overall(console, title, found.agreement, KEYS)
    console.print(f"agreement gained by examples: {_signed(found.gain)}; asked for {found.dollars:.4f} dollars")
    return {"examples": found.agreement, "examples_asked": found.asked}


def _runs(labels: Sequence[Label]) -> str:
    return ", ".join(sorted({label.run for label in labels}))


def _share(found: Interval) -> str:
    return f"{found.mean:.3f}" + (f" [{found.low:.3f}, {found.high:.3f}]" if np.isfinite(found.low) else "")


def _signed(found: Interval) -> str:
    return f"{found.mean:+.3f}" + (f" [{found.low:+.3f}, {found.high:+.3f}]" if np.isfinite(found.low) else "")
