"""Whatever a run waits for outside of a step's learning has a name, and a start has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.errors import ClusterError
from draco_ray.judging import build as judge_module
from draco_ray.lab.evaluation import evaluate, judged
from draco_ray.pipeline import Group, Pipeline
from draco_ray.runs.directory import RunDirectory
from draco_ray.training import progress, session
from draco_ray.training.held_out import HeldOutEvaluator
from draco_ray.training.resume import StartPoint
from draco_ray.training.trainer import TaskOrder, WeightSync
from draco_ray.training.watchdog import PendingOperations


def remote(work: Callable[..., Any]) -> Any:
    """An actor's method."""
    return SimpleNamespace(remote=work)


class Hang:
    """A method of a process that is stopped."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def __call__(self, *ignored: Any, **named: Any) -> None:
        self.asked.set()
        await asyncio.Event().wait()


async def waited_for(work: Awaitable[Any], hang: Hang, pending: PendingOperations) -> str:
    """What ``work`` waits for once it has asked what hangs."""
    working, asked = asyncio.ensure_future(work), asyncio.ensure_future(hang.asked.wait())
    await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
    assert asked.done(), working.exception()
    named = str(pending)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return named


async def test_the_run_store_that_does_not_take_a_rollout_is_named() -> None:
    hang, pending = Hang(), PendingOperations()
    algorithm = load_config("sandbox", ["setting=random"]).algorithm

    async def play(*ignored: Any, **named: Any) -> Any:
        return SimpleNamespace(member=SimpleNamespace(summary=None, trajectory=None))

    rollouts: Any = SimpleNamespace(run=play)
    judges: Any = None
    pipeline = Pipeline(
        algorithm.model_copy(update={"group_size": 1}),
        rollouts,
        judges,
        None,
        SimpleNamespace(trajectory=remote(hang)),
        wait=pending.of,
    )
    group = Group(step=1, index=0, task_id="a_1", prompt=())
    assert (await waited_for(pipeline.run(group), hang, pending)).startswith("writing a rollout step1/a_1/0, for ")


async def test_a_rollout_of_an_evaluation_is_named() -> None:
    hang, pending = Hang(), PendingOperations()
    pool: Any = SimpleNamespace(run=hang)
    task: Any = SimpleNamespace(task_id="a_1")
    nobody: Any = None
    measuring = HeldOutEvaluator(load_config("sandbox"), nobody, nobody, nobody, Console(quiet=True), wait=pending.of)
    assert (await waited_for(measuring._rollout(pool, 4, 0, task, 0), hang, pending)).startswith(
        "rollout evaluation4/a_1/0, for "
    )


def test_a_judge_that_does_not_answer_at_the_start_is_named_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tries of ten minutes went by without a word."""

    async def check() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(judge_module, "build_judge", lambda *_: SimpleNamespace(check=check))
    config = load_config("sandbox", ["judge.rule_judge.start=false", "watch.start_seconds=0.01"])
    with (
        pytest.raises(ClusterError, match=r"not started in watch.start_seconds=0.01, waiting for: the judge's first"),
        session.open_judge(config, Console(quiet=True)),
    ):
        raise AssertionError


async def test_a_run_in_whose_first_step_nothing_happens_has_a_step_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alert on steps that do not end compares figures; where there was none it was silent."""
    steps: asyncio.Queue[Any] = asyncio.Queue()
    metrics = SimpleNamespace(set=lambda *_: None, step=steps.put_nowait)
    monkeypatch.setattr(progress, "RunMetrics", lambda name: metrics)
    workers: Any = SimpleNamespace(waiting=0, in_flight=0, up=0, wanted=0)
    workers.elastic = workers
    pools: Any = SimpleNamespace(in_flight=0, workers=workers)
    watching = progress.RunObserver(load_config("sandbox", ["run.trackers=[]"]), tmp_path, done=3)
    sampling = asyncio.create_task(watching.watch_pools(pools, pools))
    assert await steps.get() == {"step": 3}
    sampling.cancel()


async def test_a_continued_run_whose_first_sync_hangs_has_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step nothing else would end it, or say what it waits for."""
    hang, loop = Hang(), asyncio.get_running_loop()

    async def nothing(*ignored: Any) -> None: ...

    async def unless_gone(stop: Callable[[], Awaitable[object]]) -> None:
        await stop()

    learner = SimpleNamespace(start=nothing, stop=nothing)
    actors = SimpleNamespace(start=nothing, stop=nothing, fleet=None)
    monkeypatch.setattr(session, "RunObserver", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(session, "find_learner", lambda use: lambda *_, **__: learner)
    monkeypatch.setattr(session, "Actors", lambda *_: actors)
    monkeypatch.setattr(session, "start_advantage_computer", lambda *_: None)
    monkeypatch.setattr(session, "stop_unless_head_lost", unless_gone)
    monkeypatch.setattr(session, "pending_demand", lambda: "")
    monkeypatch.setattr(session, "release_start_lock", lambda: None)
    monkeypatch.setattr(WeightSync, "publish", hang)
    config = load_config("sandbox", ["watch.start_seconds=3600"])
    run = RunDirectory.create(tmp_path / "run", "")
    start, order = StartPoint(step=3), TaskOrder(["a_1"], 1, seed=0)

    async def begin() -> None:
        async with session.training_session(config, {}, order, run, start, Console(quiet=True)):
            raise AssertionError

    beginning, asked = asyncio.ensure_future(begin()), asyncio.ensure_future(hang.asked.wait())
    await asyncio.wait({beginning, asked}, return_when=asyncio.FIRST_COMPLETED)
    assert asked.done(), beginning.exception()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 3600.0)
    with pytest.raises(
        ClusterError, match=r"^the run has not started in watch.start_seconds=3600, waiting for: sync of the adapter"
    ):
        await beginning


async def test_a_judged_evaluation_whose_actors_do_not_start_ends_with_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As do `draco rubric author`, by the same function, and an evaluation."""
    hang = Hang()

    async def start(pending: PendingOperations) -> None:
        with pending.of("the engines' start"):
            await hang()

    async def stop() -> None:
        pass

    actors = SimpleNamespace(start=start, stop=stop)
    monkeypatch.setattr(judged, "Actors", lambda *_: actors)
    config = load_config("sandbox", ["watch.start_seconds=0.01"])
    policy: Any = SimpleNamespace(checkpoints=())
    run: Any = SimpleNamespace(path=tmp_path)
    environment: Any = SimpleNamespace()
    with pytest.raises(ClusterError, match="not started in watch.start_seconds=0.01, waiting for: the engines' start"):
        await judged._judge(policy, config, environment, run, Console(quiet=True))


async def test_an_evaluation_whose_engines_do_not_start_ends_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("sandbox", ["watch.start_seconds=0.01"])
    workers = SimpleNamespace(open=lambda: None)
    for name in ("say_cut_prompts", "start_policy_engines", "EngineClient", "load_tokenizer", "rollout_starter"):
        monkeypatch.setattr(evaluate, name, lambda *_, **__: None)
    monkeypatch.setattr(evaluate, "EnginePolicies", lambda **_: None)
    monkeypatch.setattr(evaluate, "find_price", lambda *_: None)
    monkeypatch.setattr(evaluate, "RolloutWorkers", lambda *_: workers)
    monkeypatch.setattr(evaluate, "EngineFleet", lambda *_: SimpleNamespace(start=Hang()))
    evaluator: Any = object.__new__(evaluate._Evaluator)
    directory = SimpleNamespace(path=tmp_path, plan=SimpleNamespace(tasks=()))
    vars(evaluator).update(
        _config=config, _policy=SimpleNamespace(api_model=None, checkpoints=()), _environment=None, _directory=directory
    )
    vars(evaluator).update(_name="evaluation", _console=Console(quiet=True))
    with pytest.raises(ClusterError, match="not started in watch.start_seconds=0.01, waiting for: the engines' start"):
        await evaluator._start()
