"""Every number of every table against plain Python, over invented evaluations of all shapes."""

from __future__ import annotations

import csv
import io
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

import pytest

from draco_ray.lab.evaluation.rendering import Table, TableFormat, render
from draco_ray.lab.evaluation.results import EvaluationDirectory, RolloutResult
from draco_ray.lab.evaluation.tables import SPLITS, TABLES, compare, comparison_table, read_settings
from draco_ray.records import LOST_ROLLOUT, EpisodeEnd, Termination, Usage
from tests.support.evaluations import a_plan, a_result

Number = float | None


@dataclass(slots=True)
class Row:
    """What was invented of one setting on one split: results by seed, checkpoint, run and task."""

    runs: int
    difficulty: dict[str, int]
    seeds: list[list[dict[tuple[int, str], RolloutResult]]] = field(default_factory=list)

    @property
    def flat(self) -> list[RolloutResult]:
        return [result for seed in self.seeds for part in seed for result in part.values()]

    @property
    def lost(self) -> int:
        return sum(result.error is not None for result in self.flat)

    def rate(
        self,
        k: int,
        good: Callable[[Iterable[bool]], bool] = all,
        *,
        whole: bool = False,
        level: int | None = None,
        seeds: Sequence[Sequence[dict[tuple[int, str], RolloutResult]]] | None = None,
        only_run: int | None = None,
    ) -> float:
        tasks = [task for task, of in self.difficulty.items() if level in (None, of)]
        groups: dict[str, list[str]] = defaultdict(list)
        for task in tasks:
            groups[task.rsplit("_", 1)[0] if whole else task].append(task)
        runs = range(self.runs) if only_run is None else [only_run]
        values = []
        for part in (part for seed in seeds or self.seeds for part in seed):
            for members in groups.values():
                done = [all(part[run, task].evaluation.success for task in members) for run in runs]
                values.append(fmean(good(done[run] for run in subset) for subset in combinations(range(len(done)), k)))
        return fmean(values)

    def turns(self, results: Iterable[RolloutResult]) -> Number:
        found = [each.evaluation.turns for each in results if each.evaluation.turns]
        return fmean(found) if found else None

    @property
    def dollars(self) -> Number:
        passes = self.runs * sum(map(len, self.seeds))
        known = [each.usage.dollars for each in self.flat if each.usage != Usage()]
        return None if not known or None in known else sum(each for each in known if each is not None) / passes


Invented = dict[str, dict[str, Row]]


def invent(folder: Path, seed: int) -> tuple[list[str], Invented]:
    """Evaluation directories as `draco tables` is told them, and what is in them."""
    chance = random.Random(seed)
    splits = chance.sample(["test_normal", "dev"], chance.choice([1, 2]))
    difficulty = {
        split: {
            f"{split[0]}{scenario}_{number}": chance.choice([1, 2, 3])
            for scenario in range(chance.randint(1, 4))
            for number in range(1, chance.choice([1, 3]) + 1)
        }
        for split in splits
    }
    arguments, invented = [], Invented()
    for label in ("A", "B", "C")[: chance.randint(1, 3)]:
        runs, checkpoints, seeds = chance.choice([1, 2, 3, 4]), chance.choice([1, 1, 2]), chance.choice([1, 1, 2, 3])
        for split in chance.sample(splits, chance.randint(1, len(splits))):
            row = invented.setdefault(label, {}).setdefault(split, Row(runs, difficulty[split]))
            solved, lost = chance.choice([0.0, 1.0, 0.6]), chance.choice([0.0, 0.0, 0.1, 1.0])
            for number in range(seeds):
                names = tuple(f"step{place:05d}" for place in range(1, checkpoints + 1))
                plan = a_plan(
                    split=split, label=label, runs=runs, measurements=names, tasks=difficulty[split],
                    generated=chance.random() < 0.5, settings={"model fingerprint": f"{label}{number}"},
                )  # fmt: skip
                price = chance.choice([0.25, 0.25, None])
                directory = EvaluationDirectory.begin(folder / f"{label}-{split}-{number}", plan)
                row.seeds.append([])
                for name in names:
                    part = {}
                    for run in range(runs):
                        for task in difficulty[split]:
                            result = a_result(task, run, chance.random() < solved, chance.randint(1, 9), price)
                            if chance.random() < lost:
                                result = gone(result)
                            part[run, task] = result
                            directory.add(name, result)
                    row.seeds[-1].append(part)
                arguments.append(f"{label}={directory.path}")
    return arguments, invented


def gone(result: RolloutResult) -> RolloutResult:
    evaluation = replace(
        result.evaluation, success=False, turns=0, ended=EpisodeEnd.SERVER_ERROR, termination=Termination.SERVER_ERROR,
        failures=(LOST_ROLLOUT,),
    )  # fmt: skip
    return replace(result, evaluation=evaluation, usage=Usage(), error="the world crashed")


def read(table: Table) -> dict[str, dict[str, Number]]:
    """Row -> column, without what is in brackets -> number, out of the CSV form."""
    rows = list(csv.DictReader(io.StringIO(render(table, TableFormat.CSV))))
    return {
        row.pop(table.row_header): {
            re.sub(r" \([^()]*(?:\([^()]*\))?[^()]*tasks\)", "", name): float(cell) if cell else None
            for name, cell in row.items()
        }
        for row in rows
    }


def same(found: Number, expected: Number) -> bool:
    return found == expected if None in (found, expected) else found == pytest.approx(expected, abs=1e-9)


def expected_tables(invented: Invented) -> dict[str, dict[str, dict[str, Number]]]:
    """Table -> row -> column -> number."""
    most = min(3, max(row.runs for splits in invented.values() for row in splits.values()))
    titles = [
        SPLITS["appworld", split] for split in ("test_normal", "dev") if any(split in of for of in invented.values())
    ]
    tables: dict[str, dict[str, dict[str, Number]]] = {name: {label: {} for label in invented} for name in TABLES}
    for label, splits in invented.items():
        by_title = {SPLITS["appworld", split]: row for split, row in splits.items()}
        averages: dict[int, list[Number]] = defaultdict(list)
        for title in titles:
            row = by_title.get(title)
            for metric, whole in (("TGC", False), ("SGC", True)):
                for k in range(1, most + 1):
                    there = row is not None and k <= row.runs
                    rate = 100 * row.rate(k, whole=whole) if there and row else None
                    at = 100 * row.rate(k, any, whole=whole) if there and row else None
                    tables["main"][label][f"{title} {metric} p^{k}"] = rate
                    tables["consistency"][label][f"{title} {metric} pass^{k}"] = rate
                    tables["consistency"][label][f"{title} {metric} pass@{k}"] = at
                    averages[k].append(rate)
                one = tables["main"][label][f"{title} {metric} p^1"]
                every = tables["main"][label][f"{title} {metric} p^{most}"]
                tables["retention"][label][f"{title} {metric}"] = (
                    100 * every / one if every is not None and one else None
                )
                tables["frontier"][label][f"{title} {metric}"] = one
            cost = row.dollars if row else None
            tables["frontier"][label][f"{title} Cost ($)"] = tables["cost"][label][f"{title} dollars"] = cost
            tables["frontier"][label][f"{title} $/task"] = (
                cost / len(row.difficulty) if row and cost is not None else None
            )
            tables["efficiency"][label][title] = row.turns(row.flat) if row else None
            # The word of other environments; AppWorld's are listed whether they occur or not.
            for mode in set(Termination) - {Termination.FINISHED}:
                share = 100 * fmean(each.evaluation.termination is mode for each in row.flat) if row else None
                tables["terminations"][label][f"{title} {mode.value.replace('_', ' ')}"] = share
            for level, name in ((1, "Easy"), (2, "Medium"), (3, "Hard")):
                if row and level in row.difficulty.values():
                    many = list(row.difficulty.values()).count(level)
                    for metric, whole in (("TGC", False), ("SGC", True)):
                        tables["difficulty"][label][f"{title} {name} ({many}) {metric}"] = 100 * row.rate(
                            1, whole=whole, level=level
                        )
        for k, rates in averages.items():
            tables["main"][label][f"Average  p^{k}".replace("  ", " ")] = mean_of_all(rates)
        tables["efficiency"][label]["Avg."] = mean_of_all([tables["efficiency"][label][title] for title in titles])
        for table in tables.values():
            table[label]["Lost"] = float(sum(row.lost for row in splits.values()))
    return tables


def mean_of_all(values: Sequence[Number]) -> Number:
    return None if None in values else fmean(each for each in values if each is not None)


@pytest.mark.parametrize("seed", range(24))
def test_every_number_is_that_of_plain_python(tmp_path: Path, seed: int) -> None:
    arguments, invented = invent(tmp_path, seed)
    settings = read_settings(arguments)
    for name, rows in expected_tables(invented).items():
        table = TABLES[name](settings)
        found = read(table)
        assert found.keys() == rows.keys()
        for label, cells in rows.items():
            for column, number in cells.items():
                assert same(found[label][column], number), (name, label, column, found[label], number)
        # The note on lost rollouts names every row and split that lost any.
        notes = "\n".join(table.notes)
        for label, splits in invented.items():
            for split, row in splits.items():
                said = f"{label} on {SPLITS['appworld', split]}: {row.lost} of {len(row.flat)} rollouts"
                assert (said in notes) is (row.lost > 0)


@pytest.mark.parametrize("seed", range(24))
def test_every_spread_and_difference_is_that_of_plain_python(tmp_path: Path, seed: int) -> None:
    arguments, invented = invent(tmp_path, seed)
    settings = read_settings(arguments)
    found = read(TABLES["main"](settings))
    for label, splits in invented.items():
        for split, row in splits.items():
            if len(row.seeds) > 1:
                spread = [row.rate(1, seeds=[each]) for each in row.seeds]
            elif len(row.seeds[0]) > 1:
                spread = [row.rate(1, seeds=[[part]]) for part in row.seeds[0]]
            else:
                spread = [row.rate(1, only_run=run) for run in range(row.runs)]
            std = 100 * stdev(spread) if len(spread) > 1 else None
            assert same(found[label][f"{SPLITS['appworld', split]} TGC p^1 std"], std), (label, split)
    others = [label for label in invented if label != "A" and invented[label].keys() & invented["A"].keys()]
    if others == [label for label in invented if label != "A"]:
        differences = read(comparison_table(compare(settings, "A")))
        for label in others:
            for split in invented[label].keys() & invented["A"].keys():
                one, other = invented[label][split], invented["A"][split]
                for k in {1, min(3, one.runs)} & {1, min(3, other.runs)}:
                    for metric, whole in (("TGC", False), ("SGC", True)):
                        line = differences[f"{label} - A on {SPLITS['appworld', split]}, {metric} p^{k}"]
                        assert same(line["difference"], 100 * (one.rate(k, whole=whole) - other.rate(k, whole=whole)))
                        assert same(line["lost (%)"], 100 * one.lost / len(one.flat))
                        assert same(line["of the other (%)"], 100 * other.lost / len(other.flat))
