"""What each role of a simulated conversation took: agent, user simulator and judge of τ-bench.

A rollout's own result has the agent's part alone. An evaluation's ``summary.json`` has all of them by measurement,
where the benchmark has roles: ``{"measurements": {NAME: {"costs": {ROLE: ...}}}}``.
"""

from __future__ import annotations

import os

from pydantic import BaseModel, ValidationError

from draco_ray.lab.evaluation.results import Amount, Count, EvaluationDirectory
from draco_ray.runs.directory import damaged, read_text


class RoleCost(BaseModel):
    """One role's part of all rollouts of a measurement."""

    input_tokens: Count
    output_tokens: Count
    dollars: Amount | None
    """None where no price is known."""


class _Measured(BaseModel):
    costs: dict[str, RoleCost] = {}


class _Summary(BaseModel):
    measurements: dict[str, _Measured] = {}


def role_costs(directory: EvaluationDirectory) -> dict[str, dict[str, RoleCost]]:
    """Measurement -> role -> what it took; a measurement of a benchmark without roles, or unfinished, is not there.

    Raises:
        DamagedRun: ``summary.json`` cannot be read.
    """
    file = directory.path / "summary.json"
    if not os.path.lexists(file):
        return {}
    try:
        found = _Summary.model_validate_json(read_text(file), strict=True)
    except ValidationError as error:
        raise damaged(file, error) from None
    return {name: measured.costs for name, measured in found.measurements.items() if measured.costs}


def together(costs: dict[str, RoleCost]) -> float | None:
    """Dollars of all roles; None where that of one is not known."""
    dollars = [cost.dollars for cost in costs.values()]
    known = [each for each in dollars if each is not None]
    return sum(known) if len(known) == len(dollars) else None
