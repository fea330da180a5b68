"""The evaluation directory: rollouts evaluated so far, one line each, and what they are evaluations of.

::

    evaluation.json               what is measured: benchmark, split, tasks, runs, policy, settings
    results/<measurement>.jsonl   one line per finished (task, run); a measurement is one checkpoint, or the one policy
    summary.json                  rates and costs, once everything is there
    tables/                       the rollouts themselves (see `draco_ray.lab.evaluation.trajectories`)
    appworld/                     AppWorld's own layout of the outputs (see `draco_ray.lab.evaluation.appworld_outputs`)

Lines are appended as rollouts finish, so an interrupted evaluation goes on where it stopped. Any benchmark may use it:
a benchmark whose tasks form no scenarios says so by ``scenarios: false``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from draco_ray.config.file_names import FileName
from draco_ray.errors import ConfigError, TooManyLost
from draco_ray.records import Evaluation, Usage
from draco_ray.runs.directory import damaged, read_bytes, read_text

MOST = 1e15
"""Of a count, of seconds or of dollars: what is larger is none, and its sums could not be shown."""
Amount = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Several = Annotated[int, Field(ge=1, le=MOST)]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


OneLine = Annotated[str, AfterValidator(_printable)]
"""Words that tables repeat: a received file might begin lines in them, or command the terminal."""


def _plausible(usage: Usage) -> Usage:
    """``usage`` if it can be one. Raises ValueError."""
    for field in fields(usage):
        amount = getattr(usage, field.name)
        if amount is not None and not 0 <= amount <= MOST:
            raise ValueError(f"{field.name} is {amount}")
    return usage


def _counted(evaluation: Evaluation) -> Evaluation:
    """``evaluation`` if its counts can be any. Raises ValueError."""
    for name, most in (("turns", MOST), ("total_tests", MOST), ("passed_tests", evaluation.total_tests)):
        if not 0 <= (count := getattr(evaluation, name)) <= most:
            raise ValueError(f"{name} is {count}")
    if evaluation.reward is not None and not abs(evaluation.reward) <= MOST:
        raise ValueError(f"reward is {evaluation.reward}")
    return evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """One finished (task, run): the benchmark's verdict, and what it took, attempts that were replaced included."""

    evaluation: Annotated[Evaluation, AfterValidator(_counted)]
    usage: Annotated[Usage, AfterValidator(_plausible)]
    seconds: Amount
    attempts: Count = 1
    error: str | None = None
    """Why the last attempt was lost, of a rollout whose every attempt was; None otherwise."""


class Plan(BaseModel):
    """What an evaluation directory measures. Two plans that differ are two evaluations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: OneLine
    split: FileName
    label: OneLine
    """The setting's name in tables."""
    policy: OneLine
    """What the user named; which weights that were is in ``settings``, so a folder may be named in another way."""
    runs: Several
    measurements: Annotated[tuple[FileName, ...], Field(min_length=1)]
    """Checkpoints (``step00090``), or one name for a policy without any."""
    tasks: dict[FileName, Count | None]
    """Task id -> difficulty (1 easy .. 3 hard), None where the benchmark has none."""
    world: str = ""
    """Digest of the tasks: the same ids in two generated worlds are different tasks."""
    generated: bool = False
    """Whether the world was made by `draco sandbox build`, and is none of AppWorld's."""
    split_size: Several | None = None
    """Tasks of the whole split, of which ``tasks`` may be a part; None where that was not recorded."""
    scenarios: bool = True
    """Whether tasks have scenarios (SGC, clustered intervals)."""
    settings: dict[str, Any] = {}
    """Config keys, dotted, and fingerprints that decide the outcome."""

    @property
    def whole_split(self) -> int | None:
        """Tasks of the whole split, as published unless the world is generated; None where nobody knows."""
        published = None if self.generated else OFFICIAL_TASKS.get((self.benchmark, self.split))
        return published or self.split_size

    @property
    def weights(self) -> tuple[str, ...]:
        """Digests of what was trained: of the adapters, else of the model; empty for an API model."""
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
"""Benchmark and split -> tasks of the split as published."""

PROTOCOL = (
    *(f"agent.{name}" for name in ("max_turns", "max_response_length", "max_turn_tokens", "max_output_characters")),
    *(f"environment.{name}" for name in ("cell_timeout_seconds", "max_memory_mib", "max_output_bytes")),
    *("max_turns", "retrieval", "episode_timeout_seconds"),
    *("user.model", "user.temperature", "judge.model", "judge.temperature", "embedder.model"),
)
"""Settings of AppWorld and τ-bench evaluations that every policy in one table should have met alike."""

_LINE: TypeAdapter[RolloutResult] = TypeAdapter(RolloutResult)


class EvaluationDirectory:
    """One evaluation on disk. A single process writes to it."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.plan = plan

    @classmethod
    def open(cls, path: Path) -> EvaluationDirectory:
        """An existing evaluation.

        Raises:
            ConfigError: ``path`` holds none, or one of another version of this program.
            DamagedRun: its plan cannot be read.
        """
        file = path / "evaluation.json"
        if not os.path.lexists(file):
            raise ConfigError(
                f"{path}: not an evaluation directory (it has no evaluation.json); `draco evaluate` makes one"
            )
        try:
            return cls(path, Plan.model_validate_json(read_text(file), strict=True))
        except ValidationError as error:
            kinds = {problem["type"] for problem in error.errors()}
            if kinds <= {"missing", "extra_forbidden"}:
                raise ConfigError(
                    f"{file}: of another version of this program: {' '.join(str(error).split())[:300]}"
                ) from None
            raise damaged(file, error) from None

    @classmethod
    def begin(cls, path: Path, plan: Plan) -> EvaluationDirectory:
        """Start an evaluation, or go on with one of the same plan.

        Raises:
            ConfigError: another evaluation is there (the message names the first thing that differs), or ``path``
                cannot be written.
        """
        if (found := cls.found(path, plan)) is not None:
            plan = found.plan
        try:
            (path / "results").mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(path / "evaluation.json"):
                _write_whole(path / "evaluation.json", plan.model_dump_json(indent=1))
        except OSError as error:
            raise ConfigError(f"evaluation {path}: cannot be written: {error.filename}: {error.strerror}") from None
        return cls(path, plan)

    @classmethod
    def found(cls, path: Path, plan: Plan) -> EvaluationDirectory | None:
        """The evaluation of that plan, finished or not; None where none was begun.

        Raises:
            ConfigError: another evaluation is there (the message names the first thing that differs).
        """
        if not os.path.lexists(path / "evaluation.json"):
            return None
        found = cls.open(path)
        if difference := plan_difference(found.plan, plan):
            raise ConfigError(f"evaluation {path}: {difference}; expected the same command; choose another --out")
        return found

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes from adding to it for as long as the block runs, and mend what a killed one left.

        Raises:
            ConfigError: another process is at it.
            DamagedRun: its lock or the results are no files of an evaluation.
        """
        file = self.path / ".lock"
        if os.path.lexists(file):
            read_bytes(file)
        with file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"evaluation {self.path}: another process is at it; wait for it or choose another --out"
                ) from None
            self.mend()
            yield

    def add(self, measurement: str, result: RolloutResult) -> None:
        """Keep one finished rollout."""
        with self._file(measurement).open("ab") as file:
            file.write(_LINE.dump_json(result) + b"\n")

    def results(self, measurement: str) -> list[RolloutResult]:
        """The finished rollouts of a measurement, in the order they finished.

        Raises:
            DamagedRun: a line is none, or of a rollout that is not planned or there already.
        """
        results: list[RolloutResult] = []
        seen: set[tuple[str, int]] = set()
        for number, line in enumerate(self._lines(measurement), start=1):
            try:
                result = _LINE.validate_json(line, strict=True)
            except ValidationError as error:
                raise damaged(self._file(measurement), f"line {number}: {error}") from None
            rollout = result.evaluation.task_id, result.evaluation.run
            what = None
            if rollout in seen:
                what = "is there twice"
            elif rollout[0] not in self.plan.tasks or not 0 <= rollout[1] < self.plan.runs:
                what = "is none of the plan's"
            elif result.error is not None and not result.evaluation.lost:
                what = "has an error but is not marked as lost"
            if what is not None:
                raise damaged(self._file(measurement), f"line {number}: {rollout[0]!r}, run {rollout[1]} {what}")
            seen.add(rollout)
            results.append(result)
        return results

    def drop_lost(self) -> int:
        """Forget the rollouts whose every attempt crashed, so that they are missing again; returns how many they were.

        Their usage is forgotten with them. Call it while the directory is claimed.
        """
        dropped = 0
        for measurement in self.plan.measurements:
            results = self.results(measurement)
            kept = [result for result in results if result.error is None]
            if len(kept) < len(results):
                lines = "".join(_LINE.dump_json(result).decode() + "\n" for result in kept)
                _write_whole(self._file(measurement), lines)
                dropped += len(results) - len(kept)
        return dropped

    def lost(self) -> list[RolloutResult]:
        """The rollouts whose every attempt crashed; each counts as a failure."""
        results = [result for measurement in self.plan.measurements for result in self.results(measurement)]
        return [result for result in results if result.error is not None]

    def check_lost(self, max_share: float) -> None:
        """Stop where more rollouts are lost than may be.

        Args:
            max_share: of all rollouts that the plan asks for, in [0, 1].

        Raises:
            TooManyLost: more are.
        """
        lost = self.lost()
        if len(lost) > max_share * self.total:
            raise TooManyLost(
                f"evaluation {self.path}: {len(lost)} of {self.total} rollouts were lost, more than "
                f"max_lost_share={max_share:g} allows (the last: {lost[-1].error}); {self.finished()} are kept; see to "
                "what is wrong, then the same command with --retry-errors plays the lost ones again and goes on"
            )

    def mend(self) -> None:
        """Cut half a line that a killed process left; call it before the first `add`."""
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
        """Rollouts that are there, of ``total``."""
        return sum(len(self.results(measurement)) for measurement in self.plan.measurements)

    @property
    def total(self) -> int:
        """Rollouts the plan asks for."""
        return len(self.plan.measurements) * len(self.plan.tasks) * self.plan.runs

    def complete_results(self) -> dict[str, list[RolloutResult]]:
        """Measurement -> every rollout of the plan.

        Raises:
            ConfigError: some are missing: rates over a part would be of other tasks.
        """
        if (finished := self.finished()) < self.total:
            raise ConfigError(
                f"evaluation {self.path}: {finished} of {self.total} rollouts are there; run its `draco evaluate` "
                "command again to finish it"
            )
        return {measurement: self.results(measurement) for measurement in self.plan.measurements}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``."""
        _write_whole(self.path / "summary.json", json.dumps(summary, indent=1))

    def _file(self, measurement: str) -> Path:
        return self.path / "results" / f"{measurement}.jsonl"

    def _lines(self, measurement: str) -> Sequence[bytes]:
        # What follows the last line break was being written when its process was killed.
        return _content(self._file(measurement)).split(b"\n")[:-1]


def plan_difference(before: Plan, now: Plan) -> str | None:
    """The first thing in which two plans differ, as words for a message; None when they are the same."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    old_settings, new_settings = old.pop("settings"), new.pop("settings")
    for described in ("policy", "generated", "split_size"):
        # Paths do not tell plans apart: the fingerprints, the tasks and the world's digest do.
        del old[described], new[described]
    for name in old:
        if old[name] != new[name]:
            if name in ("tasks", "world"):
                return f"{name} of the split are others than when it began ({len(old['tasks'])} tasks then)"
            return f"{name} was {old[name]!r}, this command says {new[name]!r}"
    for key in sorted(old_settings.keys() | new_settings.keys()):
        if old_settings.get(key) != new_settings.get(key):
            return f"{key} was {old_settings.get(key)!r}, this command says {new_settings.get(key)!r}"
    return None


def protocol_differences(plans: Iterable[Plan]) -> list[str]:
    """Limits and simulators, the policy's own settings apart, that were not the same: ``agent.max_turns 50 or 100``."""
    found: dict[str, set[str]] = {}
    for plan in plans:
        # τ-bench's are nested.
        nested = {
            f"{role}.{key}": value
            for role, keys in plan.settings.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
        settings = plan.settings | nested
        for key in PROTOCOL:
            if key in settings:
                found.setdefault(key, set()).add("none" if settings[key] is None else str(settings[key]))
    return [
        f"{key} {' or '.join(sorted(values, key=lambda value: (len(value), value)))}"
        for key, values in found.items()
        if len(values) > 1
    ]


def _content(file: Path) -> bytes:
    """The file's text, empty where there is none yet; raises DamagedRun where it cannot be read."""
    return read_bytes(file) if os.path.lexists(file) else b""


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.unfinished")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
