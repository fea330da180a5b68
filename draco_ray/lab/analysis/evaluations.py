"""Evaluations of a run: made during training, or in evaluation directories inside the run (`draco evaluate --run`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.lab.evaluation.policies import parse_checkpoint_step
from draco_ray.lab.evaluation.results import EvaluationDirectory, role_costs, sum_or_none
from draco_ray.lab.rows import collect_table
from draco_ray.records import Evaluation
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations, scenario_goal_completion, task_goal_completion
from draco_ray.runs.rows import Row

TRAINING = "training"
"""Name of the evaluations made during training (train.evaluate_before_after)."""


@collect_table(
    "string: run evaluation split",
    "int64: training_step tasks runs lost",
    "float64: tgc sgc dollars_per_pass tokens_per_pass",
)
def evaluations(run: RunDirectory) -> Iterator[Row]:
    """One row per finished measurement: task and scenario goal completion (TGC, SGC), and the cost if it is known.

    The cost of one pass over the tasks is known for evaluation directories only: input and output tokens, and dollars
    if the model has a price.
    Unfinished measurements are left out, since their rates would cover only a part of the tasks.
    """
    for (step, split), found in read_evaluations(run).items():
        about: Row = {"evaluation": TRAINING, "split": split, "training_step": step}
        yield about | _rates(found, scenarios=True)
    for directory in evaluation_directories(run):
        plan, roles = directory.plan, role_costs(directory)
        for name in plan.measurements:
            if directory.missing(name) or not (results := directory.results(name)):
                continue
            about = {
                "evaluation": directory.path.name,
                "split": plan.split,
                "training_step": parse_checkpoint_step(name),
            }
            rates = _rates([result.evaluation for result in results], scenarios=plan.scenarios)
            # If a conversation has several roles, its cost is the sum over all of them.
            costs = list(roles[name].values()) if name in roles else [result.usage for result in results]
            dollars = sum_or_none(each.dollars for each in costs)
            tokens = sum(each.input_tokens + each.output_tokens for each in costs)
            rates["dollars_per_pass"] = None if dollars is None else dollars / rates["runs"]
            yield about | rates | {"tokens_per_pass": tokens / rates["runs"]}


def evaluation_directories(run: RunDirectory) -> Iterator[EvaluationDirectory]:
    """Evaluation directories that `draco evaluate --run` wrote into a run, by name.

    A directory written by an incompatible version of this program is skipped.
    """
    for file in sorted((run.path / "evaluations").glob("*/evaluation.json")):
        with contextlib.suppress(ConfigError):
            yield EvaluationDirectory.open(file.parent)


def judged_directories(run: RunDirectory) -> Iterator[RunDirectory]:
    """Judged evaluations that `draco evaluate --run` wrote into a run without an evaluator, by name."""
    for file in sorted((run.path / "evaluations").glob("*/config.yaml")):
        with contextlib.suppress(ConfigError, DamagedRun):
            yield RunDirectory.open(file.parent)


def _rates(found: Sequence[Evaluation], *, scenarios: bool) -> Row:
    return {
        "tasks": len({each.task_id for each in found}),
        "runs": max(each.run for each in found) + 1,
        "lost": sum(each.lost for each in found),
        "tgc": task_goal_completion(found),
        "sgc": scenario_goal_completion(found) if scenarios else None,
    }
