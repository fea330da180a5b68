"""An evaluation set, from a file or arguments: several settings, each measured on several splits and benchmarks.

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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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

from draco_ray.config.file_names import file_name
from draco_ray.errors import ConfigError

TAU = "tau-banking"
"""Split name of τ-bench banking; all other names are splits of the environment."""


def _label(text: str) -> str:
    if "=" in text:
        raise ValueError("expected a name without =")
    return file_name(text)


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"{twice[0]!r} is given twice")
    return values


Label = Annotated[str, AfterValidator(_label)]
Split = Annotated[str, AfterValidator(file_name)]
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
    """``KEY=VALUE``, applied after those of the set."""
    api_base: str | None = None
    api_key_env: str | None = None
    api_temperature: float | None = None

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
class PlannedEvaluation:
    """One setting, or one of its runs, on one split."""

    label: str
    setting: EvaluatedSetting
    run: Path | None
    split: str
    out: Path

    @property
    def title(self) -> str:
        """Name of the evaluation in messages."""
        return f"{self.label} on {self.split}" + (f" ({self.run.name})" if self.run else "")


def parse_set(tree: Mapping[str, Any], source: str) -> EvaluationSet:
    """Validate a file or arguments.

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


def planned_evaluations(wanted: EvaluationSet, out: Path) -> list[PlannedEvaluation]:
    """Every evaluation of a set, split by split, each with its own folder: ``<label>/<split>[/<run>]``.

    Raises:
        ConfigError: two evaluations would share a folder.
    """
    found: dict[str, PlannedEvaluation] = {}
    for split in wanted.splits:
        for label, setting in wanted.settings.items():
            for run in setting.run or (None,):
                folder = out / label / split
                path = folder if run is None else folder / run.resolve().name
                planned = PlannedEvaluation(label=label, setting=setting, run=run, split=split, out=path)
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
