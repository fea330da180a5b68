"""Read tau2's result files as episodes, results and tables.

tau2's averages leave out episodes that ended in an infrastructure error. The paper counts over the full split, so the
denominator here is tasks times trials, and a missing episode is a failure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from draco_ray.benchmarks.tau.config import TauBenchConfig
from draco_ray.config.schema import DracoConfig, Price
from draco_ray.errors import ConfigError, TauBenchError
from draco_ray.judging.pricing import find_price, reply_cost
from draco_ray.lab.evaluation.rendering import Cell, Column, Table
from draco_ray.lab.evaluation.results import EvaluationDirectory, RoleCost, RolloutResult, role_costs, sum_or_none
from draco_ray.records import LOST_ROLLOUT, EpisodeEnd, Evaluation, Usage

INFRASTRUCTURE_ERROR = "infrastructure_error"
MISSING_EPISODE = "missing"
ENDED_WELL = ("user_stop", "agent_stop")
"""Termination reasons that tau2 grades; any other ending is a failure."""
TOLERANCE = 1e-6
"""A reward within this distance of 1 counts as success, as in tau2."""
ROLES = ("agent", "user", "judge")
ENDS = {
    "user_stop": EpisodeEnd.FINISHED,
    "agent_stop": EpisodeEnd.FINISHED,
    "max_steps": EpisodeEnd.TURN_LIMIT,
    "context_window_exceeded": EpisodeEnd.RESPONSE_LIMIT,
}
"""tau2's termination reason -> ours; any other is a server error."""


class _Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(BaseModel):
    role: str
    usage: _Usage | None = None


class Reward(BaseModel):
    """tau2's reward of an episode, and its parts."""

    reward: float
    reward_breakdown: dict[str, float] | None = None

    @property
    def success(self) -> bool:
        """Whether the task is solved."""
        return abs(self.reward - 1) <= TOLERANCE

    @property
    def failed_parts(self) -> tuple[str, ...]:
        """Sorted names of the reward's parts whose value is below 1, such as ``DB``, ``ACTION`` or ``NL_ASSERTION``."""
        return tuple(sorted(part for part, value in (self.reward_breakdown or {}).items() if value < 1 - TOLERANCE))


class Episode(BaseModel):
    """One trial of one task, with the fields of tau2's record that are used."""

    task_id: str
    trial: int
    timestamp: str
    duration: float = 0.0
    termination_reason: str
    """tau2's termination reason, or ``missing`` if tau2 has no record of the episode."""
    reward_info: Reward | None = None
    messages: list[_Message] | None = None
    info: dict[str, Any] | None = None

    @property
    def success(self) -> bool:
        """Whether the task is solved."""
        return self.reward_info is not None and self.reward_info.success

    @property
    def failure(self) -> str | None:
        """The failed parts of the reward, or how the episode ended; None for a success."""
        if self.success:
            return None
        if self.termination_reason in ENDED_WELL:
            return "+".join(self.reward_info.failed_parts if self.reward_info else ()) or "ungraded"
        kind = (self.info or {}).get("error_type")
        lost = self.termination_reason == INFRASTRUCTURE_ERROR
        return f"{INFRASTRUCTURE_ERROR} ({kind})" if lost and kind else self.termination_reason

    def usage(self, role: str) -> Usage:
        """Calls and tokens of ``assistant`` or ``user``."""
        # tau2's greeting has no usage: it is not a call of the agent.
        return _total(each.usage for each in self.messages or () if each.role == role and each.usage)


def _total(usages: Iterable[_Usage]) -> Usage:
    counts = [
        Usage(calls=1, requests=1, input_tokens=each.prompt_tokens, output_tokens=each.completion_tokens)
        for each in usages
    ]
    return sum(counts, start=Usage())


def simulation_files(folder: Path) -> list[Path]:
    """Records of finished episodes in tau2's directory format; hidden files are still being written."""
    return sorted((folder / "simulations").glob("[!.]*.json"))


def read_records(folder: Path) -> list[Episode]:
    """Read ``simulations/*.json`` (tau2's directory format), or else the episodes in ``results.json``.

    Raises:
        TauBenchError: a file is not one of tau2-bench 1.0.1.
    """
    files, single = simulation_files(folder), folder / "results.json"
    try:
        if files or not single.is_file():
            return [Episode.model_validate_json(path.read_bytes()) for path in files]
        content = json.loads(single.read_text(encoding="utf-8"))
        return [Episode.model_validate(each) for each in content.get("simulations") or []]
    except (OSError, ValueError, AttributeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise TauBenchError(
            f"{folder}: not result files of tau2-bench 1.0.1 ({' '.join(reason.split())}); expected results.json, and "
            "simulations/<id>.json in directory format"
        ) from None


def read_episodes(folder: Path, tasks: Sequence[str], trials: int) -> list[Episode]:
    """Read every planned episode, task by task; an episode without a record counts as ``missing``, a failure.

    Args:
        folder: tau2's results, see `read_records`.

    Raises:
        TauBenchError: a file cannot be read, or contains an episode that was not planned.
    """
    found: dict[tuple[str, int], Episode] = {}
    # An episode has several records if it was retried after an infrastructure error, or if the process was killed.
    # The earliest record without an infrastructure error counts, or else the earliest one.
    records = read_records(folder)
    for record in sorted(records, key=lambda each: (each.termination_reason == INFRASTRUCTURE_ERROR, each.timestamp)):
        if record.task_id not in tasks or not 0 <= record.trial < trials:
            raise TauBenchError(
                f"{folder}: contains {record.task_id}, trial {record.trial}, which is not part of this evaluation of "
                f"{len(tasks)} tasks with {trials} trials; use a separate folder for each evaluation"
            )
        found.setdefault((record.task_id, record.trial), record)
    return [
        found.get((task, trial)) or Episode(task_id=task, trial=trial, timestamp="", termination_reason=MISSING_EPISODE)
        for task in tasks
        for trial in range(trials)
    ]


def read_judge_usage(folder: Path) -> Usage:
    """Sum the tokens of all judge calls, including those of episodes that were retried."""
    file = folder / "judge_calls.jsonl"
    if not file.is_file():
        return Usage()
    # A killed process may have left an incomplete last line.
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return _total(_Usage.model_validate(json.loads(line)["usage"] or {}) for line in lines)


def rollout_result(episode: Episode, price: Price | None) -> RolloutResult:
    """Convert an episode to the result that every benchmark stores; ``price`` is the policy's."""
    failure, usage = episode.failure, episode.usage("assistant")
    lost = episode.termination_reason in (INFRASTRUCTURE_ERROR, MISSING_EPISODE)
    return RolloutResult(
        evaluation=Evaluation(
            task_id=episode.task_id,
            run=episode.trial,
            success=episode.success,
            passed_tests=int(episode.success),
            total_tests=1,
            turns=usage.calls,
            ended=ENDS.get(episode.termination_reason, EpisodeEnd.SERVER_ERROR),
            failures=(() if failure is None else (failure,)) + ((LOST_ROLLOUT,) if lost else ()),
        ),
        usage=replace(usage, dollars=_dollars(price, usage)),
        seconds=episode.duration,
        error=failure if lost else None,
    )


def summary(
    episodes: Sequence[Episode], judge: Usage, policy_model: str, config: DracoConfig, commit: str
) -> dict[str, Any]:
    """Costs and failures of one measurement, as JSON.

    Args:
        episodes: every planned episode.
        judge: usage of all judge calls.
        policy_model: model name for the price.
        commit: commit of tau2-bench, which determines the grading.
    """
    tau = TauBenchConfig.of(config)
    used = {
        "agent": (policy_model, sum((episode.usage("assistant") for episode in episodes), start=Usage())),
        "user": (tau.user.model, sum((episode.usage("user") for episode in episodes), start=Usage())),
        "judge": (tau.judge.model, judge),
    }
    failures = Counter(episode.failure for episode in episodes if episode.failure is not None)
    return {
        "episodes": len(episodes),
        "successes": sum(episode.success for episode in episodes),
        "infrastructure_errors": sum(episode.termination_reason == INFRASTRUCTURE_ERROR for episode in episodes),
        "missing": failures[MISSING_EPISODE],
        "failures": dict(failures.most_common()),
        "costs": {
            role: {
                "model": model,
                "input_tokens": usage.input_tokens,
                "output_tokens": usage.output_tokens,
                "dollars": _dollars(find_price(model, config.judge.prices), usage),
            }
            for role, (model, usage) in used.items()
        },
        "trials": tau.trials,
        "tau2_commit": commit,
    }


def _dollars(price: Price | None, usage: Usage) -> float | None:
    return None if price is None else reply_cost(price, usage.input_tokens, 0, usage.output_tokens)


def cost_by_role_table(settings: Mapping[str, Sequence[EvaluationDirectory]]) -> Table:
    """Tokens and dollars of one pass over the tasks, by role, and dollars of all roles together.

    Args:
        settings: label -> evaluations, one for each training seed.

    Raises:
        ConfigError: an evaluation has no costs by role.
        DamagedRun: ``summary.json`` cannot be read.
    """
    names = (("input_tokens", 0), ("output_tokens", 0), ("dollars", 2))
    rows: list[tuple[str, tuple[Cell | None, ...]]] = []
    for label, directories in settings.items():
        measured: list[Mapping[str, RoleCost]] = []
        for directory in directories:
            costs = role_costs(directory)
            if costs.keys() != set(directory.plan.measurements):
                raise ConfigError(
                    f"{directory.path}: not a finished tau-bench evaluation; expected costs by role in summary.json, "
                    "which `draco tau run` writes"
                )
            measured += costs.values()
        passes = sum(each.plan.runs * len(each.plan.measurements) for each in directories)
        values = [
            sum_or_none(getattr(each[role], name) if role in each else None for each in measured)
            for role in ROLES
            for name, _ in names
        ]
        values.append(sum_or_none(values[2::3]))
        rows.append((label, tuple(None if value is None else Cell(value / passes) for value in values)))
    return Table(
        name="tau-costs",
        title="τ-bench banking: tokens and dollars of one pass over the tasks, by role",
        row_header="Setting",
        columns=(
            *(Column((role, name.replace("_", " ")), digits) for role in ROLES for name, digits in names),
            Column(("together", "dollars"), 2, "low"),
        ),
        rows=tuple(rows),
        notes=("Attempts that tau2 repeated after an exception are not counted. -: the price is unknown.",),
    )


def failure_table(settings: Mapping[str, Sequence[EvaluationDirectory]]) -> Table:
    """Failures by kind, in % of all planned episodes; successes and failures add up to 100."""
    counts: dict[str, Counter[str]] = {}
    for label, directories in settings.items():
        results = [result for each in directories for part in each.complete_results().values() for result in part]
        counts[label] = Counter("success" if each.evaluation.success else _kind(each) for each in results)
    kinds = [kind for kind, _ in sum(counts.values(), start=Counter[str]()).most_common() if kind != "success"]
    return Table(
        name="tau-failures",
        title="τ-bench banking: how episodes ended (% of all planned)",
        row_header="Setting",
        columns=tuple(Column((name,)) for name in ("success", *kinds)),
        rows=tuple(
            (label, tuple(Cell(100 * count[kind] / count.total()) for kind in ("success", *kinds)))
            for label, count in counts.items()
        ),
        notes=(
            "DB, ACTION, NL_ASSERTION: episodes in which this part of the reward failed. missing: episodes without a "
            "tau2 record.",
        ),
    )


def _kind(result: RolloutResult) -> str:
    """How an episode failed (`Episode.failure`)."""
    return next(iter(result.evaluation.failures), "ungraded")
