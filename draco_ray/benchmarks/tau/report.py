"""What τ-bench adds to the other benchmarks' tables: costs of agent, user simulator and judge, failures by kind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from draco_ray.benchmarks.tau.episodes import INFRASTRUCTURE, MISSING, Episode, Tokens
from draco_ray.config.schema import DracoConfig, Price
from draco_ray.errors import ConfigError
from draco_ray.judging.pricing import find_price, price_of
from draco_ray.lab.evaluation.rendering import Cell, Column, Table
from draco_ray.lab.evaluation.results import Count, OneLine, RoleCost, RolloutResult, Several
from draco_ray.lab.evaluation.tables import (
    Settings,
    consistency_table,
    efficiency_table,
    frontier_table,
    main_table,
)
from draco_ray.records import LOST, EpisodeEnd, Evaluation, Usage
from draco_ray.runs.directory import damaged, read_text


class _Measured(BaseModel):
    """What the tables read of `summary`."""

    trials: Several
    episodes: Several
    successes: Count
    failures: dict[OneLine, Count]
    costs: Annotated[dict[Literal["agent", "user", "judge"], RoleCost], Field(min_length=3)]

    @model_validator(mode="after")
    def _adds_up(self) -> _Measured:
        if self.successes + sum(self.failures.values()) != self.episodes:
            raise ValueError(f"successes and failures are not {self.episodes} together")
        return self


class _Summary(BaseModel):
    measurements: Annotated[dict[str, _Measured], Field(min_length=1)]


ROLES = ("agent", "user", "judge")
ENDS = {
    "user_stop": EpisodeEnd.FINISHED,
    "agent_stop": EpisodeEnd.FINISHED,
    "max_steps": EpisodeEnd.TURN_LIMIT,
    "context_window_exceeded": EpisodeEnd.RESPONSE_LIMIT,
}
"""The other endings count as server errors."""


def rollout_result(episode: Episode, price: Price | None) -> RolloutResult:
    """An episode as every benchmark's results are kept; ``price`` is the policy's."""
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
    """What one measurement took and how it failed, as JSON.

    Args:
        episodes: every planned one.
        judge: tokens of all judge calls.
        policy_model: for its price.
        commit: of tau2-bench, which decides how episodes are graded.
    """
    tokens = {
        "agent": sum((episode.agent for episode in episodes), start=Tokens()),
        "user": sum((episode.user for episode in episodes), start=Tokens()),
        "judge": judge,
    }
    models = {"agent": policy_model, "user": config.tau_bench.user.model, "judge": config.tau_bench.judge.model}
    failures = Counter(episode.failure for episode in episodes if episode.failure is not None)
    return {
        "episodes": len(episodes),
        "successes": sum(episode.success for episode in episodes),
        "infrastructure_errors": sum(episode.ended == INFRASTRUCTURE for episode in episodes),
        "missing": failures[MISSING],
        "failures": dict(failures.most_common()),
        "costs": {
            role: {
                "model": models[role],
                "input_tokens": tokens[role].input,
                "output_tokens": tokens[role].output,
                "dollars": _dollars(find_price(models[role], config.judge.prices), tokens[role]),
            }
            for role in ROLES
        },
        "trials": config.tau_bench.trials,
        "tau2_commit": commit,
    }


def tau_tables(settings: Settings, summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """SR at p^k, pass@k, turns and SR against cost as for every benchmark, then costs by role and failures by kind.

    Args:
        settings: label -> split -> result.
        summaries: label -> `summary` of each measurement.
    """
    return [
        main_table(settings),
        consistency_table(settings),
        efficiency_table(settings),
        frontier_table(settings),
        cost_by_role_table(summaries),
        failure_table(summaries),
    ]


def cost_by_role_table(summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Tokens and dollars of one pass over the split, by role, and the dollars of all roles together."""
    names = (("input tokens", 0), ("output tokens", 0), ("dollars", 2))
    rows: list[tuple[str, tuple[Cell | None, ...]]] = []
    for label, measured in summaries.items():
        passes = sum(each["trials"] for each in measured)
        cells: list[Cell | None] = []
        for role in ROLES:
            for key in ("input_tokens", "output_tokens", "dollars"):
                values = [each["costs"][role][key] for each in measured]
                cells.append(None if None in values else Cell(sum(values) / passes))
        dollars = [cell.mean for cell in cells[2::3] if cell is not None]
        cells.append(Cell(sum(dollars)) if len(dollars) == len(ROLES) else None)
        rows.append((label, tuple(cells)))
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


def failure_table(summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Failures by kind, in % of all episodes; the columns add up to 100 with the successes."""
    totals: Counter[str] = Counter()
    for measured in summaries.values():
        for each in measured:
            totals.update(each["failures"])
    kinds = [kind for kind, _ in totals.most_common()]
    rows: list[tuple[str, tuple[Cell | None, ...]]] = []
    for label, measured in summaries.items():
        episodes = sum(each["episodes"] for each in measured)
        counts = [sum(each["successes"] for each in measured)]
        counts += [sum(each["failures"].get(kind, 0) for each in measured) for kind in kinds]
        rows.append((label, tuple(Cell(100 * count / episodes) for count in counts)))
    return Table(
        name="tau-failures",
        title="τ-bench banking: how episodes ended (% of all planned)",
        row_header="Setting",
        columns=tuple(Column((name,)) for name in ("success", *kinds)),
        rows=tuple(rows),
        notes=("DB, ACTION, NL_ASSERTION: parts of the reward that failed; missing: tau2 has no record of it.",),
    )


def read_summaries(directory: Path) -> list[dict[str, Any]]:
    """The summaries of a finished evaluation, one a measurement.

    Raises:
        ConfigError: it has none.
        DamagedRun: it cannot be read.
    """
    file = directory / "summary.json"
    if not os.path.lexists(file):
        raise ConfigError(
            f"{directory}: no finished evaluation on tau-bench; expected summary.json; `draco tau run` makes it"
        )
    try:
        found = _Summary.model_validate_json(read_text(file), strict=True)
    except ValidationError as error:
        raise damaged(file, error) from None
    return [each.model_dump() for each in found.measurements.values()]


def _dollars(price: Price | None, tokens: Tokens) -> float | None:
    return None if price is None else price_of(price, tokens.input, 0, tokens.output)
