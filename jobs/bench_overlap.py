"""How close a training step comes to its critical path, and what the same work costs phase by phase.

python jobs/bench_overlap.py [--world DIR] [--model DIR] [--cells "balanced judge-bound"] [--repeats 1]

The pipeline, Ray, the agent loop, AppWorld, the judge's client and HTTP server, the advantages and the run store are
real. The policy engine and the learner are stand-ins of a given speed (`paced.py`), and the rule judge has a given
latency, so that one machine shows any ratio of generation, judging and learning. Weight sync and checkpoint follow the
step in both modes and are left out. `critical_path.py` defines the bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import ray
import typer
from critical_path import CriticalPath, LearnerTask, critical_path
from paced import LearnerPace, PacedLearner, Repertoire, Script, start_paced_engine
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.environments.appworld.data_root import load_task
from draco_ray.environments.appworld.environment import AppWorldEnvironment
from draco_ray.environments.base import make_environment
from draco_ray.judging.phases import Phase
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Message
from draco_ray.rollout.agent import agent_template, fill_agent_prompt
from draco_ray.runs.directory import RunDirectory
from draco_ray.sandbox.world.build import read_manifest
from draco_ray.sandbox.world.scripts import Family, Fault, families
from draco_ray.training.advantage_computer import start_advantage_computer
from draco_ray.training.metrics import generation_intervals, judge_intervals
from draco_ray.training.overlap import busy_seconds
from draco_ray.training.session import Actors, open_judge, ray_session, usable_prompts
from draco_ray.training.trainer import TaskOrder, streamed_update

GROUP, SLOTS = 3, 9
WARM_UP_SPEED = 1e6
STEP_SECONDS = 3600.0
"""A step that takes longer has lost something."""
FAULTS: tuple[frozenset[Fault], ...] = (
    frozenset(),
    frozenset({Fault.NO_COMPLETION}),
    frozenset({Fault.PRINT_SECRET}),
    frozenset({Fault.REPEAT_FAILING_CALL, Fault.NO_COMPLETION}),
)
"""Faults of the scripts; without them all verdicts of a group would agree, and there would be nothing to credit."""
LENGTHS = (0, 0, 0, 0, 1, 1, 2, 6)
"""Lines of thought that a script adds to each of its cells: a few rollouts are several times as long as most."""
THOUGHT = "# I look at this once more before I go on."


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One line of the table: how fast each part is."""

    name: str
    engine: float
    """Tokens a second of one rollout."""
    judge: float
    """Seconds a reply."""
    learner: float
    """Sampled tokens a second."""
    prompts: int = 6
    """Prompts of the step."""
    updates: int = 2
    """Minibatches, and so updates, of the step."""

    @property
    def minibatch(self) -> int:
        """Prompts per update."""
        return self.prompts // self.updates


CELLS = {
    cell.name: cell
    for cell in (
        Cell(name="balanced", engine=100.0, judge=1.5, learner=1000.0),
        Cell(name="one-update", engine=100.0, judge=1.5, learner=1000.0, updates=1),
        Cell(name="generation-bound", engine=50.0, judge=0.5, learner=4000.0),
        Cell(name="judge-bound", engine=300.0, judge=4.0, learner=4000.0),
        Cell(name="learner-bound", engine=300.0, judge=0.5, learner=300.0, updates=1),
        Cell(name="wide", engine=200.0, judge=2.0, learner=1500.0, prompts=16, updates=1),
        # With phase by phase it takes half an hour on two cores, so it must be named to run.
        Cell(name="256-groups", engine=200.0, judge=2.0, learner=1500.0, prompts=256, updates=4),
    )
}
USUAL = [name for name, cell in CELLS.items() if cell.prompts < 256]
WARM_UP_PROMPTS = 16
MIB = 2**20


def scripts(family: Family, tokenizer: Any, chat: ChatTokenizer) -> tuple[Script, ...]:
    """A script for every fault and length; no two begin with the same turn."""
    made: list[Script] = []
    for length in LENGTHS:
        for faults in FAULTS:
            thoughts = [THOUGHT] * length
            cells = ["\n".join([cell, *thoughts]) for cell in family.script(faults & family.faults)]
            cells[0] += f"\n# Plan {len(made)}."
            turns = [*(f"<code>\n{cell}\n</code>" for cell in cells), "Done."]
            made.append(
                tuple((*tokenizer.encode(turn, add_special_tokens=False), chat.end_of_turn_id) for turn in turns)
            )
    return tuple(made)


def repertoire(config: DracoConfig, tasks: Sequence[str]) -> Repertoire:
    """The scripts that the engine says for these tasks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    chat = ChatTokenizer(tokenizer, thinking=config.agent.thinking)
    manifest = read_manifest(config.data.root)
    if manifest is None:
        sys.exit(f"bench-overlap: {config.data.root} is not a sandbox; run `make world`, or choose one with --world")
    known, template = families(), agent_template(config.agent.prompt, AppWorldEnvironment.agent_prompt)
    spoken = {}
    for task_id in tasks:
        prompt = chat.prompt(fill_agent_prompt(template, load_task(config.data.root, task_id)))
        family = known[manifest["tasks"][task_id]["family"]]
        spoken[tuple(prompt[-config.agent.max_prompt_length :])] = scripts(family, tokenizer, chat)
    return Repertoire(scripts=spoken, end_of_turn_id=chat.end_of_turn_id)


BEFORE = {"stage2": "run", "union": "stage2", "score": "union", "credit": "score"}
"""Phase -> the phase (``run``: the rollouts) that must have ended for all groups before it begins."""


class Barriers:
    """Let a phase begin only when the phase before it has ended for all groups."""

    def __init__(self, prompts: int, group_size: int) -> None:
        rollouts = prompts * group_size
        self._left = Counter({"run": rollouts, "stage2": rollouts, "union": prompts, "score": rollouts})
        self._over = {phase: asyncio.Event() for phase in (*self._left, "credit")}

    async def hold(self, phase: str, work: Awaitable[Any]) -> Any:
        """Do ``work`` of that phase, behind its barrier."""
        if phase in BEFORE:
            await self._over[BEFORE[phase]].wait()
        result = await work
        self._left[phase] -= 1
        if phase in self._over and self._left[phase] == 0:
            self._over[phase].set()
        return result


class Held:
    """A pool whose phases wait at barriers; stage1 runs during the rollouts."""

    def __init__(self, pool: Any, barriers: Barriers) -> None:
        self._pool = pool
        self._barriers = barriers

    async def run(self, *arguments: Any, **named: Any) -> Any:
        """A rollout."""
        return await self._barriers.hold("run", self._pool.run(*arguments, **named))

    async def ask(self, phase: Phase, *arguments: Any, **named: Any) -> Any:
        """A judge phase."""
        return await self._barriers.hold(phase.name, self._pool.ask(phase, *arguments, **named))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a step."""

    seconds: float
    groups: list[Group]
    learned: list[LearnerTask]
    bound: CriticalPath

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds in which at least one rollout ran, at least one judge phase ran, and the learner worked."""
        learner = sum(task.seconds for task in self.learned)
        return busy_seconds(generation_intervals(self.groups)), busy_seconds(judge_intervals(self.groups)), learner

    @property
    def early(self) -> int:
        """Number of groups that the learner processed before its first update and before the last rollout ended."""
        last = max(rollout.ended_at for group in self.groups for rollout in group.rollouts)
        done: set[str] = set()
        for task in self.learned:
            if task.kind == "update":
                break
            if task.ended_at < last:
                done.add(task.group)
        return len(done)


class Machinery:
    """CPU time of raylet, memory of the driver and bytes in the object store, before and after a step."""

    def __init__(self) -> None:
        self._raylets = [each for each in psutil.Process().children(recursive=True) if each.name() == "raylet"]
        self._cpu, self._memory = self._seconds(), self._held()

    def _seconds(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self._raylets)

    @staticmethod
    def _held() -> tuple[float, float]:
        used = ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]
        return psutil.Process().memory_info().rss / MIB, used / MIB

    def said(self, groups: int) -> str:
        """A line of what changed."""
        (driver, store), (driver_now, store_now) = self._memory, self._held()
        return (
            f"raylet: {1000 * (self._seconds() - self._cpu) / groups:.0f} CPU ms a group; driver {driver:.0f} MiB at "
            f"first, {driver_now:.0f} at last; object store {store:.0f} MiB at first, {store_now:.0f} at last; load "
            f"average {os.getloadavg()[0]:.1f}"
        )


class Bench:
    """The actors for cells with the same judge speed, and steps run with them."""

    def __init__(self, config: DracoConfig, prompts: dict[str, tuple[Message, ...]], run: RunDirectory) -> None:
        self._config = config
        self._prompts = prompts
        self._run = run
        per_step = min(config.train.prompts_per_step, len(prompts))
        self._tasks = TaskOrder(list(prompts), per_step, config.seed).tasks(1)

    async def measure(self, cells: Sequence[Cell], repeats: int, *, barriers: bool) -> None:
        """Print each cell's step as it is trained and, with ``barriers``, phase by phase."""
        name = self._run.path.name
        engine = start_paced_engine(repertoire(self._config, self._tasks), WARM_UP_SPEED, name)
        self._actors = Actors(self._config, self._run, engines=[engine])
        self._advantages = start_advantage_computer(self._config.algorithm, name)
        self._learner = PacedLearner(LearnerPace(tokens_per_second=WARM_UP_SPEED), name)
        try:
            await self._actors.start()
            # Warm up: every process imports what it needs, and every slot starts AppWorld.
            await self._step(replace(cells[0], prompts=min(WARM_UP_PROMPTS, cells[0].prompts)), barriers=False)
            for cell in cells:
                await engine.set_speed.remote(cell.engine)
                await self._learner.set_pace(LearnerPace(tokens_per_second=cell.learner))
                for _ in range(repeats):
                    machinery = Machinery()
                    streamed = await self._step(cell, barriers=False)
                    said = machinery.said(cell.prompts)
                    phased = await self._step(cell, barriers=True) if barriers else None
                    print(f"{row(cell, streamed, phased)} {said} |", flush=True)
        finally:
            await self._actors.stop()
            self._learner.stop()
            ray.kill(engine)

    async def _step(self, cell: Cell, *, barriers: bool) -> Measured:
        # If a cell has more prompts than the world has tasks, repeated tasks get the number of a later step.
        groups = []
        for index in range(cell.prompts):
            again, place = divmod(index, len(self._tasks))
            task_id = self._tasks[place]
            groups.append(Group(step=1 + again, index=index, task_id=task_id, prompt=self._prompts[task_id]))
        rollouts: Any = self._actors.pool(self._actors.workers)
        judges: Any = self._actors.judges
        if barriers:
            gates = Barriers(cell.prompts, GROUP)
            rollouts, judges = Held(rollouts, gates), Held(judges, gates)
        pipeline = Pipeline(self._config.algorithm, rollouts, judges, self._advantages, self._actors.store)
        started = time.time()
        async with asyncio.timeout(STEP_SECONDS):
            work = [asyncio.create_task(pipeline.run(group)) for group in groups]
            if barriers:
                await asyncio.gather(*work)
            await streamed_update(self._learner, work, cell.minibatch)
        seconds = time.time() - started
        failed = [f"{group.name}: {group.reason}" for group in groups if group.advantage is None]
        if failed or any(len(group.rollouts) < GROUP for group in groups):
            sys.exit(
                f"bench-overlap: the step lost rollouts or groups ({failed}); free memory and run the benchmark again"
            )
        learned = await self._learner.done()
        bound = critical_path(groups, learned, slots=SLOTS, minibatch_prompts=cell.minibatch)
        return Measured(seconds=seconds, groups=groups, learned=learned, bound=bound)


def configuration(
    world: Path, model: Path, root: Path, judge_seconds: float, overrides: Sequence[str] = ()
) -> DracoConfig:
    """The sandbox preset at the bench's size, and what ``overrides`` change of it."""
    return load_config(
        "sandbox",
        [
            f"data.root={world}",
            f"model.path={model}",
            f"run.root={root}",
            f"environment.slots={SLOTS}",
            f"environment.slots_per_worker={SLOTS}",
            f"train.prompts_per_step={max(CELLS[name].prompts for name in USUAL)}",
            f"algorithm.group_size={GROUP}",
            "agent.max_response_length=8192",
            "agent.max_turn_tokens=2048",
            f"judge.rule_judge.latency_seconds={judge_seconds}",
            "judge.concurrency_per_worker=128",
            "environment.start_timeout_seconds=600",
            "environment.cell_timeout_seconds=300",
            "ray.dashboard=false",
            *overrides,
        ],
    )


def row(cell: Cell, streamed: Measured, phased: Measured | None) -> str:
    """A line of the table without its last column."""
    longest = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in streamed.bound.by_stage.items())
    parts = " : ".join(f"{part:.1f}" for part in (phased or streamed).parts)
    gain = "| - | - |" if phased is None else f"| {phased.seconds:.2f} | {phased.seconds / streamed.seconds:.2f}x |"
    return (
        f"| {cell.name} | {cell.prompts} | {cell.updates} | {parts} | {streamed.seconds:.2f} | "
        f"{streamed.bound.seconds:.2f} | {streamed.seconds / streamed.bound.seconds:.3f} {gain} "
        f"{streamed.early} of {cell.prompts} | {longest} |"
    )


@contextlib.contextmanager
def session(config: DracoConfig) -> Iterator[DracoConfig]:
    """Ray, and a judge of the configured speed; yields the configuration with the judge's endpoint."""
    # No reply cache, because both modes ask the same questions.
    with open_judge(config, Console(quiet=True)) as final, ray_session(final):
        yield final


def main(
    cells: Annotated[str, typer.Option(help=f"Choices: {' '.join(CELLS)}.")] = " ".join(USUAL),
    repeats: Annotated[int, typer.Option(min=1, help="Measurements per cell.")] = 1,
    world: Annotated[Path, typer.Option(help="Data root of a sandbox world.")] = Path(".cache/sandbox"),
    model: Annotated[Path, typer.Option(help="The starter policy; its tokenizer is used.")] = Path(".cache/starter"),
    barriers: Annotated[bool, typer.Option(help="Also measure the same work phase by phase.")] = True,
) -> None:
    """Measure every cell and print the table; about a minute a cell on a quiet machine."""
    if unknown := [name for name in cells.split() if name not in CELLS]:
        sys.exit(f"bench-overlap: unknown cell {unknown[0]!r}; expected one of {', '.join(CELLS)}")
    memory = psutil.virtual_memory().total / 2**30
    print(
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f} at the start\n\n"
        f"{GROUP} rollouts a prompt on {SLOTS} slots. Seconds.\n\n"
        "| cell | prompts | updates | generation : judging : learning | step | bound | step / bound | phase by phase | "
        f"gain | learned before the last rollout ended | longest path | machinery |\n|{'---|' * 12}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        chosen = sorted((CELLS[name] for name in cells.split()), key=lambda cell: cell.judge)
        for seconds, alike in itertools.groupby(chosen, key=lambda cell: cell.judge):
            config = configuration(
                world.resolve(),
                model.resolve(),
                Path(folder),
                seconds,
                [f"train.prompts_per_step={max(cell.prompts for cell in chosen)}"],
            )
            environment = make_environment(config.environment, config.data)
            run = RunDirectory.create(Path(folder) / f"judge-{seconds}", "")
            with session(config) as final:
                bench = Bench(final, usable_prompts(config, environment, Console(quiet=True)), run)
                asyncio.run(bench.measure(list(alike), repeats, barriers=barriers))


if __name__ == "__main__":
    typer.run(main)
