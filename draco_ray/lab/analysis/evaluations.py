"""Evaluations of a run: those that training made, and the evaluation directories inside it (`draco evaluate --run`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.lab.analysis.columns import columns
from draco_ray.lab.evaluation.results import EvaluationDirectory, role_costs, sum_known
from draco_ray.records import Evaluation
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations, scenario_goal_completion, task_goal_completion

TRAINING = "training"
"""Name of the evaluations made during training (train.evaluate_before_after)."""

_KEYS = ("string: run evaluation split", "int64: training_step")
EVALUATIONS = columns(*_KEYS, "int64: tasks runs lost", "float64: tgc sgc dollars_per_pass tokens_per_pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    evaluation: str
    split: str
    step: int | None
    evaluations: list[Evaluation]
    scenarios: bool = True
    dollars: float | None = None
    """Cost of all runs together."""
    tokens: float | None = None

    @property
    def tasks(self) -> int:
        return len({evaluation.task_id for evaluation in self.evaluations})

    @property
    def runs(self) -> int:
        return max(evaluation.run for evaluation in self.evaluations) + 1


def evaluations(run: RunDirectory) -> pa.Table:
    """One row per finished measurement: TGC, SGC, and what one pass over the tasks cost where that is known.

    Cost is known of evaluation directories only: dollars where the model has a price, and input and output tokens.
    Measurements that are not finished are left out, since their rates would be of other tasks.
    """
    rows = [
        {
            **_keys(run, found),
            "tasks": found.tasks,
            "runs": found.runs,
            "lost": sum(evaluation.lost for evaluation in found.evaluations),
            "tgc": task_goal_completion(found.evaluations),
            "sgc": scenario_goal_completion(found.evaluations) if found.scenarios else None,
            "dollars_per_pass": None if found.dollars is None else found.dollars / found.runs,
            "tokens_per_pass": None if found.tokens is None else found.tokens / found.runs,
        }
        for found in _measurements(run)
    ]
    return pa.Table.from_pylist(rows, schema=EVALUATIONS)


def _keys(run: RunDirectory, found: _Measurement) -> dict[str, object]:
    return {
        "run": run.path.name,
        "evaluation": found.evaluation,
        "split": found.split,
        "training_step": found.step,
    }


def evaluation_directories(run: RunDirectory) -> Iterator[EvaluationDirectory]:
    """Evaluation directories that `draco evaluate --run` wrote into a run, by name.

    A directory of another version of this program is skipped.
    """
    for file in sorted((run.path / "evaluations").glob("*/evaluation.json")):
        with contextlib.suppress(ConfigError):
            yield EvaluationDirectory.open(file.parent)


def judged_directories(run: RunDirectory) -> Iterator[RunDirectory]:
    """Judged evaluations that `draco evaluate --run` wrote into a run without an evaluator, by name."""
    for file in sorted((run.path / "evaluations").glob("*/config.yaml")):
        with contextlib.suppress(ConfigError, DamagedRun):
            yield RunDirectory.open(file.parent)


def _measurements(run: RunDirectory) -> Iterator[_Measurement]:
    for (step, split), in_training in read_evaluations(run).items():
        yield _Measurement(evaluation=TRAINING, split=split, step=step, evaluations=in_training)
    for directory in evaluation_directories(run):
        # Where a conversation has several roles, its cost is that of all.
        roles = role_costs(directory)
        for name in directory.plan.measurements:
            if directory.missing(name) or not (results := directory.results(name)):
                continue
            usages = [result.usage for result in results]
            number = re.fullmatch(r"step(\d+)", name)
            yield _Measurement(
                evaluation=directory.path.name,
                split=directory.plan.split,
                step=int(number[1]) if number else None,
                evaluations=[result.evaluation for result in results],
                scenarios=directory.plan.scenarios,
                dollars=sum_known(each.dollars for each in (roles[name].values() if name in roles else usages)),
                tokens=float(
                    sum(
                        each.input_tokens + each.output_tokens
                        for each in (roles[name].values() if name in roles else usages)
                    )
                ),
            )
