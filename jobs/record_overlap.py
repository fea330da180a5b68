"""Record steps of the overlap benchmark as a run directory, for `draco plan --simulate`.

python jobs/record_overlap.py OUT [KEY=VALUE ...] [--cell balanced] [--steps 6] [--world DIR] [--model DIR]

Parts and stand-ins are `bench_overlap.py`'s; keys change the sandbox preset, for example environment.slots=18 or
judge.limits.requests_per_minute=60. The first step warms up every process, as in a run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from bench_overlap import CELLS, STEP_SECONDS, Cell, configuration, repertoire, session
from paced import LearnerPace, PacedLearner, start_paced_engine
from rich.console import Console

from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig
from draco_ray.environments.base import make_environment
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Message
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.advantage_computer import start_advantage_computer
from draco_ray.training.metrics import step_metrics, step_spans, update_metrics
from draco_ray.training.overlap import busy_seconds, merged
from draco_ray.training.session import Actors, usable_prompts
from draco_ray.training.trainer import TaskOrder, streamed_update


class Recorder:
    """The actors of one cell, and its steps."""

    def __init__(self, config: DracoConfig, prompts: dict[str, tuple[Message, ...]], run: RunDirectory) -> None:
        self._config, self._prompts, self._run = config, prompts, run
        self._order = TaskOrder(list(prompts), config.train.prompts_per_step, config.seed)

    async def record(self, cell: Cell, steps: int) -> None:
        """Play and write ``steps`` steps."""
        config, name = self._config, self._run.path.name
        tasks = sorted(set(itertools.chain(*(self._order.tasks(step) for step in range(1, steps + 1)))))
        engine = start_paced_engine(repertoire(config, tasks), cell.engine, name)
        actors = Actors(config, self._run, engines=[engine])
        learner = PacedLearner(LearnerPace(tokens_per_second=cell.learner), name)
        advantages = start_advantage_computer(config.algorithm, name)
        try:
            await actors.start()
            pipeline = Pipeline(config.algorithm, actors.pool(actors.workers), actors.judges, advantages, actors.store)
            for step in range(1, steps + 1):
                async with asyncio.timeout(STEP_SECONDS):
                    print(f"step {step}: {await self._step(step, pipeline, learner, actors.store):.2f} s", flush=True)
        finally:
            await actors.stop()
            learner.stop()
            ray.kill(engine)

    async def _step(self, step: int, pipeline: Pipeline, learner: PacedLearner, store: Any) -> float:
        started = time.time()
        groups = [
            Group(step=step, index=index, task_id=task_id, prompt=self._prompts[task_id])
            for index, task_id in enumerate(self._order.tasks(step))
        ]
        work = [asyncio.create_task(pipeline.run(group)) for group in groups]
        update = await streamed_update(learner, work, self._config.learner.minibatch_prompts)
        learned_at = time.time()
        rest = {"learning": merged(update.busy), "sync": [(learned_at, time.time())]}
        await store.spans.remote(step, "spans", step_spans(groups, rest))
        now = time.time()
        metrics = {
            **step_metrics(step, groups, self._config.algorithm.group_size),
            **update_metrics(update.updates),
            "seconds_learning": busy_seconds(update.busy),
            "seconds_sync": now - learned_at,
            "seconds": now - started,
        }
        await store.finish_step.remote(step, metrics)
        return now - started


def main(
    out: Annotated[Path, typer.Argument(help="Run directory to write; it must not exist.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE")] = None,
    cell: Annotated[str, typer.Option(help=f"Choices: {' '.join(CELLS)}.")] = "balanced",
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to record.")] = 6,
    world: Annotated[Path, typer.Option(help="Data root of a sandbox world.")] = Path(".cache/sandbox"),
    model: Annotated[Path, typer.Option(help="The starter policy; its tokenizer is used.")] = Path(".cache/starter"),
) -> None:
    """Record a run of a cell; about half a minute a step."""
    chosen = CELLS[cell]
    sizes = [f"train.prompts_per_step={chosen.prompts}", f"learner.minibatch_prompts={chosen.minibatch}"]
    config = configuration(
        world.resolve(), model.resolve(), out.resolve().parent, chosen.judge, [*sizes, *(overrides or [])]
    )
    environment = make_environment(config.environment, config.data)
    run = RunDirectory.create(out.resolve(), dump_config(config))
    with session(config) as final:
        prompts = usable_prompts(config, environment, Console(quiet=True))
        asyncio.run(Recorder(final, prompts, run).record(chosen, steps))


if __name__ == "__main__":
    typer.run(main)
