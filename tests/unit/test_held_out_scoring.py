"""The held-out judge: what it scores, that nothing is trained on it, and when a drift of two judges is flagged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from draco_ray.algorithm.drift import drift
from draco_ray.config.load import load_config
from draco_ray.config.schema import HeldOutJudgeConfig, JudgeConfig, WatchConfig
from draco_ray.errors import RunStopped
from draco_ray.judging.actors import only_self
from draco_ray.judging.example import RUBRIC, example_trajectory
from draco_ray.judging.held_out import HeldOutJudge, HeldOutScores, pass_share
from draco_ray.judging.judge import CallContext
from draco_ray.judging.phases import Score, Union
from draco_ray.judging.pool import JudgeWorkerActor, PolicyJudge, phase_summary
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.report.page import _of_held_out
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Judged, ScoredCriterion, Verdict
from draco_ray.training.metrics import held_out_metrics
from draco_ray.training.watchdog import Watchdog

CONTEXT = CallContext(group="step1/t_1", task_id="t_1")


def judged(*verdicts: int) -> Judged[Any]:
    return Judged(
        value=tuple(ScoredCriterion(verdict=Verdict(each), evidence="", justification="") for each in verdicts)
    )


def summary(*verdicts: int) -> Any:
    return phase_summary("score", CONTEXT, judged(*verdicts), 0.0)


class Judges:
    """A pool whose held-out judge fails everything and may hang, and whose judge passes everything but one."""

    def __init__(self, *, hang: bool = False) -> None:
        self.asked: list[tuple[type, CallContext, dict[str, Any]]] = []
        self.hang, self.began = hang, asyncio.Event()

    async def ask(self, phase: Any, context: CallContext, **given: Any) -> Any:
        self.asked.append((phase, context, given))
        if context.held_out and self.hang:
            self.began.set()
            await asyncio.Event().wait()
        value = judged(-1, -1) if context.held_out else judged(1, 1 if context.rollout else -1)
        found = summary(*(int(each.verdict) for each in value.value or ())) if phase is Score else summary()
        return SimpleNamespace(judged=value, archived=value, ok=True, summary=replace(found, phase=phase.name))


class Keep:
    """Remembers what is stored, by method."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self.calls.append(name))


def held_out(judges: Judges, keep: Keep, share: float = 1.0) -> HeldOutJudge:
    config = JudgeConfig(held_out=HeldOutJudgeConfig(model="openai/other", share=share))
    return HeldOutJudge(config, judges, keep)  # type: ignore[arg-type]


async def test_it_scores_a_sample_and_only_its_calls_are_stored() -> None:
    judges, keep, phases = Judges(), Keep(), list[Any]()
    trained: Any = [(0, "trajectory 0", summary(1, -1)), (1, "trajectory 1", summary(1, 1))]
    found = await held_out(judges, keep).score(1, CONTEXT, trained, "rubric", phases)
    assert found == HeldOutScores(trained=0.75, held_out=0.0, rollouts=2)
    assert keep.calls == ["heldout_calls"] * 2
    assert [each.phase for each in phases] == ["held_out"] * 2
    assert all(context.held_out and given["rubric"] == "rubric" for _, context, given in judges.asked)
    assert await held_out(judges, keep, share=1e-9).score(1, CONTEXT, trained, "rubric", phases) is None
    assert len(judges.asked) == 2


def test_a_rubric_without_criteria_is_passed_and_a_failed_scoring_says_nothing() -> None:
    assert pass_share(summary()) == 1.0
    assert pass_share(summary(0, 0)) is None
    assert pass_share(summary(1, 0, -1)) == 0.5
    assert pass_share(phase_summary("verdicts", CONTEXT, judged(1, 0, -1), 0.0)) == 0.5
    assert pass_share(phase_summary("score", CONTEXT, Judged(value=None, error="refused"), 0.0)) is None


async def test_no_reward_is_made_of_its_verdicts_and_no_group_waits_for_it() -> None:
    judges, keep, rewarded = Judges(hang=True), Keep(), list[Any]()

    async def rewards(rollouts: Any, scores: Any) -> Any:
        rewarded.extend(scores)
        return SimpleNamespace(scored=rollouts, has_spread=False, surviving=(), rewards=(0.0, 0.0))

    async def advantage() -> None:
        return None

    computer = SimpleNamespace(
        rewards=SimpleNamespace(remote=rewards),
        from_verdicts=SimpleNamespace(remote=lambda *_: ("samples", None, None, advantage())),
    )
    pipeline = Pipeline(
        load_config("sandbox", []).algorithm,
        None,  # type: ignore[arg-type]
        judges,  # type: ignore[arg-type]
        computer,
        keep,
        held_out=held_out(judges, keep),
    )
    group = Group(step=1, index=0, task_id="t_1", prompt=())
    members: Any = [SimpleNamespace(rollout=each, trajectory=f"trajectory {each}") for each in range(2)]
    stage1: Any = asyncio.get_running_loop().create_future()
    stage1.set_result(SimpleNamespace(ok=True, judged=None))
    proposals: Any = [SimpleNamespace(ok=True, judged=None) for _ in members]
    samples = await pipeline._rubric_reward(group, members, proposals, stage1)
    assert samples == "samples"
    assert rewarded == [judged(1, -1), judged(1, 1)]
    assert "heldout_calls" not in keep.calls
    assert group.held_out is not None
    await judges.began.wait()
    assert not group.held_out.done()
    group.held_out.cancel()
    assert {phase for phase, context, _ in judges.asked if context.held_out} == {Score}
    assert any(phase is Union for phase, _, _ in judges.asked)


async def test_a_worker_asks_the_held_out_judge_what_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Client:
        def __init__(self, config: JudgeConfig, *_: Any, **__: Any) -> None:
            self.name = f"{config.model} at {config.api_base}"

        async def __call__(self, request: Any) -> Any:
            asked.append(self.name)
            raise RuntimeError

        async def check(self) -> None:
            asked.append(f"check {self.name}")

    monkeypatch.setattr("draco_ray.judging.client.LiteLLMClient", Client)
    config = JudgeConfig.model_validate(
        {
            "model": "openai/m",
            "held_out": {"model": "openai/m", "api_base": "http://other/v1"},
            "rule_judge": {"start": True},
        }
    )
    nobody = PolicyJudge(samplers=(), tokenizer=None, name="")
    worker = JudgeWorkerActor(config, nobody, None, None, None, True, load_prompts(config.prompts, b"key"))
    await worker.check()
    assert sorted(asked) == ["check openai/m at None", "check openai/m at http://other/v1"]
    ask: Any = worker.ask
    for context in (CONTEXT, replace(CONTEXT, held_out=True)):
        with pytest.raises(RuntimeError):
            await ask(Score, context, trajectory=example_trajectory(), rubric=RUBRIC)
    assert asked[2:] == ["openai/m at None", "openai/m at http://other/v1"]


def test_it_is_another_judge_or_has_a_rubric_of_its_own() -> None:
    with pytest.raises(ValidationError, match="set judge.held_out.model or judge.held_out.rubric"):
        HeldOutJudgeConfig()
    both = load_config("sandbox", ["judge.self_judge.enabled=true", "judge.rule_judge.start=false"]).judge
    assert only_self(both)
    assert not only_self(both.model_copy(update={"held_out": HeldOutJudgeConfig(model="openai/other")}))


def divergences(rng: np.random.Generator, steps: int, mean: float) -> list[list[tuple[float, int]]]:
    """Steps of 16 groups, in each of which one to four rollouts were scored by both judges."""
    rollouts = rng.integers(1, 5, (steps, 16))
    values = rng.normal(mean, 0.3 / np.sqrt(rollouts))
    return [list(zip(*step, strict=True)) for step in zip(values.tolist(), rollouts.tolist(), strict=True)]


def flagged_at(steps: list[list[tuple[float, int]]]) -> int | None:
    """The first step after which the drift is significant."""
    for step in range(1, len(steps) + 1):
        found = drift(steps[:step])
        if found is not None and found.significant:
            return step
    return None


def test_a_lasting_difference_of_two_judges_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    runs = [divergences(rng, 24, 0.3) for _ in range(40)]
    assert sum(flagged_at(run) is not None for run in runs) <= 2


def test_a_rise_is_flagged_soon_and_a_fall_never() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        start = divergences(rng, 10, 0.1)
        at = flagged_at(start + divergences(rng, 6, 0.5))
        assert at is not None
        assert 12 <= at <= 14
        assert flagged_at(start + divergences(rng, 10, -0.4)) is None


def test_too_few_groups_say_nothing() -> None:
    assert drift([]) is None
    assert drift([[(0.0, 1)] * 95, [(1.0, 1)] * 96]) is None
    assert drift([[(0.0, 1)] * 96, [], [(1.0, 1)] * 95]) is None
    found = drift([[(0.0, 1)] * 96, [], [(1.0, 1)] * 96])
    assert found is not None
    assert (found.rise, found.significant) == (1.0, True)


def test_a_group_counts_by_its_rollouts() -> None:
    found = drift([[(0.0, 1)] * 96, [(0.0, 1), (0.4, 3)] * 48])
    assert found is not None
    assert found.rise == pytest.approx(0.3)
    # By hand: 96 groups each with 1 * (0 - 0.3) or 3 * (0.4 - 0.3); the other side has the least error.
    error = ((0.3**2 * 96 / 192**2) * 96 / 95 + 0.05**2 / 96) ** 0.5
    assert (found.high - found.low) / 2 == pytest.approx(1.98 * error, rel=0.01)


def test_metrics_hold_both_curves_and_the_drift_since_the_start() -> None:
    start = {"held_out_divergence": [[0.0, 1], [0.1, 2]] * 48}
    scored = [
        HeldOutScores(trained=0.9, held_out=0.3, rollouts=1),
        HeldOutScores(trained=0.8, held_out=0.2, rollouts=3),
    ]
    found = held_out_metrics(scored * 48, [start])
    assert (found["held_out_rollouts"], found["drift_significant"]) == (192, 1)
    assert found["held_out_trained_rate"] == pytest.approx(0.825)
    assert found["held_out_rate"] == pytest.approx(0.225)
    assert found["drift_low"] < found["drift"] < found["drift_high"]
    nothing = held_out_metrics([], [])
    assert (nothing["held_out_rate"], nothing["drift"], nothing["drift_significant"]) == (None, None, 0)


def test_the_page_shows_both_curves_and_names_the_flagged_steps() -> None:
    none = {"held_out_rate": None}
    lines = [
        {"step": step, **held_out_metrics([HeldOutScores(trained=0.9, held_out=rate, rollouts=2)] * 96, [])}
        for step, rate in ((1, 0.8), (2, 0.3))
    ]
    lines[1] |= held_out_metrics([HeldOutScores(trained=0.9, held_out=0.3, rollouts=2)] * 96, lines[:1])
    assert _of_held_out([none]) == []
    rates, drifts = _of_held_out([none, *lines])
    assert "held-out judge" in str(rates.drawing)
    assert "Significant after step 2" in drifts.note


def test_a_run_warns_or_stops_as_it_is_told() -> None:
    line = {"step": 4, "drift": 0.31, "drift_low": 0.2, "drift_high": 0.42, "drift_significant": 1}
    said: list[str] = []
    Watchdog(WatchConfig()).check_drift(line, said.append)
    Watchdog(WatchConfig(drift="off")).check_drift(line, said.append)
    Watchdog(WatchConfig(drift="stop")).check_drift(line | {"drift_significant": 0}, said.append)
    Watchdog(WatchConfig(drift="stop")).check_drift({"step": 4}, said.append)
    assert len(said) == 1
    assert said[0].startswith("step 4: the judge's pass rate has risen by 31 points (95 % interval 20 to 42)")
    with pytest.raises(RunStopped, match=r"watch\.drift=stop"):
        Watchdog(WatchConfig(drift="stop")).check_drift(line, said.append)
