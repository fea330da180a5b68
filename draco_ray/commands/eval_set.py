"""`draco eval-set FILE`: several settings, each measured on several splits and benchmarks, and their tables.

::

    runs: 3
    max_lost_share: 0.05
    splits: [test_normal, test_challenge, tau-banking]
    settings:
      Base: {policy: Qwen/Qwen3.6-27B, config: qwen3.6-27b}
      DRACO: {run: [runs/draco-seed0, runs/draco-seed1], last_epochs: 3}
      GPT-5.4: litellm:openai/gpt-5.4
    overrides: [data.root=/shared/appworld]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from draco_ray.commands.evaluate import RUNS, SECTIONS_READ, EvaluateOptions, find_policy_and_config, print_tables
from draco_ray.config.file_names import validate_file_name
from draco_ray.config.ineffective_keys import check_effective
from draco_ray.config.load import read_tree
from draco_ray.config.schema import NonEmptyStr
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.rendering import ShownUncertainty, TableFormat
from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan
from draco_ray.lab.evaluation.tables import group_seeds
from draco_ray.lab.files import create_output_folder

TAU = "tau-banking"
"""Split name of τ-bench banking; all other names are splits of the environment."""


def _label(text: str) -> str:
    if "=" in text:
        raise ValueError("expected a name without =")
    return validate_file_name(text)


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"{twice[0]!r} is given twice")
    return values


Label = Annotated[str, AfterValidator(_label)]
Split = Annotated[str, AfterValidator(validate_file_name)]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_listed), Field(min_length=1)]


class EvaluatedSetting(BaseModel):
    """One row of the tables: a policy, or the runs that trained it, one per seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str | None = None
    """Policy, as in ``draco evaluate --policy``."""
    run: Paths | None = None
    """Run directories, one for each training seed; their last epochs are measured."""
    last_epochs: PositiveInt = 3
    config: str | None = None
    """Configuration, as in ``draco evaluate --config``."""
    overrides: Words = ()
    """``KEY=VALUE``, applied after the overrides of the set."""
    api_base: NonEmptyStr | None = None
    api_key_env: NonEmptyStr | None = None
    api_temperature: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one_of_both(self) -> EvaluatedSetting:
        if (self.policy is None) == (self.run is None):
            raise ValueError("expected one of policy and run")
        if self.run is None and "last_epochs" in self.model_fields_set:
            raise ValueError("last_epochs works only with a run, not with a policy")
        return self


class EvaluationSet(BaseModel):
    """Settings and splits to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[
        Label, Annotated[EvaluatedSetting, BeforeValidator(lambda v: {"policy": v} if isinstance(v, str) else v)]
    ] = Field(min_length=1)
    """Label in the tables -> setting; a plain string is short for ``policy``."""
    splits: Annotated[tuple[Split, ...], BeforeValidator(_listed), AfterValidator(_distinct)] = Field(min_length=1)
    """Splits of the environment, or ``tau-banking``."""
    runs: PositiveInt | None = None
    """Independent rollouts per task; null: 3, or ``tau_bench.trials`` for tau-banking."""
    max_lost_share: float = Field(default=0.05, ge=0, le=1)
    """Stop the set as soon as an evaluation has lost more than this share of its rollouts."""
    overrides: Words = ()
    """``KEY=VALUE`` for the configuration of every setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvaluation(EvaluateOptions):
    """One setting, or one of its runs, on one split."""

    label: str
    split: str
    out: Path

    @property
    def title(self) -> str:
        """Name of the evaluation in messages."""
        return f"{self.label} on {self.split}" + (f" ({self.run.name})" if self.run else "")


def parse_set(tree: Mapping[str, Any], source: str) -> EvaluationSet:
    """Validate an evaluation set, given as a file's content or as arguments.

    Args:
        tree: the keys of `EvaluationSet`.
        source: name of the file or the arguments in messages.

    Raises:
        ConfigError: one line with every mistake.
    """
    try:
        return EvaluationSet.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_message(problem) for problem in error.errors())}") from None


def planned_evaluations(wanted: EvaluationSet, out: Path, **options: Any) -> list[PlannedEvaluation]:
    """Every evaluation of a set, split by split, each with its own folder: ``<label>/<split>[/<run>]``.

    Args:
        wanted: the set.
        out: the set's folder.
        options: ``retry_errors`` and ``trust``, for every evaluation.

    Raises:
        ConfigError: two evaluations would share a folder.
    """
    found: dict[str, PlannedEvaluation] = {}
    for split in wanted.splits:
        for label, setting in wanted.settings.items():
            for run in setting.run or (None,):
                folder = out / label / split
                path = folder if run is None else folder / run.resolve().name
                planned = PlannedEvaluation(
                    **setting.model_dump(exclude={"run", "last_epochs", "overrides"}),
                    run=run,
                    last_epochs=None if run is None else setting.last_epochs,
                    split=split,
                    runs=wanted.runs,
                    overrides=(*wanted.overrides, *setting.overrides),
                    out=path,
                    label=label,
                    **options,
                )
                # Some file systems ignore case.
                other = found.setdefault(str(path).casefold(), planned)
                if other is not planned:
                    raise ConfigError(
                        f"{other.label} and {label} on {split} would both be stored in {path}; give the labels or the "
                        "runs' folders different names"
                    )
    return list(found.values())


def _message(problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("function-"))
    if problem["type"] == "missing":
        return f"{key}: is missing"
    what = problem["msg"].removeprefix("Value error, ")
    found = "" if problem["type"] == "value_error" else f", found {problem['input']!r}"
    return f"{key}: {what[:1].lower()}{what[1:]}{found}"


def evaluate_set(
    file: Path,
    overrides: Sequence[str],
    *,
    out: Path | None,
    against: str | None,
    form: TableFormat,
    show: ShownUncertainty,
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
    check_effective("draco eval-set", typed, (*SECTIONS_READ, "setting", "tau_bench"), idle)
    planned = planned_evaluations(wanted, out, retry_errors=retry_errors, trust=trust)
    # Check all evaluations before the first one runs.
    ready = {each: _prepare(each, wanted.max_lost_share, starter) for each in planned}
    group_seeds((each.label, EvaluationDirectory(each.out, plan)) for each, (plan, _) in ready.items())
    unfinished = {each for each, (plan, _) in ready.items() if not _finished(each, plan)}
    create_output_folder(out)
    typer.echo(f"{out}: {len(ready) - len(unfinished)} of {len(ready)} evaluations are finished")
    for number, (each, (_, run)) in enumerate(ready.items(), start=1):
        if each in unfinished:
            typer.echo(f"{number} of {len(ready)}: {each.title}, results in {each.out}")
            run()
        EvaluationDirectory.open(each.out).check_lost(wanted.max_lost_share)
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
    planned: PlannedEvaluation, max_lost_share: float, starter: Path
) -> tuple[EvaluationPlan, Callable[[], object]]:
    """Check one evaluation; returns its plan and the function that runs it.

    Raises:
        ConfigError: it cannot run, or its folder holds a different evaluation.
    """
    plan, run = (_prepare_tau if planned.split == TAU else _prepare_split)(planned, starter)
    EvaluationDirectory.find(planned.out, plan)
    told = {"label": planned.label, "retry_errors": planned.retry_errors, "max_lost_share": max_lost_share}
    return plan, partial(run, out=planned.out, **told)


def _prepare_split(planned: PlannedEvaluation, starter: Path) -> tuple[EvaluationPlan, Callable[..., object]]:
    from draco_ray.environments.base import make_environment
    from draco_ray.lab.evaluation.evaluate import evaluate_policy, plan_policy

    policy, config = find_policy_and_config(planned, starter)
    if not make_environment(config.environment, config.data).evaluates:
        raise ConfigError(
            f"{planned.title}: the environment {config.environment.use} has no evaluator; use `draco evaluate`, which "
            "measures one policy by the judge"
        )
    split, runs = planned.split, planned.runs or RUNS
    _, _, plan = plan_policy(policy, config, split=split, runs=runs, label=planned.label)
    return plan, partial(evaluate_policy, policy, config, split=split, runs=runs)


def _prepare_tau(planned: PlannedEvaluation, starter: Path) -> tuple[EvaluationPlan, Callable[..., object]]:
    from draco_ray.benchmarks.tau.evaluate import evaluate_tau, plan_tau
    from draco_ray.benchmarks.tau.server import tau_policies
    from draco_ray.commands.tau import log_messages, policy_and_config

    log_messages()
    policy, config = policy_and_config(planned, starter)
    policies = tau_policies(policy, config)
    _, plan = plan_tau(config, policies, planned.label)
    return plan, partial(evaluate_tau, config, policies)


def _finished(planned: PlannedEvaluation, plan: EvaluationPlan) -> bool:
    directory = EvaluationDirectory.find(planned.out, plan)
    if directory is None or not (directory.path / "summary.json").is_file():
        return False
    return directory.finished() == directory.total and not (planned.retry_errors and directory.lost())
