"""`draco eval-set`: runs every evaluation of a set, described by a file, and prints its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from draco_ray.commands.evaluate import (
    READ,
    RUNS,
    EvaluateOptions,
    check_api_options,
    check_options,
    find_policy_and_config,
    print_tables,
)
from draco_ray.config.effect import check_effect
from draco_ray.config.load import read_tree
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.evaluation_set import (
    TAU,
    EvaluationSet,
    PlannedEvaluation,
    parse_set,
    planned_evaluations,
)
from draco_ray.lab.evaluation.rendering import Shown, TableFormat
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan
from draco_ray.lab.evaluation.tables import group_seeds
from draco_ray.lab.files import check_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """An evaluation that has been checked and can be run."""

    planned: PlannedEvaluation
    plan: Plan
    run: Callable[[], object]


def evaluate_set(
    file: Path,
    overrides: Sequence[str],
    *,
    out: Path | None,
    against: str | None,
    form: TableFormat,
    show: Shown,
    retry_errors: bool,
    trust: bool,
    starter: Path,
) -> None:
    """Run the unfinished evaluations of a set one after another, then print and write its tables.

    Args:
        file: YAML (docs/evaluation.md).
        overrides: further ``KEY=VALUE`` arguments for all evaluations.
        out: the set's folder; None is ``evaluations/`` and the file's name.
        against: label that all others are compared with.
        form: format of the printed tables.
        show: what to print beside a mean.
        retry_errors: repeat lost rollouts.
        trust: as in `load_config`.
        starter: directory of the starter policy.

    Raises:
        ConfigError: the set cannot be used, or its folder holds evaluations of another set; nothing has run then.
        TooManyLost: an evaluation lost more rollouts than ``max_lost_share``; the other rollouts are kept.
        DracoError: as `draco_ray.lab.evaluation.evaluate.evaluate_policy` and
            `draco_ray.benchmarks.tau.evaluate.evaluate_tau`.
    """
    wanted = read_set(file, overrides)
    out = (out or Path("evaluations") / file.stem).resolve()
    if against is not None and against not in wanted.settings:
        raise ConfigError(f"--against {against!r}: expected one of {', '.join(wanted.settings)}")
    typed = [*wanted.overrides, *(words for each in wanted.settings.values() for words in each.overrides)]
    idle = {"tau_bench.trials": "together with runs"} if wanted.runs is not None else {}
    check_effect("draco eval-set", typed, (*READ, "setting", "tau_bench"), idle)
    planned = planned_evaluations(wanted, out)
    # Check all evaluations before the first one runs.
    ready = [_prepare(each, wanted, starter, retry_errors=retry_errors, trust=trust) for each in planned]
    group_seeds((each.planned.label, EvaluationDirectory(each.planned.out, each.plan)) for each in ready)
    unfinished = [each for each in ready if not _finished(each, retry_errors)]
    check_folder(out)
    typer.echo(f"{out}: {len(ready) - len(unfinished)} of {len(ready)} evaluations are finished")
    for number, each in enumerate(ready, start=1):
        if each in unfinished:
            typer.echo(f"{number} of {len(ready)}: {each.planned.title}, results in {each.planned.out}")
            each.run()
        EvaluationDirectory.open(each.planned.out).check_lost(wanted.max_lost_share)
    directories = [str(each.out) for each in planned]
    print_tables(directories, tables=["main"], form=form, shown=show, against=against, out=None)
    typer.echo(f"all tables in all formats: {out / 'tables'}", err=True)
    print_tables(directories, tables=[], form=form, shown=show, against=against, out=out / "tables", quiet=True)


def read_set(file: Path, overrides: Sequence[str]) -> EvaluationSet:
    """The set that a file describes, with further overrides for all of it. Raises: ConfigError if it cannot be used."""
    tree = read_tree(file)
    own = tree.get("overrides") or []
    tree["overrides"] = [*(own if isinstance(own, list) else [own]), *overrides]
    return parse_set(tree, f"eval-set {file}")


def _prepare(
    planned: PlannedEvaluation, wanted: EvaluationSet, starter: Path, *, retry_errors: bool, trust: bool
) -> _Ready:
    """Check one evaluation. Raises ConfigError if it cannot run, or its folder holds a different evaluation."""
    setting = planned.setting
    told = EvaluateOptions(
        policy=setting.policy,
        run=planned.run,
        last_epochs=None if planned.run is None else setting.last_epochs,
        split=planned.split,
        runs=wanted.runs,
        config=setting.config,
        overrides=(*wanted.overrides, *setting.overrides),
        out=planned.out,
        label=planned.label,
        api_base=setting.api_base,
        api_key_env=setting.api_key_env,
        api_temperature=setting.api_temperature,
        retry_errors=retry_errors,
        trust=trust,
    )
    check_options(told)
    ready = (_prepare_tau if planned.split == TAU else _prepare_split)(planned, told, wanted.max_lost_share, starter)
    EvaluationDirectory.find(planned.out, ready.plan)
    return ready


def _prepare_split(planned: PlannedEvaluation, told: EvaluateOptions, max_lost_share: float, starter: Path) -> _Ready:
    from draco_ray.environments.base import make_environment
    from draco_ray.lab.evaluation.evaluate import ApiOptions, evaluate_policy, plan_policy

    policy, config = find_policy_and_config(told, starter)
    check_api_options(told, policy)
    if not make_environment(config.environment, config.data).evaluates:
        raise ConfigError(
            f"{planned.title}: the environment {config.environment.use} has no evaluator; use `draco evaluate`, which "
            "measures one policy by the judge"
        )
    api = ApiOptions(api_base=told.api_base, api_key_env=told.api_key_env, temperature=told.api_temperature)
    return _Ready(
        planned=planned,
        plan=plan_policy(policy, config, split=planned.split, runs=told.runs or RUNS, label=planned.label, api=api),
        run=lambda: evaluate_policy(
            policy,
            config,
            split=planned.split,
            runs=told.runs or RUNS,
            out=planned.out,
            label=planned.label,
            api=api,
            retry_errors=told.retry_errors,
            max_lost_share=max_lost_share,
        ),
    )


def _prepare_tau(planned: PlannedEvaluation, told: EvaluateOptions, max_lost_share: float, starter: Path) -> _Ready:
    from draco_ray.benchmarks.tau.evaluate import evaluate_tau, plan_tau
    from draco_ray.benchmarks.tau.server import tau_policies
    from draco_ray.commands.tau import log_messages, policy_and_config

    log_messages()
    policy, config = policy_and_config(told, starter)
    policies = tau_policies(policy, config)
    _, plan = plan_tau(config, policies, planned.label)
    return _Ready(
        planned=planned,
        plan=plan,
        run=lambda: evaluate_tau(
            config,
            policies,
            planned.out,
            label=planned.label,
            retry_errors=told.retry_errors,
            max_lost_share=max_lost_share,
        ),
    )


def _finished(ready: _Ready, retry_errors: bool) -> bool:
    directory = EvaluationDirectory.find(ready.planned.out, ready.plan)
    if directory is None or not (directory.path / "summary.json").is_file():
        return False
    return directory.finished() == directory.total and not (retry_errors and directory.lost())
