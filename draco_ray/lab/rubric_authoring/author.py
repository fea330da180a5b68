"""The job that authors a static rubric (appendix "Rubric Construction").

::

    task ──► stage1 ──┐                              (once per training task)
      └► rollout ×8 ──► stage2 ×8 ──► union ──┐
                                              ├──► merges across tasks, level by level ──► one set
    task ──► ...                        ──────┘                                             │
                                                 pruned set ◄── verdict counts ◄── score of every rollout

Rollouts come from the untrained policy (adapter version 0). Every call and verdict is archived in a run directory:
proposals and merges as training step 0, the measurement as step 1.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError, RubricError
from draco_ray.judging.judge import CallContext, Judgement
from draco_ray.judging.phases import Phase, Score, Stage1, Stage2, Union
from draco_ray.lab.files import check_writable
from draco_ray.lab.rubric_authoring.reduction import (
    CriterionSet,
    Reduction,
    candidates,
    merge_batches,
    reduction_prompt,
    reduction_template,
)
from draco_ray.lab.rubric_authoring.statistics import MeasuredCriterion, measure, prune, rubric_table, write_rubric
from draco_ray.records import Criterion, Judged, Message, ScoredCriterion, Verdict
from draco_ray.rollout.finished import FinishedRollout
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.remote.location import run_location
from draco_ray.terminal import PlainConsole
from draco_ray.training.cluster import release_start_lock
from draco_ray.training.preflight import check_outlives_job
from draco_ray.training.progress import StepProgress
from draco_ray.training.session import (
    Actors,
    checked_model,
    open_run_session,
    start_actors,
    usable_prompts,
    with_environment,
)

PROPOSING, MEASURING = 0, 1
"""Training-step numbers under which the two halves of the job are archived."""


TABLE_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthoringSettings:
    """Settings of the authoring job; defaults are the paper's if it states them."""

    rollouts: int = 8
    """Rollouts per training task."""
    tasks: int | None = None
    """Number of training tasks, from the first on; None takes all."""
    max_candidates: int = 120
    """Maximum number of criteria in one merge across tasks."""
    min_applicability: float = 0.2
    """Minimum share of rollouts a criterion applies to; the rarest of the paper's 21 applies to 29.9 %."""
    min_discrimination: float = 0.02
    """Minimum share of tasks on which some rollouts pass a criterion and others fail it."""


def author_rubric(config: DracoConfig, out: Path, settings: AuthoringSettings) -> tuple[MeasuredCriterion, ...]:
    """Author a static rubric and write it to ``out``.

    Returns: the kept criteria, by descending failure rate.
    Raises:
        DracoError: the job failed, with a one-line reason; finished work is in the run directory.
    """
    console = PlainConsole()
    if config.algorithm.reward != "rubric":
        raise ConfigError(
            f"algorithm.reward={config.algorithm.reward}: authoring a rubric needs algorithm.reward=rubric"
        )
    if out.exists():
        raise ConfigError(f"--out {out}: already exists; choose another file")
    check_writable(out)
    config, environment = with_environment(config.updated(algorithm={"rubric": "dynamic"}))
    environment.tasks(config.data.train_split)
    config = checked_model(config)
    prompts = dict(list(usable_prompts(config, environment, console).items())[: settings.tasks])
    check_outlives_job(config.run.root)
    name = config.run.name or f"rubric-{datetime.now():%Y%m%d-%H%M%S}"
    run = RunDirectory.create(run_location(config.run, name).local, dump_config(config))
    console.print(
        f"{name}: {len(prompts)} tasks x {settings.rollouts} rollouts of {config.model.path}, environment "
        f"{config.environment.use}",
    )
    with open_run_session(config, run, console) as final:
        author = RubricAuthor(final, settings, prompts, run, console)
        kept, pruned = asyncio.run(author.run())
    write_rubric(
        out,
        kept,
        f"Static rubric authored by {final.judge.model} on {len(prompts)} tasks x {settings.rollouts} rollouts of "
        f"{Path(config.model.path).name}; {len(pruned)} criteria pruned (run {name}).",
    )
    # A console without a terminal has 80 columns, which would wrap titles.
    wide = console if console.is_terminal else PlainConsole(file=console.file, width=TABLE_WIDTH, soft_wrap=False)
    wide.print(rubric_table(kept, pruned))
    console.print(f"{len(kept)} criteria in {out}; every call and verdict is in {run.path}")
    return kept


@dataclass
class RubricAuthor:
    """One authoring run: its actors and its stages."""

    _config: DracoConfig
    _settings: AuthoringSettings
    _prompts: Mapping[str, tuple[Message, ...]]
    _run: RunDirectory
    _console: Console

    def __post_init__(self) -> None:
        self._progress = StepProgress(self._console)
        self._template = reduction_template()

    async def run(self) -> tuple[tuple[MeasuredCriterion, ...], tuple[MeasuredCriterion, ...]]:
        """Propose, reduce, measure and prune.

        Returns: (kept, pruned), each by descending failure rate.
        Raises:
            RubricError: no criterion is left.
        """
        self._actors = Actors(self._config, self._run)
        try:
            await start_actors(self._actors, self._config, self._console)
            release_start_lock()
            members, sets = await self._propose()
            rubric = await self._reduce(sets)
            measured = await self._measure(rubric, members)
        finally:
            self._progress.stop()
            await self._actors.stop()
        settings = self._settings
        kept, pruned = prune(
            measured, min_applicability=settings.min_applicability, min_discrimination=settings.min_discrimination
        )
        if not kept:
            raise RubricError(
                f"none of {len(pruned)} criteria applies to at least {settings.min_applicability:.0%} of the rollouts "
                f"and separates the rollouts of at least {settings.min_discrimination:.0%} of the tasks; lower "
                "--min-applicability or --min-discrimination, or raise --rollouts"
            )
        return kept, pruned

    async def _propose(self) -> tuple[list[FinishedRollout], list[CriterionSet]]:
        """Play the rollouts of all tasks; the judge proposes (stage1, stage2) and merges (union) each task's criteria.

        Returns: the finished rollouts, and the merged criteria of each task that has any.
        Raises:
            RubricError: no task has criteria.
        """
        number = len(self._prompts)
        self._pool = self._actors.pool(self._actors.workers)
        self._progress.start("rollouts of the untrained policy", rollouts=number * self._settings.rollouts)
        found = await asyncio.gather(
            *(self._task(index, task_id, prompt) for index, (task_id, prompt) in enumerate(self._prompts.items()))
        )
        self._progress.stop()
        members = [member for played, _ in found for member in played]
        sets = [criteria for _, criteria in found if criteria is not None and criteria.criteria]
        proposed = sum(len(each.criteria) for each in sets)
        self._console.print(
            f"{len(members)} of {number * self._settings.rollouts} rollouts finished; {proposed} criteria proposed "
            f"for {len(sets)} of {number} tasks"
        )
        if not sets:
            raise RubricError(
                f"no usable criterion for {number} tasks with {len(members)} finished rollouts; see {self._run.path}"
            )
        return members, sets

    async def _task(
        self, index: int, task_id: str, prompt: tuple[Message, ...]
    ) -> tuple[list[FinishedRollout], CriterionSet | None]:
        stage1 = asyncio.create_task(self._ask(Stage1, task_id, messages=prompt))
        played = await asyncio.gather(
            *(self._member(index, task_id, rollout, stage1) for rollout in range(self._settings.rollouts))
        )
        members = [member for member, _ in filter(None, played)]
        proposals = [await stage1, *(proposal for _, proposal in filter(None, played))]
        if not members:
            self._console.print(f"{task_id}: left out, because none of its rollouts finished")
            return [], None
        union = await self._ask(
            Union,
            task_id,
            messages=prompt,
            candidates=[proposal.judged for proposal in proposals],
            trajectories=[each.trajectory for each in members],
        )
        judged: Judged[tuple[Criterion, ...]] = await union.judged
        row: dict[str, Any] = {"state": "merged" if union.ok else "failed", "rollouts": len(members), "unscored": 0}
        row |= {"lost": self._settings.rollouts - len(members), "credit_failures": 0, "reason": union.summary.error}
        self._actors.store.group.remote(PROPOSING, task_id, union.judged, None, None, row)
        if judged.value is None:
            self._console.print(f"{task_id}: no criteria: {judged.error}")
            return members, None
        return members, CriterionSet(name=task_id, prompts=(prompt,), criteria=judged.value)

    async def _member(
        self, index: int, task_id: str, rollout: int, stage1: asyncio.Task[Judgement]
    ) -> tuple[FinishedRollout, Judgement] | None:
        played = await self._pool.run(task_id, _group(task_id), rollout, step=PROPOSING, priority=index)
        member = played.member
        self._progress.advance()
        if member is None:
            return None
        self._actors.store.trajectory.remote(PROPOSING, member.trajectory)
        existing = (await stage1).judged
        return member, await self._ask(Stage2, task_id, rollout, trajectory=member.trajectory, existing=existing)

    async def _reduce(self, sets: Sequence[CriterionSet]) -> tuple[Criterion, ...]:
        """Merge across tasks until one set is left; even a single set is merged once, to reword it for any task."""
        level = 0
        while level == 0 or len(sets) > 1:
            level += 1
            work = [
                self._merge(f"reduction{level}.{number}", batch)
                for number, batch in enumerate(merge_batches(sets, self._settings.max_candidates), start=1)
            ]
            merged = await asyncio.gather(*work)
            sets = [each for each in merged if each is not None and each.criteria]
            if not sets:
                raise RubricError(f"no criterion is left after level {level} of the reduction; see {self._run.path}")
        self._console.print(f"reduced to {len(sets[0].criteria)} criteria in {level} levels of merging")
        await self._actors.store.finish_step.remote(
            PROPOSING, {"step": PROPOSING, "levels": level, "criteria": len(sets[0].criteria)}
        )
        return sets[0].criteria

    async def _merge(self, name: str, batch: Sequence[CriterionSet]) -> CriterionSet | None:
        merge = await self._ask(
            Reduction,
            name,
            messages=(),
            candidates=candidates(batch),
            trajectories=(),
            text=reduction_prompt(batch, self._template, self._config.judge.environment_facts or ""),
        )
        judged: Judged[tuple[Criterion, ...]] = await merge.judged
        if judged.value is None:
            lost = sum(len(each.criteria) for each in batch)
            self._console.print(f"{name}: {lost} criteria lost: {judged.error}")
            return None
        prompts = tuple(prompt for each in batch for prompt in each.prompts)
        return CriterionSet(name=name, prompts=prompts, criteria=judged.value)

    async def _measure(
        self, rubric: tuple[Criterion, ...], members: Sequence[FinishedRollout]
    ) -> tuple[MeasuredCriterion, ...]:
        """Score every rollout against the whole set."""
        reference = ray.put(Judged(value=rubric))
        tasks = [member.summary.task_id for member in members]
        scores = await asyncio.gather(
            *(
                self._ask(Score, task_id, member.rollout, MEASURING, trajectory=member.trajectory, rubric=reference)
                for task_id, member in zip(tasks, members, strict=True)
            )
        )
        verdicts: dict[str, list[Sequence[Verdict]]] = defaultdict(list)
        for task_id, score in zip(tasks, scores, strict=True):
            if score.ok:
                verdicts[task_id].append(await _verdicts.remote(score.judged))
        for task_id, scored in verdicts.items():
            row = {"state": "scored", "rollouts": len(scored), "lost": 0, "unscored": 0, "credit_failures": 0}
            self._actors.store.group.remote(MEASURING, task_id, reference, None, None, row | {"reason": None})
        unscored = sum(not score.ok for score in scores)
        if unscored:
            self._console.print(f"{unscored} of {len(members)} rollouts could not be scored")
        await self._actors.store.finish_step.remote(
            MEASURING, {"step": MEASURING, "rollouts": len(members) - unscored, "criteria": len(rubric)}
        )
        return measure(rubric, verdicts)

    async def _ask(
        self, phase: Phase, task_id: str, rollout: int | None = None, step: int = PROPOSING, **given: Any
    ) -> Judgement:
        """Ask the judge and archive its calls."""
        context = CallContext(group=_group(task_id), task_id=task_id, rollout=rollout)
        judgement = await self._actors.judges.ask(phase, context, **given)
        self._actors.store.judged.remote(step, task_id, rollout, phase.name, judgement.archived)
        return judgement


def _group(task_id: str) -> str:
    return f"step{PROPOSING}/{task_id}"


@ray.remote(num_cpus=0)
def _verdicts(judged: Judged[tuple[ScoredCriterion, ...]]) -> tuple[Verdict, ...]:
    """Return only the verdicts, so that the driver does not fetch prompts."""
    return tuple(score.verdict for score in judged.value or ())
