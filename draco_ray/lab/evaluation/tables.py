"""The paper's tables over several evaluated settings, and comparisons of settings.

A row is a setting (one label); its columns are the splits it was evaluated on. Rates are percentages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.intervals import Interval
from draco_ray.lab.evaluation.measures import differences, holm
from draco_ray.lab.evaluation.policies import UNTRAINED
from draco_ray.lab.evaluation.rendering import BLOCK, Cell, Column, Table, block_and_name
from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan, protocol_differences
from draco_ray.lab.evaluation.setting import SplitResult, read_seeds
from draco_ray.records import Termination

Settings = Mapping[str, Mapping[str, SplitResult]]
"""Label -> split title -> result, in the order of rows and columns."""
Getter = Callable[[SplitResult], Cell | None]
SplitColumn = tuple[Column, Getter]
"""A column of a split (without the split's title in its path) and the function that gets its cell."""

SPLITS = {
    ("appworld", "test_normal"): "AppWorld TN",
    ("appworld", "test_challenge"): "AppWorld TC",
    ("appworld", "train"): "AppWorld train",
    ("appworld", "dev"): "AppWorld dev",
    ("tau-banking", "full"): "τ-bench",
}
DIFFICULTIES = {1: "Easy", 2: "Medium", 3: "Hard"}
LOST = Column(("Lost",), digits=0)
"""The column with a row's number of lost rollouts, which every table has."""
ONE_SEED = (
    "With one training seed, intervals cover the choice of scenarios but not the variation between training runs."
)
_PAIRED = "a comparison needs the same tasks in both settings"


def split_title(plan: EvaluationPlan) -> str:
    """Title of a plan's split in tables; the same for a part of the split's tasks and for a generated world."""
    split = "full" if plan.benchmark == "tau-banking" else plan.split
    return SPLITS.get((plan.benchmark, split), f"{plan.benchmark} {plan.split}")


def describe_task_subset(plans: Iterable[EvaluationPlan]) -> str:
    """How a column's tasks differ from the published split, e.g. ``generated world, 45 tasks``; empty if equal."""
    found: dict[str, None] = {}
    for plan in plans:
        part = plan.whole_split is not None and len(plan.tasks) != plan.whole_split
        many = f"{len(plan.tasks)} of {plan.whole_split}" if part else str(len(plan.tasks))
        found["generated world, " * plan.generated + f"{many} tasks"] = None
    whole = all(not plan.generated and len(plan.tasks) == plan.whole_split for plan in plans)
    return "" if whole else " or ".join(found)


def read_settings(arguments: Sequence[str]) -> dict[str, dict[str, SplitResult]]:
    """Read evaluation directories (`open_settings`); a row shows the mean over its training seeds.

    Raises: ConfigError: as `open_settings`, or an evaluation is not finished.
    """
    return {
        label: {title: read_seeds(splits[title], label) for title in _in_order(splits)}
        for label, splits in open_settings(arguments).items()
    }


def open_settings(arguments: Sequence[str]) -> dict[str, dict[str, list[EvaluationDirectory]]]:
    """Label -> split title -> evaluations, from ``DIR``, ``LABEL=DIR`` or ``BLOCK::LABEL=DIR``.

    Raises:
        ConfigError: a directory is no evaluation or is a training curve; or for the reasons of `group_seeds`.
    """
    opened = []
    for argument in arguments:
        label, separator, name = argument.partition("=")
        if not separator or Path(argument).is_dir():
            label, name = "", argument
        directory = EvaluationDirectory.open(Path(name))
        if len(directory.plan.measurements) > 1 and UNTRAINED in directory.plan.measurements:
            raise ConfigError(
                f"{name}: this is a training curve, which has no mean over its checkpoints; see its curve.csv, or "
                "measure the setting with `draco evaluate --run DIR --last-epochs 3`"
            )
        opened.append((label or directory.plan.label, directory))
    return group_seeds(opened)


def group_seeds(
    labelled: Iterable[tuple[str, EvaluationDirectory]],
) -> dict[str, dict[str, list[EvaluationDirectory]]]:
    """Label -> split title -> evaluations; several evaluations of one label and split are training seeds of a setting.

    Raises:
        ConfigError: two evaluations of a setting are not different training seeds on the same tasks.
    """
    found: dict[str, dict[str, list[EvaluationDirectory]]] = {}
    for label, directory in labelled:
        title = split_title(directory.plan)
        others = found.setdefault(label, {}).setdefault(title, [])
        for other in others:
            _check_seeds(label, title, directory, other)
        others.append(directory)
    return found


def _check_seeds(label: str, title: str, one: EvaluationDirectory, other: EvaluationDirectory) -> None:
    """Check that two evaluations with one label and split are different training seeds of one setting.

    Raises: ConfigError: they have the same weights, or differ in tasks, runs, checkpoints or limits.
    """
    if one.plan.weights == other.plan.weights:
        raise ConfigError(
            f"{one.path}: {label} on {title} is already in {other.path}, with the same weights; expected one "
            "evaluation per setting, split and training seed; choose another label with LABEL=DIR"
        )
    for name, mine, theirs in (
        ("tasks", (set(one.plan.tasks), one.plan.world), (set(other.plan.tasks), other.plan.world)),
        ("runs", one.plan.runs, other.plan.runs),
        ("checkpoints", len(one.plan.measurements), len(other.plan.measurements)),
        ("limits", protocol_differences((one.plan, other.plan)), []),
    ):
        if mine != theirs:
            raise ConfigError(
                f"{one.path}: {label} on {title} was also evaluated in {other.path}, with other {name}; training "
                "seeds of one setting must not differ in this; choose another label with LABEL=DIR"
            )


def main_table(settings: Settings) -> Table:
    """TGC and SGC (SR without scenarios) at p^1 .. p^k per split, and their average over splits and metrics."""
    ks = _ks(settings)
    return _table(
        settings,
        "main",
        "Task success and consistency (%)",
        lambda results: [(_high(metric, f"p^{k}"), _rate(metric, k)) for metric in _metrics(results) for k in ks],
        averages=[_high("Average", "", f"p^{k}") for k in ks],
        notes=("p^k: pass^k over the runs; Average: over the columns of that k.",),
    )


def consistency_table(settings: Settings) -> Table:
    """pass^k and pass@k, of tasks and of scenarios."""
    ks = _ks(settings)
    return _table(
        settings,
        "consistency",
        "Consistency and discovery: pass^k and pass@k (%)",
        lambda results: [
            (_high(metric, f"pass{kind}{k}"), _rate(metric, k, kind))
            for metric in _metrics(results)
            for kind in "^@"
            for k in ks
        ],
    )


def retention_table(settings: Settings) -> Table:
    """p^k / p^1 of tasks and of scenarios: the share of successes that hold in all k runs (section "Results")."""
    k = _ks(settings)[-1]

    def retention(metric: str, result: SplitResult) -> Cell | None:
        one, every = _rate(metric, 1)(result), _rate(metric, k)(result)
        return Cell(100 * every.mean / one.mean) if one and every and one.mean else None

    def columns(results: Sequence[SplitResult]) -> list[SplitColumn]:
        return [(_high(metric), partial(retention, metric)) for metric in _metrics(results)]

    return _table(settings, "retention", f"Retention: p^{k} / p^1 (%)", columns)


def efficiency_table(settings: Settings) -> Table:
    """Mean agent turns per split and their average."""
    return _table(
        settings,
        "efficiency",
        "Average agent turns (lower is better)",
        lambda _: [(Column((), best="low"), lambda result: scaled(result.turns))],
        averages=[Column(("Avg.",), best="low")],
    )


def difficulty_table(settings: Settings) -> Table:
    """TGC and SGC (p^1) by AppWorld's difficulty label, with the number of tasks of each."""

    def rate(level: int, metric: str, result: SplitResult) -> Cell | None:
        stratum = result.difficulty.get(level)
        return None if stratum is None else scaled(stratum.tgc if metric == "TGC" else stratum.sgc, 100)

    def columns(results: Sequence[SplitResult]) -> Iterator[SplitColumn]:
        for level in sorted({level for result in results for level in result.difficulty}):
            # A level has several task counts if settings were measured on different tasks; a note says so.
            many = sorted({result.difficulty[level].tasks for result in results if level in result.difficulty})
            header = f"{DIFFICULTIES.get(level, level)} ({' or '.join(map(str, many))})"
            yield from ((_high(header, metric), partial(rate, level, metric)) for metric in ("TGC", "SGC"))

    return _table(settings, "difficulty", "Task success by difficulty (p^1, %)", columns)


def frontier_table(settings: Settings) -> Table:
    """Success (p^1) against the dollars of one pass over a split and of one task."""
    costs: list[SplitColumn] = [
        (Column(("Cost ($)",), 2, "low"), lambda result: _number(result.pass_dollars)),
        (Column(("$/task",), 3, "low"), lambda result: _number(result.dollars_per_task)),
    ]
    notes = ["Cost: dollars of the policy's tokens for one pass over the split. -: the price is unknown."]
    for split in _titles(settings):
        roles = dict.fromkeys(role for result in _results(settings, split) for role in result.role_dollars or ())
        notes += [f"{split}: the cost of {', '.join(roles)} together."] * bool(roles)
    table = _table(
        settings,
        "frontier",
        "Success (p^1, %) against cost",
        lambda results: [*((_high(metric), _rate(metric, 1)) for metric in _metrics(results)), *costs],
        notes=notes,
    )
    return replace(table, row_header="Model")


def cost_table(settings: Settings) -> Table:
    """Calls, tokens and dollars of one pass."""
    fields = {"turns": "calls", "input": "input_tokens", "cached": "cached_tokens", "output": "output_tokens"}

    def number(field: str, result: SplitResult) -> Cell | None:
        return _number(getattr(result.usage, field))

    counts = [(Column((name,), 0), partial(number, field)) for name, field in fields.items()]
    return _table(
        settings,
        "cost",
        "Tokens and dollars of one pass over the split",
        lambda _: [*counts, (Column(("dollars",), 2), partial(number, "dollars"))],
        notes=("input: prompt tokens of all turns; cached: the part that was already in the previous turn's prompt.",),
    )


def termination_table(settings: Settings) -> Table:
    """Termination modes (Figure "terminations"), in % of all rollouts."""

    def share(mode: Termination) -> Getter:
        return lambda result: None if result.terminations is None else Cell(100 * result.terminations[mode])

    results = [(label, split, result) for label, splits in settings.items() for split, result in splits.items()]
    unknown = [f"{label} on {split}" for label, split, result in results if result.terminations is None]
    used = {mode for *_, result in results for mode, part in (result.terminations or {}).items() if part}
    return _table(
        settings,
        "terminations",
        "How rollouts ended (%)",
        lambda _: [(Column((mode.value.replace("_", " "),)), share(mode)) for mode in Termination.shown(used)],
        notes=(f"Termination modes were not recorded: {', '.join(unknown)}.",) if unknown else (),
    )


TABLES: dict[str, Callable[[Settings], Table]] = {
    "main": main_table,
    "efficiency": efficiency_table,
    "difficulty": difficulty_table,
    "frontier": frontier_table,
    "consistency": consistency_table,
    "cost": cost_table,
    "retention": retention_table,
    "terminations": termination_table,
}
"""Tables by their names in `draco tables --table`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference ``one`` - ``other`` in one measure on one split."""

    one: SplitResult
    other: SplitResult
    split: str
    measure: str
    """Name of the measure, e.g. ``TGC p^1``, ``SGC p^3`` or ``turns``."""
    difference: Interval
    """Difference of shares, or of turns, with the interval over scenarios and training seeds."""
    p_value: float
    """Two-sided p-value."""
    adjusted_p: float
    """p-value after Holm's correction over all comparisons of the report."""

    @property
    def lost(self) -> tuple[float, float]:
        """Share of lost rollouts of ``one`` and of ``other``."""
        return self.one.lost / self.one.rollouts, self.other.lost / self.other.rollouts

    @property
    def title(self) -> str:
        """Label of the comparison: ``BLOCK::one - other on split``."""
        (block, one), (other_block, other) = block_and_name(self.one.label), block_and_name(self.other.label)
        if block != other_block:
            return f"{self.one.label} - {self.other.label} on {self.split}".replace(BLOCK, ": ")
        return f"{block}{BLOCK * bool(block)}{one} - {other} on {self.split}"


def compare(settings: Settings, baseline: str) -> list[Comparison]:
    """Every other setting minus ``baseline``, for every measure on every common split; p-values corrected together.

    Args:
        settings: rows, with or without blocks (``BLOCK::LABEL``).
        baseline: a row's label; without a block, it means the row of that name in each block.

    Raises:
        ConfigError: the baseline is unknown, or two settings have no split in common, or different tasks or worlds.
    """
    found: list[Comparison] = []
    for label, splits in settings.items():
        reference = _baseline(settings, baseline, label)
        if label == reference:
            continue
        common = [split for split in splits if split in settings[reference]]
        if not common:
            raise ConfigError(
                f"{label} and {reference} cannot be compared: no split in common ({', '.join(splits)} against "
                f"{', '.join(settings[reference])}); {_PAIRED}"
            )
        found += [each for split in common for each in _compare(splits[split], settings[reference][split], split)]
    adjusted = holm([comparison.p_value for comparison in found])
    return [replace(each, adjusted_p=p_value) for each, p_value in zip(found, adjusted, strict=True)]


def _baseline(settings: Settings, baseline: str, label: str) -> str:
    """The row that ``label`` is compared with."""
    if baseline in settings:
        return baseline
    block, _ = block_and_name(label)
    for other in settings:
        if block and block_and_name(other) == (block, baseline):
            return other
    raise ConfigError(
        f"--against {baseline!r}: no such setting{f' in block {block}' * bool(block)}; expected one of "
        f"{', '.join(settings)}"
    )


def _compare(one: SplitResult, other: SplitResult, split: str) -> list[Comparison]:
    only_one, only_other = (len(a.plan.tasks.keys() - b.plan.tasks.keys()) for a, b in ((one, other), (other, one)))
    if only_one or only_other:
        raise ConfigError(
            f"{one.label} and {other.label} on {split} are not paired: {only_one} tasks are only in the first, "
            f"{only_other} only in the second; {_PAIRED}; evaluate both on the whole split"
        )
    if one.plan.world != other.plan.world:
        raise ConfigError(
            f"{one.label} and {other.label} on {split} are not paired: they have the same task ids but different "
            f"tasks (two generated worlds); {_PAIRED}; evaluate both on one data root"
        )
    return [
        Comparison(
            one=one, other=other, split=split, measure=measure, difference=interval, p_value=p_value, adjusted_p=p_value
        )
        for measure, (interval, p_value) in differences(one.measures, other.measures).items()
    ]


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Differences in percentage points (for turns, in turns) with their intervals and p-values."""
    names = ("difference", "low", "high", "p", "p (Holm)", "tasks", "clusters", "lost (%)", "of the other (%)")
    digits = (1, 1, 1, 4, 4, 0, 0, 1, 1)
    rows = []
    for each in comparisons:
        unit = 1.0 if each.measure == "turns" else 100.0
        interval = each.difference
        bounded = math.isfinite(interval.low)
        numbers = [
            unit * interval.mean,
            *(unit * bound if bounded else None for bound in (interval.low, interval.high)),
        ]
        numbers += [each.p_value, each.adjusted_p, len(each.one.plan.tasks), each.one.clusters]
        numbers += [100 * share for share in each.lost]
        rows.append((f"{each.title}, {each.measure}", tuple(map(_number, numbers))))
    alone = any((each.one.seeds, each.other.seeds) == (1, 1) for each in comparisons)
    return Table(
        name="comparison",
        title="Paired differences (points of TGC, SGC and SR; turns), 95 % interval and two-sided test",
        row_header="Comparison",
        columns=tuple(Column((name,), digit) for name, digit in zip(names, digits, strict=True)),
        rows=tuple(rows),
        notes=(
            "Paired by task. p: permutation test over scenarios; with several seeds the larger of it and Student's "
            f"test over scenarios and seeds. Holm's correction over {len(rows)} comparisons.",
            *[ONE_SEED] * alone,
            *dict.fromkeys(note for each in comparisons for note in _comparison_notes(each)),
        ),
    )


def _comparison_notes(each: Comparison) -> Iterator[str]:
    if protocols := protocol_differences((each.one.plan, each.other.plan)):
        yield f"{each.title}: measured under different protocols ({', '.join(protocols)})."
    if any(each.lost):
        one, other = (f"{100 * share:.1f} %" for share in each.lost)
        yield (
            f"{each.title}: {one} and {other} of the rollouts were lost; interval and p cover every result they could "
            "have had (turns: only finished rollouts)."
        )
    seeds = (each.one.seeds, each.other.seeds)
    if 1 in seeds and seeds != (1, 1):
        yield (
            f"{each.title}: {seeds[0]} and {seeds[1]} training seeds; with one seed the variation between training "
            "runs is unknown."
        )


def _in_order(splits: Iterable[str]) -> list[str]:
    order = list(SPLITS.values())
    return sorted(splits, key=lambda title: order.index(title) if title in order else len(order))


def _titles(settings: Settings) -> list[str]:
    return _in_order(dict.fromkeys(split for splits in settings.values() for split in splits))


def _results(settings: Settings, split: str) -> list[SplitResult]:
    return [splits[split] for splits in settings.values() if split in splits]


def _high(*path: str) -> Column:
    """A column whose highest value is best."""
    return Column(path, best="high")


def _ks(settings: Settings) -> range:
    """1 .. k, for the largest k of any setting."""
    most = max((len(result.tgc) for splits in settings.values() for result in splits.values()), default=1)
    return range(1, most + 1)


def _metrics(results: Iterable[SplitResult]) -> tuple[str, ...]:
    return ("TGC", "SGC") if any(result.sgc for result in results) else ("SR",)


def _rate(metric: str, k: int, kind: str = "^") -> Getter:
    """pass^k (or pass@k) of a metric, in %."""

    def get(result: SplitResult) -> Cell | None:
        of_tasks, of_scenarios = (result.tgc, result.sgc) if kind == "^" else (result.tgc_at, result.sgc_at)
        rates = of_scenarios if metric == "SGC" else of_tasks
        return scaled(rates[k - 1], 100) if k <= len(rates) else None

    return get


def scaled(estimate: Cell | None, factor: float = 1.0) -> Cell | None:
    if estimate is None:
        return None
    beside = (None if each is None else factor * each for each in (estimate.std, estimate.low, estimate.high))
    return Cell(factor * estimate.mean, *beside)


def _number(value: float | None) -> Cell | None:
    return None if value is None else Cell(float(value))


def _average(cells: Sequence[Cell | None]) -> Cell | None:
    """The mean of a row's cells; None if any is missing."""
    known = [cell.mean for cell in cells if cell is not None]
    return Cell(sum(known) / len(known)) if known and len(known) == len(cells) else None


def _table(
    settings: Settings,
    name: str,
    title: str,
    columns: Callable[[Sequence[SplitResult]], Iterable[SplitColumn]],
    *,
    averages: Sequence[Column] = (),
    notes: Sequence[str] = (),
) -> Table:
    """A table, with notes on the tasks, lost rollouts and protocol of its rows.

    Args:
        columns: function from a split's results to the split's columns.
        averages: n columns at the end; the i-th is the mean over every n-th cell, starting at i.
    """
    splits = {split: _results(settings, split) for split in _titles(settings)}
    found = [(split, *column) for split, results in splits.items() for column in columns(results)]
    played = {split: describe_task_subset([result.plan for result in results]) for split, results in splits.items()}
    played = {split: words for split, words in played.items() if words}
    headers = {split: f"{split} ({words})" for split, words in played.items()}
    rows = []
    for label, mine in settings.items():
        cells = [get(mine[split]) if split in mine else None for split, _, get in found]
        means = [_average(cells[place :: len(averages)]) for place in range(len(averages))]
        rows.append((label, (*cells, *means, _number(sum(result.lost for result in mine.values())))))
    under = [replace(column, path=(headers.get(split, split), *column.path)) for split, column, _ in found]
    return Table(
        name=name,
        title="; ".join([title, *(f"{split}: {words}" for split, words in played.items())]),
        row_header="Setting",
        columns=(*under, *averages, LOST),
        rows=tuple(rows),
        notes=(*_notes(settings), *notes),
    )


def _notes(settings: Settings) -> list[str]:
    """Notes on protocol, training seeds and lost rollouts, and a warning for every split with incomparable rows."""
    notes = [_protocol(settings), _seeds(settings), *_lost(settings)]
    for title in _titles(settings):
        plans = [result.plan for result in _results(settings, title)]
        if len({(frozenset(plan.tasks), plan.world) for plan in plans}) > 1:
            sizes = " or ".join(str(many) for many in sorted({len(plan.tasks) for plan in plans}))
            notes.append(f"{title}: the rows were measured on different tasks ({sizes} tasks) and cannot be compared.")
        if protocols := protocol_differences(plans):
            notes.append(f"{title}: the rows were measured under different protocols ({', '.join(protocols)}).")
    return notes


def _protocol(settings: Settings) -> str:
    """The number of checkpoints and runs behind the table's numbers, in words."""
    plans = [result.plan for splits in settings.values() for result in splits.values()]
    words = " or ".join(
        f"{runs} run{'s' * (runs > 1)} of {f'each of {many} checkpoints' if many > 1 else 'one policy'}"
        for many, runs in sorted({(len(plan.measurements), plan.runs) for plan in plans}, reverse=True)
    )
    return f"Mean of {words}; crashed and unsolved tasks are failures."


def _seeds(settings: Settings) -> str:
    """The number of training seeds behind each row, in words."""
    many = {label: sorted({result.seeds for result in splits.values()}) for label, splits in settings.items()}
    if set().union(*many.values()) <= {1}:
        return (
            "One training seed per row: intervals and comparisons cover the choice of scenarios but not the variation "
            "between training runs."
        )
    words = ", ".join(f"{label} {' or '.join(map(str, seeds))}" for label, seeds in many.items())
    alone = " With one seed the interval does not cover the variation between training runs." * any(
        1 in each for each in many.values()
    )
    return f"Training seeds: {words.replace(BLOCK, ': ')}; intervals are over seeds and scenarios.{alone}"


def _lost(settings: Settings) -> Iterator[str]:
    """A note for each row and split with lost rollouts: their number, and one rate if they all fail or all succeed."""
    for label, splits in settings.items():
        for split, result in splits.items():
            if result.lost:
                name, measure = next(iter(result.measures.items()))
                yield (
                    f"{label.replace(BLOCK, ': ')} on {split}: {result.lost} of {result.rollouts} rollouts "
                    f"({100 * result.lost / result.rollouts:.1f} %) were lost and count as failures; {name} is "
                    f"{100 * measure.at_worst.mean:.1f}, and would be {100 * measure.at_best.mean:.1f} if all lost "
                    "rollouts had succeeded; intervals cover both."
                )
