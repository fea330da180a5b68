"""The loop over steps with staleness: what runs ahead, with which adapter, and what is taken over.

The trainer is the real one; engines, learner and pipeline are stand-ins that note which adapter samples what.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.engine.canary import CanaryReading
from draco_ray.errors import LearnerError, RunStopped
from draco_ray.pipeline import MOST_GROUPS, Group
from draco_ray.runs.directory import RunDirectory
from draco_ray.training.progress import StepProgress
from draco_ray.training.resume import StartPoint
from draco_ray.training.trainer import BatchScheduler, TaskOrder, Trainer, WeightSync
from draco_ray.workers.elastic import fixed_workers
from tests.unit.test_training_metrics import an_update

STEPS, PROMPTS = 5, 3
TASKS = [f"t{number}_1" for number in range(6)]
JUDGE_TICKS = 20
"""Turns of the event loop that judging takes, a rollout three: there is a tail in which slots are free."""


def remote(work: Callable[..., Awaitable[Any]]) -> Any:
    """An actor's method."""
    return SimpleNamespace(remote=work)


class Run:
    """A trainer on stand-ins; everything of note is in its lists."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        start: StartPoint | None = None,
        grad_norm: float = 0.5,
        slots: int = 1,
        live_adapter: bool = True,
    ) -> None:
        self.live_adapter = live_adapter
        """Whether the canary finds an effect that is not rounding."""
        config = load_config(
            "sandbox",
            [
                f"train.steps={STEPS}",
                f"train.prompts_per_step={PROMPTS}",
                f"learner.minibatch_prompts={PROMPTS}",
                "train.evaluate_before_after=false",
                *overrides,
            ],
        )
        start = start or StartPoint()
        self.first = start.step + 1
        self.order = TaskOrder(TASKS, PROMPTS, seed=0, behind=config.train.staleness)
        self.live = start.step
        """Version of the adapter that samples now."""
        self.sampled: dict[int, set[int]] = {}
        """Step -> versions that its rollouts were sampled with."""
        self.began: list[int] = []
        """Steps in the order in which their first rollouts began."""
        self.learned: list[int] = []
        """Steps whose metrics were written, in order."""
        self.asked_for_effect: dict[int, bool] = {}
        """Version -> whether the canary asked for an effect of the adapter."""
        self.looked_for: dict[int, list[int]] = {}
        """Step -> versions of which recorded rollouts were looked for."""
        self.taken_over: list[tuple[str, str]] = []
        self._slots = fixed_workers(1, slots)
        self._grad_norm = grad_norm
        console = Console(quiet=True)
        learner: Any = SimpleNamespace(
            accumulate=self._nothing,
            step=self._update,
            token_logprobs=self._logprobs,
            checkpoint=self._nothing,
            weights=self._weights,
        )
        store = SimpleNamespace(
            spans=remote(self._nothing),
            metrics=remote(self._nothing),
            finish_step=remote(self._finished),
            recorded=remote(self._recorded),
            drop_rollouts=remote(self._nothing),
            trajectory_again=SimpleNamespace(remote=self._again),
        )
        pool: Any = SimpleNamespace(take_over=lambda group, member: self.taken_over.append((group, member.summary)))
        pipeline: Any = SimpleNamespace(run=self._pipeline, keep=store, rollouts=pool, config=config.algorithm)
        observer: Any = SimpleNamespace(
            group=lambda group: None, step=lambda line: None, rollouts=lambda step, run: None
        )
        fleet: Any = SimpleNamespace(load=self._load, prove=self._prove)
        self.trainer = Trainer(
            config,
            batches=BatchScheduler(dict.fromkeys(TASKS, ()), self.order, pipeline, console, start.recorded),
            learner=learner,
            fleet=fleet,
            weights=WeightSync(
                learner,
                fleet,
                SimpleNamespace(probe=remote(self._probe)),
                tolerance=config.engine.canary_tolerance,
                moved=start.moved,
                canary=self.canary,
            ),
            store=store,
            observer=observer,
            progress=StepProgress(console),
            run=RunDirectory.create(folder / "run", ""),
            console=console,
        )

    async def canary(self, client: str, *probes: Any, version: int, moved: bool, **limits: Any) -> CanaryReading:
        self.asked_for_effect[version] = moved
        values: dict[str, Any] = dict.fromkeys((field.name for field in fields(CanaryReading)), 0.0)
        values["shift_max"] = float(self.live_adapter)
        return CanaryReading(**values)

    async def _pipeline(self, group: Group) -> str:
        slot = await self._slots.acquire(group.step * MOST_GROUPS + group.index)
        if group.step not in self.began:
            self.began.append(group.step)
        self.sampled.setdefault(group.step, set()).add(self.live)
        await self._ticks(3)
        self._slots.release(slot)
        await self._ticks(JUDGE_TICKS)
        return "samples"

    async def _weights(self, version: int) -> Awaitable[int]:
        async def update() -> int:
            return version

        return update()

    async def _load(self, update: int) -> None:
        self.live = update

    async def _prove(self, proof: Callable[[Any], Awaitable[CanaryReading]]) -> list[CanaryReading]:
        return [await proof("engine")]

    async def _update(self) -> Any:
        await self._ticks(JUDGE_TICKS)
        return an_update(100, kl=0.0, grad_norm=self._grad_norm)

    async def _probe(self, *ignored: Any) -> tuple[list[int], Any]:
        return [1, 2, 3], None

    async def _logprobs(self, tokens: list[int], *, adapter: bool = True) -> list[float]:
        return [0.0] * len(tokens)

    async def _recorded(self, step: int, version: int) -> list[tuple[str, int]]:
        self.looked_for.setdefault(step, []).append(version)
        task = self.order.tasks(step)[0]
        return [(task, version)]

    def _again(self, step: int, task: str, rollout: int) -> tuple[str, Awaitable[str]]:
        return "trajectory", self._text(f"rollout {rollout}")

    async def _finished(self, step: int, metrics: dict[str, Any]) -> None:
        self.learned.append(step)

    async def _text(self, text: str) -> str:
        return text

    async def _nothing(self, *ignored: Any) -> None:
        return None

    async def _ticks(self, number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)


async def trained(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(ray, "put", lambda value: value)
    await run.trainer.train(run.first, STEPS)
    return run


async def test_without_it_every_step_is_sampled_by_the_adapter_it_is_learned_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await trained(Run(tmp_path), monkeypatch)
    assert run.sampled == {step: {step - 1} for step in range(1, STEPS + 1)}
    assert all(run.asked_for_effect.values())


async def test_rollouts_run_ahead_by_one_version_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await trained(Run(tmp_path, "train.staleness=1"), monkeypatch)
    assert run.began == [1, 2, 3, 4, 5]
    # An adapter must have been seen to have an effect first, on quiet engines: that is after the first step.
    assert (run.sampled[1], run.sampled[2]) == ({0}, {1})
    for step in range(3, STEPS + 1):
        assert run.sampled[step] <= {step - 2, step - 1}
        assert step - 2 in run.sampled[step]
    # Nothing runs ahead of the last step, so that the engines are quiet then.
    assert run.asked_for_effect == {1: True, 2: False, 3: False, 4: False, 5: True}


@pytest.mark.parametrize("staleness", [2, 3, 8])
async def test_as_many_steps_run_ahead_as_versions_may_lie_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    run = await trained(Run(tmp_path, f"train.staleness={staleness}"), monkeypatch)
    # Each step's rollouts come before those of the next, and each is trained on, in order.
    assert run.began == [1, 2, 3, 4, 5]
    assert run.learned == [1, 2, 3, 4, 5]
    assert (run.sampled[1], run.sampled[2]) == ({0}, {1})
    for step in range(3, STEPS + 1):
        assert run.sampled[step] <= set(range(max(1, step - 1 - staleness), step))
    assert run.asked_for_effect == {1: True, 2: False, 3: False, 4: False, 5: True}


async def test_a_rollout_that_takes_several_steps_is_waited_for_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first group of step 4 is played until step 3 has been learned, across two syncs."""
    run = Run(tmp_path, "train.staleness=2", slots=100)
    slow = asyncio.Event()
    loads: list[int] = []
    played = run._pipeline

    async def pipeline(group: Group) -> str:
        if (group.step, group.index) == (4, 0):
            run.sampled.setdefault(4, set()).add(run.live)
            await slow.wait()
        return await played(group)

    async def load(update: int) -> None:
        loads.append(update)
        run.live = update
        if update == 3:
            # Step 4 has been taken by nobody yet: its turn comes now, and it waits for this group.
            slow.set()

    monkeypatch.setattr(run.trainer.batches.pipeline, "run", pipeline)
    monkeypatch.setattr(run.trainer.weights.fleet, "load", load)
    await trained(run, monkeypatch)
    assert loads == [1, 2, 3, 4, 5]
    assert run.learned == [1, 2, 3, 4, 5]
    # Begun with version 1, two before the weights it was learned on, and ended with version 3.
    assert run.sampled[4] == {1, 3}
    assert min(run.sampled[5]) == 2


async def test_what_runs_ahead_is_ended_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, "train.staleness=3", slots=100)
    ended: list[str] = []

    async def pipeline(group: Group) -> str:
        if group.step < 3:
            return await run._pipeline(group)
        try:
            if group.step == 3:
                raise RunStopped("the judge's budget is spent")
            await asyncio.Future()
        finally:
            ended.append(group.name)
        return "samples"

    monkeypatch.setattr(run.trainer.batches.pipeline, "run", pipeline)
    with pytest.raises(RunStopped, match="budget"):
        await trained(run, monkeypatch)
    assert {name.split("/")[0] for name in ended} == {"step3", "step4", "step5"}
    assert len(ended) == 3 * PROMPTS


async def test_nothing_runs_ahead_while_no_adapter_has_an_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await trained(Run(tmp_path, "train.staleness=1", grad_norm=0.0), monkeypatch)
    assert run.sampled == {step: {step - 1} for step in range(1, STEPS + 1)}
    assert not any(run.asked_for_effect.values())


async def test_nor_while_rounding_hides_the_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await trained(Run(tmp_path, "train.staleness=1", live_adapter=False), monkeypatch)
    assert run.sampled == {step: {step - 1} for step in range(1, STEPS + 1)}
    assert all(run.asked_for_effect.values())


@pytest.mark.parametrize(
    ("staleness", "versions"),
    [(0, {3: [2], 4: [3]}), (1, {3: [1, 2], 4: [2, 3]}), (2, {3: [0, 1, 2], 4: [1, 2, 3]})],
)
async def test_a_resumed_run_takes_over_what_the_step_may_have_been_sampled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, versions: dict[int, list[int]]
) -> None:
    start = StartPoint(step=2, moved=True, recorded=frozenset({3, 4}))
    run = await trained(Run(tmp_path, f"train.staleness={staleness}", start=start), monkeypatch)
    assert run.looked_for == versions
    expected = [
        (f"step{step}/{run.order.tasks(step)[0]}", f"rollout {version}")
        for step, asked in versions.items()
        for version in asked
    ]
    assert run.taken_over == expected
    # The process that goes on has not seen an adapter's effect yet.
    assert run.sampled[3] == {2}
    assert run.sampled[4] == {3}
    assert (3 in run.sampled[5]) == bool(staleness)


async def test_a_step_that_does_not_end_is_given_up_and_what_it_waits_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cancelled, loop = Run(tmp_path, "watch.step_seconds=3600"), asyncio.Event(), asyncio.get_running_loop()
    now, hanging = loop.time, 0
    monkeypatch.setattr(loop, "time", lambda: now() + (3600.0 if hanging == 3 else 0.0))

    async def hung(samples: Any) -> None:
        nonlocal hanging
        hanging += 1
        try:
            await asyncio.Future()
        finally:
            cancelled.set()

    monkeypatch.setattr(run.trainer.learner, "accumulate", hung)
    with pytest.raises(RunStopped, match=r"step 1 has not ended .*=3600, waiting for: 3 x a group's gradients in the "):
        await trained(run, monkeypatch)
    assert cancelled.is_set()


async def test_a_step_in_which_every_group_was_dropped_is_no_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, saved = Run(tmp_path), []

    async def dropped(group: Group) -> None:
        group.reason = "no rubric"

    async def checkpoint(folder: Path) -> None:
        saved.append(folder)

    monkeypatch.setattr(run.trainer.batches.pipeline, "run", dropped)
    monkeypatch.setattr(run.trainer.learner, "checkpoint", checkpoint)
    with pytest.raises(RunStopped, match="step 1: all 3 groups were dropped, .* 3 x no rubric"):
        await trained(run, monkeypatch)
    assert saved == []


async def test_a_checkpoint_is_written_beside_the_next_step_and_before_the_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    asked: list[tuple[str, list[int], list[str]]] = []
    on_disk: list[str] = []

    async def checkpoint(folder: Path) -> None:
        asked.append((folder.name, list(run.learned), list(on_disk)))
        # Step 1's until step 2 has been learned.
        while folder.name == "step00001" and not run.asked_for_effect.get(2):  # noqa: ASYNC110 (the loop's doing)
            await asyncio.sleep(0)
        on_disk.append(folder.name)

    monkeypatch.setattr(run.trainer.learner, "checkpoint", checkpoint)
    await trained(run, monkeypatch)
    names = [f"step{step:05d}" for step in range(1, STEPS + 1)]
    # Each is asked for at the end of its step, when the one before is on disk, the last one's too when training ends.
    assert asked == [(names[step], [*range(1, step + 1)], names[:step]) for step in range(STEPS)]
    assert on_disk == names


async def test_a_checkpoint_that_cannot_be_written_stops_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, "train.checkpoint_every=4")
    run.first = 4

    async def checkpoint(folder: Path) -> None:
        raise LearnerError("no space left on device")

    monkeypatch.setattr(run.trainer.learner, "checkpoint", checkpoint)
    with pytest.raises(LearnerError, match="no space left"):
        await trained(run, monkeypatch)
    assert run.learned == [4]


async def test_a_run_that_is_stopped_keeps_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    on_disk: list[str] = []

    async def checkpoint(folder: Path) -> None:
        while not stopping.cancelling():  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        on_disk.append(folder.name)

    monkeypatch.setattr(run.trainer.learner, "checkpoint", checkpoint)
    stopping = asyncio.create_task(trained(run, monkeypatch))
    while run.learned != [1]:  # noqa: ASYNC110 (the loop's doing)
        await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert on_disk == ["step00001"]


async def test_a_step_over_its_deadline_ends_the_run_and_names_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, loop, ended = Run(tmp_path, "watch.step_seconds=3600"), asyncio.get_running_loop(), []
    now, passed = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: now() + passed)

    async def hang(samples: str) -> None:
        nonlocal passed
        if run.learned == [1]:
            passed = 3600.0
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(samples)

    monkeypatch.setattr(run.trainer.learner, "accumulate", hang)
    with pytest.raises(
        RunStopped, match=r"^step 2 has not ended in watch.step_seconds=3600, waiting for: .*in the learn"
    ):
        await trained(run, monkeypatch)
    # Nothing goes on by itself, and what was done before counts.
    assert ended
    assert set(ended) == {"samples"}
    assert run.learned == [1]


@pytest.mark.parametrize(
    ("part", "method", "named"),
    [
        ("store", "spans", "the run store"),
        ("store", "metrics", "the run store"),
        ("store", "finish_step", "the run store"),
        ("learner", "token_logprobs", "the learner's log-probs for the canary"),
        ("learner", "step", "the learner's update"),
        ("fleet", "load", "sync of the adapter to the engines"),
    ],
)
async def test_whatever_a_step_waits_for_has_a_name(
    part: str, method: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped never answers: what is asked of it here."""
    run, asked = Run(tmp_path), asyncio.Event()

    async def hang(*ignored: Any, **named: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    instead = remote(hang) if part == "store" else hang
    monkeypatch.setattr(getattr(run.trainer, part), method, instead)
    training = asyncio.create_task(trained(run, monkeypatch))
    await asked.wait()
    assert str(run.trainer.pending).startswith(f"{named}, for ")
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)


async def test_a_tracker_that_hangs_holds_up_its_step_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked, goes_on = Run(tmp_path), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(line: Any) -> None:
        loop.call_soon_threadsafe(asked.set)
        assert goes_on.wait(60)

    monkeypatch.setattr(run.trainer.observer, "step", hang)
    training = asyncio.create_task(trained(run, monkeypatch))
    await asked.wait()
    assert str(run.trainer.pending).startswith("the trackers, for ")
    assert run.learned == []
    goes_on.set()
    await training
    assert run.learned == [1, 2, 3, 4, 5]
