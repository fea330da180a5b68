"""`draco attribution-bench`: measure a judge on planted faults, or judges against people's step labels."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa

from draco_ray.commands.printing import print_table, with_interval
from draco_ray.commands.replay import judges_own_config
from draco_ray.config.schema import RULE_JUDGE
from draco_ray.errors import ConfigError, WorldError
from draco_ray.judging.build import prompts_of
from draco_ray.judging.judge import Judge
from draco_ray.lab.analysis.attribution.bench import judge_groups
from draco_ray.lab.analysis.attribution.measure import BASELINES, measures
from draco_ray.lab.analysis.attribution.plant import planted_groups
from draco_ray.lab.analysis.attribution.step_labels import (
    BEFORE_ANSWER,
    EVERY_JUDGE,
    EVERYTHING,
    calibration_rows,
    label_rows,
    read_step_labels,
)
from draco_ray.lab.analysis.judges import (
    OWN_JUDGE,
    NamedJudge,
    RuleCompleter,
    folder_name,
    judge_config,
    judge_description,
    open_completer,
)
from draco_ray.lab.analysis.tables import write_table
from draco_ray.lab.files import create_output_folder
from draco_ray.lab.rows import grouped
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.noise import Noise
from draco_ray.terminal import console

SHOWN_BY_FAULT = ("kappa", "citation_precision", "citation_recall", "hit_at_1", "push_share")
"""Measures printed for each kind of fault."""
RANDOM_SPLITS = 200
"""With --labels: number of random divisions of the questions into two halves."""
CALIBRATION = ("reliability", "uniform", "draco", "calibrated", "low", "shrunk", "within_tolerance")
ERRORS = ("false_pass", "false_fail", "wrong_step")
ROLLOUTS = "rollouts.json"
"""File of executed rollouts in the folder of the tables; reused by the next call."""


def attribution_bench(
    *,
    judge: NamedJudge,
    world: Path,
    split: str,
    tasks: int | None,
    hard: bool,
    processes: int,
    config: str | None,
    out: Path,
    wrong_step: float = 0.0,
    trust: bool = False,
) -> list[Path]:
    """Plant faults in reference solutions, and print how well a judge and the step credit find them.

    Args:
        judge: the judge to measure.
        world: folder of a sandbox.
        split: split of the tasks.
        tasks: maximum number of tasks; None is all.
        hard: whether to plant hard groups (see the option --hard).
        processes: number of AppWorld processes.
        config: configuration of the judge; None: the defaults.
        out: folder of the tables.
        wrong_step: share of citations in which the offline judge names a wrong step; 0 for any other judge.
        trust: see `draco_ray.config.load.load_config`.

    Returns: the written files.
    Raises:
        ConfigError: an unknown split, or a configuration that cannot be used.
        WorldError: no sandbox, no reference that passes, or AppWorld fails.
        JudgeUnavailable: the judge does not answer.
    """
    if wrong_step and judge.model != RULE_JUDGE:
        raise ConfigError(
            f"--wrong-step {wrong_step:g}: only the offline judge can be given errors; use it with --judge {RULE_JUDGE}"
        )
    create_output_folder(out)
    configured = judges_own_config(config, judge, trust=trust)
    settings = judge_config(configured.judge, judge, out / "judge_cache")
    prompts = prompts_of(settings)
    groups = planted_groups(world, split, tasks, processes, out / ROLLOUTS, hard=hard)
    if not groups:
        raise WorldError(
            f"{world}: no reference solution of split {split} passes; check the world with `draco sandbox verify`"
        )
    faults = sum(bool(rollout.faults) for group in groups for rollout in group)
    console.print(
        f"{len(groups)} tasks, {sum(map(len, groups))} rollouts, {faults} with planted faults; "
        f"judge {judge_description(judge.model, settings)}"
    )
    name = settings.model if judge.model == OWN_JUDGE else judge.model
    name += f", {wrong_step:.0%} of steps wrong" if wrong_step else ""
    noisy = RuleCompleter(Noise(wrong_step=wrong_step).blur(answer)) if wrong_step else None
    complete = noisy or open_completer(settings, configured.seed)
    judged = asyncio.run(judge_groups(Judge(complete, prompts, settings), groups, world))
    found = measures(judged, name)
    _print(found)
    return write_table(found, out / folder_name(name), "measures")


def attribution_labels(path: Path, *, out: Path) -> list[Path]:
    """Measure judges against people's step labels; print and write the tables.

    Args:
        path: the labels of people and judges.
        out: folder of the tables.

    Raises:
        ConfigError: not a labels file.
    """
    found = read_step_labels(path)
    create_output_folder(out)
    measured, calibrated = label_rows(found), calibration_rows(found, splits=RANDOM_SPLITS)
    scopes = grouped(measured.to_pylist(), "scope")
    for scope, title in (
        (EVERYTHING, "share of the advantage that falls on bad steps"),
        (BEFORE_ANSWER, "the same without trajectories whose only bad step is the final answer"),
    ):
        judges = grouped(scopes[scope], "judge")
        losers, *_, winners = next(iter(judges.values()))
        counts = [f"{row['trajectories']} {row['measure']} ({row['questions']} questions)" for row in (losers, winners)]
        print_table(
            f"{title}: {' and '.join(counts)}",
            ["", "losers (higher is better)", "first error found", "all on first error", "winners (lower is better)"],
            {
                judge: [with_interval(row["value"], row["low"], row["high"]) for row in rows]
                for judge, rows in judges.items()
            },
        )
    print_table(
        f"recommended algorithm.reliability; {RANDOM_SPLITS} splits by question: measured on one half, used on the "
        "other",
        ["", *CALIBRATION],
        {row["judge"]: [row[head] for head in CALIBRATION] for row in calibrated.to_pylist()},
    )
    print_table(
        "error rates by trajectory, for the keys of judge.rule_judge",
        ["", *ERRORS],
        {row["judge"]: [row[head] for head in ERRORS] for row in calibrated.to_pylist() if row["judge"] != EVERY_JUDGE},
    )
    return [*write_table(measured, out, "labels"), *write_table(calibrated, out, "reliability")]


def _print(found: pa.Table) -> None:
    rows = found.to_pylist()
    heads = ("observations", "value", "low", "high", *BASELINES)
    whole = {row["measure"]: [row[head] for head in heads] for row in rows if row["scope"] == "all"}
    print_table("all planted faults", ["", *heads], whole)
    shown = grouped((row for row in rows if row["measure"] in SHOWN_BY_FAULT and row["scope"] != "all"), "scope")
    values = {scope: {row["measure"]: row["value"] for row in of_fault} for scope, of_fault in shown.items()}
    cells = {scope: [found.get(name) for name in SHOWN_BY_FAULT] for scope, found in values.items()}
    print_table("by fault", ["", *SHOWN_BY_FAULT], cells)
