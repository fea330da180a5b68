"""What stops a run that nobody looks at, and what it says before: what is decided, without Ray or a clock."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draco_ray.cli import main
from draco_ray.config.load import dump_config
from draco_ray.config.schema import DracoConfig, RunConfig, WatchConfig
from draco_ray.errors import ConfigError, RunStopped
from draco_ray.runs.directory import RunDirectory
from draco_ray.training import run as run_module
from draco_ray.training.run import resume_or_start
from draco_ray.training.watchdog import PendingOperations, Watchdog, report_inactivity, run_with_timeout

NO_RUBRIC = "no rubric: stage1 and every stage2 call failed"


def line(
    step: int, *, groups: int = 4, dropped: int = 0, failed: int = 0, phases: int = 40, lost: int = 0
) -> dict[str, Any]:
    """The part of a step's metrics that is looked at."""
    return {
        "step": step,
        "groups": 4,
        "groups_failed": dropped,
        "rollouts": 24 - lost,
        "rollouts_lost": lost,
        "judge": {"score": {"phases": 40, "failed": failed}, "credit": {"phases": 10, "failed": 0}},
    }


def test_a_machine_whose_clock_is_set_makes_nothing_late(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = PendingOperations()
    with pending.of("rollout", "step1/a_1/0"):
        jumped = time.time() + 86400
        monkeypatch.setattr(time, "time", lambda: jumped)
        assert 0 <= pending.quiet < 3600
        assert "day" not in str(pending)
        assert "24 h" not in str(pending)


def test_a_step_in_which_every_group_was_dropped_stops_the_run_and_says_why() -> None:
    with pytest.raises(RunStopped) as stopped:
        Watchdog(WatchConfig()).check(
            line(3, dropped=4, lost=6), Counter({NO_RUBRIC: 3, "1 of 6 rollouts finished": 1})
        )
    assert str(stopped.value) == (
        f"step 3: all 4 groups were dropped, 6 of 24 rollouts lost: 3 x {NO_RUBRIC}; 1 x 1 of 6 rollouts finished, so "
        "the policy cannot learn; the run stops (watch.empty_steps)"
    )


def test_more_such_steps_may_be_allowed_but_only_in_a_row_and_not_as_the_last() -> None:
    watchdog = Watchdog(WatchConfig(empty_steps=2))
    watchdog.check(line(1, dropped=4), {})
    watchdog.check(line(2, dropped=3), {})
    watchdog.end()
    watchdog.check(line(3, dropped=4), {})
    with pytest.raises(RunStopped, match="step 3: all 4 groups .* so the policy has not learned from the last step"):
        watchdog.end()
    with pytest.raises(RunStopped, match=r"step 4: .*\(2 such steps in a row\)"):
        watchdog.check(line(4, dropped=4), {})


def test_a_share_of_failed_judge_phases_stops_the_run() -> None:
    watchdog = Watchdog(WatchConfig())
    watchdog.check(line(1, failed=25), {})
    with pytest.raises(RunStopped, match=r"step 2: 26 of 50 judge phases failed \(score 26 of 40\), more than .*=0.5"):
        watchdog.check(line(2, failed=26), {})
    # A handful says nothing.
    watchdog.check({**line(3), "judge": {"score": {"phases": 9, "failed": 9}}}, {})
    Watchdog(WatchConfig(judge_failures=1.0)).check(line(1, failed=40), {})


def test_what_is_waited_for_is_named_with_its_oldest() -> None:
    now = 0.0
    pending = PendingOperations(lambda: now)
    assert str(pending) == "unknown"
    with pending.of("rollout", "step3/a_1/0"):
        now = 60.0
        with pending.of("rollout", "step3/b_1/2"), pending.of("the learner's update"):
            now = 120.0
            rollouts = "2 x rollout (the oldest: step3/a_1/0, for 2 min 0 s)"
            assert str(pending) == f"{rollouts}; the learner's update, for 60 s"
            assert pending.quiet == 60.0
        assert pending.quiet == 0.0
        assert str(pending) == "rollout step3/a_1/0, for 2 min 0 s"


async def test_silence_is_broken_once_in_each_such_time() -> None:
    now, said = 0.0, asyncio.Queue[str]()
    pending = PendingOperations(lambda: now)
    reason = ""
    watching = asyncio.create_task(report_inactivity(pending, 600.0, said.put_nowait, lambda: reason, look_seconds=0.0))
    with pending.of("rollout", "step3/a_1/0"):
        for minutes, reason in ((10, ""), (20, "no node has free resources for 1 x 2 CPU")):
            shown = f" ({reason})" if reason else ""
            now = 60.0 * minutes
            assert await said.get() == (
                f"no progress for {minutes} min 0 s, waiting for: rollout step3/a_1/0, for {minutes} min 0 s{shown}"
            )
            for _ in range(5):
                await asyncio.sleep(0)
            assert said.empty()
    # Progress: the count begins anew.
    now += 599.0
    for _ in range(5):
        await asyncio.sleep(0)
    assert said.empty()
    watching.cancel()


async def test_what_takes_too_long_is_ended_and_what_it_waited_for_was_asked_before() -> None:
    pending, ended = PendingOperations(), []

    async def step() -> None:
        try:
            with pending.of("the learner's update"):
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("step")

    late = partial(_late_of, pending)
    with pytest.raises(RunStopped, match="waiting for: the learner's update, for"):
        await run_with_timeout(step(), 0.01, late)
    assert ended == ["step"]
    assert str(pending) == "unknown"

    async def quick() -> int:
        return 7

    assert await run_with_timeout(quick(), 3600.0, late) == 7
    assert await run_with_timeout(quick(), None, late) == 7


def _late_of(pending: PendingOperations) -> RunStopped:
    return RunStopped(f"step 1 has not ended, waiting for: {pending}")


def configured(root: Path, name: str | None = "nightly") -> DracoConfig:
    return DracoConfig(run=RunConfig(root=root, name=name))


def test_one_command_starts_continues_and_starts_again_what_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(run_module, "train", lambda *given: done.append("started"))
    monkeypatch.setattr(run_module, "resume", lambda place, *given, **more: done.append(f"continued {place.local}"))
    config = configured(tmp_path)
    resume_or_start(config, "sandbox")
    run = RunDirectory.create(tmp_path / "nightly", dump_config(config))
    resume_or_start(config, "sandbox")
    run.part("trajectories", 1, "a").parent.mkdir(parents=True)
    run.part("trajectories", 1, "a").touch()
    resume_or_start(config, "sandbox")
    assert done == ["started", "started", f"continued {run.path}"]
    with pytest.raises(ConfigError, match="run.name is not set; set run.name"):
        resume_or_start(configured(tmp_path, None), "sandbox")


def test_both_ways_of_continuing_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--resume", "runs/a", "--resume-or-start"])
    assert "--resume DIR and --resume-or-start cannot be combined" in capsys.readouterr().err


def test_a_refused_start_does_not_keep_the_runs_name(tmp_path: Path) -> None:
    first, second = configured(tmp_path), configured(tmp_path).model_copy(update={"seed": 7})
    run = RunDirectory.create(tmp_path / "nightly", dump_config(first))
    assert run_module._directory(tmp_path / "nightly", second).path == run.path
    run.metrics_file.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="already exists; choose another run.name"):
        run_module._directory(tmp_path / "nightly", second)
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        run_module._directory(tmp_path / "other", second)
