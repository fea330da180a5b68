"""What is said of held-out tasks before and after training, where a run was resumed with others."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from draco_ray.config.load import dump_config, load_config
from draco_ray.errors import ConfigError
from draco_ray.records import JudgedRollout
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.training import checks, held_out, session
from draco_ray.training import run as driver
from draco_ray.training.held_out import HeldOutEvaluator, HeldOutJudgeEvaluator
from tests.support.evaluations import a_result


def about(said: StringIO) -> tuple[Any, ...]:
    nobody: Any = None
    return load_config("sandbox"), nobody, nobody, nobody, Console(file=said, width=300)


def test_a_rate_before_and_after_is_that_of_the_tasks_that_were_played_both_times() -> None:
    said = StringIO()
    judged = HeldOutJudgeEvaluator(*about(said), prompts=lambda tasks: {}, static=())
    evaluated = HeldOutEvaluator(*about(said))
    before, after = {"a": True, "b": False}, {"b": True, "c": False, "d": False}

    def report(last: dict[str, bool]) -> None:
        evaluated.report(*([a_result(task, 0, done).evaluation for task, done in of.items()] for of in (before, last)))
        verdicts = {True: (1, 1), False: (-1, -1)}
        judged.report(
            *([JudgedRollout(task_id=each, run=0, verdicts=verdicts[of[each]]) for each in of] for of in (before, last))
        )

    report(after)
    assert "TGC 0.0% -> 100.0% (+100.0 points) on the 1 of 4 tasks that were measured both times, setting" in (
        said.getvalue()
    )
    assert "rate 0.0 % -> 100.0 % on the 1 of 4 tasks that were measured both times (a stand-in" in said.getvalue()
    said.truncate(0)
    report({"c": True})
    assert "->" not in said.getvalue()
    report({"a": True, "b": True})
    assert "TGC 50.0% -> 100.0% (+50.0 points), setting" in said.getvalue()
    assert "50.0 % [0.0, 100.0] -> 100.0 % [100.0, 100.0] (a stand-in" in said.getvalue()


async def test_what_was_judged_of_a_policy_that_is_gone_stays_when_other_tasks_are_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(*_: Any) -> list[JudgedRollout]:
        return new

    old, new = ([JudgedRollout(task_id=task, run=0, verdicts=(1,))] for task in ("a", "b"))
    environment = SimpleNamespace(tasks=lambda split: ["b"], task=lambda name: SimpleNamespace(task_id=name))
    monkeypatch.setattr(held_out, "make_environment", lambda *_: environment)
    monkeypatch.setattr(HeldOutJudgeEvaluator, "_judge", asked)
    judged = HeldOutJudgeEvaluator(*about(StringIO()), prompts=lambda tasks: {}, static=())
    split = load_config("sandbox").data.eval_split
    monkeypatch.setattr(held_out, "read_judged", lambda run: {(0, split): old})
    assert await judged.measure(0, 3) == old
    assert await judged.measure(3, 3) == new
    # As many as there were, and of another task.
    assert await judged.measure(0, 0) == new


def test_a_run_killed_while_its_last_policy_is_judged_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("sandbox", ["train.evaluate_before_after=true", "train.evaluation_runs=2"])
    run = RunDirectory.create(tmp_path / "run", dump_config(config))
    split = config.data.eval_split
    environment = SimpleNamespace(evaluates=False, tasks=lambda split: ["a"])
    monkeypatch.setattr(driver, "make_environment", lambda *_: environment)
    for number, finished in enumerate((False, True)):
        judged = JudgedRollout(task_id="a", run=number, verdicts=(1,))
        RunStore(run).write("heldout_verdicts", 3, f"{split}-a-{number}", [rows.heldout_row(3, split, judged, ())])
        assert driver._measured(run, config, 3) == finished
    # Of a task that is held out no longer there are verdicts, too.
    gone = JudgedRollout(task_id="gone", run=0, verdicts=(1,))
    RunStore(run).write("heldout_verdicts", 3, f"{split}-gone-0", [rows.heldout_row(3, split, gone, ())])
    assert driver._measured(run, config, 3)
    assert not driver._measured(run, config, 4)
    assert driver._measured(run, load_config("sandbox", ["train.evaluate_before_after=false"]), 4)


def test_a_split_without_a_task_is_refused_and_not_measured_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = SimpleNamespace(evaluates=True, tasks=lambda split: ["a"] if split == "train" else [])
    config = load_config("sandbox")
    monkeypatch.setattr(checks, "with_environment", lambda config: (config, environment))
    with pytest.raises(ConfigError, match=rf"data.eval_split={config.data.eval_split}: .* has no task in this split"):
        checks.check_environment(checks.CheckContext(config, Console(quiet=True)))
    untested = config.updated(train={"evaluate_before_after": False})
    checks.check_environment(checks.CheckContext(untested, Console(quiet=True)))


def test_held_out_tasks_that_lose_the_beginning_of_their_prompt_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = SimpleNamespace(prompt=lambda prompt: [0] * prompt)
    monkeypatch.setattr(session, "task_prompts", lambda *given: (dict(zip(given[2], (9, 10, 11), strict=True)), chat))
    environment: Any = None

    def said(tasks: tuple[str, ...] = ("a", "b", "c"), use: str = "tool_calling", most: int = 10) -> str:
        words = StringIO()
        config = load_config("sandbox", [f"agent.use={use}", f"agent.max_prompt_length={most}"])
        session.say_cut_prompts(config, environment, tasks, Console(file=words, width=300))
        return words.getvalue()

    assert said() == (
        "1 of 3 held-out tasks have prompts longer than agent.max_prompt_length=10 tokens, which will be "
        "left-truncated; first c\n"
    )
    assert said(most=11) == said(()) == ""
    # What a program asks is refused where it is too long, and never cut.
    assert said(use="command") == ""
