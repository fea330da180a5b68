"""The trajectories that evaluated rollouts leave in an evaluation directory, laid out as in a run directory.

::

    tables/evaluation_trajectories/<measurement>/<task>-<run>.parquet
    tables/evaluation_steps/<measurement>/<task>-<run>.parquet
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from draco_ray.config.file_names import file_name
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.records import Trajectory
from draco_ray.runs import rows
from draco_ray.runs.directory import read_table
from draco_ray.runs.schema import TABLES
from draco_ray.runs.store import write_parquet

_ROWS = {"evaluation_trajectories": rows.trajectory_rows, "evaluation_steps": rows.step_rows}


def keep_trajectory(directory: EvaluationDirectory, measurement: str, trajectory: Trajectory) -> None:
    """Write one; ``training_step`` is the version of the policy, ``rollout`` the run."""
    for table, made in _ROWS.items():
        found = made(trajectory.policy_version, trajectory)
        name = file_name(f"{trajectory.task_id}-{trajectory.rollout}")
        path = _folder(directory, table, measurement) / f"{name}.parquet"
        write_parquet(path, pa.Table.from_pylist(found, schema=TABLES[table]))


def read_trajectories(directory: EvaluationDirectory, measurement: str, table: str = "evaluation_steps") -> pa.Table:
    """Either table of a measurement, as far as it has been played.

    Raises:
        DamagedRun: one of its files cannot be read.
    """
    files = sorted(_folder(directory, table, measurement).glob("*.parquet"))
    return pa.concat_tables([TABLES[table].empty_table(), *(read_table(file, table) for file in files)])


def _folder(directory: EvaluationDirectory, table: str, measurement: str) -> Path:
    return directory.path / "tables" / table / measurement
