"""What a person is told while a step goes on, while the judge is away, and when a run is interrupted."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from functools import partial
from typing import Any, cast

import pytest
from rich.console import Console

from draco_ray.judging.outage import OutageStatus
from draco_ray.pipeline import Group
from draco_ray.summaries import PhaseSummary
from draco_ray.training import progress as progress_module
from draco_ray.training.progress import STAGES, StepProgress, stage, watch_judge
from draco_ray.training.run import _stopping
from draco_ray.training.watchdog import PendingOperations, cancel_on_loss


def away(next_try: float, gives_up: float) -> OutageStatus:
    return OutageStatus(reason="503 overloaded", lasted=10.0, next_try=next_try, gives_up=gives_up)


async def test_an_outage_is_a_line_a_countdown_and_another_line() -> None:
    looks = [None, away(4, 3590), away(3, 3589), away(2, 3588), None, None]
    over = asyncio.Event()
    notes: list[str] = []

    class Noted(StepProgress):
        def note(self, text: str) -> None:
            super().note(text)
            notes.append(text)

    async def pause() -> OutageStatus | None:
        if not looks:
            over.set()
            return None
        return looks.pop(0)

    text = io.StringIO()
    console = Console(file=text, width=200)
    progress = Noted(console)
    progress.start("step 1/2", rollouts=6)
    watching = asyncio.create_task(watch_judge(pause, progress, console, 0.0))
    await over.wait()
    watching.cancel()
    progress.stop()
    lines = text.getvalue().splitlines()
    assert lines == [
        "the judge does not answer (503 overloaded): judging is paused; next try in 4 s, the run stops in 59 min 50 s",
        "the judge answers again: judging continues",
    ]
    assert notes == [
        "judge unavailable: next try in 4 s, the run stops in 59 min 50 s",
        "judge unavailable: next try in 3 s, the run stops in 59 min 49 s",
        "judge unavailable: next try in 2 s, the run stops in 59 min 48 s",
        "",
    ]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def group(task: str, rollouts: int, phases: int, *, done: bool = False) -> Group:
    """With so many rollouts and phases; what they hold is not looked at."""
    phase = cast(PhaseSummary, None)
    made = Group(step=1, index=0, task_id=task, prompt=(), rollouts=cast(Any, [None] * rollouts))
    made.phases = [phase] * phases
    made.reason = "done with" if done else None
    return made


def test_the_counts_are_summed_over_groups_and_the_line_fits_60_columns() -> None:
    clock, pending = Clock(), PendingOperations()
    progress = StepProgress(Console(file=io.StringIO()), pending, clock=clock)
    groups = [group(task, 0, 0) for task in "abcdefgh"]
    progress.start("step 3/100", groups, 48)
    assert progress.line() == "step 3/100 0:00 · 0/48 rollouts · 0/8 groups"
    clock.now += 42
    with pending.of("rollout", "a/1"):
        groups[:2] = [group("a", 6, 14, done=True), group("b", 3, 5)]
        assert progress.line() == "step 3/100 0:42 · generating · 9/48 rollouts · 19 judge phases · 1/8 groups"
        assert len(progress.line(60)) <= 60
        assert progress.line(60).startswith("step 3/100 0:42 · generating · 9/48")
        progress.note("judge unavailable: next try in 4 s")
        assert "judge unavailable: next try in 4 s" in progress.line(60)
        progress.note("judge unavailable: next try in 300 s, the run stops in 59 min 30 s")
        assert progress.line(60).startswith("step 3/100 0:42 · judge unavailable: next try in 300 s, ")
    progress.note("")
    groups[:] = [group(task, 6, 14, done=True) for task in "abcdefgh"]
    assert "112 judge phases · 8/8 groups" in progress.line()
    # Nothing that a step of this size may show is wider.
    for phase in STAGES:
        with pending.of(phase):
            assert len(progress.line(60)) <= 60


def test_stages_are_named_by_what_is_waited_for() -> None:
    pending = PendingOperations()
    assert stage(pending) == ""
    with pending.of("the engines' start"), pending.of("the learner's start"):
        assert stage(pending) == "loading engine"
    with pending.of("a group's gradients in the learner"):
        assert stage(pending) == "learning"
        with pending.of("judge's score", "step1/a/0"):
            assert stage(pending) == "judging"


def test_a_job_log_gets_a_line_where_a_step_takes_long_and_none_beside_a_live_one() -> None:
    clock = Clock()
    progress = StepProgress(Console(file=io.StringIO()), heartbeat_seconds=60.0, clock=clock)
    assert progress.due() is None
    progress.start("step 1/2", [group("a", 0, 0)], 6)
    clock.now += 59
    assert progress.due() is None
    clock.now += 1
    assert progress.due() == "step 1/2 1:00 · 0/6 rollouts · 0/1 groups"
    assert progress.due() is None
    clock.now += 60
    assert progress.due() == "step 1/2 2:00 · 0/6 rollouts · 0/1 groups"
    progress.stop()
    clock.now += 60
    assert progress.due() is None
    text = io.StringIO()
    alive = StepProgress(
        Console(file=text, force_terminal=True, width=60, _environ={"TERM": "xterm"}),
        heartbeat_seconds=1.0,
        clock=clock,
    )
    alive.start("starting")
    clock.now += 5
    assert alive.due() is None
    alive.stop()
    assert "starting 0:0" in text.getvalue()


async def test_the_line_of_a_job_log_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    text, clock = io.StringIO(), Clock()
    monkeypatch.setattr(progress_module, "LOOK_SECONDS", 0.001)
    progress = StepProgress(Console(file=text, width=200), heartbeat_seconds=60.0, clock=clock)
    progress.start("step [1]/2", [group("a", 0, 0)], 6)
    clock.now += 61
    while not text.getvalue():  # noqa: ASYNC110 (a thread prints it)
        await asyncio.sleep(0)
    progress.stop()
    assert text.getvalue() == "in progress: step [1]/2 1:01 · 0/6 rollouts · 0/1 groups\n"


def test_an_interrupted_run_says_so_before_it_cleans_up() -> None:
    text, seen = io.StringIO(), []
    console = Console(file=text, width=200)

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            seen.append(text.getvalue())

    async def run() -> None:
        await cancel_on_loss(work(), cancelled=partial(_stopping, console))

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert seen == ["stopping…\n"]
    assert signal.getsignal(signal.SIGINT) is before
