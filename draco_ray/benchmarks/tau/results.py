"""tau2's result files as episodes, results and tables.

tau2 leaves episodes that ended in an infrastructure error out of its averages. The paper counts unsolved tasks over
the full split, so the denominator here is tasks times trials, and a missing episode is a failure.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from draco_ray.config.schema import DracoConfig, Price
from draco_ray.errors import ConfigError, TauBenchError
from draco_ray.judging.pricing import find_price, price_of
from draco_ray.lab.evaluation.rendering import Cell, Column, Table
from draco_ray.lab.evaluation.results import Count, OneLine, RoleCost, RolloutResult, Several, sum_known
from draco_ray.records import LOST, EpisodeEnd, Evaluation, Usage
from draco_ray.runs.directory import damaged, read_text

INFRASTRUCTURE = "infrastructure_error"
MISSING = "missing"
ENDED_WELL = ("user_stop", "agent_stop")
"""tau2 grades only these; any other ending is a failure."""
TOLERANCE = 1e-6
"""Largest distance from 1 of a reward that counts as success, as in tau2."""
ROLES = ("agent", "user", "judge")
ENDS = {
    "user_stop": EpisodeEnd.FINISHED,
    "agent_stop": EpisodeEnd.FINISHED,
    "max_steps": EpisodeEnd.TURN_LIMIT,
    "context_window_exceeded": EpisodeEnd.RESPONSE_LIMIT,
}
"""tau2's termination reason -> ours; any other is a server error."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one role's calls."""

    input: int = 0
    output: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.input + other.input, self.output + other.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One trial of one task."""

    task_id: str
    trial: int
    success: bool
    ended: str
    """tau2's termination reason, or ``missing``."""
    failure: str | None
    """The failed parts of the reward (``DB``, ``ACTION``, ``NL_ASSERTION``), or how it ended; None: success."""
    turns: int = 0
    """Agent calls; 0 if the record has no messages."""
    agent: Tokens = Tokens()
    user: Tokens = Tokens()
    seconds: float = 0.0


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
        """Names of the parts below 1, e.g. ``DB``, sorted."""
        return tuple(sorted(part for part, value in (self.reward_breakdown or {}).items() if value < 1 - TOLERANCE))


class Simulation(BaseModel):
    """The fields that are read of tau2's record of an episode."""

    task_id: str
    trial: int
    timestamp: str
    duration: float = 0.0
    termination_reason: str
    reward_info: Reward | None = None
    messages: list[_Message] | None = None
    info: dict[str, Any] | None = None


def simulation_files(folder: Path) -> list[Path]:
    """Records of finished episodes in tau2's directory format; hidden files are still being written."""
    return sorted((folder / "simulations").glob("[!.]*.json"))


def read_simulations(folder: Path) -> list[Simulation]:
    """Read ``simulations/*.json`` (tau2's directory format), or else the episodes in ``results.json``.

    Raises:
        TauBenchError: a file is not one of tau2-bench 1.0.1.
    """
    files, single = simulation_files(folder), folder / "results.json"
    try:
        if files or not single.is_file():
            return [Simulation.model_validate_json(path.read_bytes()) for path in files]
        content = json.loads(single.read_text(encoding="utf-8"))
        return [Simulation.model_validate(each) for each in content.get("simulations") or []]
    except (OSError, ValueError, AttributeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise TauBenchError(
            f"{folder}: not result files of tau2-bench 1.0.1 ({' '.join(reason.split())}); expected results.json, and "
            "simulations/<id>.json in directory format"
        ) from None


def read_episodes(folder: Path, tasks: Sequence[str], trials: int) -> list[Episode]:
    """Read every planned episode, task by task; one without a record has failed as ``missing``.

    Args:
        folder: tau2's results, see `read_simulations`.

    Raises:
        TauBenchError: a file cannot be read, or holds an episode that was not planned.
    """
    found: dict[tuple[str, int], Simulation] = {}
    # An episode has several records if it was retried after an infrastructure error, or if the process was killed.
    # The earliest counts, those without an infrastructure error first.
    for simulation in sorted(
        read_simulations(folder), key=lambda each: (each.termination_reason == INFRASTRUCTURE, each.timestamp)
    ):
        if simulation.task_id not in tasks or not 0 <= simulation.trial < trials:
            raise TauBenchError(
                f"{folder}: holds {simulation.task_id}, trial {simulation.trial}, which was not asked for; expected "
                f"{len(tasks)} tasks with {trials} trials; give other runs a folder of their own"
            )
        found.setdefault((simulation.task_id, simulation.trial), simulation)
    return [_episode(task, trial, found.get((task, trial))) for task in tasks for trial in range(trials)]


def read_judge_tokens(folder: Path) -> Tokens:
    """Sum the tokens of all judge calls, including those of episodes that were retried."""
    file = folder / "judge_calls.jsonl"
    if not file.is_file():
        return Tokens()
    # A process that was killed may have left half a line at the end.
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return _sum(_Usage.model_validate(json.loads(line)["usage"] or {}) for line in lines)


def _episode(task: str, trial: int, simulation: Simulation | None) -> Episode:
    if simulation is None:
        return Episode(task_id=task, trial=trial, success=False, ended=MISSING, failure=MISSING)
    success = simulation.reward_info is not None and simulation.reward_info.success
    # tau2's greeting is no call of the agent: it has no usage.
    calls = [(each.role, each.usage) for each in simulation.messages or [] if each.usage is not None]
    agent = [usage for role, usage in calls if role == "assistant"]
    return Episode(
        task_id=task,
        trial=trial,
        success=success,
        ended=simulation.termination_reason,
        failure=None if success else _failure(simulation),
        turns=len(agent),
        agent=_sum(agent),
        user=_sum(usage for role, usage in calls if role == "user"),
        seconds=simulation.duration,
    )


def _failure(simulation: Simulation) -> str:
    if simulation.termination_reason == INFRASTRUCTURE:
        kind = (simulation.info or {}).get("error_type")
        return f"{INFRASTRUCTURE} ({kind})" if kind else INFRASTRUCTURE
    if simulation.termination_reason not in ENDED_WELL:
        return simulation.termination_reason
    return "+".join(simulation.reward_info.failed_parts if simulation.reward_info else ()) or "ungraded"


def _sum(usages: Iterable[_Usage]) -> Tokens:
    return sum((Tokens(each.prompt_tokens, each.completion_tokens) for each in usages), start=Tokens())


def rollout_result(episode: Episode, price: Price | None) -> RolloutResult:
    """Convert an episode to the result that every benchmark stores; ``price`` is the policy's."""
    lost = episode.ended in (INFRASTRUCTURE, MISSING)
    return RolloutResult(
        evaluation=Evaluation(
            task_id=episode.task_id,
            run=episode.trial,
            success=episode.success,
            passed_tests=int(episode.success),
            total_tests=1,
            turns=episode.turns,
            ended=ENDS.get(episode.ended, EpisodeEnd.SERVER_ERROR),
            failures=(() if episode.failure is None else (episode.failure,)) + ((LOST,) if lost else ()),
        ),
        usage=Usage(
            calls=episode.turns,
            requests=episode.turns,
            input_tokens=episode.agent.input,
            output_tokens=episode.agent.output,
            dollars=_dollars(price, episode.agent),
        ),
        seconds=episode.seconds,
        error=episode.failure if lost else None,
    )


def summary(
    episodes: Sequence[Episode], judge: Tokens, policy_model: str, config: DracoConfig, commit: str
) -> dict[str, Any]:
    """Costs and failures of one measurement, as JSON.

    Args:
        episodes: every planned one.
        judge: tokens of all judge calls.
        policy_model: model name for the price.
        commit: of tau2-bench, which decides how episodes are graded.
    """
    tau = config.tau_bench
    used = {
        "agent": (policy_model, sum((episode.agent for episode in episodes), start=Tokens())),
        "user": (tau.user.model, sum((episode.user for episode in episodes), start=Tokens())),
        "judge": (tau.judge.model, judge),
    }
    failures = Counter(episode.failure for episode in episodes if episode.failure is not None)
    return {
        "episodes": len(episodes),
        "successes": sum(episode.success for episode in episodes),
        "infrastructure_errors": sum(episode.ended == INFRASTRUCTURE for episode in episodes),
        "missing": failures[MISSING],
        "failures": dict(failures.most_common()),
        "costs": {
            role: {
                "model": model,
                "input_tokens": tokens.input,
                "output_tokens": tokens.output,
                "dollars": _dollars(find_price(model, config.judge.prices), tokens),
            }
            for role, (model, tokens) in used.items()
        },
        "trials": tau.trials,
        "tau2_commit": commit,
    }


def _dollars(price: Price | None, tokens: Tokens) -> float | None:
    return None if price is None else price_of(price, tokens.input, 0, tokens.output)


class Measured(BaseModel):
    """The fields of `summary` that the tables show."""

    trials: Several
    episodes: Several
    successes: Count
    failures: dict[OneLine, Count]
    costs: Annotated[dict[Literal["agent", "user", "judge"], RoleCost], Field(min_length=3)]

    @model_validator(mode="after")
    def _adds_up(self) -> Measured:
        if self.successes + sum(self.failures.values()) != self.episodes:
            raise ValueError(f"successes and failures do not add up to {self.episodes} episodes")
        return self


class _Summary(BaseModel):
    measurements: Annotated[dict[str, Measured], Field(min_length=1)]


def read_summaries(directory: Path) -> list[Measured]:
    """Read the summary of every measurement of a finished evaluation.

    Raises:
        ConfigError: the evaluation is not finished, or not on τ-bench.
        DamagedRun: ``summary.json`` cannot be read.
    """
    file = directory / "summary.json"
    if not os.path.lexists(file):
        raise ConfigError(
            f"{directory}: no finished evaluation on tau-bench; expected summary.json; `draco tau run` makes it"
        )
    try:
        return list(_Summary.model_validate_json(read_text(file), strict=True).measurements.values())
    except ValidationError as error:
        raise damaged(file, error) from None


def cost_by_role_table(summaries: Mapping[str, Sequence[Measured]]) -> Table:
    """Tokens and dollars of one pass over the tasks, by role, and dollars of all roles together."""
    names = (("input tokens", 0), ("output tokens", 0), ("dollars", 2))
    rows: list[tuple[str, tuple[Cell | None, ...]]] = []
    for label, measured in summaries.items():
        passes = sum(each.trials for each in measured)
        values: list[float | None] = []
        for role in ROLES:
            costs = [each.costs[role] for each in measured]  # type: ignore[index]
            values += [sum(each.input_tokens for each in costs), sum(each.output_tokens for each in costs)]
            values.append(sum_known(each.dollars for each in costs))
        values.append(sum_known(values[2::3]))
        rows.append((label, tuple(None if value is None else Cell(value / passes) for value in values)))
    return Table(
        name="tau-costs",
        title="τ-bench banking: tokens and dollars of one pass over the tasks, by role",
        row_header="Setting",
        columns=(
            *(Column((role, name), digits) for role in ROLES for name, digits in names),
            Column(("together", "dollars"), 2, "low"),
        ),
        rows=tuple(rows),
        notes=("Attempts that tau2 repeated after an exception are not in its records; -: no price is known.",),
    )


def failure_table(summaries: Mapping[str, Sequence[Measured]]) -> Table:
    """Failures by kind, in % of all planned episodes; together with the successes they add up to 100."""
    totals: Counter[str] = Counter()
    for each in (each for measured in summaries.values() for each in measured):
        totals.update(each.failures)
    kinds = [kind for kind, _ in totals.most_common()]
    rows: list[tuple[str, tuple[Cell | None, ...]]] = []
    for label, measured in summaries.items():
        episodes = sum(each.episodes for each in measured)
        counts = [sum(each.successes for each in measured)]
        counts += [sum(each.failures.get(kind, 0) for each in measured) for kind in kinds]
        rows.append((label, tuple(Cell(100 * count / episodes) for count in counts)))
    return Table(
        name="tau-failures",
        title="τ-bench banking: how episodes ended (% of all planned)",
        row_header="Setting",
        columns=tuple(Column((name,)) for name in ("success", *kinds)),
        rows=tuple(rows),
        notes=("DB, ACTION, NL_ASSERTION: failed parts of the reward; missing: tau2 has no record of the episode.",),
    )
