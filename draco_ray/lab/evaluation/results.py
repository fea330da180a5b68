"""The evaluation directory: the plan of an evaluation, and the rollouts evaluated so far, one line each.

::

    evaluation.json               what is measured: benchmark, split, tasks, runs, policy, settings
    results/<measurement>.jsonl   one line per finished (task, run); a measurement is one checkpoint, or the one policy
    summary.json                  rates and costs, written when all rollouts are finished
    tables/                       trajectories, laid out as in a run directory (see `write_trajectory`)
    appworld/                     AppWorld's own layout of the outputs (see `draco_ray.lab.evaluation.appworld`)

Lines are appended as rollouts finish, so an interrupted evaluation continues where it stopped. Any benchmark may use
this directory; if its tasks have no scenarios, it sets ``scenarios: false``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from draco_ray.config.file_names import FileName, validate_file_name
from draco_ray.config.keys import flat
from draco_ray.errors import ConfigError, TooManyLost
from draco_ray.lab.files import write_atomically
from draco_ray.records import Evaluation, Trajectory, Usage
from draco_ray.runs import rows
from draco_ray.runs.directory import damaged, read_bytes, read_table, read_text
from draco_ray.runs.schema import TABLE_SCHEMAS
from draco_ray.runs.store import write_parquet

MAX_AMOUNT = 1e15
"""Largest count, duration or cost that is accepted from a file."""
Amount = Annotated[float, Field(ge=0, le=MAX_AMOUNT, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MAX_AMOUNT)]
Several = Annotated[int, Field(ge=1, le=MAX_AMOUNT)]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


OneLine = Annotated[str, AfterValidator(_printable)]
"""Text for printing: control characters are replaced by spaces."""


def _plausible(record: Any) -> Any:
    """Return the record if all its numbers are plausible. Raises ValueError otherwise."""
    for field in fields(record):
        number = getattr(record, field.name)
        least = -MAX_AMOUNT if field.name in ("reward", "run") else 0
        if isinstance(number, int | float) and not least <= number <= MAX_AMOUNT:
            raise ValueError(f"{field.name} is {number}")
    if isinstance(record, Evaluation) and record.passed_tests > record.total_tests:
        raise ValueError(f"passed_tests is {record.passed_tests}, more than total_tests={record.total_tests}")
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """One finished (task, run): the benchmark's verdict, and the cost including attempts that were repeated."""

    evaluation: Annotated[Evaluation, AfterValidator(_plausible)]
    usage: Annotated[Usage, AfterValidator(_plausible)]
    seconds: Amount
    attempts: Count = 1
    error: str | None = None
    """Why the last attempt of a lost rollout failed; None if the rollout is not lost."""


class EvaluationPlan(BaseModel):
    """What an evaluation directory measures; a different plan is a different evaluation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: OneLine
    split: FileName
    label: OneLine
    """The setting's name in tables."""
    policy: OneLine
    """The policy's name or folder, as the user gave it. The folder may be renamed before the evaluation is continued:
    policies are compared by the fingerprints of their weights in ``settings``."""
    runs: Several
    measurements: Annotated[tuple[FileName, ...], Field(min_length=1)]
    """Checkpoints (``step00090``), or one name for a policy without checkpoints."""
    tasks: dict[FileName, Count | None]
    """Task id -> difficulty (1 easy .. 3 hard), None if the benchmark has no difficulties."""
    world: str = ""
    """Digest of the tasks; needed since the same id is a different task in another generated world."""
    generated: bool = False
    """Whether the world was made by `draco sandbox build`."""
    split_size: Several | None = None
    """Number of tasks in the whole split (``tasks`` may be a part); None if not recorded."""
    scenarios: bool = True
    """Whether tasks have scenarios (SGC, clustered intervals)."""
    settings: dict[str, Any] = {}
    """Dotted configuration keys and fingerprints that affect the outcome."""

    @property
    def whole_split(self) -> int | None:
        """Number of tasks in the whole split; the published number unless the world is generated; None if unknown."""
        published = None if self.generated else OFFICIAL_TASKS.get((self.benchmark, self.split))
        return published or self.split_size

    @property
    def weights(self) -> tuple[str, ...]:
        """Fingerprints of the adapters, or of the model if there are none; empty for an API model."""
        adapters = [key for key in self.settings if key.startswith(("adapter fingerprint of ", "weights."))]
        keys = [key for key in adapters if self.settings[key]] or ["model fingerprint"]
        return tuple(str(self.settings[key]) for key in sorted(keys) if self.settings.get(key))


OFFICIAL_TASKS = {
    ("appworld", "train"): 90,
    ("appworld", "dev"): 57,
    ("appworld", "test_normal"): 168,
    ("appworld", "test_challenge"): 417,
    ("tau-banking", "full"): 97,
    ("tau-banking", "part"): 97,
}
"""(benchmark, split) -> published number of tasks."""

PROTOCOL = (
    *(f"agent.{name}" for name in ("max_turns", "max_response_length", "max_turn_tokens", "max_output_characters")),
    *(f"environment.{name}" for name in ("cell_timeout_seconds", "max_memory_mib", "max_output_bytes")),
    *("max_turns", "retrieval", "episode_timeout_seconds"),
    *("user.model", "user.temperature", "judge.model", "judge.temperature", "embedder.model"),
)
"""Settings of AppWorld and τ-bench evaluations that should be the same for every policy in one table."""

_LINE: TypeAdapter[RolloutResult] = TypeAdapter(RolloutResult)


class EvaluationDirectory:
    """One evaluation on disk. A single process writes to it."""

    def __init__(self, path: Path, plan: EvaluationPlan) -> None:
        self.path = path
        self.plan = plan

    @classmethod
    def open(cls, path: Path) -> EvaluationDirectory:
        """An existing evaluation.

        Raises:
            ConfigError: ``path`` contains no evaluation, or one of an incompatible version of this program.
            DamagedRun: its plan cannot be read.
        """
        file = path / "evaluation.json"
        if not os.path.lexists(file):
            raise ConfigError(
                f"{path}: not an evaluation directory (it has no evaluation.json); create one with `draco evaluate`"
            )
        try:
            return cls(path, EvaluationPlan.model_validate_json(read_text(file), strict=True))
        except ValidationError as error:
            if {problem["type"] for problem in error.errors()} <= {"missing", "extra_forbidden"}:
                words = " ".join(str(error).split())[:300]
                raise ConfigError(f"{file}: written by another version of draco-ray: {words}") from None
            raise damaged(file, error) from None

    @classmethod
    def find(cls, path: Path, plan: EvaluationPlan) -> EvaluationDirectory | None:
        """The evaluation of that plan, finished or not; None if none was begun.

        Raises:
            ConfigError: ``path`` contains another evaluation (the message names the first difference).
        """
        if not os.path.lexists(path / "evaluation.json"):
            return None
        found = cls.open(path)
        if difference := plan_difference(found.plan, plan):
            raise ConfigError(f"evaluation {path}: {difference}; repeat the same command, or choose another --out")
        return found

    @classmethod
    def begin(cls, path: Path, plan: EvaluationPlan) -> EvaluationDirectory:
        """Start an evaluation, or continue one with the same plan.

        Raises:
            ConfigError: as `find`, or ``path`` cannot be written.
        """
        found = cls.find(path, plan)
        try:
            (path / "results").mkdir(parents=True, exist_ok=True)
            if found is None:
                write_atomically(path / "evaluation.json", plan.model_dump_json(indent=1))
        except OSError as error:
            raise ConfigError(f"evaluation {path}: cannot be written: {error.filename}: {error.strerror}") from None
        return found or cls(path, plan)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the directory against other processes during the block, and truncate an incomplete last line.

        Raises:
            ConfigError: another process has the lock.
            DamagedRun: the lock file or a results file is not a regular file.
        """
        file = self.path / ".lock"
        _content(file)
        with file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"evaluation {self.path}: another process is using it; wait for that process or choose another "
                    "--out"
                ) from None
            self.mend()
            yield

    def add(self, measurement: str, result: RolloutResult) -> None:
        """Append one finished rollout."""
        with self._file(measurement).open("ab") as file:
            file.write(_LINE.dump_json(result) + b"\n")

    def results(self, measurement: str) -> list[RolloutResult]:
        """The finished rollouts of a measurement, in the order they finished.

        Raises:
            DamagedRun: a line is invalid, or its rollout is not planned or occurs twice.
        """
        file = self._file(measurement)
        results: dict[tuple[str, int], RolloutResult] = {}
        # The last item is empty, or a line that was incomplete when its process was killed.
        for number, line in enumerate(_content(file).split(b"\n")[:-1], start=1):
            try:
                result = _LINE.validate_json(line, strict=True)
            except ValidationError as error:
                raise damaged(file, f"line {number}: {error}") from None
            task, run = rollout = result.evaluation.task_id, result.evaluation.run
            problem = None
            if rollout in results:
                problem = "occurs twice"
            elif task not in self.plan.tasks or not 0 <= run < self.plan.runs:
                problem = "is not in the plan"
            elif result.error is not None and not result.evaluation.lost:
                problem = "has an error but is not marked as lost"
            if problem is not None:
                raise damaged(file, f"line {number}: {task!r}, run {run} {problem}")
            results[rollout] = result
        return list(results.values())

    def drop_lost(self) -> int:
        """Remove the lost rollouts and their usage, so that they count as missing; returns their number.

        Call it while the directory is claimed.
        """
        lost = len(self.lost())
        for measurement in self.plan.measurements if lost else ():
            kept = [result for result in self.results(measurement) if result.error is None]
            write_atomically(
                self._file(measurement), "".join(f"{_LINE.dump_json(result).decode()}\n" for result in kept)
            )
        return lost

    def lost(self) -> list[RolloutResult]:
        """The rollouts whose every attempt crashed; each counts as a failure."""
        results = [result for measurement in self.plan.measurements for result in self.results(measurement)]
        return [result for result in results if result.error is not None]

    def check_lost(self, max_share: float) -> None:
        """Stop if too many rollouts are lost.

        Args:
            max_share: allowed share of all planned rollouts, in [0, 1].

        Raises:
            TooManyLost: a larger share is lost.
        """
        lost = self.lost()
        if len(lost) > max_share * self.total:
            raise TooManyLost(
                f"evaluation {self.path}: {len(lost)} of {self.total} rollouts were lost, more than "
                f"max_lost_share={max_share:g} (the last: {lost[-1].error}); {self.finished()} are kept; fix the "
                "cause, then add --retry-errors to the same command to repeat the lost rollouts and continue"
            )

    def mend(self) -> None:
        """Truncate an incomplete last line, left by a killed process; call it before the first `add`."""
        for measurement in self.plan.measurements:
            file = self._file(measurement)
            if (content := _content(file)) and not content.endswith(b"\n"):
                os.truncate(file, content.rfind(b"\n") + 1)

    def missing(self, measurement: str) -> list[tuple[str, int]]:
        """(task, run) pairs of the plan that have not finished, all of run 0 first."""
        done = {(result.evaluation.task_id, result.evaluation.run) for result in self.results(measurement)}
        pairs = [(task, run) for run in range(self.plan.runs) for task in self.plan.tasks]
        return [pair for pair in pairs if pair not in done]

    def finished(self) -> int:
        """Number of finished rollouts, of ``total``."""
        return sum(len(self.results(measurement)) for measurement in self.plan.measurements)

    @property
    def total(self) -> int:
        """Number of planned rollouts."""
        return len(self.plan.measurements) * len(self.plan.tasks) * self.plan.runs

    def complete_results(self) -> dict[str, list[RolloutResult]]:
        """Measurement -> every rollout of the plan.

        Raises:
            ConfigError: rollouts are missing, so rates would cover only a part of the tasks.
        """
        if (finished := self.finished()) < self.total:
            raise ConfigError(
                f"evaluation {self.path}: {finished} of {self.total} rollouts are finished; run its `draco evaluate` "
                "command again to finish the rest"
            )
        return {measurement: self.results(measurement) for measurement in self.plan.measurements}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=1))

    def write_trajectory(self, measurement: str, trajectory: Trajectory) -> None:
        """Write a trajectory to ``tables/<table>/<measurement>/<task>-<run>.parquet``.

        Columns are as in a run directory, with the policy version as ``training_step`` and the run as ``rollout``.
        """
        name = validate_file_name(f"{trajectory.task_id}-{trajectory.rollout}")
        for table, to_rows in _ROWS.items():
            found = to_rows(trajectory.policy_version, trajectory)
            path = self.path / "tables" / table / measurement / f"{name}.parquet"
            write_parquet(path, pa.Table.from_pylist(found, schema=TABLE_SCHEMAS[table]))

    def trajectories(self, measurement: str, table: str = "evaluation_steps") -> pa.Table:
        """``evaluation_steps`` or ``evaluation_trajectories`` of a measurement's played rollouts.

        Raises:
            DamagedRun: a table file cannot be read.
        """
        files = sorted((self.path / "tables" / table / measurement).glob("*.parquet"))
        return pa.concat_tables([TABLE_SCHEMAS[table].empty_table(), *(read_table(file, table) for file in files)])

    def _file(self, measurement: str) -> Path:
        return self.path / "results" / f"{measurement}.jsonl"


_ROWS = {"evaluation_trajectories": rows.trajectory_rows, "evaluation_steps": rows.step_rows}


class RoleCost(BaseModel):
    """Calls and cost of one role (agent, user simulator or judge of τ-bench) in a measurement."""

    input_tokens: Count
    output_tokens: Count
    dollars: Amount | None
    """Cost in dollars; None if no price is known."""


class _Measured(BaseModel):
    costs: dict[str, RoleCost] = {}


class _Summary(BaseModel):
    measurements: dict[str, _Measured] = {}


def role_costs(directory: EvaluationDirectory) -> dict[str, dict[str, RoleCost]]:
    """Measurement -> role -> cost, from ``summary.json``; measurements without roles are left out.

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


def sum_or_none(amounts: Iterable[float | None]) -> float | None:
    """The sum; None if any amount is None."""
    listed = list(amounts)
    known = [amount for amount in listed if amount is not None]
    return sum(known) if len(known) == len(listed) else None


def plan_difference(before: EvaluationPlan, now: EvaluationPlan) -> str | None:
    """The first difference of two plans, for an error message; None if they are equal."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    # Plans are compared by fingerprints, tasks and world digest, not by paths, which may change.
    old, new = ({**each, **each["settings"]} for each in (old, new))
    for name in dict.fromkeys((*EvaluationPlan.model_fields, *sorted(old | new))):
        if name in ("settings", "policy", "generated", "split_size") or old.get(name) == new.get(name):
            continue
        if name in ("tasks", "world"):
            return f"the {name} of the split have changed since the evaluation began ({len(before.tasks)} tasks then)"
        return f"{name} was {old.get(name)!r}, but is {new.get(name)!r} in this command"
    return None


def protocol_differences(plans: Iterable[EvaluationPlan]) -> list[str]:
    """Limits and simulators that differ between plans, e.g. ``agent.max_turns 50 or 100``."""
    found: dict[str, set[str]] = {}
    for plan in plans:
        # The settings of τ-bench are nested.
        settings = dict(flat(plan.settings))
        for key in PROTOCOL:
            if key in settings:
                found.setdefault(key, set()).add("none" if settings[key] is None else str(settings[key]))
    return [
        f"{key} {' or '.join(sorted(values, key=lambda value: (len(value), value)))}"
        for key, values in found.items()
        if len(values) > 1
    ]


def _content(file: Path) -> bytes:
    """Bytes of a file, empty if it does not exist; raises DamagedRun if it cannot be read."""
    return read_bytes(file) if os.path.lexists(file) else b""
