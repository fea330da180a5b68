"""Find where a stopped run continues: its newest checkpoint, and the results of later steps in the run directory.

A step is done once its checkpoint is complete. Later steps are repeated, reusing what is on disk: their finished
rollouts, and the judge's replies from the durable cache; see docs/faults.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from draco_ray.config.keys import flat
from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.records import Message
from draco_ray.runs.checkpoints import COUNTERS, checkpoint_damage
from draco_ray.runs.directory import RunDirectory, damaged, read_bytes, read_table, read_text, write_private
from draco_ray.runs.manifest import forget_steps
from draco_ray.runs.schema import STEP_TABLES, TABLE_SCHEMAS
from draco_ray.runs.store import RunStore
from draco_ray.training.trainer import OrderRules, TaskOrder, TaskPart

log = logging.getLogger(__name__)


CHANGEABLE_KEYS = (
    *(
        "run.",
        "ray.",
        "watch.",
        "train.keep_",
        "judge.limits.",
        "judge.api_base",
        "judge.api_key_env",
        "judge.cache",
        "judge.max_outage_seconds",
    ),
    *("judge.workers", "judge.max_workers", "judge.concurrency_per_worker", "judge.idle_seconds"),
    *("judge.local.", "judge.start_timeout_seconds", "judge.request_timeout_seconds", "judge.max_attempts"),
    *("engine.min_engines", "engine.max_failures", "engine.stall_seconds"),
    *("environment.min_slots", "environment.idle_seconds"),
    *("learner.max_failures", "learner.stall_seconds", "learner.hang_seconds"),
    *("learner.gradient_checkpointing", "learner.sft_learning_rate"),
)
"""Keys that may change when a run is resumed, because they do not change what is computed: where the run is, how the
same judge is reached, and what may be spent."""
TASKS_FILE, PROMPTS_FILE = "tasks.json", "task_prompts.json"
HELD_OUT, FILE_PREFIX = "", "/"
"""Key of the held-out tasks in `PROMPTS_FILE`, and prefix of the keys of judge files; no task has such an id."""
REUSED_TABLES = {
    "trajectories": ("task_id", "rollout"),
    "steps": ("task_id", "rollout"),
    "judge_calls": ("task_id", "phase", "rollout"),
    "heldout_calls": ("task_id", "phase", "rollout"),
}
"""Tables whose rows a repeated step reuses, and the columns whose values name a part; other tables are rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where the loop over steps begins."""

    step: int = 0
    """Number of finished steps; the learner loads the checkpoint of the last one. 0 is the untrained policy."""
    checkpoint: Path | None = None
    moved: bool = False
    """Whether the adapter differs from the base model."""
    recorded: frozenset[int] = frozenset()
    """Later steps whose finished rollouts are reused."""
    damage: tuple[str, ...] = ()
    """One line for each file of the run directory that was damaged or missing, with what was done about it."""
    first_gap: float | None = None
    """The canary's mean gap, in nats, of the first step that has one."""


def config_changes(old: DracoConfig, new: DracoConfig) -> list[str]:
    """``key (old -> new)`` for every key that differs and is not in `CHANGEABLE_KEYS`."""
    before, after = (dict(flat(config.model_dump(mode="json"))) for config in (old, new))
    return [
        f"{key} ({before.get(key)} -> {after.get(key)})"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(CHANGEABLE_KEYS)
    ]


def allowed_changes(
    run: RunDirectory, old: DracoConfig, new: DracoConfig, edited: Sequence[str] = (), *, allow_changed: bool
) -> list[str]:
    """The changes that `config_changes` finds, and those names in ``edited`` (see `edited_names`) that are judge files.

    Raises:
        ConfigError: there are changes and ``allow_changed`` is off.
    """
    files = [f"{name.removeprefix(FILE_PREFIX)} (edited)" for name in edited if name.startswith(FILE_PREFIX)]
    changes = [*config_changes(old, new), *files]
    if changes and not allow_changed:
        raise ConfigError(
            f"--resume {run.path}: the configuration has changed: {'; '.join(changes)}; undo these changes, or add "
            "--allow-changed-config"
        )
    return changes


def adopt_config(run: RunDirectory, new: DracoConfig) -> None:
    """Make ``new`` the configuration of the run; if it differs, keep the old one beside it.

    Call this after `rewind`: if that fails, the next attempt must find the same changes.
    """
    text = dump_config(new)
    if text != run.config_text():
        copies = len(list(run.path.glob("config.before-resume-*.yaml")))
        write_private(run.path / f"config.before-resume-{copies + 1}.yaml", run.config_text())
        run.write_config(text)


def adopt_tasks(
    run: RunDirectory, tasks: Collection[str], rules: OrderRules, step: int, console: Console
) -> list[TaskPart]:
    """Store the run's training tasks from ``step`` on, and print how they differ from before.

    Args:
        rules: the rules that choose tasks from then on.

    Returns: the parts of the run, oldest first; the last one has the present tasks and rules.
    Raises:
        DamagedRun: the run directory's list of tasks cannot be read.
    """
    # A part whose steps were all rewound is run again with the present tasks.
    parts = [part for part in _task_parts(run) if part.first_step <= step]
    now = set(tasks)
    before = set(parts[-1].tasks) if parts else now
    if new := now - before:
        console.print(f"training tasks: {len(new)} new tasks; they are used from the next epoch on")
    if gone := before - now:
        console.print(f"training tasks: {len(gone)} tasks no longer exist; they are left out from step {step + 1} on")
    if not parts or now != before or parts[-1].rules != rules:
        parts.append(TaskPart(step + 1 if parts else 1, tuple(sorted(now)), rules))
    write_private(run.path / TASKS_FILE, json.dumps([asdict(part) for part in parts]))
    return parts


def edited_tasks(run: RunDirectory, prompts: Mapping[str, Sequence[Message]]) -> list[str]:
    """Tasks whose prompts have changed since `write_prompts` recorded them. Raises: as `edited_names`."""
    return edited_names(run, _prompt_digests(prompts))


def edited_names(run: RunDirectory, digests: Mapping[str, str]) -> list[str]:
    """Names whose digest differs from the one that `write_prompts` recorded; names without a record do not count.

    Raises:
        DamagedRun: the record cannot be read.
    """
    known = _recorded_digests(run)
    return [name for name, digest in digests.items() if known.get(name, digest) != digest]


def write_prompts(
    run: RunDirectory, prompts: Mapping[str, Sequence[Message]], others: Mapping[str, str] | None = None
) -> None:
    """Record digests of each task's prompt, of the held-out tasks, and of judge files.

    Tasks and files that no longer exist stay recorded, because they may come back. Raises: OSError, DamagedRun.
    """
    recorded = {**_recorded_digests(run), **_prompt_digests(prompts), **(others or {})}
    write_private(run.path / PROMPTS_FILE, json.dumps(recorded))


def _recorded_digests(run: RunDirectory) -> dict[str, Any]:
    path = run.path / PROMPTS_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path, error) from None


def _prompt_digests(prompts: Mapping[str, Sequence[Message]]) -> dict[str, str]:
    return {task: _digest([asdict(message) for message in prompt]) for task, prompt in prompts.items()}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def recorded_order(run: RunDirectory) -> TaskOrder:
    """The order in which the run took its tasks, from ``tasks.json`` and the metrics.

    Raises:
        DamagedRun: one of them is missing or cannot be read.
    """
    if not (parts := _task_parts(run)):
        raise damaged(run.path / TASKS_FILE, "it is missing or empty")
    order = TaskOrder(parts[-1].tasks, **asdict(parts[-1].rules))
    order.parts = parts
    for line in run.metrics():
        order.note(line["step"], line.get("solved_tasks") or ())
    return order


def _task_parts(run: RunDirectory) -> list[TaskPart]:
    """The parts of a run, oldest first. Raises: DamagedRun: ``tasks.json`` cannot be read."""
    path = run.path / TASKS_FILE
    if not path.exists():
        return []
    try:
        return TypeAdapter(list[TaskPart]).validate_json(read_text(path))
    except ValidationError as error:
        raise damaged(path, error) from None


def rewind(run: RunDirectory, *, reuse: bool, learner: str | None = None) -> StartPoint:
    """Rewind a run directory to its newest sound checkpoint, keeping finished rollouts and paid replies of later steps.

    Args:
        run: the run directory.
        reuse: whether rollouts of later steps match the configuration and are kept.
        learner: ``learner.use`` from now on; None: the run's.

    Raises:
        DamagedRun: it has checkpoints, but all are damaged; or another file cannot be read.
    """
    step, damage = _newest_sound(run, learner or run.setting("learner.use"))
    forget_steps(run, step)
    metrics = run.metrics()
    done = [line for line in metrics if line["step"] <= step]
    if not done:
        run.metrics_file.unlink(missing_ok=True)
    elif len(done) < len(metrics):
        write_private(run.metrics_file, "".join(json.dumps(line) + "\n" for line in done))
    later = [found for found in run.steps() if found > step]
    dropped = [path for again in later for path in _unreadable(run, again)]
    for path in dropped:
        path.unlink()
    for again in later:
        _reopen(run, again, reuse=reuse)
    # Move damaged checkpoints aside last: if something above fails, the next attempt must find this damage, too.
    said = [
        f"checkpoint {run.checkpoint(later)} is damaged: {found}; {run.checkpoint(step).name} is used instead, and the "
        f"damaged one is moved to {_moved_aside(run.checkpoint(later))}"
        for later, found in damage.items()
    ]
    if dropped:
        said.append(
            f"{len(dropped)} files of later steps are incomplete and will be written again, first {dropped[0]}; the "
            "machine was lost before they were on the disk"
        )
    if unmeasured := sorted({*range(1, step + 1)} - {line["step"] for line in done}):
        said.append(
            f"metrics.jsonl lacks {len(unmeasured)} finished steps, first step {unmeasured[0]}; restore the file, "
            "otherwise tasks are chosen without the results of these steps"
        )
    return StartPoint(
        step=step,
        checkpoint=run.checkpoint(step) if step else None,
        moved=any((line.get("updates") or 0) > 0 and (line.get("grad_norm") or 0) > 0 for line in done),
        recorded=frozenset(later) if reuse else frozenset(),
        damage=tuple(said),
        first_gap=next((gap for line in done if (gap := line.get("canary_gap")) is not None), None),
    )


def _newest_sound(run: RunDirectory, learner: str) -> tuple[int, dict[int, str]]:
    """The step of the newest sound checkpoint, and the damage of later ones. Raises: DamagedRun: all are damaged."""
    damage: dict[int, str] = {}
    ships = learner == LearnerConfig().use
    for step in reversed(run.checkpoint_steps()):
        folder = run.checkpoint(step)
        # A user's own learner may write checkpoints in another format.
        found = checkpoint_damage(folder) if ships or (folder / COUNTERS).exists() else None
        if found is None:
            return step, damage
        damage[step] = found
    if damage:
        newest, found = next(iter(damage.items()))
        raise DamagedRun(
            f"{run.checkpoints}: all checkpoints are damaged, the newest is {run.checkpoint(newest).name}/{found}; "
            "restore one, or move the folder away to train again from step 1 with the recorded rollouts and replies"
        )
    return 0, damage


def _moved_aside(folder: Path) -> str:
    """Rename a damaged checkpoint so that `train.keep_last` does not count it; returns its new name."""
    names = (f".{folder.name}.damaged-{number}" for number in range(1, 10**6))
    aside = next(name for name in names if not os.path.lexists(folder.with_name(name)))
    folder.rename(folder.with_name(aside))
    return aside


def _unreadable(run: RunDirectory, step: int) -> Iterator[Path]:
    """The truncated files among the table parts of an unfinished step.

    Raises:
        DamagedRun: the disk cannot read one of the files.
    """
    for table in STEP_TABLES:
        for path in run.parts(table, step):
            # This raises if the disk cannot read the file. Such a file may be complete, so it must not be deleted.
            read_bytes(path)
            try:
                read_table(path, table)
            except DamagedRun:
                yield path


def _reopen(run: RunDirectory, step: int, *, reuse: bool) -> None:
    """Split a step's tables back into the parts they were merged from, and delete those that will be rewritten."""
    store = RunStore(run)
    for folder in (run.tables / name for name in TABLE_SCHEMAS):
        gathered, parts = folder / f"step{step:05d}.parquet", folder / f"step{step:05d}"
        # Judge calls were paid for, so they stay recorded even if the rollouts do not.
        keep = folder.name in ("judge_calls", "heldout_calls") or (reuse and folder.name in REUSED_TABLES)
        if not keep:
            shutil.rmtree(parts, ignore_errors=True)
        elif gathered.exists():
            rows = read_table(gathered, folder.name)
            named: dict[str, list[int]] = {}
            for index, names in enumerate(
                zip(*(rows.column(name).to_pylist() for name in REUSED_TABLES[folder.name]), strict=True)
            ):
                named.setdefault("-".join(str(name) for name in names if name is not None), []).append(index)
            for key, indices in named.items():
                store.write_table(folder.name, step, key, rows.take(indices))
        gathered.unlink(missing_ok=True)
