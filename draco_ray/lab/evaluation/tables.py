"""The paper's tables over several evaluated settings: which numbers stand in which column.

A row is a setting (one label); its columns are the splits it was evaluated on. Percentages but for turns and dollars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.comparison import Comparison, holm
from draco_ray.lab.evaluation.measures import difference
from draco_ray.lab.evaluation.policies import UNTRAINED
from draco_ray.lab.evaluation.rendering import BLOCK, Cell, Column, Table, block_and_name
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan, protocol_differences
from draco_ray.lab.evaluation.setting import Estimate, SplitResult, read_seeds
from draco_ray.records import Termination

Settings = Mapping[str, Mapping[str, SplitResult]]
"""Label -> split title -> result, rows and columns in their order."""

SPLITS = {
    ("appworld", "test_normal"): "AppWorld TN",
    ("appworld", "test_challenge"): "AppWorld TC",
    ("appworld", "train"): "AppWorld train",
    ("appworld", "dev"): "AppWorld dev",
    ("tau-banking", "full"): "τ-bench",
}
DIFFICULTIES = {1: "Easy", 2: "Medium", 3: "Hard"}
LOST = Column(("Lost",), digits=0)
"""How many rollouts of a row were lost, in every table."""
ONE_SEED = "Where a setting has one training seed, its figures speak of the choice of scenarios, not of training again."
_PAIRED = "a comparison needs the same tasks in both settings"


def split_title(plan: Plan) -> str:
    """How a benchmark's split is called, whatever part or world of it was played."""
    split = "full" if plan.benchmark == "tau-banking" else plan.split
    return SPLITS.get((plan.benchmark, split), f"{plan.benchmark} {plan.split}")


def what_was_played(plans: Iterable[Plan]) -> str:
    """What is not the published split about the tasks of a column: ``generated world, 45 tasks``; empty for none."""
    found: dict[str, None] = {}
    for plan in plans:
        part = plan.whole_split is not None and len(plan.tasks) != plan.whole_split
        if plan.generated or part:
            many = f"{len(plan.tasks)} of {plan.whole_split}" if part else str(len(plan.tasks))
            found["generated world, " * plan.generated + f"{many} tasks"] = None
        else:
            found[f"{len(plan.tasks)} tasks"] = None
    whole = all(not plan.generated and len(plan.tasks) == plan.whole_split for plan in plans)
    return "" if whole else " or ".join(found)


def read_settings(arguments: Sequence[str]) -> dict[str, dict[str, SplitResult]]:
    """Read evaluation directories, ``DIR``, ``LABEL=DIR`` or ``BLOCK::LABEL=DIR``; equal labels make one row.

    Directories of one label and split are the training seeds of one setting, whose mean the row shows.

    Raises:
        ConfigError: one is no finished evaluation, or a training curve, or a label has the same split twice and they
            are no two training seeds on the same tasks.
    """
    found: dict[str, dict[str, list[EvaluationDirectory]]] = {}
    for argument in arguments:
        label, separator, name = argument.partition("=")
        if not separator or Path(argument).is_dir():
            label, name = "", argument
        directory = EvaluationDirectory.open(Path(name))
        if len(directory.plan.measurements) > 1 and UNTRAINED in directory.plan.measurements:
            raise ConfigError(
                f"{name}: a training curve, whose checkpoints have no common mean; its figures are in curve.csv, and "
                "`draco evaluate --run DIR --last-epochs 3` measures a setting"
            )
        label, title = label or directory.plan.label, split_title(directory.plan)
        others = found.setdefault(label, {}).setdefault(title, [])
        for other in others:
            check_seeds(label, title, directory, other)
        others.append(directory)
    order = {title: place for place, title in enumerate(SPLITS.values())}
    return {
        label: {
            title: read_seeds(splits[title], label)
            for title in sorted(splits, key=lambda title: order.get(title, len(order)))
        }
        for label, splits in found.items()
    }


def check_seeds(label: str, title: str, one: EvaluationDirectory, other: EvaluationDirectory) -> None:
    """Refuse evaluations that are not of different training seeds of one setting. Raises: ConfigError."""
    if one.plan.weights == other.plan.weights:
        raise ConfigError(
            f"{one.path}: {label} on {title} is in {other.path} already, of the same weights; "
            "expected one evaluation a setting, split and training seed; give it another label with LABEL=DIR"
        )
    for name, mine, theirs in (
        ("tasks", (set(one.plan.tasks), one.plan.world), (set(other.plan.tasks), other.plan.world)),
        ("runs", one.plan.runs, other.plan.runs),
        ("checkpoints", len(one.plan.measurements), len(other.plan.measurements)),
        ("limits", protocol_differences((one.plan, other.plan)), []),
    ):
        if mine != theirs:
            raise ConfigError(
                f"{one.path}: {label} on {title} is in {other.path} as well, with other {name}; expected training "
                "seeds of one setting to be measured alike; give it another label with LABEL=DIR"
            )


def main_table(settings: Settings, name: str = "main", title: str = "Task success and consistency (%)") -> Table:
    """TGC and SGC (SR where there are no scenarios) at p^1 .. p^k per split, and their average."""
    titles = _titles(settings)
    ks = max((len(result.tgc) for splits in settings.values() for result in splits.values()), default=1)
    columns: list[Column] = []
    getters: list[Callable[[Mapping[str, SplitResult]], Estimate | None]] = []
    for split in titles:
        for metric in _metrics(settings, split):
            for k in range(ks):
                columns.append(Column((split, metric, f"p^{k + 1}"), best="high"))
                getters.append(_rate_getter(split, metric, k))
    rows = []
    for label, splits in settings.items():
        cells = [_percent(getter(splits)) for getter in getters]
        averages = [_average(cells[k::ks]) for k in range(ks)]
        rows.append((label, (*cells, *averages)))
    columns += [Column(("Average", "", f"p^{k + 1}"), best="high") for k in range(ks)]
    return _table(
        settings,
        name=name,
        title=title,
        columns=tuple(columns),
        rows=tuple(rows),
        notes=("p^k: pass^k over the runs; Average: over the columns of that k.",),
    )


def self_judge_table(settings: Settings) -> Table:
    """The main table's columns for variants of the self-judge."""
    return main_table(settings, "selfjudge-variants", "Self-judge variants (%)")


def consistency_table(settings: Settings) -> Table:
    """pass^k beside pass@k, of tasks and of scenarios."""
    ks = max((len(result.tgc) for splits in settings.values() for result in splits.values()), default=1)
    places = [
        (split, metric, kind, k)
        for split in _titles(settings)
        for metric in _metrics(settings, split)
        for kind in "^@"
        for k in range(ks)
    ]
    rows = []
    for label, splits in settings.items():
        cells: list[Cell | None] = []
        for split, metric, kind, k in places:
            rates: tuple[Estimate, ...] = ()
            if (result := splits.get(split)) is not None:
                hat, at = (result.sgc, result.sgc_at) if metric == "SGC" else (result.tgc, result.tgc_at)
                rates = hat if kind == "^" else at
            cells.append(_percent(rates[k]) if k < len(rates) else None)
        rows.append((label, tuple(cells)))
    return _table(
        settings,
        name="consistency",
        title="Consistency and discovery: pass^k and pass@k (%)",
        columns=tuple(Column((split, metric, f"pass{kind}{k + 1}"), best="high") for split, metric, kind, k in places),
        rows=tuple(rows),
    )


def retention_table(settings: Settings) -> Table:
    """p^k / p^1 of tasks and of scenarios: how much of the success of one run is left in all k (section "Results")."""
    ks = max((len(result.tgc) for splits in settings.values() for result in splits.values()), default=1)
    places = [(split, metric) for split in _titles(settings) for metric in _metrics(settings, split)]
    rows = []
    for label, splits in settings.items():
        cells: list[Cell | None] = []
        for split, metric in places:
            one, every = (_rate_getter(split, metric, k)(splits) for k in (0, ks - 1))
            cells.append(Cell(100 * every.mean / one.mean) if one and every and one.mean else None)
        rows.append((label, tuple(cells)))
    return _table(
        settings,
        name="retention",
        title=f"Retention: p^{ks} / p^1 (%)",
        columns=tuple(Column((split, metric), best="high") for split, metric in places),
        rows=tuple(rows),
    )


def efficiency_table(settings: Settings) -> Table:
    """Average agent turns per split and their average."""
    titles = _titles(settings)
    rows = []
    for label, splits in settings.items():
        cells = [_cell(splits[split].turns) if split in splits else None for split in titles]
        rows.append((label, (*cells, _average(cells))))
    return _table(
        settings,
        name="efficiency",
        title="Average agent turns (lower is better)",
        columns=(*(Column((split,), best="low") for split in titles), Column(("Avg.",), best="low")),
        rows=tuple(rows),
    )


def difficulty_table(settings: Settings) -> Table:
    """TGC and SGC (p^1) by AppWorld's difficulty label, each against its own number of tasks."""
    columns: list[Column] = []
    places: list[tuple[str, int, str]] = []
    for split in _titles(settings):
        found = [splits[split].difficulty for splits in settings.values() if split in splits]
        for level in sorted({level for strata in found for level in strata}):
            # More than one where settings were measured on different tasks; a note says so.
            tasks = " or ".join(
                str(many) for many in sorted({strata[level].tasks for strata in found if level in strata})
            )
            for metric in ("TGC", "SGC"):
                columns.append(Column((split, f"{DIFFICULTIES.get(level, level)} ({tasks})", metric), best="high"))
                places.append((split, level, metric))
    rows = []
    for label, splits in settings.items():
        cells: list[Cell | None] = []
        for split, level, metric in places:
            stratum = splits[split].difficulty.get(level) if split in splits else None
            if stratum is None:
                cells.append(None)
            else:
                cells.append(_percent(stratum.tgc if metric == "TGC" else stratum.sgc))
        rows.append((label, tuple(cells)))
    return _table(
        settings,
        name="difficulty",
        title="Task success by difficulty (p^1, %)",
        columns=tuple(columns),
        rows=tuple(rows),
    )


def frontier_table(settings: Settings) -> Table:
    """Success (p^1) against the dollars of one pass over a split and of one task."""
    columns: list[Column] = []
    titles = _titles(settings)
    for split in titles:
        columns += [Column((split, metric), best="high") for metric in _metrics(settings, split)]
        columns += [Column((split, "Cost ($)"), 2, "low"), Column((split, "$/task"), 3, "low")]
    rows = []
    for label, splits in settings.items():
        cells: list[Cell | None] = []
        for split in titles:
            cells += [_percent(_rate_getter(split, metric, 0)(splits)) for metric in _metrics(settings, split)]
            result = splits.get(split)
            dollars = (None, None) if result is None else (result.pass_dollars, result.dollars_per_task)
            cells += [None if value is None else Cell(value) for value in dollars]
        rows.append((label, tuple(cells)))
    return _table(
        settings,
        name="frontier",
        title="Success (p^1, %) against cost",
        row_header="Model",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=(
            "Cost: dollars of the policy's tokens for one pass over the split; -: its price is not known.",
            *(
                f"{split}: the cost of {', '.join(roles)} together."
                for split in titles
                if (roles := _roles(settings, split))
            ),
        ),
    )


def _roles(settings: Settings, split: str) -> list[str]:
    """Roles whose costs are known apart on a split."""
    found = (splits[split].role_dollars for splits in settings.values() if split in splits)
    return list(dict.fromkeys(role for roles in found for role in roles or ()))


def cost_table(settings: Settings) -> Table:
    """What one pass took: calls, tokens and dollars."""
    names = ("turns", "input", "cached", "output", "dollars")
    titles = _titles(settings)
    columns = tuple(Column((split, name), 2 if name == "dollars" else 0) for split in titles for name in names)
    rows = []
    for label, splits in settings.items():
        cells: list[Cell | None] = []
        for split in titles:
            if split not in splits:
                cells += [None] * len(names)
                continue
            usage = splits[split].usage
            numbers = (usage.calls, usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.dollars)
            cells += [None if number is None else Cell(float(number)) for number in numbers]
        rows.append((label, tuple(cells)))
    return _table(
        settings,
        name="cost",
        title="Tokens and dollars of one pass over the split",
        columns=columns,
        rows=tuple(rows),
        notes=("input: read again at every turn; cached: the part that stood in the turn before.",),
    )


def termination_table(settings: Settings) -> Table:
    """Termination modes (Figure "terminations"), in % of all rollouts."""
    titles = _titles(settings)
    columns = tuple(Column((split, mode.value.replace("_", " "))) for split in titles for mode in Termination)
    rows, unknown = [], []
    for label, splits in settings.items():
        cells: list[Cell | None] = []
        for split in titles:
            shares = splits[split].terminations if split in splits else None
            cells += [None if shares is None else Cell(100 * shares[mode]) for mode in Termination]
            if split in splits and shares is None:
                unknown.append(f"{label} on {split}")
        rows.append((label, tuple(cells)))
    return _table(
        settings,
        name="terminations",
        title="How rollouts ended (%)",
        columns=columns,
        rows=tuple(rows),
        notes=(f"Termination modes were not recorded: {', '.join(unknown)}.",) if unknown else (),
    )


TABLES: dict[str, Callable[[Settings], Table]] = {
    "main": main_table,
    "efficiency": efficiency_table,
    "difficulty": difficulty_table,
    "frontier": frontier_table,
    "self-judge": self_judge_table,
    "consistency": consistency_table,
    "cost": cost_table,
    "retention": retention_table,
    "terminations": termination_table,
}
"""What `draco tables --table` knows."""


def compare(settings: Settings, baseline: str) -> list[Comparison]:
    """Every other setting minus ``baseline``, in every measure on every split of both; p-values corrected together.

    Args:
        settings: rows, in blocks (``BLOCK::LABEL``) or not.
        baseline: a row's label; the name alone of rows in blocks stands for the row of that name in each block.

    Raises:
        ConfigError: the baseline is unknown, or a pair is not paired: no split in common, other tasks, other worlds.
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


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Differences in points (of turns: in turns) with their intervals and p-values."""
    names = ("difference", "low", "high", "p", "p (Holm)", "tasks", "clusters", "lost (%)", "of the other (%)")
    digits = (1, 1, 1, 4, 4, 0, 0, 1, 1)
    rows = []
    for each in comparisons:
        unit = 1.0 if each.measure == "turns" else 100.0
        bounds = each.difference if math.isfinite(each.difference.low) else None
        cells = (
            Cell(unit * each.difference.mean),
            None if bounds is None else Cell(unit * bounds.low),
            None if bounds is None else Cell(unit * bounds.high),
            *(Cell(number) for number in (each.p_value, each.adjusted_p, float(each.tasks), float(each.clusters))),
            *(Cell(100 * share) for share in each.lost),
        )
        rows.append((f"{_comparison_label(each)}, {each.measure}", cells))
    return Table(
        name="comparison",
        title="Paired differences (points of TGC, SGC and SR; turns), 95 % interval and two-sided test",
        row_header="Comparison",
        columns=tuple(Column((name,), digit) for name, digit in zip(names, digits, strict=True)),
        rows=tuple(rows),
        notes=(
            "Paired by task, over scenarios; p: permutation test by scenario, and Student's over scenarios and seeds "
            f"where there are several, the larger; Holm's correction over {len(rows)} comparisons.",
            *([ONE_SEED] if any(each.seeds == (1, 1) for each in comparisons) else []),
            *dict.fromkeys(note for each in comparisons for note in _comparison_notes(each)),
        ),
    )


def _comparison_notes(each: Comparison) -> list[str]:
    label = _comparison_label(each)
    notes = []
    if each.protocols:
        notes.append(f"{label}: measured under different protocols ({', '.join(each.protocols)}).")
    if any(each.lost):
        one, other = (f"{100 * share:.1f} %" for share in each.lost)
        notes.append(
            f"{label}: {one} and {other} of the rollouts were lost; interval and p hold whatever they would have been "
            "(turns: of the rollouts that were played)."
        )
    if 1 in each.seeds and each.seeds != (1, 1):
        notes.append(f"{label}: {each.seeds[0]} and {each.seeds[1]} training seeds; of one the spread is not known.")
    return notes


def _comparison_label(each: Comparison) -> str:
    (block, one), (other_block, other) = block_and_name(each.one), block_and_name(each.other)
    if block != other_block:
        return f"{each.one} - {each.other} on {each.split}".replace(BLOCK, ": ")
    return f"{block}{BLOCK * bool(block)}{one} - {other} on {each.split}"


def _compare(one: SplitResult, other: SplitResult, split: str) -> list[Comparison]:
    only_one, only_other = (len(a.plan.tasks.keys() - b.plan.tasks.keys()) for a, b in ((one, other), (other, one)))
    if only_one or only_other:
        raise ConfigError(
            f"{one.label} and {other.label} on {split} are not paired: {only_one} tasks only in the first, "
            f"{only_other} only in the second; {_PAIRED}; evaluate both on the whole split"
        )
    if one.plan.world != other.plan.world:
        raise ConfigError(
            f"{one.label} and {other.label} on {split} are not paired: their task ids are the same, the tasks are not "
            f"(two generated worlds); {_PAIRED}; evaluate both on one data root"
        )
    found = []
    for measure in [name for name in one.measures if name in other.measures]:
        interval, p_value = difference(one.measures[measure], other.measures[measure])
        found.append(
            Comparison(
                one=one.label,
                other=other.label,
                split=split,
                measure=measure,
                difference=interval,
                p_value=p_value,
                adjusted_p=p_value,
                tasks=len(one.plan.tasks),
                clusters=one.clusters,
                seeds=(one.seeds, other.seeds),
                lost=(one.lost / one.rollouts, other.lost / other.rollouts),
                protocols=tuple(protocol_differences((one.plan, other.plan))),
            )
        )
    return found


def _titles(settings: Settings) -> list[str]:
    order = {title: place for place, title in enumerate(SPLITS.values())}
    found = dict.fromkeys(split for splits in settings.values() for split in splits)
    return sorted(found, key=lambda title: order.get(title, len(order)))


def _metrics(settings: Settings, split: str) -> tuple[str, ...]:
    scenarios = any(splits[split].sgc for splits in settings.values() if split in splits)
    return ("TGC", "SGC") if scenarios else ("SR",)


def _rate_getter(split: str, metric: str, k: int) -> Callable[[Mapping[str, SplitResult]], Estimate | None]:
    def get(splits: Mapping[str, SplitResult]) -> Estimate | None:
        if split not in splits:
            return None
        rates = splits[split].sgc if metric == "SGC" else splits[split].tgc
        return rates[k] if k < len(rates) else None

    return get


def _cell(estimate: Estimate | None, factor: float = 1.0) -> Cell | None:
    if estimate is None:
        return None
    std, low, high = (
        None if value is None else factor * value for value in (estimate.std, estimate.low, estimate.high)
    )
    return Cell(factor * estimate.mean, std, low, high)


def _percent(estimate: Estimate | None) -> Cell | None:
    return _cell(estimate, 100.0)


def _average(cells: Iterable[Cell | None]) -> Cell | None:
    """A row-level summary; none where a part is missing."""
    known = list(cells)
    if not known or any(cell is None for cell in known):
        return None
    return Cell(sum(cell.mean for cell in known if cell is not None) / len(known))


def _table(
    settings: Settings,
    *,
    name: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[tuple[str, tuple[Cell | None, ...]]],
    notes: Sequence[str] = (),
    row_header: str = "Setting",
) -> Table:
    """A table that says which tasks were played, how many rollouts each row lost, and under which protocol."""
    played = {split: said for split in _titles(settings) if (said := what_was_played(_plans(settings, split)))}
    headers = {split: f"{split} ({said})" for split, said in played.items()}
    lost = {label: sum(result.lost for result in splits.values()) for label, splits in settings.items()}
    return Table(
        name=name,
        title="; ".join([title, *(f"{split}: {said}" for split, said in played.items())]),
        row_header=row_header,
        columns=(
            *(replace(each, path=(headers.get(each.path[0], each.path[0]), *each.path[1:])) for each in columns),
            LOST,
        ),
        rows=tuple((label, (*cells, Cell(float(lost[label])))) for label, cells in rows),
        notes=(*_notes(settings), *notes),
    )


def _plans(settings: Settings, split: str) -> list[Plan]:
    return [splits[split].plan for splits in settings.values() if split in splits]


def _notes(settings: Settings) -> tuple[str, ...]:
    """The protocol, training seeds, lost rollouts, and a warning for every split of which the rows do not compare."""
    notes = [_protocol(settings), _seeds(settings), *_lost(settings)]
    for title in _titles(settings):
        results = [splits[title] for splits in settings.values() if title in splits]
        if len({(frozenset(result.plan.tasks), result.plan.world) for result in results}) > 1:
            sizes = " or ".join(str(many) for many in sorted({len(result.plan.tasks) for result in results}))
            notes.append(f"{title}: the rows were measured on different tasks ({sizes} of them) and do not compare.")
        if protocols := protocol_differences(result.plan for result in results):
            notes.append(f"{title}: the rows were measured under different protocols ({', '.join(protocols)}).")
    return tuple(notes)


def _protocol(settings: Settings) -> str:
    """How many checkpoints and runs stand behind the numbers, in words."""
    shapes = {
        (len(result.plan.measurements), result.plan.runs) for splits in settings.values() for result in splits.values()
    }
    said = " or ".join(
        f"{runs} run{'s' * (runs > 1)} of {f'each of {many} checkpoints' if many > 1 else 'one policy'}"
        for many, runs in sorted(shapes, reverse=True)
    )
    return f"Mean of {said}; crashed and unsolved tasks are failures."


def _seeds(settings: Settings) -> str:
    """How many training seeds stand behind each row."""
    many = {label: sorted({result.seeds for result in splits.values()}) for label, splits in settings.items()}
    if set().union(*many.values()) <= {1}:
        return (
            "One training seed of every row: intervals and comparisons speak of the scenarios, not of training again."
        )
    said = ", ".join(f"{label} {' or '.join(map(str, seeds))}" for label, seeds in many.items())
    alone = (
        " Of one seed the interval does not speak of training again."
        if any(1 in each for each in many.values())
        else ""
    )
    return f"Training seeds: {said.replace(BLOCK, ': ')}; intervals are over seeds and scenarios.{alone}"


def _lost(settings: Settings) -> Iterator[str]:
    """What each row lost, and within which bounds its first rate would have been without."""
    for label, splits in settings.items():
        for split, result in splits.items():
            if result.lost:
                name, measure = next(iter(result.measures.items()))
                yield (
                    f"{label.replace(BLOCK, ': ')} on {split}: {result.lost} of {result.rollouts} rollouts "
                    f"({100 * result.lost / result.rollouts:.1f} %) were lost and count as failures; {name} is "
                    f"{100 * measure.at_worst.mean:.1f}, and {100 * measure.at_best.mean:.1f} had all of them been "
                    "solved; intervals span both."
                )
