"""`draco evaluate` and `draco tables`: check the options, run evaluations and print tables."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from draco_ray.config.ineffective_keys import check_effective, ineffective_judge_keys, overridden_keys
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.policies import ApiOptions, EvaluatedPolicy, every_checkpoint, find_policy, last_epochs
from draco_ray.lab.evaluation.rendering import SUFFIXES, Cell, Column, ShownUncertainty, Table, TableFormat, render
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.lab.evaluation.setting import aggregate
from draco_ray.lab.evaluation.tables import (
    LOST,
    TABLES,
    compare,
    comparison_table,
    cost_table,
    describe_task_subset,
    difficulty_table,
    main_table,
    read_settings,
    scaled,
    split_title,
    termination_table,
)
from draco_ray.lab.files import create_output_folder
from draco_ray.runs.evaluations import scenario_goal_completion, task_goal_completion

RUNS = 3
SECTIONS_READ = (
    *("seed", "data", "model", "agent", "environment", "engine", "learner", "judge", "algorithm", "watch", "ray"),
)
"""Sections of the configuration that an evaluation uses."""
OF_A_CLIENT = ("limits", "prices", "max_attempts", "request_timeout_seconds", "max_backoff_seconds", "service_tier")
"""Keys of ``judge`` that also apply to an evaluated API model, besides ``concurrency_per_worker``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Options of `draco evaluate`."""

    policy: str | None
    run: Path | None
    last_epochs: int | None
    train_curve: bool = False
    every: int | None = None
    split: str | None
    runs: int | None
    """Rollouts per task; None: `RUNS`, or the number in the benchmark's configuration."""
    config: str | None
    overrides: Sequence[str]
    out: Path | None
    label: str | None
    api_base: str | None
    api_key_env: str | None
    api_temperature: float | None
    retry_errors: bool = False
    trust: bool = False
    """See `draco_ray.config.load.load_config`."""


def evaluate(options: EvaluateOptions, starter: Path) -> None:
    """Run an evaluation in an environment and print its tables.

    Raises:
        ConfigError: options that exclude each other, or no usable policy or configuration.
        DracoError: as `evaluate_policy`.
    """
    from draco_ray.environments.base import make_environment
    from draco_ray.lab.evaluation.evaluate import evaluate_policy
    from draco_ray.lab.evaluation.judged import judge_policy
    from draco_ray.runs.directory import RunDirectory

    policy, config = find_policy_and_config(options, starter)
    split = options.split or (config.data.train_split if options.train_curve else config.data.eval_split)
    out = (options.out or _default_out(options, policy, config.environment.use, split)).resolve()
    evaluates = make_environment(config.environment, config.data).evaluates
    check_options(options, policy, config, judged=not evaluates)
    if not evaluates:
        cache = None if options.run is None else RunDirectory.open(options.run.resolve()).judge_cache
        rates = judge_policy(policy, config, split=split, runs=options.runs or RUNS, out=out, cache=cache)
        for name, found in rates.items():
            typer.echo(f"{name} on {split}: {found}")
        typer.echo(f"{out / 'summary.json'}")
        return
    result = evaluate_policy(
        policy,
        config,
        split=split,
        runs=options.runs or RUNS,
        out=out,
        label=options.label,
        retry_errors=options.retry_errors,
    )
    if options.train_curve:
        curve = curve_table(EvaluationDirectory.open(out))
        (out / "curve.csv").write_text(render(curve, TableFormat.CSV), encoding="utf-8")
        typer.echo(render(curve, TableFormat.TEXT, ShownUncertainty.INTERVAL), nl=False)
        typer.echo(f"\n{out / 'curve.csv'}")
        return
    settings = {result.label: {split_title(result.plan): result}}
    for table in (main_table, difficulty_table, termination_table, cost_table):
        typer.echo(render(table(settings), TableFormat.TEXT, ShownUncertainty.INTERVAL))
    typer.echo(
        f"turns: {'-' if result.turns is None else f'{result.turns.mean:.1f}'}; for more tables run: draco tables {out}"
    )


def reevaluate(path: Path, config: str | None, overrides: Sequence[str]) -> bool:
    """Evaluate the saved worlds of an evaluation again; print the rates, and each verdict that has changed.

    Returns: whether all verdicts equal the recorded ones.
    Raises:
        ConfigError: not an evaluation of AppWorld, or its world is not that of ``data.root``.
        DracoError: as `draco_ray.lab.evaluation.appworld.reevaluate`.
    """
    from draco_ray.lab.evaluation.appworld import reevaluate as evaluate_again
    from draco_ray.lab.evaluation.evaluate import APPWORLD

    directory = EvaluationDirectory.open(path)
    if directory.plan.benchmark != APPWORLD:
        raise ConfigError(
            f"{path}: this is an evaluation of {directory.plan.benchmark}; expected an evaluation of {APPWORLD}"
        )
    default = "sandbox" if directory.plan.generated else None
    worlds = asyncio.run(evaluate_again(directory, load_config(config or default, overrides)))
    for measurement, run in dict.fromkeys((name, now.run) for name, _, now in worlds):
        mine = [now for name, _, now in worlds if (name, now.run) == (measurement, run)]
        tgc, sgc = 100 * task_goal_completion(mine), 100 * scenario_goal_completion(mine)
        typer.echo(f"{measurement}-run{run + 1}: TGC {tgc:.1f} %, SGC {sgc:.1f} % ({len(mine)} tasks)")
    differing = [(name, now) for name, recorded, now in worlds if now.success != recorded.success]
    for measurement, now in differing:
        said = "; ".join(now.failures) or "now every test passes"
        recorded = "failed" if now.success else "solved"
        typer.echo(f"{measurement}-run{now.run + 1} {now.task_id}: recorded as {recorded}, but {said}")
    typer.echo(
        f"{len(worlds) - len(differing)} of {len(worlds)} verdicts equal the recorded ones in {path / 'results'}"
    )
    return not differing


def print_tables(
    directories: Sequence[str],
    *,
    tables: Sequence[str],
    form: TableFormat,
    shown: ShownUncertainty,
    against: str | None,
    out: Path | None,
    quiet: bool = False,
) -> None:
    """Print settings side by side, or write each table to a file of ``out`` and name these files unless ``quiet``.

    Raises:
        ConfigError: a directory is no finished evaluation, a table is unknown, or settings cannot be compared.
    """
    if unknown := [name for name in tables if name not in TABLES]:
        raise ConfigError(f"--table {unknown[0]}: unknown; expected one of {', '.join(TABLES)}")
    if out is not None:
        create_output_folder(out)
    settings = read_settings(directories)
    made = [TABLES[name](settings) for name in tables or TABLES]
    if against is not None:
        made.append(comparison_table(compare(settings, against)))
    if out is None:
        typer.echo("\n".join(render(table, form, shown) for table in made), nl=False)
        return
    for table in made:
        for each in TableFormat:
            path = out / f"{table.name}{SUFFIXES[each]}"
            path.write_text(render(table, each, shown), encoding="utf-8")
            if not quiet:
                typer.echo(path)


def curve_table(directory: EvaluationDirectory) -> Table:
    """Success by training step, each checkpoint a row (Figure "Train TGC vs. training step").

    Raises:
        ConfigError: rollouts are missing.
    """
    plan = directory.plan
    played = describe_task_subset([plan])
    rows = []
    for measurement, results in directory.complete_results().items():
        one = aggregate(plan.model_copy(update={"measurements": (measurement,)}), [[results]])
        step = measurement.removeprefix("step").lstrip("0") or "0"
        tgc, sgc = (scaled(rates[0], 100) if rates else None for rates in (one.tgc, one.sgc))
        rows.append((step, (tgc, sgc, one.turns, Cell(float(one.lost)))))
    return Table(
        name="train-curve",
        title=f"{plan.label} on {plan.split}{f' ({played})' * bool(played)}, by training step (p^1, %)",
        row_header="Step",
        columns=(Column(("TGC",)), Column(("SGC",)), Column(("Turns",)), LOST),
        rows=tuple(rows),
        notes=(
            "Measured afterwards from checkpoints; training did not use these results. Step 0 is the untrained policy.",
            "One training seed. Lost rollouts count as failures; intervals cover every result they could have had.",
        ),
    )


def _check_options(options: EvaluateOptions) -> None:
    """Refuse options that exclude each other. Raises: ConfigError."""
    if (options.policy is None) == (options.run is None):
        raise ConfigError("draco evaluate: expected one of --policy and --run")
    if options.run is None and (options.last_epochs is not None or options.train_curve):
        raise ConfigError("draco evaluate: --last-epochs and --train-curve need a run; add --run DIR")
    if options.last_epochs is not None and options.train_curve:
        raise ConfigError(
            "draco evaluate: --last-epochs and --train-curve are different evaluations; give only one of them"
        )
    if options.every is not None and not options.train_curve:
        raise ConfigError("draco evaluate: --every needs --train-curve")


def check_options(options: EvaluateOptions, policy: EvaluatedPolicy, config: DracoConfig, *, judged: bool) -> None:
    """Refuse options and keys that have no effect on this policy in this environment.

    Args:
        judged: whether the judge replaces the evaluator.

    Raises: ConfigError.
    """
    only_evaluated = {"--label": options.label, "--retry-errors": options.retry_errors}
    if judged and (given := [name for name, value in only_evaluated.items() if value]):
        raise ConfigError(
            f"{given[0]}: no effect, because this environment has no evaluator and the judge is used instead"
        )
    idle = (
        ineffective_judge_keys(config)
        if judged
        else dict.fromkeys(("judge", "algorithm"), "because the environment has its own evaluator")
    )
    idle |= {"judge.prices": "", "learner": "in an evaluation", "learner.lora_rank": ""}
    if options.split is not None:
        idle["data.eval_split"] = "together with --split"
    if policy.api_model is not None:
        idle |= dict.fromkeys(("judge", "model", "engine", "learner.lora_rank"), "for an API model")
        idle |= {f"judge.{key}": "" for key in (*OF_A_CLIENT, "concurrency_per_worker")}
        idle["judge.temperature"] = "for an API model; use --api-temperature"
    check_effective("draco evaluate", options.overrides, SECTIONS_READ, idle)


def _check_one_model(options: EvaluateOptions, policy: EvaluatedPolicy) -> None:
    """Refuse API options for other policies, and model.path if the policy names the model. Raises: ConfigError."""
    api = {
        "--api-base": options.api_base,
        "--api-key-env": options.api_key_env,
        "--api-temperature": options.api_temperature,
    }
    if policy.api_model is None and (given := [name for name, value in api.items() if value is not None]):
        raise ConfigError(f"{given[0]}: works only with an API model, --policy litellm:MODEL")
    # With an adapter, model.path may name the base model.
    alone = policy.model is not None and all(each.adapter is None for each in policy.checkpoints)
    if alone and "model.path" in overridden_keys(options.overrides):
        raise ConfigError(f"--policy {policy.name} and model.path both name the model; give only one of them")


def find_policy_and_config(options: EvaluateOptions, starter: Path) -> tuple[EvaluatedPolicy, DracoConfig]:
    """The policy to evaluate and its configuration.

    Raises:
        ConfigError: the options exclude each other, name two models, or name no usable policy or configuration.
    """
    _check_options(options)
    if options.run is None:
        assert options.policy is not None
        api = ApiOptions(options.api_base, options.api_key_env, options.api_temperature)
        policy = replace(find_policy(options.policy, starter), api=api)
    elif options.train_curve:
        policy = every_checkpoint(options.run, options.every or 1)
    else:
        from draco_ray.runs.directory import RunDirectory
        from draco_ray.training.resume import recorded_order

        run = RunDirectory.open(options.run.resolve())
        # The length of an epoch depends on the run's tasks, which it has recorded.
        policy = last_epochs(options.run, options.last_epochs or 3, recorded_order(run).steps_per_epoch)
    _check_one_model(options, policy)
    config = load_config(options.config or policy.config, options.overrides, trust=options.trust)
    if policy.model is None or "model.path" in overridden_keys(options.overrides):
        return policy, config
    return policy, config.updated(model={"path": policy.model})


def _default_out(options: EvaluateOptions, policy: EvaluatedPolicy, environment: str, split: str) -> Path:
    world = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(environment).name)
    if options.run is not None:
        kind = "train-curve" if options.train_curve else f"last{options.last_epochs or 3}"
        return options.run / "evaluations" / f"{world}-{split}-{kind}"
    return Path("evaluations") / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', policy.label)}-{world}-{split}"
