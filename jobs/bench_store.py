"""What a group costs the driver, the run store and the object store, and how long a step waits for them at its end.

Ray, pipeline, pools, advantages, run store, metrics and the observer are real, and each step ends as the trainer ends
it. Rollout workers and judge are stand-ins that take no time and answer at the paper's size: 6 rollouts a group, 40
turns and 30,000 tokens each, 20 judge calls of 208 KB of prompt. Their texts are random words, which compress like
text. No learner reads the samples: they are dropped when a group is done.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import typer
from ray.experimental import get_object_locations
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig, EnvironmentConfig, JudgeConfig
from draco_ray.judging.judge import CallContext, Judgement, phase_summary
from draco_ray.judging.phases import Phase
from draco_ray.judging.pool import JudgePool
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import (
    Attribution,
    Criterion,
    EpisodeEnd,
    JudgeCall,
    Judged,
    Message,
    ScoredCriterion,
    Termination,
    Trajectory,
    Turn,
    Verdict,
)
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.finished import RolloutResult, summarise
from draco_ray.rollout.pool import RolloutPool, RolloutWorkers
from draco_ray.runs.directory import RunDirectory, read_table
from draco_ray.runs.schema import STEP_TABLES
from draco_ray.runs.store import RunStore
from draco_ray.runs.store_actor import start_run_store
from draco_ray.training.advantage_computer import start_advantage_computer
from draco_ray.training.metrics import step_metrics, step_spans
from draco_ray.training.progress import RunObserver, StepProgress
from draco_ray.workers.elastic import fixed_workers

GROUP, TURNS, TOKENS, PROMPT_TOKENS, CRITERIA = 6, 40, 30_000, 2_000, 15
PROMPT, REPLY = 208_000, 6_000
"""Characters of a judge call."""
SLOTS = 8
"""Maximum number of concurrent rollouts, and of concurrent judge phases."""
MIB = 2**20


class Words:
    """Random texts of any length."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        known = ["".join(draw.choices("etaoinshrdlucmfw", k=draw.randint(2, 9))) for _ in range(5000)]
        often = [1 / rank for rank in range(1, len(known) + 1)]
        self._draw, self._text = draw, " ".join(draw.choices(known, often, k=500_000))

    def __call__(self, length: int) -> str:
        """A text."""
        begin = self._draw.randrange(len(self._text) - length)
        return self._text[begin : begin + length]


class MadeRollouts:
    """Stands in for rollout workers: returns a rollout of the paper's size at once."""

    def __init__(self) -> None:
        self._words, self._random = Words(0), np.random.default_rng(0)

    async def up(self) -> None:
        """Return at once: the worker is ready."""

    @ray.method(num_returns=3)
    async def rollout(self, request: RolloutRequest, policy: int) -> tuple[Trajectory, Any, None]:
        """A rollout."""
        each = (TOKENS - PROMPT_TOKENS) // TURNS
        sampled_T, step_T = np.zeros(TOKENS, dtype=bool), np.full(TOKENS, -1, dtype=np.int32)
        turns = []
        for step in range(TURNS):
            first = PROMPT_TOKENS + step * each
            last = first + each // 3
            sampled_T[first:last], step_T[first:last] = True, step
            said = self._words(4 * (last - first))
            told = self._words(4 * (each - each // 3))
            turns.append(Turn(text=said, action=said, observation=told, first_token=first, last_token=last))
        now = time.time()
        trajectory = Trajectory(
            task_id=request.task_id,
            group=request.group,
            rollout=request.rollout,
            attempt=0,
            policy_version=0,
            prompt=(Message(role="system", content=self._words(4 * PROMPT_TOKENS)),),
            turns=tuple(turns),
            token_ids_T=self._random.integers(0, 150_000, TOKENS, dtype=np.int32),
            sampled_T=sampled_T,
            logprob_T=np.where(sampled_T, -self._random.random(TOKENS, dtype=np.float32), np.float32(0)),
            step_T=step_T,
            prompt_length=PROMPT_TOKENS,
            ended=EpisodeEnd.FINISHED,
            termination=Termination.SUBMITTED,
            started_at=now,
            ended_at=now,
        )
        return trajectory, summarise(trajectory), None


class MadeJudge:
    """Stands in for judge workers: returns an answer of the usual size at once, with random verdicts."""

    def __init__(self) -> None:
        self._words, self._random, self._calls = Words(1), random.Random(1), 0

    async def up(self) -> None:
        """Return at once: the worker is ready."""

    async def check(self) -> None:
        """Return at once: the judge answers."""

    @ray.method(num_returns=3)
    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> tuple[Judged[Any], Judged[Any], Any]:
        """An answer, the same with its call, and a summary: as `JudgeWorkerActor.ask`."""
        started = time.time()
        value = self._value(phase.name)
        self._calls += 1
        call = JudgeCall(
            call_id=f"{self._calls:032x}",
            phase=phase.name,
            group=context.group,
            task_id=context.task_id,
            rollout=context.rollout,
            model="made",
            prompt=self._words(PROMPT),
            reply=self._words(REPLY),
            finish_reason="stop",
            input_tokens=PROMPT // 4,
            cached_tokens=0,
            output_tokens=REPLY // 4,
            dollars=0.1,
            started_at=started,
            seconds=1.0,
            requests=1,
        )
        archived: Judged[Any] = Judged(value=value, calls=(call,))
        return Judged(value=value), archived, phase_summary(phase.name, context, archived, started)

    def _value(self, phase: str) -> tuple[Any, ...]:
        if phase == "score":
            verdicts = self._random.choices(list(Verdict), k=CRITERIA)
            return tuple(
                ScoredCriterion(verdict=verdict, evidence=self._words(200), justification=self._words(200))
                for verdict in verdicts
            )
        if phase == "credit":
            return tuple(
                Attribution(criterion=index, verdict=Verdict.PASS, steps=(3, 7, 9), explanation=self._words(100))
                for index in range(CRITERIA)
            )
        number = {"stage1": 10, "stage2": 4, "union": CRITERIA}[phase]
        return tuple(
            Criterion(title=self._words(30), description=self._words(150), evaluator_instruction=self._words(200))
            for _ in range(number)
        )


class Sizes:
    """Bytes in the object store by kind."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def add(self, kind: str, *references: Any) -> None:
        """Add the sizes of existing objects."""
        found = get_object_locations(list(references))
        self.of[kind] += sum(each["object_size"] for each in found.values())


class MeasuredRollouts(RolloutPool):
    """A pool that counts its objects where ``sizes`` is set."""

    sizes: Sizes | None = None

    async def run(self, *arguments: Any, **named: Any) -> RolloutResult:
        """See `RolloutPool`."""
        played = await super().run(*arguments, **named)
        if self.sizes is not None and played.member is not None:
            self.sizes.add("trajectories", played.member.trajectory)
        return played


class MeasuredJudges(JudgePool):
    """A pool that counts its objects where ``sizes`` is set."""

    sizes: Sizes | None = None

    async def ask(self, *arguments: Any, **named: Any) -> Judgement:
        """See `JudgePool`."""
        judgement = await super().ask(*arguments, **named)
        if self.sizes is not None:
            self.sizes.add("verdicts and criteria", judgement.judged)
            self.sizes.add("prompts and replies, for the archive", judgement.archived)
        return judgement


class Watched:
    """CPU seconds and memory of the run store's process; memory without pages that it shares with the object store."""

    def __init__(self) -> None:
        started = [process for process in psutil.process_iter(["cmdline"]) if _is_store(process)]
        (self._process,) = started
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def cpu(self) -> float:
        """CPU seconds since the process started."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        while not self._over.wait(0.1):
            (line,) = (line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
            self.peak = max(self.peak, int(line.split()[1]) * 1024)


def _is_store(process: psutil.Process) -> bool:
    words = process.info["cmdline"] or [""]
    return words[0].startswith("ray::RunStoreActor") and os.getpid() in [each.pid for each in process.parents()]


class Bench:
    """The actors of a run, and steps through them."""

    def __init__(self, config: DracoConfig, run: RunDirectory, every: float) -> None:
        """``every``: seconds between two groups that begin."""
        name = run.path.name
        self._every = every
        rollouts = ray.remote(MadeRollouts).options(num_cpus=0, max_concurrency=SLOTS).remote()
        made = ray.remote(MadeJudge)

        def judge(which: str) -> Any:
            return made.options(name=f"{which}@{name}", num_cpus=0, max_concurrency=4 * SLOTS).remote()

        self._config, self.run = config, run
        self.workers = RolloutWorkers(lambda number: rollouts, EnvironmentConfig(slots=SLOTS, slots_per_worker=SLOTS))
        self.rollouts = MeasuredRollouts(self.workers, fixed_workers(1, SLOTS), 0, 0)
        self.judges = MeasuredJudges(judge, JudgeConfig(workers=1, max_workers=1, concurrency_per_worker=SLOTS))
        self._advantages = start_advantage_computer(config.algorithm, name)
        self.store = start_run_store(run.path, name)
        self._progress = StepProgress(Console(quiet=True))
        watch = RunObserver(config, run.path).group
        self.pipeline = Pipeline(
            config.algorithm, self.rollouts, self.judges, self._advantages, self.store, watch=watch
        )

    async def step(
        self, step: int, prompts: int, sizes: Sizes | None = None, written: Callable[[], None] = lambda: None
    ) -> float:
        """A training step without a learner; returns the seconds from its last group to its end.

        ``written`` is called when its parts are on disk and not merged yet.
        """
        self.rollouts.sizes = self.judges.sizes = sizes
        prompt = (Message(role="system", content="Act."),)
        groups = [Group(step=step, index=index, task_id=f"t{index}_1", prompt=prompt) for index in range(prompts)]
        self._progress.start(f"step {step}", groups, len(groups) * GROUP)

        async def work(group: Group) -> None:
            await asyncio.sleep(group.index * self._every)
            samples = await self.pipeline.run(group)
            if samples is None:
                raise SystemExit(f"bench-store: group {group.name} failed: {group.reason}")
            if sizes is not None:
                sizes.add("samples, for the learner", samples)

        await asyncio.gather(*(work(group) for group in groups))
        began = time.perf_counter()
        metrics = {**step_metrics(step, groups, GROUP), "seconds": 0.0}
        await self.store.spans.remote(step, "spans", step_spans(groups, {}))
        await self.store.metrics.remote(step, metrics)
        written()
        await self.store.finish_step.remote(step, metrics)
        return time.perf_counter() - began


async def measured(config: DracoConfig, folder: Path, sizes: Sequence[int], steps: int, every: float) -> None:
    """Print the tables."""
    bench = Bench(config, RunDirectory.create(folder / "store", ""), every)
    bench.workers.open()
    bench.judges.open()
    await bench.judges.ready()
    kinds = Sizes()
    # Warm up: every process imports what it needs.
    await bench.step(1, 2, kinds, lambda: print_files(bench.run, folder))
    await bench.store.settle.remote()
    print("\n| a group in the object store | MiB |\n|---|---|")
    print("\n".join(f"| {kind} | {size / 2 / MIB:.2f} |" for kind, size in kinds.of.items()))
    print(
        "\n| groups a step | steps | driver, CPU ms a group | store, CPU ms a group | of it gathering | "
        "store's memory at most, MiB | a step waits at its end, s | gathering behind it, s | groups a second |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    step = 1
    for prompts in sizes:
        watched, driver = Watched(), time.process_time()
        cpu, waited, began = watched.cpu, [], time.perf_counter()
        for _ in range(steps):
            step += 1
            waited.append(await bench.step(step, prompts))
        seconds, driver = time.perf_counter() - began, time.process_time() - driver
        written, ended = watched.cpu, time.perf_counter()
        await bench.store.settle.remote()
        gathered = time.perf_counter() - ended
        watched.stop()
        each = 1000 / (prompts * steps)
        print(
            f"| {prompts} | {steps} | {driver * each:.0f} | {(watched.cpu - cpu) * each:.0f} | "
            f"{(watched.cpu - written) * each * steps:.0f} | {watched.peak / MIB:.0f} | {max(waited):.2f} | "
            f"{gathered:.1f} | {prompts * steps / seconds:.1f} |",
            flush=True,
        )
        shutil.rmtree(bench.run.tables)
    bench.judges.close()
    bench.workers.watched.close()


def print_files(run: RunDirectory, folder: Path) -> None:
    """Compare the files of the first step with Parquet parts that are gathered at once, as they were before."""
    parts = [(table, path.stem, read_table(path, table)) for table in STEP_TABLES for path in run.parts(table, 1)]
    store = RunStore(RunDirectory.create(folder / "streams", ""))
    old = folder / "parquet"

    def parquet(rows: pa.Table, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, path, compression="zstd", write_page_checksum=True)

    def old_write() -> None:
        for table, key, rows in parts:
            parquet(rows, old / table / f"{key}.parquet")

    def old_gather() -> None:
        for table in {table for table, _, _ in parts}:
            read = [pq.read_table(path, page_checksum_verification=True) for path in (old / table).iterdir()]
            parquet(pa.concat_tables(read), old / f"{table}.parquet")

    def new_write() -> None:
        for table, key, rows in parts:
            store.write_table(table, 1, key, rows)

    compared = {"written": (old_write, new_write), "gathered": (old_gather, lambda: store.gather(1, STEP_TABLES))}
    print("\n| files of a group | Parquet, gathered at once: CPU ms | streams: CPU ms | ratio |\n|---|---|---|---|")
    for what, (before, after) in compared.items():
        first, second = cpu_ms(before) / 2, cpu_ms(after) / 2
        print(f"| {what} | {first:.0f} | {second:.0f} | {second / first:.2f} |")


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds that this process needs for ``work``."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


@contextmanager
def ray_for_bench(object_store_mib: int) -> Iterator[None]:
    """Ray on this machine."""
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=object_store_mib * MIB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


def main(
    groups: Annotated[str, typer.Option(help="Groups per step.")] = "16 64 256 1024",
    steps: Annotated[int, typer.Option(min=1, help="Number of steps per size.")] = 1,
    every: Annotated[float, typer.Option(min=0, help="Seconds between two groups; 0: no pause.")] = 1.0,
    object_store_mib: Annotated[int, typer.Option(help="Size of Ray's object store.")] = 2048,
) -> None:
    """Print what groups cost (a quarter of a CPU second each, stand-ins included, and 4 MB of disk)."""
    memory = psutil.virtual_memory().total / 2**30
    print(
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f} at the start; a group every {every:g} s",
        flush=True,
    )
    config = load_config("sandbox", [f"algorithm.group_size={GROUP}", "run.trackers=[]", "ray.dashboard=false"])
    with tempfile.TemporaryDirectory() as folder, ray_for_bench(object_store_mib):
        asyncio.run(measured(config, Path(folder), [int(each) for each in groups.split()], steps, every))


if __name__ == "__main__":
    typer.run(main)
