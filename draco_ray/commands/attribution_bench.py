"""What `draco attribution-bench` does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from draco_ray.commands.printing import print_table
from draco_ray.commands.replay import judges_own_config, open_run
from draco_ray.config.load import load_config
from draco_ray.config.schema import RULES as RULE_JUDGE
from draco_ray.errors import ConfigError, WorldError
from draco_ray.judging.build import prompts_of
from draco_ray.judging.judge import Judge
from draco_ray.lab.analysis.attribution.bench import judge_groups
from draco_ray.lab.analysis.attribution.measure import RULES, STEP_MEASURES, measures, rollout_rows
from draco_ray.lab.analysis.attribution.plant import PlantedRollout, planted_groups
from draco_ray.lab.analysis.attribution.plant_recorded import recorded_groups
from draco_ray.lab.analysis.attribution.step_labels import (
    BEFORE_ANSWER,
    EVERYTHING,
    TOLERANCE,
    calibration_rows,
    label_rows,
    read_step_labels,
)
from draco_ray.lab.analysis.judges import OWN, NamedJudge, RuleComplete, asked, folder_name, judge_config, open_complete
from draco_ray.lab.analysis.tables import write_table
from draco_ray.lab.files import check_folder
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.noise import Noise

SHOWN_BY_FAULT = ("kappa", "citation_precision", "citation_recall", "hit_at_1", "push_share")
"""Measures printed for each kind of fault."""
ROLLOUTS = "rollouts.jsonl"
"""Executed rollouts, below the folder of the tables; those that are there are used again."""


@dataclass(frozen=True, kw_only=True)
class Solutions:
    """What faults are planted in: a run's successful rollouts, or a sandbox's reference solutions."""

    run: Path | None
    """None takes the reference solutions."""
    steps: Sequence[int] | None
    """Training steps of the run; None is all."""
    world: Path | None
    """Data root; None is the run's, or ``sandbox`` where there is no run."""
    sandbox: Path
    """The usual place of a sandbox."""
    split: str
    """Of the sandbox."""
    tasks: int | None
    """At most so many."""
    processes: int
    """AppWorld processes side by side."""
    hard: bool = False
    """Whether the groups are hard ones, of a sandbox only."""

    def plant(self, kept: Path, *, trust: bool) -> tuple[list[list[PlantedRollout]], Path]:
        """The groups, and the data root that they belong to.

        Raises:
            ConfigError: an unknown split or step, or not a run.
            WorldError: no sandbox, no successful rollout, or AppWorld fails.
        """
        if self.run is None:
            world = self.world or self.sandbox
            groups = planted_groups(world, self.split, self.tasks, self.processes, kept, hard=self.hard)
            if not groups:
                raise WorldError(
                    f"{world}: no reference of split {self.split} passes; check it with `draco sandbox verify`"
                )
            return groups, world
        recorded = open_run(self.run, self.steps)
        of_run = load_config(str(recorded.path), trust=trust)
        world = self.world or of_run.data.root
        groups = recorded_groups(recorded, self.steps, self.tasks, world, of_run.environment, self.processes, kept)
        if not groups:
            raise WorldError(
                f"{self.run}: no rollout passes its task's tests in {world} without an error and breaks with a planted "
                "fault; take more training steps, or a run whose policy succeeds"
            )
        return groups, world


def attribution_bench(
    solutions: Solutions,
    *,
    judge: NamedJudge,
    config: str | None,
    out: Path,
    console: Console,
    wrong_step: float = 0.0,
    trust: bool = False,
) -> list[Path]:
    """Plant faults in solutions, let a judge find them, print how well it and credit do.

    Args:
        solutions: what faults are planted in.
        judge: who is measured.
        config: for the judge; None is the run's own, else the defaults.
        out: folder of the tables.
        console: where figures are printed.
        wrong_step: share of its citations in which the offline judge names another step, 0 for any other judge.
        trust: as of `draco_ray.config.load.load_config`.

    Raises:
        ConfigError: an unknown split or step, not a run, or a configuration that cannot be used.
        WorldError: no sandbox, no successful rollout, or AppWorld fails.
        JudgeUnavailable: the judge does not answer.
    """
    if wrong_step and judge.model != RULE_JUDGE:
        raise ConfigError(
            f"--wrong-step {wrong_step:g}: only the offline judge is wrong as told; with --judge {RULE_JUDGE}"
        )
    recorded = None if solutions.run is None else open_run(solutions.run, solutions.steps)
    check_folder(out)
    source = config if config is not None or recorded is None else str(recorded.path)
    configured = judges_own_config(source, [judge], trust=trust)
    settings = judge_config(configured.judge, judge, out / "judge_cache")
    prompts = prompts_of(settings)
    groups, world = solutions.plant(out / ROLLOUTS, trust=trust)
    faults = sum(bool(rollout.faults) for group in groups for rollout in group)
    console.print(
        f"{len(groups)} tasks, {sum(map(len, groups))} rollouts, {faults} with planted faults; "
        f"judge {asked(judge.model, settings)}"
    )
    name = settings.model if judge.model == OWN else judge.model
    name += f", {wrong_step:.0%} of steps wrong" if wrong_step else ""
    complete = (
        RuleComplete(Noise(wrong_step=wrong_step).blur(answer))
        if wrong_step
        else open_complete(settings, configured.seed)
    )
    judged = asyncio.run(judge_groups(Judge(complete, prompts, settings), groups, world))
    found = measures(judged, name)
    _print(console, found)
    tables = out / folder_name(name)
    return [*write_table(found, tables, "measures"), *write_table(rollout_rows(judged, name), tables, "rollouts")]


def attribution_labels(path: Path, *, splits: int, out: Path, console: Console) -> list[Path]:
    """Measure judges by the step labels of a file; print and write the tables.

    Args:
        path: the labels, of people and of judges.
        splits: of the questions, into half for calibration and half for test.
        out: folder of the tables.
        console: where figures are printed.

    Raises:
        ConfigError: no labels file, or too few questions.
    """
    check_folder(out)
    found = read_step_labels(path)
    measured = label_rows(found)
    calibrated, least_S = calibration_rows(found, splits=splits)
    rows = measured.to_pylist()
    for scope, title in (
        (EVERYTHING, "share of the push on bad steps"),
        (BEFORE_ANSWER, "the same without faults in the final answer alone"),
    ):
        mine = [row for row in rows if row["scope"] == scope]
        counts = {row["measure"]: f"{row['trajectories']} of {row['questions']} questions" for row in mine}
        cells: dict[str, list[object]] = {}
        for row in mine:
            cells.setdefault(row["judge"], []).append(_with_interval(row))
        print_table(
            console,
            f"{title}: losers ({counts.get('losers')}) and winners ({counts.get('winners')})",
            ["", "losers (more is better)", "first error found", "all on first error", "winners (less is better)"],
            cells,
        )
    heads = ("reliability", "mean_reliability", "uniform", "draco", "calibrated", "low", "within_tolerance")
    judges = calibrated.to_pylist()
    print_table(
        console,
        f"draco_calibrated on losers, {splits} splits by question into calibration and test",
        ["", *heads],
        {row["judge"]: [row[head] for head in heads] for row in judges},
    )
    worst, best = min(judges, key=lambda row: row["within_tolerance"]), judges[0]
    console.print(
        f"at least uniform - {TOLERANCE:g}: every judge in {worst['within_tolerance']:.1%} of the splits or more, all "
        f"in the same {(least_S >= -TOLERANCE).mean():.1%}; the best judge, {best['judge']}: {best['calibrated']:.3f}"
    )
    return [*write_table(measured, out, "labels"), *write_table(calibrated, out, "calibration")]


def _with_interval(row: dict[str, Any]) -> str | None:
    if row["value"] is None:
        return None
    return f"{row['value']:.3f}" + ("" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]")


def _print(console: Console, found: pa.Table) -> None:
    rows = found.to_pylist()
    heads = ("observations", "value", "low", "high", *RULES)
    whole = [row for row in rows if row["scope"] == "all"]
    print_table(
        console,
        "all planted faults",
        ["", *heads],
        {row["measure"]: [row[head] for head in heads] for row in whole},
    )
    print_table(
        console,
        "more than a rule without a judge, 95 % intervals over tasks",
        ["", *RULES],
        {
            row["measure"]: [_difference(row, rule) for rule in RULES]
            for row in whole
            if row["measure"] in STEP_MEASURES
        },
    )
    cells: dict[str, list[object]] = {}
    for row in rows:
        if row["measure"] in SHOWN_BY_FAULT and row["scope"] != "all":
            of_fault = cells.setdefault(row["scope"], [None] * len(SHOWN_BY_FAULT))
            of_fault[SHOWN_BY_FAULT.index(row["measure"])] = row["value"]
    print_table(console, "by fault", ["", *SHOWN_BY_FAULT], cells)


def _difference(row: dict[str, Any], rule: str) -> str | None:
    low, high = row[f"over_{rule}_low"], row[f"over_{rule}_high"]
    return None if low is None else f"{row['value'] - row[rule]:+.3f} [{low:+.3f}, {high:+.3f}]"
