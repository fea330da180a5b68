"""`draco verify`: recompute a finished run from its records.

File digests are compared with the manifest. Then every step runs through the training pipeline again. Recorded rollouts
replace engines and environments, recorded replies replace the judge, and the results are compared with the run's
tables. If the run was deterministic (``engine.deterministic``), its updates are recomputed, too: sampled tokens are
compared by their log-probs, adapters and optimizer byte by byte.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from draco_ray.algorithm.computer import local_advantages
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig, JudgeConfig, LearnerConfig
from draco_ray.errors import ConfigError, DamagedRun, DracoError, StoreError
from draco_ray.judging.build import prompts_of
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.judge import CallContext, Judgement, ask_phase
from draco_ray.judging.panel import panel_judge
from draco_ray.judging.phases import Phase
from draco_ray.judging.prompts import KEY_FILE
from draco_ray.judging.reply_cache import REPLIES_FILE, RESTORE, ReplyCache
from draco_ray.lab.rows import grouped
from draco_ray.learner.base import UpdateMetrics, over_workers
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import EpisodeEnd, Evaluation, Judged, TrainingSample, Trajectory
from draco_ray.rollout.finished import PlayedRollouts
from draco_ray.rollout.worker import Evaluated
from draco_ray.runs.checkpoints import ADAPTER, ADAPTER_CONFIG, COUNTERS, OPTIMIZER, checkpoint_damage, file_digest
from draco_ray.runs.directory import RunDirectory, check_regular
from draco_ray.runs.manifest import MANIFEST_FILE, line_digest, other_versions, read_manifest
from draco_ray.runs.rows import Row, carried_rubrics, step_trajectories
from draco_ray.runs.schema import STEP_TABLES
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.training.metrics import step_metrics, update_metrics
from draco_ray.training.resume import config_changes, recorded_order
from draco_ray.training.session import learner_config, static_criteria
from draco_ray.training.trainer import streamed_update
from draco_ray.workers.local import LocalActor, resolve

if TYPE_CHECKING:
    from draco_ray.learner.lora_learner import LoraLearner

COMPARED_TABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("proposals", (), ()),
    ("criteria", ("criterion",), ("survived",)),
    ("verdicts", ("rollout", "criterion"), ()),
    ("citations", ("rollout", "criterion", "step"), ()),
    ("criteria", ("criterion",), ()),
    ("advantages", ("rollout",), ()),
    ("groups", (), ()),
)
"""(table, columns that identify a row, columns that are not compared), in the order of comparison.

Each table follows from the tables before it. ``criteria`` is compared twice: its column ``survived`` follows from the
verdicts, so it is compared only after them.
"""
DERIVED_METRICS = (
    *("reward", "pass_rate", "criteria", "surviving_criteria", "groups_with_signal", "groups_failed", "solved_tasks"),
    *("task_pass_rates", "rollouts", "sampled_tokens", "inert_share", "quality_spread", "credit_fallbacks"),
)
"""Metrics that are computed from rollouts and judge replies alone."""
UNRELATED_KEYS = ("train.steps", "train.epochs", "train.evaluate", "train.checkpoint_every", "data.eval")
"""Keys that may change between steps: what a step computes does not depend on them."""
RATIO_SLACK = 1e-4
"""Allowed difference in nats between log-probs of a forward pass with and without gradients (rounding)."""
LOCAL_KEYS = {"base_model_name_or_path", "sha256"}
"""Keys of a checkpoint's JSON files that contain the base model's folder or depend on it; not compared."""
MAX_VALUE_LENGTH = 80
"""Maximum number of characters of a value that a message shows."""


class _NotAsked(DracoError):
    """Recomputing makes a judge call that the run did not make."""


def verify(directory: Path, *, model: Path | None, trust: bool, console: Console) -> None:
    """Check a run's digests and compute it again, step by step, up to the first difference.

    Args:
        directory: the run directory.
        model: the base model's directory; None uses the path in the run's configuration.
        trust: as in `load_config`.
        console: receives one line per step.

    Raises:
        ConfigError: the run cannot be recomputed.
        DamagedRun: a difference was found; names the first one.
    """
    run, began = RunDirectory.open(directory.resolve()), time.monotonic()
    config = load_config(str(run.path), trust=trust)
    if model is not None:
        config = config.updated(model={"path": str(model.resolve())})
    if not (run.path / MANIFEST_FILE).exists() or not (manifest := read_manifest(run))["metrics"]:
        raise ConfigError(
            f"{run.path}: no step in {MANIFEST_FILE}; expected a training run with a finished step (draco judge writes "
            "no digests, nor did earlier versions)"
        )
    steps = sorted(int(step) for step in manifest["metrics"])
    check_digests(run, manifest, dropped=config.train.keep_last is not None)
    console.print(f"{len(manifest['files'])} files of {len(steps)} steps match the digests of the manifest")
    _check_unchanged(run, config)
    if others := other_versions(run):
        console.print(f"this run was made on another machine, so last digits may differ: {others}")
    asyncio.run(_recompute(run, config, steps, console))
    console.print(f"{run.path.name}: {len(steps)} steps verified in {time.monotonic() - began:.0f}s")


def check_digests(run: RunDirectory, manifest: Mapping[str, Any], *, dropped: bool) -> None:
    """Compare every file with the manifest.

    Args:
        run: the run directory.
        manifest: from `read_manifest`.
        dropped: whether the run deletes old checkpoints (``train.keep_last``).

    Raises:
        DamagedRun: a file is missing, or the digest of a file or of a metrics row differs.
    """
    for name, digest in manifest["files"].items():
        path = run.path / name
        if dropped and name.startswith("checkpoints/") and not path.parent.exists():
            continue
        try:
            check_regular(path)
            if file_digest(path)[0] != digest:
                raise OSError("its SHA-256 differs from the one in manifest.json")
        except OSError as error:
            raise DamagedRun(f"{path}: {error}") from None
    for number in range(1, 1 + max(map(int, manifest["metrics"]), default=0)):
        names = [f"tables/{table}/step{number:05d}.parquet" for table in STEP_TABLES]
        unlisted = [name for name in names if name not in manifest["files"] and (run.path / name).exists()]
        if unlisted or str(number) not in manifest["metrics"]:
            raise DamagedRun(
                f"{run.path / MANIFEST_FILE}: {(*unlisted, f'step {number}')[0]} is missing in the manifest"
            )
    lines = {str(line["step"]): line_digest(line) for line in run.metrics()}
    for step, digest in manifest["metrics"].items():
        if lines.get(step) != digest:
            what = "is missing" if step not in lines else "differs from manifest.json"
            raise DamagedRun(f"{run.metrics_file}: the line of step {step} {what}")


def _check_unchanged(run: RunDirectory, config: DracoConfig) -> None:
    """Refuse a run whose configuration changed between its steps. Raises: ConfigError."""
    for path in sorted(run.path.glob("config.before-resume-*.yaml")):
        changes = config_changes(load_config(str(path), trust=True), config)
        if changes := [each for each in changes if not each.startswith(UNRELATED_KEYS)]:
            raise ConfigError(
                f"{run.path}: cannot be verified, because the configuration changed between steps ({path.name}): "
                f"{'; '.join(changes)}"
            )


async def _recompute(run: RunDirectory, config: DracoConfig, steps: Sequence[int], console: Console) -> None:
    order, metrics = recorded_order(run), {line["step"]: line for line in run.metrics()}
    judge = RecordedJudge(run, config) if config.algorithm.reward == "rubric" else None
    adapts = config.engine.deterministic and config.learner.use == LearnerConfig().use
    learner = _Relearner(run, config) if adapts else None
    if learner is None:
        console.print("adapters are not recomputed, because engine.deterministic is false or the learner is custom")
    for step in steps:
        if judge is not None:
            judge.open(step)
        groups, samples = await _Step(run, config, step, judge).recompute(order.tasks(step), metrics[step])
        said = f"step {step}: {len(groups)} groups, {sum(len(group.rollouts) for group in groups)} rollouts as recorded"
        if learner is not None:
            gap = learner.check_tokens(step, samples, metrics[step])
            compared = await learner.learn(step, samples, metrics[step])
            said += f"; largest log-prob gap {gap:.2g} nats; {compared}"
        console.print(said)


class _Step:
    """Records of one step of a run, from which the step is recomputed."""

    def __init__(self, run: RunDirectory, config: DracoConfig, step: int, judge: RecordedJudge | None) -> None:
        """
        Raises:
            DamagedRun: a table cannot be read.
        """
        self._run, self._config, self._step, self._judge = run, config, step, judge
        self._played = step_trajectories(run, step)
        names = {name for name, _, _ in COMPARED_TABLES}
        self._recorded = {name: grouped(run.table(name, step).to_pylist(), "task_id") for name in names}
        self._outcomes = {
            (row["task_id"], row["rollout"]): Evaluated(evaluation=_evaluation(row))
            for row in run.table("outcomes", step).to_pylist()
        }

    async def recompute(
        self, tasks: Sequence[str], metrics: Mapping[str, Any]
    ) -> tuple[list[Group], list[list[TrainingSample] | None]]:
        """Run the recorded rollouts through the pipeline.

        Args:
            tasks: task ids of the step, in order.
            metrics: the step's line in ``metrics.jsonl``.

        Returns: the groups, and the training samples of each; None for a failed group.
        Raises:
            DamagedRun: a result differs from the record; names the first difference.
        """
        if strange := sorted(self._recorded["groups"].keys() ^ set(tasks)):
            raise self._differs(f"task {strange[0]}: tasks.json and the seed give other tasks than recorded")
        found = [await self._group(index, task_id) for index, task_id in enumerate(tasks)]
        groups = [group for group, _ in found]
        made = step_metrics(self._step, groups, self._config.algorithm.group_size)
        for name in DERIVED_METRICS:
            old, new = metrics.get(name), made[name]
            if not _equal(old, new):
                raise self._differs(f"{name} in metrics.jsonl is {_short(old, new)}, recomputed {_short(new, old)}")
        return groups, [samples for _, samples in found]

    async def _group(self, index: int, task_id: str) -> tuple[Group, list[TrainingSample] | None]:
        members = {each.rollout: each for each in self._played.get(task_id, [])}
        # A group without any rollout has no prompt for stage1, and has failed.
        prompt = next((each.prompt for each in members.values()), ())
        group, problem = Group(step=self._step, index=index, task_id=task_id, prompt=prompt), None
        samples: Any = None
        with PrivateTempDir() as scratch:
            store = LocalActor(RunStoreActor(scratch))
            try:
                samples = await self._pipeline(members, store).run(group) if members else None
            except (_NotAsked, ValueError) as error:
                # ValueError means that rows of a rollout contradict each other.
                problem = error
            await store.done()
            if members:
                self._compare(RunDirectory(scratch), task_id, complete=problem is None)
        if problem is not None:
            raise self._differs(f"task {task_id}: {problem}")
        return group, None if samples is None else await samples

    def _pipeline(self, members: Mapping[int, Trajectory], store: LocalActor) -> Pipeline:
        return Pipeline(
            self._config.algorithm,
            PlayedRollouts(members, self._outcomes),  # type: ignore[arg-type]
            self._judge,  # type: ignore[arg-type]
            local_advantages(self._config.algorithm),
            store,
            static_rubric=Judged(value=static_criteria(self._config)),
            carried=carried_rubrics(self._run, self._step) if self._config.algorithm.rubric_visits else {},
            seed=self._config.seed,
        )

    def _compare(self, again: RunDirectory, task_id: str, *, complete: bool) -> None:
        """Compare a group's rows with recomputed ones; for an incomplete group, only rows that were recomputed."""
        for table, keys, later in COMPARED_TABLES:
            recomputed = _sorted(grouped(again.table(table, self._step).to_pylist(), "task_id")[task_id], keys)
            recorded = _sorted(self._recorded[table].get(task_id, []), keys)
            if not complete:
                names = [[row[key] for key in keys] for row in recomputed]
                recorded = [row for row in recorded if [row[key] for key in keys] in names] if keys else []
                recomputed = recomputed if keys else []
            for old, new in zip_longest(recorded, recomputed):
                row = old or new
                where = ", ".join([f"task {task_id}", *(f"{key} {row[key]}" for key in keys if row[key] is not None)])
                if old is None or new is None:
                    what = "is not recorded" if old is None else "does not follow from the judge's replies"
                    raise self._differs(f"{where}: a row of {table} {what}")
                for column in (each for each in old if each not in later and not _equal(old[each], new[each])):
                    shown, recomputed_shown = _short(old[column], new[column]), _short(new[column], old[column])
                    raise self._differs(
                        f"{where}: {table}.{column} is {shown}, recomputed from the stored replies {recomputed_shown}"
                    )

    def _differs(self, what: str) -> DamagedRun:
        return DamagedRun(f"{self._run.path}: step {self._step}, {what}")


def _sorted(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    return sorted(rows, key=(lambda row: [row[key] or 0 for key in keys]) if keys else repr)


def _equal(old: Any, new: Any, *, exact: bool = False) -> bool:
    """Whether two values are equal. Unless ``exact``, floats may differ in the last digits, as between processors."""
    if isinstance(old, float) and new is None:
        return not math.isfinite(old)
    if isinstance(old, float) and isinstance(new, float) and not exact:
        return math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(old) and math.isnan(new))
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_equal, old, new))
    return bool(old == new)


def _short(value: Any, other: Any) -> str:
    """An excerpt of ``value`` that starts shortly before its first difference from ``other``."""
    text, other = (each if isinstance(each, str) else repr(each) for each in (value, other))
    first = max(0, _common(text, other) - MAX_VALUE_LENGTH // 4)
    return f"{'…' * (first > 0)}{text[first : first + MAX_VALUE_LENGTH]}{'…' * (first + MAX_VALUE_LENGTH < len(text))}"


def _common(text: str, other: str) -> int:
    """Length of the common prefix of two texts, in characters."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(text), len(other)))


def _evaluation(row: Row) -> Evaluation:
    """The recorded evaluation, with the fields that rewards need."""
    names = ("task_id", "success", "passed_tests", "total_tests", "reward")
    given = {name: row[name] for name in names} | {"failures": tuple(row["failures"] or ())}
    return Evaluation(**given, run=row["rollout"], turns=0, ended=EpisodeEnd.FINISHED)


class RecordedJudge:
    """Stand-in for a `JudgePool` that answers from a run's archived calls."""

    def __init__(self, run: RunDirectory, config: DracoConfig) -> None:
        """
        Args:
            run: the run directory.
            config: the run's configuration.

        Raises:
            DamagedRun: the key file of the judge's prompts is missing.
            StoreError: the judge's replies cannot be read.
        """
        cache = config.judge.cache or run.judge_cache
        if not (key := (config.judge.files or cache) / KEY_FILE).is_file():
            raise DamagedRun(f"{key}: missing, so the judge's prompts cannot be rebuilt; restore this file")
        self._prompts = prompts_of(config.judge.model_copy(update={"cache": cache}))
        judge = config.judge
        if judge.rule_judge.start:
            # The run set the rule judge's endpoint at start; it is not in the recorded configuration.
            judge = judge.model_copy(update={"api_base": "http://127.0.0.1", "model": "openai/rule-judge"})
        self._run, self._config = run, judge
        # Prompt truncation lengths are stored with the replies. Open a copy: opening the store writes to it.
        scratch = PrivateTempDir()
        try:
            for path in cache.glob(f"{REPLIES_FILE}*"):
                shutil.copy(path, scratch.path)
            self._replies = ReplyCache(scratch.path)
        except OSError as error:
            raise StoreError(f"judge replies in {cache / REPLIES_FILE} cannot be read: {error}; {RESTORE}") from None
        except StoreError as error:
            raise StoreError(str(error).replace(str(scratch.path), str(cache))) from None
        self._calls: list[Row] = []

    def open(self, step: int) -> None:
        """Answer from the calls of this training step."""
        self._calls = self._run.table("judge_calls", step).to_pylist()

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Judgement:
        """See `JudgePool.ask`."""
        return await ask_phase(self._judge(phase, context), phase, context, **given)

    def _judge(self, phase: Phase, context: CallContext) -> Any:
        """The judge of one phase of a group or a rollout."""
        mine = [
            row
            for row in self._calls
            if (row["task_id"], row["rollout"]) == (context.task_id, context.rollout) and row["phase"] == phase.name
        ]
        beside = {each.model for each in (*self._config.jury, *filter(None, [self._config.strong]))}
        own = [row for row in mine if row["model"] not in beside - {self._config.model}]

        def open_one(judge: JudgeConfig) -> Completer:
            return _Replies(phase.name, [row for row in mine if row["model"] == judge.model])

        return panel_judge(self._config, self._prompts, _Replies(phase.name, own), open_one, self._replies)


class _Replies:
    """A `Completer` that answers from rows of ``judge_calls``; equal prompts are answered in recorded order."""

    def __init__(self, phase: str, rows: Sequence[Row]) -> None:
        self._phase, self._rows = phase, list(rows)

    async def __call__(self, request: Request) -> Completion:
        """The recorded reply. Raises: _NotAsked: no reply to this prompt is recorded."""
        first, *rest = (message.content for message in request.messages)
        again = zip(rest[::2], rest[1::2], strict=True)
        prompt = first + "".join(f"\n\n[REPLY]\n{reply}\n\n[ASKED AGAIN]\n{asked}" for reply, asked in again)
        index = next((at for at, row in enumerate(self._rows) if row["prompt"] == prompt), None)
        if index is None:
            raise _NotAsked(_unlike(self._phase, prompt, [row["prompt"] for row in self._rows]))
        row = self._rows.pop(index)
        failed = row["finish_reason"] in ("error", "unavailable")
        names = ("finish_reason", "model", "input_tokens", "cached_tokens", "output_tokens", "dollars", "started_at")
        more = ("seconds", "requests", "call_id", "reasoning_tokens", "estimated_dollars", "waited_seconds")
        given = {name: row[name] for name in (*names, *more)}
        return Completion(text=row["reply"], error=row["error"] if failed else None, **given)

    async def forget(self, request: Request) -> None:
        """Do nothing: no reply is kept."""

    async def check(self) -> None:
        """Do nothing: recorded replies are always available."""


def _unlike(phase: str, prompt: str, recorded: Sequence[str]) -> str:
    """Message that compares a prompt with the most similar recorded prompt."""
    if not recorded:
        return f"the run has no (further) reply to {phase}"

    nearest = max(recorded, key=lambda other: _common(prompt, other))
    return (
        f"the prompt of {phase} differs from the recorded prompt at character {_common(prompt, nearest)}: "
        f"{_short(nearest, prompt)!r} is recorded, {_short(prompt, nearest)!r} follows from rollouts, rubric and the "
        "installed prompts"
    )


class _Relearner:
    """The learner of a deterministic run, retrained from the initial adapter and compared after every step."""

    def __init__(self, run: RunDirectory, config: DracoConfig) -> None:
        """
        Raises:
            ConfigError: the base model cannot be used.
        """
        from draco_ray.config.machine import set_threads
        from draco_ray.learner.lora_learner import LoraLearner
        from draco_ray.learner.worker import LearnerWorker

        set_threads(1)
        self._run, self._minibatch = run, config.learner.minibatch_prompts
        self._learner: LoraLearner = LoraLearner(config.model, learner_config(config), seed=config.seed)
        self._worker = LearnerWorker(self._learner, rank=0, workers=1)

    def check_tokens(
        self, step: int, samples: Sequence[list[TrainingSample] | None], metrics: Mapping[str, Any]
    ) -> float:
        """Compare the log-prob of every sampled token with the engine's; returns the largest gap in nats.

        The gap may be as large as during training, as recorded in the run's metrics.

        Raises:
            DamagedRun: the gap of a token is larger.
        """
        low, high = (math.log(metrics.get(name) or 1.0) for name in ("engine_ratio_min", "engine_ratio_max"))
        largest = 0.0
        for sample, ratio_V in self._ratios(samples):
            off_V = (ratio_V < low - RATIO_SLACK) | (ratio_V > high + RATIO_SLACK)
            if off_V.any():
                where_V = np.flatnonzero(sample.loss_mask_T)
                at = int(where_V[int(np.argmax(off_V))])
                recorded = float(sample.logprob_T[at])
                recomputed = recorded + float(ratio_V[int(np.argmax(off_V))])
                raise DamagedRun(
                    f"{self._run.path}: step {step}, task {sample.task_id}, rollout {sample.rollout}, branch "
                    f"{sample.branch}: sampled token {at} (id {sample.token_ids_T[at]}) has log-prob {recorded:.4f}, "
                    f"recomputed {recomputed:.4f}; the recorded token, an earlier token or the log-prob differs from "
                    "what was sampled"
                )
            largest = max(largest, float(np.abs(ratio_V).max(initial=0.0)))
        return largest

    def _ratios(self, samples: Sequence[list[TrainingSample] | None]) -> Iterator[tuple[TrainingSample, Any]]:
        for group in samples:
            for sample, logprob_V in zip(group or (), self._learner.old_logprobs(group or ()), strict=True):
                yield sample, logprob_V - sample.logprob_T[sample.loss_mask_T]

    async def learn(self, step: int, samples: Sequence[list[TrainingSample] | None], metrics: Mapping[str, Any]) -> str:
        """Recompute the step's update; returns a description of what was compared.

        Raises:
            DamagedRun: the gradient or the step's checkpoint differs.
        """
        groups = [resolve(group) for group in samples]
        update = await streamed_update(_LocalLearner(self._worker), groups, self._minibatch, in_order=True)
        self._worker.weights(version=step)
        learned = update_metrics(update.updates)
        for name in ("valid_tokens", "updates", "grad_norm", *learned):
            if not _equal(learned[name], metrics.get(name), exact=True):
                raise DamagedRun(
                    f"{self._run.path}: step {step}: {name} of the update is {metrics.get(name)}, recomputed "
                    f"{learned[name]}; a gradient was computed from other tokens, log-probs or advantages"
                )
        return self._compare(step) if self._run.checkpoint(step).exists() else "gradients as recorded, no checkpoint"

    def _compare(self, step: int) -> str:
        """Compare the step's checkpoint with the learner. Raises: DamagedRun: they differ."""
        recorded = self._run.checkpoint(step)
        with PrivateTempDir() as scratch:
            made = scratch / recorded.name
            self._learner.snapshot().write(made)
            for name in (ADAPTER, OPTIMIZER):
                if (recorded / name).is_file() and file_digest(recorded / name)[0] != file_digest(made / name)[0]:
                    raise DamagedRun(f"{recorded / name}: {_tensor_difference(recorded / name, made / name)}")
            if (damage := checkpoint_damage(recorded)) is not None:
                raise DamagedRun(f"{recorded}/{damage}")
            for name in (ADAPTER_CONFIG, COUNTERS):
                old, new = (json.loads((folder / name).read_text()) for folder in (recorded, made))
                for key in sorted((old.keys() | new.keys()) - LOCAL_KEYS):
                    if old.get(key) != new.get(key):
                        raise DamagedRun(f"{recorded / name}: {key} is {old.get(key)}, recomputed {new.get(key)}")
        return "adapter and optimizer as recorded, byte by byte"


class _LocalLearner:
    """A `GroupLearner` that calls a learner worker in this process."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def accumulate(self, group: Any) -> object:
        """See `GroupLearner`."""
        return self._worker.accumulate(group)

    async def remember_old_logprobs(self, group: Any) -> object:
        """See `GroupLearner`."""
        return self._worker.remember_old_logprobs(group)

    async def step(self) -> UpdateMetrics:
        """See `GroupLearner`."""
        return over_workers([self._worker.step()])


def _tensor_difference(recorded: Path, recomputed: Path) -> str:
    """The first value that differs between two files of tensors."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        old, new = load_file(recorded), load_file(recomputed)
    except (SafetensorError, OSError) as error:
        return f"differs from the recomputed file and cannot be read: {error}"
    if old.keys() != new.keys():
        return f"tensor {min(old.keys() ^ new.keys())} is in only one of the recorded and the recomputed file"
    for name in sorted(old):
        if old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            return f"tensor {name} is {old[name].dtype}{old[name].shape}, recomputed {new[name].dtype}{new[name].shape}"
        bytes_of = [each[name].reshape(-1).view(np.uint8).reshape(each[name].size, -1) for each in (old, new)]
        if (different := (bytes_of[0] != bytes_of[1]).any(axis=1)).any():
            at = int(np.argmax(different))
            where = tuple(int(each) for each in np.unravel_index(at, old[name].shape))
            return (
                f"tensor {name}{list(where)} is {old[name].reshape(-1)[at]}, recomputed {new[name].reshape(-1)[at]} "
                f"({int(different.sum())} of {different.size} values differ)"
            )
    return "the tensors match the recomputed file, but the header differs"
