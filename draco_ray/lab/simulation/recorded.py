"""Reading what a recorded run did and how long each part took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from draco_ray.errors import ConfigError
from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.phases.union import Union
from draco_ray.lab.simulation.work import CallWork, PhaseWork, Setting
from draco_ray.pipeline import GroupState
from draco_ray.runs.directory import RunDirectory, damaged
from draco_ray.runs.schema import MOST

FEWEST_STEPS = 3
"""Finished steps: the first, in which worlds and engines are cold, and two to measure one by the other."""
MOST_OF_ONE = 100_000
"""Engines, slots or workers of a simulation, as `draco plan` takes them: each is an object."""
TOGETHER_SECONDS = 1e-3
"""Calls of a phase that overlap by more were made side by side."""

Row = Mapping[str, Any]
Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A turn that was played."""

    began: float
    """Unix seconds, as far as the turns before it tell."""
    generating: float
    executing: float
    sampled: int
    """Tokens."""
    read: int
    """Tokens that came since the turn before: prompt, observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A rollout that was played."""

    number: int
    engine: str
    began: float
    ended: float
    """Unix seconds for which it held its slot."""
    turns: tuple[RecordedTurn, ...]
    tokens: int

    @property
    def sampled(self) -> int:
        """Tokens that the policy wrote."""
        return sum(turn.sampled for turn in self.turns)

    @property
    def opening(self) -> float:
        """Seconds in its slot without a turn."""
        return max(0.0, self.ended - self.began - sum(turn.generating + turn.executing for turn in self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPhase:
    """A judge phase that was made."""

    began: float
    ended: float
    work: PhaseWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group of a finished step."""

    task_id: str
    rollouts: tuple[RecordedRollout, ...]
    phases: Mapping[Key, RecordedPhase]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A finished training step."""

    number: int
    began: float
    seconds: float
    groups: tuple[RecordedGroup, ...]
    """In the batch's order, as far as their first rollouts tell."""
    learning: tuple[tuple[float, float], ...]
    """When the learner was at work, Unix seconds."""
    updates: int

    @property
    def head(self) -> float:
        """Seconds until its first rollout."""
        return max(0.0, min(rollout.began for group in self.groups for rollout in group.rollouts) - self.began)

    @property
    def tail(self) -> float:
        """Seconds after the learner's last work: sync, canary, checkpoint."""
        return max(0.0, self.began + self.seconds - max(end for _, end in self.learning))

    @property
    def dollars(self) -> float:
        """What its judge calls cost."""
        works = (phase.work for group in self.groups for phase in group.phases.values())
        return sum(call.dollars for work in works for calls in work.rounds for call in calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What can be learned from a run."""

    name: str
    setting: Setting
    steps: tuple[RecordedStep, ...]
    """Finished ones, without the first."""
    remember_share: float
    """See `LearnerSpeed`."""
    gpus_per_engine: float
    learner_gpus: float


def read_run(run: RunDirectory) -> RecordedRun:
    """What a run recorded.

    Raises:
        ConfigError: too few finished steps, steps without spans, or a judge that shares the policy's engines.
        DamagedRun: a file cannot be read.
    """
    metrics = run.metrics()
    if len(metrics) < FEWEST_STEPS:
        going = " (a directory of judged traces has none)" if not metrics and not run.checkpoint_steps() else ""
        raise ConfigError(
            f"{run.path}: {len(metrics)} finished training steps{going}; {FEWEST_STEPS} are needed, since the first "
            "is cold and one has to be foretold by another: let the run go on (draco train --resume)"
        )
    if run.setting("algorithm.reward") == "rubric" and run.setting("judge.self_judge").enabled:
        raise ConfigError(
            f"{run.path}: its policy is its own judge, whose calls share the engines with the rollouts; "
            "what they would do to each other at another size is not recorded"
        )
    steps = [_step(run, line) for line in metrics[1:]]
    return RecordedRun(
        name=run.path.name,
        setting=_setting(run),
        steps=tuple(steps),
        remember_share=_remember_share(run),
        gpus_per_engine=float(run.setting("engine.gpus_per_engine")),
        learner_gpus=float(run.setting("learner.workers") * run.setting("learner.gpus_per_worker")),
    )


def _setting(run: RunDirectory) -> Setting:
    value = run.setting
    for key in ("engine.engines", "environment.slots", "judge.workers", "judge.max_workers"):
        if (value(key) or 0) > MOST_OF_ONE:
            raise ConfigError(
                f"{run.path / 'config.yaml'}: {key}={value(key)}: expected at most {MOST_OF_ONE:,} in a simulation"
            )
    limits = value("judge.limits")
    return Setting(
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
        reward=value("algorithm.reward"),
        rubric=value("algorithm.rubric"),
    )


def _remember_share(run: RunDirectory) -> float:
    """Passes of old log-probs over those of gradients: forward and backward of a frozen base cost alike."""
    reference = run.setting("learner.kl_coefficient") > 0
    return 1 / (2 + reference + run.setting("learner.gradient_checkpointing"))


def _step(run: RunDirectory, line: Row) -> RecordedStep:
    number = int(line["step"])
    spans = run.table("spans", number).to_pylist()
    played = [span for span in spans if span["stage"] == "rollout"]
    learning = tuple(sorted((span["started_at"], span["ended_at"]) for span in spans if span["stage"] == "learning"))
    sync = min((span["started_at"] for span in spans if span["stage"] == "sync"), default=None)
    if not played or not learning or sync is None:
        missing = "rollout" if not played else "learning" if not learning else "sync"
        raise ConfigError(
            f"{run.path}: step {number} has no {missing} spans, which say what ran when; a run of this version records "
            "them in every step"
        )
    groups = _groups(run, number, spans)
    if not groups:
        raise ConfigError(f"{run.path}: step {number}: none of its rollouts is in the table of trajectories")
    seconds, after = line.get("seconds"), line.get("seconds_sync")
    if seconds is None or after is None:
        raise ConfigError(f"{run.path}: the metrics of step {number} do not say its seconds and seconds_sync")
    updates = line.get("updates") or 0
    if not (0 <= after <= MOST and 0 <= seconds <= MOST and 0 <= updates <= MOST):
        raise damaged(run.metrics_file, f"step {number}: seconds {seconds}, seconds_sync {after}, updates {updates}")
    return RecordedStep(
        number=number,
        began=sync - (seconds - after),
        seconds=seconds,
        groups=tuple(groups),
        learning=learning,
        updates=int(updates) + len(line.get("updates_skipped") or ()),
    )


def _groups(run: RunDirectory, step: int, spans: Sequence[Row]) -> list[RecordedGroup]:
    rollouts = _rollouts(run, step, spans)
    phases = _phases(run, step, spans)
    states = {row["task_id"]: row["state"] for row in run.table("groups", step, ["task_id", "state"]).to_pylist()}
    groups = []
    for task_id, played in rollouts.items():
        made = phases.get(task_id, {})
        if states.get(task_id) == GroupState.FAILED:
            made = _failed(made)
        groups.append(RecordedGroup(task_id=task_id, rollouts=tuple(played), phases=made))
    return sorted(groups, key=lambda group: min(rollout.began for rollout in group.rollouts))


def _failed(made: Mapping[Key, RecordedPhase]) -> dict[Key, RecordedPhase]:
    """The phases of a group that failed, so that it fails again: in the last one that was made."""
    kinds = {phase for phase, _ in made}
    last = next((kind for kind in (Score.name, Union.name) if kind in kinds), None)
    failed = {last} if last else {Stage1.name, Stage2.name}
    return {
        key: RecordedPhase(
            began=phase.began,
            ended=phase.ended,
            work=PhaseWork(rounds=phase.work.rounds, overhead=phase.work.overhead, ok=key[0] not in failed),
        )
        for key, phase in made.items()
    }


def _rollouts(run: RunDirectory, step: int, spans: Sequence[Row]) -> dict[str, list[RecordedRollout]]:
    held = {
        (span["task_id"], span["rollout"]): (span["started_at"], span["ended_at"])
        for span in spans
        if span["stage"] == "rollout"
    }
    turns: dict[tuple[str, int], list[Row]] = defaultdict(list)
    columns = ["task_id", "rollout", "turn", "first_token", "last_token", "seconds_generating", "seconds_executing"]
    for row in run.table("steps", step, columns).to_pylist():
        turns[row["task_id"], row["rollout"]].append(row)
    table = run.table("trajectories", step, ["task_id", "rollout", "engine", "started_at", "token_ids"])
    lengths = pc.list_value_length(table.column("token_ids")).to_pylist()
    found: dict[str, list[RecordedRollout]] = defaultdict(list)
    for row, tokens in zip(table.drop_columns(["token_ids"]).to_pylist(), lengths, strict=True):
        key = (row["task_id"], row["rollout"])
        if key not in held:
            continue
        found[row["task_id"]].append(
            RecordedRollout(
                number=row["rollout"],
                engine=row["engine"] or "",
                began=held[key][0],
                ended=held[key][1],
                turns=tuple(_turns(turns[key], row["started_at"])),
                tokens=tokens or 0,
            )
        )
    return found


def _turns(rows: Iterable[Row], began: float) -> Iterable[RecordedTurn]:
    before = 0
    for row in sorted(rows, key=lambda row: int(row["turn"])):
        first, last = int(row["first_token"]), int(row["last_token"])
        generating, executing = row["seconds_generating"], row["seconds_executing"]
        yield RecordedTurn(
            began=began,
            generating=generating,
            executing=executing,
            sampled=max(0, last - first),
            # Another branch begins anew.
            read=max(0, first - before) if first >= before else first,
        )
        began += generating + executing
        before = last


def _phases(run: RunDirectory, step: int, spans: Sequence[Row]) -> dict[str, dict[Key, RecordedPhase]]:
    columns = ["task_id", "rollout", "phase", "started_at", "seconds", "waited_seconds", "requests", "input_tokens"]
    calls: dict[tuple[str, str, int | None], list[Row]] = defaultdict(list)
    for row in run.table("judge_calls", step, [*columns, "output_tokens", "dollars", "error"]).to_pylist():
        calls[row["task_id"], row["phase"], row["rollout"]].append(row)
    found: dict[str, dict[Key, RecordedPhase]] = defaultdict(dict)
    for span in spans:
        if span["task_id"] is None or span["stage"] == "rollout":
            continue
        rows = sorted(calls[span["task_id"], span["stage"], span["rollout"]], key=lambda row: float(row["started_at"]))
        together = _rounds(rows)
        began, ended = span["started_at"], span["ended_at"]
        # What a call waited for the limits is nobody's work: a simulation has limits of its own.
        overhead = ended - began - sum(max(max(0.0, row["seconds"]) for row in rows) for rows in together)
        ok = not rows or rows[-1]["error"] is None
        rounds = tuple(tuple(_call(row) for row in rows) for rows in together)
        work = PhaseWork(rounds=rounds, overhead=max(0.0, overhead), ok=ok)
        found[span["task_id"]][span["stage"], span["rollout"]] = RecordedPhase(began=began, ended=ended, work=work)
    return found


def _rounds(rows: Sequence[Row]) -> list[list[Row]]:
    """Calls in order of time -> those that were made side by side, together."""
    rounds: list[list[Row]] = []
    until = 0.0
    for row in rows:
        if rounds and row["started_at"] < until - TOGETHER_SECONDS:
            rounds[-1].append(row)
        else:
            rounds.append([row])
        until = max(until, row["started_at"] + row["seconds"])
    return rounds


def _call(row: Row) -> CallWork:
    return CallWork(
        seconds=max(0.0, float(row["seconds"]) - row["waited_seconds"]),
        requests=int(row["requests"]),
        input_tokens=int(row["input_tokens"]),
        output_tokens=int(row["output_tokens"]),
        dollars=float(row["dollars"]),
    )
