"""`draco eval-set`: runs every evaluation of a set, described by a file or arguments, and prints its tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    EvaluatedSetting,
    EvaluationSet,
    PlannedEvaluation,
    parse_set,
    planned_evaluations,
)
from draco_ray.lab.evaluation.rendering import Shown, TableFormat
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan
from draco_ray.lab.evaluation.tables import TABLES, check_seeds, split_title
from draco_ray.lab.files import check_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetOptions:
    """Options of `draco eval-set`; if an option is None or empty, the file's value is used."""

    words: Sequence[str]
    """An optional file, then ``KEY=VALUE`` words."""
    settings: Sequence[str]
    """``LABEL=POLICY``; a run directory means its last epochs, and runs with the same label are its seeds."""
    splits: Sequence[str]
    runs: int | None
    last_epochs: int | None
    max_lost_share: float | None
    out: Path | None
    retry_errors: bool
    trust: bool
    form: TableFormat
    shown: Shown
    against: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """An evaluation that has been checked and can be run."""

    planned: PlannedEvaluation
    plan: Plan
    run: Callable[[], object]


def evaluate_set(options: EvalSetOptions, starter: Path) -> None:
    """Run the unfinished evaluations of a set one after another, then print and write its tables.

    Raises:
        ConfigError: the set cannot be used, or its folder holds evaluations of another set; nothing has run then.
        TooManyLost: an evaluation lost more rollouts than ``max_lost_share``; the other rollouts are kept.
        DracoError: as `draco_ray.lab.evaluation.evaluate.evaluate_policy` and
            `draco_ray.benchmarks.tau.evaluate.evaluate_tau`.
    """
    wanted, out = read_set(options)
    if options.against is not None and options.against not in wanted.settings:
        raise ConfigError(f"--against {options.against!r}: expected one of {', '.join(wanted.settings)}")
    typed = [*wanted.overrides, *(words for each in wanted.settings.values() for words in each.overrides)]
    idle = {"tau_bench.trials": "together with runs"} if wanted.runs is not None else {}
    check_effect("draco eval-set", typed, (*READ, "setting", "tau_bench"), idle)
    planned = planned_evaluations(wanted, out)
    # Check all evaluations before the first one runs.
    ready = [_prepare(each, wanted, options, starter) for each in planned]
    _check_rows(ready)
    unfinished = [each for each in ready if not _finished(each, options.retry_errors)]
    check_folder(out)
    typer.echo(f"{out}: {len(ready) - len(unfinished)} of {len(ready)} evaluations are finished")
    for number, each in enumerate(ready, start=1):
        if each in unfinished:
            typer.echo(f"{number} of {len(ready)}: {each.planned.title}, results in {each.planned.out}")
            each.run()
        EvaluationDirectory.open(each.planned.out).check_lost(wanted.max_lost_share)
    directories = [str(each.out) for each in planned]
    print_tables(
        directories, tables=["main"], form=options.form, shown=options.shown, against=options.against, out=None
    )
    tables = [name for name in TABLES if name != "self-judge"]
    typer.echo(f"all tables in all formats: {out / 'tables'}", err=True)
    print_tables(
        directories,
        tables=tables,
        form=options.form,
        shown=options.shown,
        against=options.against,
        out=out / "tables",
        quiet=True,
    )


def read_set(options: EvalSetOptions) -> tuple[EvaluationSet, Path]:
    """The set that a file and arguments describe (arguments override the file), and its folder.

    Raises:
        ConfigError: the set cannot be used, or no folder is named.
    """
    words = list(options.words)
    file = None
    if words and ("=" not in words[0] or os.path.isfile(words[0])):
        file = Path(words.pop(0))
    tree: dict[str, Any] = {} if file is None else read_tree(file)
    if options.settings:
        if tree.get("settings"):
            raise ConfigError(f"--setting: {file} already has settings; give them either there or as --setting")
        tree["settings"] = _named_settings(options.settings, options.last_epochs)
        if options.last_epochs is not None and not any("run" in each for each in tree["settings"].values()):
            raise ConfigError("--last-epochs: no effect, because no setting is a run")
    elif options.last_epochs is not None:
        raise ConfigError("--last-epochs: works only with --setting; in a file, set `last_epochs` of a setting")
    told = {"splits": list(options.splits), "runs": options.runs, "max_lost_share": options.max_lost_share}
    tree |= {key: value for key, value in told.items() if value not in (None, [])}
    if words:
        own = tree.get("overrides") or []
        tree["overrides"] = [*(own if isinstance(own, list) else [own]), *words]
    out = options.out or (None if file is None else Path("evaluations") / file.stem)
    if out is None:
        raise ConfigError("--out: expected a folder for the evaluation set")
    return parse_set(tree, "draco eval-set" if file is None else f"eval-set {file}"), out.resolve()


def _named_settings(arguments: Sequence[str], last_epochs: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument in arguments:
        label, separator, policy = argument.partition("=")
        if not (separator and label and policy):
            raise ConfigError(f"--setting {argument!r}: expected LABEL=POLICY, e.g. Base=starter")
        if not os.path.isfile(Path(policy) / "config.yaml"):
            if label in found:
                raise ConfigError(
                    f"--setting {argument!r}: {label} is given twice; only the runs of several seeds may share a label"
                )
            found[label] = {"policy": policy}
            continue
        setting = found.setdefault(label, {"run": []})
        if "run" not in setting:
            raise ConfigError(
                f"--setting {argument!r}: {label} is given twice; only the runs of several seeds may share a label"
            )
        setting["run"].append(policy)
        if last_epochs is not None:
            setting["last_epochs"] = last_epochs
    return found


def _prepare(planned: PlannedEvaluation, wanted: EvaluationSet, options: EvalSetOptions, starter: Path) -> _Ready:
    """Check one evaluation. Raises ConfigError if it cannot run, or its folder holds a different evaluation."""
    told = _options(planned.setting, planned, wanted, options)
    check_options(told)
    ready = (_prepare_tau if planned.split == TAU else _prepare_split)(planned, told, wanted.max_lost_share, starter)
    EvaluationDirectory.find(planned.out, ready.plan)
    return ready


def _check_rows(ready: Sequence[_Ready]) -> None:
    """Refuse runs with the same label that are not training seeds of the same setting. Raises: ConfigError."""
    seeds: dict[tuple[str, str], list[EvaluationDirectory]] = {}
    for each in ready:
        others = seeds.setdefault((each.planned.label, split_title(each.plan)), [])
        one = EvaluationDirectory(each.planned.out, each.plan)
        for other in others:
            check_seeds(each.planned.label, each.planned.split, one, other)
        others.append(one)


def _options(
    setting: EvaluatedSetting, planned: PlannedEvaluation, wanted: EvaluationSet, options: EvalSetOptions
) -> EvaluateOptions:
    return EvaluateOptions(
        policy=setting.policy,
        run=planned.run,
        last_epochs=None if planned.run is None else setting.last_epochs,
        train_curve=False,
        every=None,
        split=planned.split,
        runs=wanted.runs,
        config=setting.config,
        overrides=(*wanted.overrides, *setting.overrides),
        out=planned.out,
        label=planned.label,
        api_base=setting.api_base,
        api_key_env=setting.api_key_env,
        api_temperature=setting.api_temperature,
        retry_errors=options.retry_errors,
        trust=options.trust,
    )


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
