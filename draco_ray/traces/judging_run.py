"""The run directory of judged traces, and resuming an interrupted judging in it.

::

    config.yaml, run.json, tables/, judge_cache/, metrics.jsonl    as in a training run
    traces.jsonl        one line per trace: its source, and its group and rollout number
    judge_files.txt     digests of the judge's prompts, examples and pinned rubric
    judged/000012.json  a finished group
    judged.jsonl        one line per trace: reward, advantage, verdicts with evidence, steps
    report.html         the page

`GROUPS_A_STEP` groups are stored like a training step. Each group is stored when it is done; repeating the command
continues with the remaining groups and repeats no judge call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.config.config_signature import private_opener
from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError, StoreError
from draco_ray.judging.build import file_digests
from draco_ray.judging.reply_cache import read_cost_ledger
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory, lock_run, read_text, write_private
from draco_ray.runs.store import RunStore
from draco_ray.traces.files import TRACES_FILE
from draco_ray.traces.judging import GroupJudgement
from draco_ray.traces.model import TraceGroup
from draco_ray.traces.results import GROUP_ADAPTER, JudgedGroup, json_lines, judged_group

GROUPS_A_STEP = 32
JUDGED = "judged"
JUDGED_FILE = "judged.jsonl"
FILES_FILE = "judge_files.txt"
TRACES_SETTING = "traces"
CHANGEABLE = (
    *("limits", "concurrency_per_worker", "max_attempts", "max_outage_seconds", "request_timeout_seconds"),
    *("prompt_cache", "service_tier", "fallbacks"),
    # Paths, which may have moved; `_check_same` compares their contents.
    *("cache", "static_rubric"),
    # The judge's address, and the number of workers that call it.
    *("api_base", "api_key_env", "local", "workers", "max_workers", "idle_seconds", "start_timeout_seconds"),
)
"""Keys of ``judge`` and ``algorithm`` that may change when a run is continued."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over judged groups."""

    traces: int
    judged: int
    rewards: tuple[float, ...]
    errors: tuple[str, ...]
    """One line per trace without a reward, with the reason."""


class JudgingRun:
    """A run directory in which groups of traces are judged."""

    def __init__(self, directory: RunDirectory, groups: Sequence[TraceGroup]) -> None:
        self.directory = directory
        self._groups = groups
        self._store = RunStore(directory)
        self._booked: set[str] = set(directory.table("judge_calls", columns=["call_id"]).column("call_id").to_pylist())

    @classmethod
    @contextmanager
    def open(cls, path: Path, config: DracoConfig, groups: Sequence[TraceGroup]) -> Iterator[JudgingRun]:
        """Create a run directory, or continue one with the same traces and judge; it is locked during the block.

        Raises:
            ConfigError: the directory has other traces or another judge, or another process uses it.
        """
        index = "".join(json.dumps(line) + "\n" for line in _index(groups))
        new = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        if new:
            if path.exists():
                path.rmdir()
            directory = RunDirectory.create(path, dump_config(config))
        else:
            directory = RunDirectory.open(path)
        with lock_run(directory):
            if not new:
                _check_same(directory, config, index)
                directory.write_config(dump_config(config))
            if not (path / TRACES_FILE).is_file() or not _begun(path):
                write_private(path / FILES_FILE, "".join(_judge_files(config)))
                write_private(path / TRACES_FILE, index)
            yield cls(directory, groups)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    def pending(self) -> list[tuple[int, TraceGroup]]:
        """Groups to judge, with their indices: unfinished ones, and ones with an error."""
        return [
            (index, group)
            for index, group in enumerate(self._groups)
            if (done := self.judged(index)) is None or done.error is not None or any(r.error for r in done.rollouts)
        ]

    def judged(self, index: int) -> JudgedGroup | None:
        """The result of a group; None if it is not finished."""
        path = self._result(index)
        return GROUP_ADAPTER.validate_json(path.read_bytes()) if path.is_file() else None

    def keep(self, state: GroupJudgement) -> JudgedGroup:
        """Store everything about a finished group.

        Raises:
            StoreError: the group cannot be written, e.g. because the disk is full.
        """
        result = judged_group(state)
        try:
            self._write_tables(state)
            path = self._result(state.index)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            # Write this file last: its presence marks the group as complete.
            write_private(path, GROUP_ADAPTER.dump_json(result).decode())
        except OSError as error:
            raise StoreError(
                f"{self.path}: cannot be written: {error.strerror or error}; free disk space there and run the same "
                "command again"
            ) from None
        return result

    def finish(self, seconds: float) -> Totals:
        """Write the results of all finished groups: tables by step, metrics, ``judged.jsonl``."""
        traces = judged = 0
        rewards: list[float] = []
        errors: list[str] = []
        lines = self.path / f"{JUDGED_FILE}.tmp"
        with open(lines, "w", encoding="utf-8", opener=private_opener) as file:
            for begin in range(0, len(self._groups), GROUPS_A_STEP):
                step = begin // GROUPS_A_STEP + 1
                members = range(begin, min(begin + GROUPS_A_STEP, len(self._groups)))
                results = [each for each in map(self.judged, members) if each is not None]
                for group in results:
                    judged += 1
                    for line in json_lines(group):
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                        traces += 1
                        if line["reward"] is None:
                            errors.append(f"{line['trace_id']} ({line['source']}): {line['error']}")
                        else:
                            rewards.append(line["reward"])
                whole = len(results) == len(members) and not any(
                    group.error or any(trace.error for trace in group.rollouts) for group in results
                )
                # Steps whose tables were merged by an earlier call stay unchanged.
                if results and self.directory.part("groups", step, "any").parent.is_dir():
                    metrics = _metrics(step, results, seconds * len(results) / max(len(self._groups), 1))
                    if whole:
                        self._store.finish_step(step, metrics)
                    else:
                        self._store.write_metrics(step, metrics)
        lines.replace(self.path / JUDGED_FILE)
        return Totals(traces, judged, tuple(rewards), tuple(errors))

    def results(self) -> Iterator[JudgedGroup]:
        """Every finished group, in order."""
        for index in range(len(self._groups)):
            if (group := self.judged(index)) is not None:
                yield group

    def _result(self, index: int) -> Path:
        return self.path / JUDGED / f"{index:06d}.json"

    def _write_tables(self, state: GroupJudgement) -> None:
        step, key, task_id = state.index // GROUPS_A_STEP + 1, f"{state.index:06d}", state.task_id
        write = self._store.write
        played = state.trajectories
        write("trajectories", step, key, [row for each in played for row in rows.trajectory_rows(step, each)])
        write("steps", step, key, [row for each in played for row in rows.step_rows(step, each)])
        write("criteria", step, key, rows.criterion_rows(step, task_id, state.rubric, state.advantages))
        recorded: dict[str, list[rows.Row]] = {"proposals": [], "verdicts": [], "citations": []}
        for (phase, rollout), judged in state.phases.items():
            if judged.value is not None:
                for table, made in rows.judged_rows(phase, step, task_id, rollout, judged.value):
                    recorded[table] += made
        for table, made_rows in recorded.items():
            write(table, step, key, made_rows)
        if state.advantages is not None:
            tokens: dict[int, Sequence[int]] = {each.rollout: [int(n) for n in each.tokens_M] for each in played}
            write("advantages", step, key, rows.advantage_rows(step, task_id, state.advantages, tokens))
        calls = [rows.recover_paid_call(call, self._booked) for call in state.calls]
        known = {call.call_id for call in calls}
        # If a group is judged again, keep its earlier calls behind the new ones: they were paid for.
        written = rows.part_rows(self.directory, "judge_calls", step, key)
        earlier = [row for row in written if row["call_id"] not in known]
        write("judge_calls", step, key, [*rows.call_rows(step, calls), *earlier])
        write("groups", step, key, [{"training_step": step, "task_id": task_id, **state.row}])


def _check_same(directory: RunDirectory, config: DracoConfig, index: str) -> None:
    path = directory.path
    if not (path / TRACES_FILE).is_file() and directory.steps():
        raise ConfigError(f"--out {path}: this is not a run directory of judged traces; choose a new folder")
    if not _begun(path):
        return  # An earlier process left the directory without judgements, e.g. because the judge was unreachable.
    if (path / TRACES_FILE).is_file() and read_text(path / TRACES_FILE) != index:
        raise ConfigError(f"--out {path}: contains judgements of other traces or groups; choose a new folder")
    if (changed := _changed(load_config(str(path)), config)) is not None:
        raise ConfigError(
            f"--out {path}: {changed} differs from the earlier judgement there; choose a new folder, or use the same "
            "settings"
        )
    before = read_text(path / FILES_FILE)
    for line, file in _judge_files(config).items():
        if line not in before:
            raise ConfigError(
                f"--out {path}: the earlier judgement there used other contents of {file}; choose a new folder, or "
                "restore the file"
            )


def _judge_files(config: DracoConfig) -> dict[str, str]:
    """For each of the judge's files, a line with its key and the digest of its contents -> its path."""
    digests = {(*name.split("=", 1), digest) for name, digest in file_digests(config).items()}
    return {f"{key} {digest}\n": path for key, path, digest in sorted(digests)}


def _begun(path: Path) -> bool:
    """Whether anything was judged or paid for in the directory."""
    return any((path / JUDGED).glob("*.json")) or read_cost_ledger(path / "judge_cache").dollars > 0


def _index(groups: Sequence[TraceGroup]) -> Iterable[dict[str, Any]]:
    for number, group in enumerate(groups):
        for rollout, each in enumerate(group.summaries):
            yield {
                "training_step": number // GROUPS_A_STEP + 1,
                "task_id": group.task_id,
                "rollout": rollout,
                "trace_id": each.trace_id,
                "format": each.format,
                "source": each.source,
                "turns": each.turns,
                "steps": each.steps,
                "characters": each.characters,
                "outcome": each.outcome,
            }


def _changed(before: DracoConfig, now: DracoConfig) -> str | None:
    """The first key that differs and affects prompts or results; None if there is none."""
    for section in ("judge", "algorithm"):
        old: Mapping[str, Any] = getattr(before, section).model_dump(mode="json")
        new: Mapping[str, Any] = getattr(now, section).model_dump(mode="json")
        for key in new:
            if key not in CHANGEABLE and old.get(key) != new[key]:
                return f"{section}.{key}"
    return None


def _metrics(step: int, groups: Sequence[JudgedGroup], seconds: float) -> dict[str, Any]:
    traces = [trace for group in groups for trace in group.rollouts]
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    verdicts = [each.verdict for trace in traces for each in trace.verdicts if each.verdict != "NOT_APPLICABLE"]
    spreads = [{trace.reward for trace in group.rollouts if trace.reward is not None} for group in groups]
    return {
        "step": step,
        "reward": math.fsum(rewards) / len(rewards) if rewards else None,
        "pass_rate": verdicts.count("PASS") / len(verdicts) if verdicts else None,
        "groups": len(groups),
        "groups_with_signal": sum(len(spread) > 1 for spread in spreads),
        "rollouts": len(traces),
        "judge_dollars": math.fsum(group.dollars for group in groups),
        "seconds": seconds,
    }
