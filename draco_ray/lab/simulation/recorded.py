"""Read the durations of a recorded run's rollouts, judge phases and learning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from draco_ray.errors import ConfigError
from draco_ray.lab.rows import grouped
from draco_ray.runs.directory import RunDirectory, damaged
from draco_ray.training.overlap import busy_seconds

FEWEST_STEPS = 3
"""Minimum number of finished steps: the first, which is a warm-up, and two that are predicted from each other."""
Row = Mapping[str, Any]
Key = tuple[str, int | None]
"""Judge phase and rollout; the rollout is None for a phase of the whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A judge phase. ``began`` and ``ended`` are Unix seconds, as in the classes below."""

    seconds: float
    """Duration of the phase, less the time in which it waited for rate limits."""
    requests: int = 1
    """Number of requests; 0 if every reply came from the cache."""
    tokens: int = 0
    """Input and output tokens of all requests."""
    dollars: float = 0.0
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of a rollout."""

    generating: float
    """Seconds in the engine, as recorded while other sequences ran."""
    sampled: float
    """Sampled tokens."""
    read: float = 0
    """Tokens of prompt or observation since the previous turn."""
    executing: float = 0.0
    """Seconds in the environment."""
    began: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A recorded rollout: its turns, its engine, and the time for which it held an environment slot."""

    number: int
    turns: tuple[Turn, ...] = ()
    tokens: int = 0
    engine: str = ""
    began: float = 0.0
    """Time at which the rollout got its environment slot, Unix seconds."""
    ended: float = 0.0

    @property
    def sampled(self) -> float:
        """Number of sampled tokens."""
        return sum(turn.sampled for turn in self.turns)

    @property
    def opening(self) -> float:
        """Seconds in the slot outside of turns, mostly to open the world."""
        return max(0.0, self.ended - self.began - sum(turn.generating + turn.executing for turn in self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A task's rollouts and judge phases."""

    rollouts: tuple[Rollout, ...]
    phases: Mapping[Key, Phase] = field(default_factory=dict)
    failed: bool = False
    """Whether the group is left out of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A finished training step."""

    number: int
    began: float
    seconds: float
    groups: tuple[Group, ...]
    """Ordered by the start of their first rollouts, which is nearly the batch's order."""
    learning: tuple[tuple[float, float], ...]
    """Intervals in which the learner was busy, Unix seconds."""
    updates: int

    @property
    def rollouts(self) -> list[Rollout]:
        """Rollouts of all groups."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def head(self) -> float:
        """Seconds from the step's start to its first rollout."""
        return max(0.0, min(rollout.began for rollout in self.rollouts) - self.began)

    @property
    def tail(self) -> float:
        """Seconds after the learner's last work: sync, canary, checkpoint."""
        return max(0.0, self.began + self.seconds - max(end for _, end in self.learning))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCounts:
    """Resources and scheduling of a run."""

    slots: int
    engines: int = 1
    sequences: int = 64
    """Concurrent sequences of an engine."""
    judge_workers: int = 1
    calls_per_worker: int = 32
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    learners: float = 1.0
    """Learner workers, as a multiple of the recorded run's."""
    minibatch: int = 0
    """Groups per update; 0: all groups of the step."""
    staleness: int = 0
    colocate: bool = False
    group_size: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The recorded steps of a run and its resources."""

    name: str
    setting: ResourceCounts
    steps: tuple[Step, ...]
    """Finished steps except the first."""
    remember_share: float
    """Time of a pass for old log-probs relative to one for gradients."""
    gpus_per_engine: float
    learner_gpus: float


def read_run(run: RunDirectory) -> RecordedRun:
    """Read a run directory.

    Raises:
        ConfigError: too few finished steps, steps without spans, or a judge that shares the policy's engines.
        DamagedRun: a file cannot be read.
    """
    value, limits, metrics = run.setting, run.setting("judge.limits"), run.metrics()
    if len(metrics) < FEWEST_STEPS:
        going = " (a directory of judged traces has none)" if not metrics and not run.checkpoint_steps() else ""
        raise ConfigError(
            f"{run.path}: {len(metrics)} finished training steps{going}; expected at least {FEWEST_STEPS}, because "
            "the first is a warm-up and each step is predicted from the others; continue the run (draco train --resume)"
        )
    if value("algorithm.reward") == "rubric" and value("judge.self_judge").enabled:
        raise ConfigError(
            f"{run.path}: the policy is its own judge, whose calls share the engines with the rollouts; such runs "
            "cannot be simulated at other sizes"
        )
    # Forward and backward of a frozen base have the same cost.
    passes = 2 + (value("learner.kl_coefficient") > 0) + (value("learner.gradient_checkpointing") is not False)
    return RecordedRun(
        name=run.path.name,
        setting=ResourceCounts(
            slots=value("environment.slots"),
            engines=value("engine.engines"),
            sequences=value("engine.max_num_seqs"),
            judge_workers=max(value("judge.workers"), value("judge.max_workers")),
            calls_per_worker=value("judge.concurrency_per_worker"),
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            minibatch=value("learner.minibatch_prompts"),
            staleness=value("train.staleness"),
            colocate=value("engine.colocate"),
            group_size=value("algorithm.group_size"),
        ),
        steps=tuple(_step(run, line) for line in metrics[1:]),
        remember_share=1 / passes,
        gpus_per_engine=float(value("engine.gpus_per_engine")),
        learner_gpus=float(value("learner.workers") * value("learner.gpus_per_worker")),
    )


def _step(run: RunDirectory, line: Row) -> Step:
    number = int(line["step"])
    spans = grouped(run.table("spans", number).to_pylist(), "stage")
    if missing := [stage for stage in ("rollout", "learning", "sync") if not spans[stage]]:
        raise ConfigError(f"{run.path}: step {number} has no {missing[0]} spans, which record what ran when")
    seconds, after, updates = line.get("seconds"), line.get("seconds_sync"), line.get("updates") or 0
    if seconds is None or after is None:
        raise ConfigError(f"{run.path}: the metrics of step {number} lack seconds or seconds_sync")
    if min(after, seconds, updates) < 0:
        raise damaged(run.metrics_file, f"step {number}: seconds {seconds}, seconds_sync {after}, updates {updates}")
    asked = [span for stage, of in spans.items() for span in of if stage != "rollout" and span["task_id"] is not None]
    phases = _phases(run, number, asked)
    states = {row["task_id"]: row["state"] for row in run.table("groups", number, ["task_id", "state"]).to_pylist()}
    groups = [
        Group(rollouts=tuple(rollouts), phases=phases[task], failed=states.get(task) == "failed")
        for task, rollouts in _rollouts(run, number, spans["rollout"]).items()
    ]
    if not groups:
        raise ConfigError(f"{run.path}: step {number}: none of the step's rollouts is in the table trajectories")
    return Step(
        number=number,
        began=min(span["started_at"] for span in spans["sync"]) - (seconds - after),
        seconds=seconds,
        groups=tuple(sorted(groups, key=lambda group: min(rollout.began for rollout in group.rollouts))),
        learning=tuple(sorted((span["started_at"], span["ended_at"]) for span in spans["learning"])),
        updates=int(updates) + len(line.get("updates_skipped") or ()),
    )


def _rollouts(run: RunDirectory, step: int, spans: Sequence[Row]) -> dict[str, list[Rollout]]:
    held = {(span["task_id"], span["rollout"]): span for span in spans}
    columns = ["task_id", "rollout", "turn", "first_token", "last_token", "seconds_generating", "seconds_executing"]
    turns = grouped(run.table("steps", step, columns).to_pylist(), "task_id", "rollout")
    table = run.table("trajectories", step, ["task_id", "rollout", "engine", "started_at", "token_ids"])
    table = table.append_column("tokens", pc.list_value_length(table["token_ids"])).drop_columns("token_ids")
    found: dict[str, list[Rollout]] = defaultdict(list)
    for row in table.to_pylist():
        key = (row["task_id"], row["rollout"])
        if span := held.get(key):
            rollout = Rollout(
                number=row["rollout"],
                engine=row["engine"] or "",
                began=span["started_at"],
                ended=span["ended_at"],
                turns=tuple(_turns(turns[key], row["started_at"])),
                tokens=row["tokens"],
            )
            found[row["task_id"]].append(rollout)
    return found


def _turns(rows: Iterable[Row], began: float) -> Iterable[Turn]:
    before = 0
    for row in sorted(rows, key=lambda row: int(row["turn"])):
        first, last = int(row["first_token"]), int(row["last_token"])
        generating, executing = row["seconds_generating"], row["seconds_executing"]
        # A new branch starts again from the prompt.
        read = first - before if first >= before else first
        sampled = max(0, last - first)
        yield Turn(began=began, generating=generating, executing=executing, sampled=sampled, read=read)
        began += generating + executing
        before = last


def _phases(run: RunDirectory, step: int, spans: Iterable[Row]) -> dict[str, dict[Key, Phase]]:
    columns = ["task_id", "rollout", "phase", "started_at", "waited_seconds", "requests", "input_tokens"]
    rows = run.table("judge_calls", step, [*columns, "output_tokens", "dollars"]).to_pylist()
    calls = grouped(rows, "task_id", "phase", "rollout")
    found: dict[str, dict[Key, Phase]] = defaultdict(dict)
    for span in spans:
        rows, began = calls[span["task_id"], span["stage"], span["rollout"]], span["started_at"]
        waited = busy_seconds((row["started_at"], row["started_at"] + row["waited_seconds"]) for row in rows)
        found[span["task_id"]][span["stage"], span["rollout"]] = Phase(
            seconds=max(0.0, span["ended_at"] - began - waited),
            requests=sum(int(row["requests"]) for row in rows),
            tokens=sum(int(row["input_tokens"]) + int(row["output_tokens"]) for row in rows),
            dollars=sum(float(row["dollars"]) for row in rows),
            began=began,
            ended=span["ended_at"],
        )
    return found
