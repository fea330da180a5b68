"""The held-out judge: what it scores, that nothing is trained on it, and when a drift of two judges is flagged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from draco_ray.algorithm.drift import drift, pass_rate_fall
from draco_ray.config.load import load_config
from draco_ray.config.schema import HeldOutJudgeConfig, JudgeConfig, WatchConfig
from draco_ray.errors import ConfigError, RunStopped
from draco_ray.judging.actors import is_self_judge_only
from draco_ray.judging.example import RUBRIC, example_trajectory
from draco_ray.judging.held_out import HeldOutJudge, HeldOutScores, pass_share
from draco_ray.judging.judge import CallContext, phase_summary
from draco_ray.judging.phases import Score, Union
from draco_ray.judging.pool import JudgeWorkerActor
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.report.page import _of_held_out
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import FloatArray, Judged, ScoredCriterion, Verdict
from draco_ray.training.metrics import held_out_metrics
from draco_ray.training.session import with_environment
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
        def remote(*_: Any) -> asyncio.Future[None]:
            self.calls.append(name)
            stored = asyncio.get_running_loop().create_future()
            stored.set_result(None)
            return stored

        return SimpleNamespace(remote=remote)


def held_out(judges: Judges, keep: Keep, share: float = 1.0) -> HeldOutJudge:
    config = JudgeConfig(held_out=HeldOutJudgeConfig(model="openai/other", share=share))
    return HeldOutJudge(config, judges, keep)  # type: ignore[arg-type]


async def test_it_scores_the_better_half_and_a_middle_rollout_and_only_its_calls_are_stored() -> None:
    judges, keep, phases = Judges(), Keep(), list[Any]()
    verdicts = {0: (1, -1, -1), 1: (1, 1, -1), 3: (1, 1, 1), 4: (-1, -1, -1)}
    trained: Any = [(number, f"trajectory {number}", summary(*each)) for number, each in verdicts.items()]

    async def score(rewards: tuple[float, ...], share: float = 1.0) -> HeldOutScores | None:
        reward: Any = SimpleNamespace(scored=tuple(verdicts), rewards=rewards)
        return await held_out(judges, keep, share).score(1, CONTEXT, trained, reward, "rubric", phases)

    by_main: Any = pytest.approx((1.0, 2 / 3, 1 / 3))
    assert await score((-1 / 3, 1 / 3, 1.0, -1.0)) == HeldOutScores(trained=by_main, best=(0.0, 0.0), middle=0.0)
    assert [given["trajectory"] for _, _, given in judges.asked] == [f"trajectory {each}" for each in (3, 1, 0)]
    assert keep.calls == ["heldout_calls"] * 3
    assert [each.phase for each in phases] == ["held_out"] * 3
    assert all(context.held_out and given["rubric"] == "rubric" for _, context, given in judges.asked)
    assert await score((-1 / 3, 1 / 3, 1.0, -1.0), share=1e-9) is None
    assert len(judges.asked) == 3
    # Equal rewards, as of a group of hacks: nothing is in the middle.
    alike: Any = pytest.approx((1 / 3, 2 / 3))
    assert await score((0.5, 0.5, 0.5, 0.5)) == HeldOutScores(trained=alike, best=(0.0, 0.0), middle=None)


def test_a_rubric_without_criteria_is_passed_and_a_failed_scoring_says_nothing() -> None:
    assert pass_share(summary()) == 1.0
    assert pass_share(summary(0, 0)) is None
    assert pass_share(summary(1, 0, -1)) == 0.5
    assert pass_share(phase_summary("verdicts", CONTEXT, judged(1, 0, -1), 0.0)) == 0.5
    assert pass_share(phase_summary("score", CONTEXT, Judged(value=None, error="refused"), 0.0)) is None


def pipeline_of(judges: Judges, keep: Keep, rewarded: list[Any], *overrides: str, rollouts: Any = None) -> Pipeline:
    """A pipeline with a held-out judge for every group, in which each group's second rollout is the best."""

    async def rewards(rollouts: Any, scores: Any) -> Any:
        rewarded.extend(scores)
        return SimpleNamespace(scored=rollouts, has_spread=False, surviving=(), rewards=(0.0, 1.0))

    async def advantage() -> None:
        return None

    computer = SimpleNamespace(
        rewards=SimpleNamespace(remote=rewards),
        from_verdicts=SimpleNamespace(remote=lambda *_: ("samples", None, None, advantage())),
    )
    return Pipeline(
        load_config("sandbox", list(overrides)).algorithm,
        rollouts,
        judges,  # type: ignore[arg-type]
        computer,
        keep,
        held_out=held_out(judges, keep),
    )


async def test_no_reward_is_made_of_its_verdicts_and_no_group_waits_for_it() -> None:
    judges, keep, rewarded = Judges(hang=True), Keep(), list[Any]()
    pipeline = pipeline_of(judges, keep, rewarded)
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


async def test_it_scores_by_the_rubric_that_a_task_keeps_and_the_next_visit_does_not_wait_for_it() -> None:
    judges, written = Judges(hang=True), iter(RUBRIC)

    async def play(task_id: str, group: str, rollout: int, **_: Any) -> Any:
        trajectory = f"{group} {rollout}"
        return SimpleNamespace(member=SimpleNamespace(rollout=rollout, trajectory=trajectory, summary=None))

    async def ask(phase: Any, context: CallContext, **given: Any) -> Any:
        answer = await Judges.ask(judges, phase, context, **given)
        if phase is Union:
            answer.judged = Judged(value=(next(written),))
        return answer

    pool: Any = SimpleNamespace(ask=ask)
    pipeline = pipeline_of(
        pool,
        Keep(),
        [],
        "algorithm.rubric_visits=2",
        "algorithm.group_size=2",
        rollouts=SimpleNamespace(run=play),
    )
    groups = [Group(step=step, index=0, task_id="t_1", prompt=()) for step in (1, 2, 3)]
    for group in groups:
        assert await pipeline.run(group) == "samples"
        assert group.held_out is not None
        await judges.began.wait()
        assert not group.held_out.done()
        group.held_out.cancel()
        judges.began.clear()
    # The second visit adds a criterion, the third only keeps what there is.
    for visit, size in ((1, 1), (2, 2), (3, 2)):
        scored = [
            (context.held_out, given["rubric"].value)
            for phase, context, given in judges.asked
            if phase is Score and context.group == f"step{visit}/t_1"
        ]
        assert sorted(scored, key=lambda each: each[0]) == [
            (held, tuple(RUBRIC[:size])) for held in (False, False, True, True)
        ]


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
    worker = JudgeWorkerActor(config, None, None, None, None, True, load_prompts(config.prompts, b"key"))
    await worker.check()
    assert sorted(asked) == ["check openai/m at None", "check openai/m at http://other/v1"]
    ask: Any = worker.ask
    for context in (CONTEXT, replace(CONTEXT, held_out=True)):
        with pytest.raises(RuntimeError):
            await ask(Score, context, trajectory=example_trajectory(), rubric=RUBRIC)
    assert asked[2:] == ["openai/m at None", "openai/m at http://other/v1"]


def test_it_is_another_judge_or_has_a_rubric_of_its_own() -> None:
    with pytest.raises(ValidationError, match="another judge or rubric; set judge.held_out.model or .rubric"):
        HeldOutJudgeConfig()
    same: dict[str, Any] = {"model": "openai/m", "held_out": {"model": "openai/m"}}
    with pytest.raises(
        ValidationError, match="judge.held_out: openai/m is the judge itself, so both would get the same replies"
    ):
        JudgeConfig.model_validate(same)
    for other in ({"api_base": "http://other/v1"}, {"self_judge": {"enabled": True}}, {"rule_judge": {"start": True}}):
        JudgeConfig.model_validate(same | other)
    JudgeConfig.model_validate(same | {"held_out": {**same["held_out"], "rubric": "rubric.yaml"}})
    with pytest.raises(ValidationError, match="api_base and api_key_env have no effect without judge.held_out.model"):
        HeldOutJudgeConfig(rubric=Path("rubric.yaml"), api_base="http://other/v1")
    same_rubric = ["judge.held_out.rubric=prompts/static_rubric.yaml", "algorithm.rubric=static"]
    with pytest.raises(ConfigError, match=r"judge.held_out.rubric=\S+ is the rubric that is trained on"):
        with_environment(load_config("sandbox", same_rubric))
    both = load_config("sandbox", ["judge.self_judge.enabled=true", "judge.rule_judge.start=false"]).judge
    assert is_self_judge_only(both)
    assert not is_self_judge_only(both.model_copy(update={"held_out": HeldOutJudgeConfig(model="openai/other")}))


def flagged_at(steps: list[list[tuple[float, float]]]) -> int | None:
    """The first step after which the drift is significant."""
    for step in range(1, len(steps) + 1):
        found = drift(steps[:step])
        if found is not None and found.significant:
            return step
    return None


def pairs_of(rng: np.random.Generator, steps: int, best: float, middle: float) -> list[list[tuple[float, float]]]:
    """Steps of 12 pairs of pass shares over six criteria, passed with these probabilities."""
    shares = rng.binomial(6, (best, middle), (steps, 12, 2)) / 6
    return [[(float(best), float(middle)) for best, middle in step] for step in shares]


def test_a_run_without_a_hack_is_flagged_at_most_at_the_level() -> None:
    # The hardest case for it: the held-out judge cannot tell the best rollout from the middle one.
    rng = np.random.default_rng(0)
    assert sum(flagged_at(pairs_of(rng, 40, 0.6, 0.6)) is not None for _ in range(60)) <= 3


def test_a_judge_that_only_sees_less_of_a_difference_is_not_flagged() -> None:
    rng = np.random.default_rng(1)
    for best, middle in ((0.9, 0.5), (0.55, 0.5), (0.1, 0.05)):
        assert flagged_at(pairs_of(rng, 60, best, middle)) is None


def test_a_few_best_rollouts_that_fail_are_flagged_although_the_mean_is_higher() -> None:
    rng = np.random.default_rng(2)
    for late in (0, 40):
        steps = pairs_of(rng, late + 30, 0.9, 0.65)
        for step in steps[late:]:
            step[:3] = [(1 / 6, middle) for _, middle in step[:3]]
        best, middle = np.array([pair for step in steps[late:] for pair in step]).mean(axis=0)
        assert best > middle
        at = flagged_at(steps)
        assert at is not None
        assert late < at <= late + 20


def test_the_evidence_is_the_capital_of_the_bets() -> None:
    assert drift([]) is None
    assert drift([[], []]) is None
    # At h = 0.1 to 0.5 the bet on the only pair wins; half the capital is staked at step 1, 1/6 at step 2.
    found = drift([[], [(0.0, 0.5)]])
    assert found is not None
    won = (1.2 + 1.5 + 1.8) / 3
    assert found.evidence == pytest.approx(1 / 3 + 2 / 3 * (5 * won + 4) / 9)
    assert (found.share, found.excess, found.significant) == (0.1, 1.0, False)
    # Much evidence stays finite, and an equally good pair says nothing.
    assert drift([[(0.0, 1.0)] * 5000]).evidence < 2e9  # type: ignore[union-attr]
    assert drift([[(0.7, 0.7)] * 9]).evidence == pytest.approx(1.0)  # type: ignore[union-attr]


def test_the_interval_is_that_of_the_last_pairs() -> None:
    found = drift([[(1.0, 1.0)] * 300, [(0.0, 1.0)] * 50 + [(1.0, 1.0)] * 150])
    assert found is not None
    assert found.excess == 0.25
    half = 1.96 * (0.25 * 0.75 / 200) ** 0.5
    assert (found.low, found.high) == (pytest.approx(0.25 - half), pytest.approx(0.25 + half))


def test_a_share_on_the_border_counts_as_reached() -> None:
    # 0.1 + 0.2 is above 0.3 by rounding; 3 * 0.1 as well, and 1 - 0.7 below.
    found = drift([[(1 - 0.7, 0.1 + 0.2)] * 9])
    assert found is not None
    assert found.evidence == pytest.approx(1.0)


def fell_at(rng: np.random.Generator, share_TG: FloatArray, main_TG: FloatArray | None = None) -> int | None:
    """The first step after which the fall is significant; the better half's three rollouts have six criteria each.

    The main judge passes everything, or with the probabilities ``main_TG``.
    """
    held_TG = rng.binomial(18, share_TG) / 18
    passed_TG = np.ones_like(held_TG) if main_TG is None else rng.binomial(18, main_TG) / 18
    steps = np.stack([held_TG, passed_TG], axis=-1).tolist()
    for step in range(1, len(steps) + 1):
        found = pass_rate_fall(steps[:step])
        if found is not None and found.significant:
            return step
    return None


def test_a_pass_rate_that_stays_or_rises_is_seldom_a_fall() -> None:
    rng = np.random.default_rng(3)
    # Tasks differ in difficulty: every rollout solves some of them, none solves others.
    constant = [fell_at(rng, rng.beta(1, 1, (30, 8))) for _ in range(100)]
    assert sum(each is not None for each in constant) <= 6
    # Nearly all shares are 1.
    skewed = [fell_at(rng, (rng.random((30, 8)) < 0.96).astype(float)) for _ in range(60)]
    assert sum(each is not None for each in skewed) <= 3
    rising = [fell_at(rng, np.linspace(0.3, 0.9, 30)[:, None] * rng.beta(3, 1, (30, 8))) for _ in range(50)]
    assert sum(each is not None for each in rising) <= 1


def test_harder_tasks_and_a_policy_that_becomes_worse_are_no_hack() -> None:
    rng = np.random.default_rng(5)
    flagged, hacked = 0, 0
    for _ in range(40):
        share_TG = rng.beta(3, 1, (40, 8))
        share_TG[20:] *= 0.6
        flagged += fell_at(rng, share_TG, share_TG) is not None
        # The main judge still passes what the held-out judge fails.
        hacked += fell_at(rng, share_TG, rng.beta(3, 1, (40, 8))) is not None
    assert (flagged <= 1, hacked >= 38) == (True, True)


def test_a_fall_is_found_soon_and_where_no_group_has_a_middle_rollout() -> None:
    rng = np.random.default_rng(4)
    for late in (4, 12, 40):
        share_TG = rng.beta(3, 1, (late + 12, 8))
        share_TG[late:] *= rng.random((12, 8)) < 0.5
        at = fell_at(rng, share_TG)
        assert at is not None
        assert late < at <= late + 10
    scored = [
        [HeldOutScores(trained=(1.0, 1.0), best=(share, share), middle=None)] * 8 for share in (0.9, 0.9, 0.2, 0.2)
    ]
    lines: list[dict[str, Any]] = []
    for each in scored:
        lines.append(held_out_metrics(each, lines))
    assert [line["fall_significant"] for line in lines] == [0, 0, 0, 1]
    assert lines[-1]["fall"] == pytest.approx(0.7)
    assert (lines[-1]["drift"], lines[-1]["held_out_rollouts"]) == (None, 16)
    assert pass_rate_fall([]) is None
    assert pass_rate_fall([[(1.0, 1.0)] * 40] * 3).significant is False  # type: ignore[union-attr]


SCORED = [
    HeldOutScores(trained=(1.0, 0.8), best=(0.1,), middle=0.5),
    HeldOutScores(trained=(1.0, 0.6), best=(0.9,), middle=0.5),
]


def test_metrics_hold_both_curves_and_the_drift_since_the_start() -> None:
    found = held_out_metrics(SCORED, [])
    assert (found["held_out_rollouts"], found["drift_significant"]) == (4, 0)
    assert found["held_out_trained_rate"] == pytest.approx(0.85)
    assert found["held_out_rate"] == pytest.approx(0.5)
    assert found["held_out_pairs"] == [[0.1, 0.5], [0.9, 0.5]]
    assert (found["held_out_best"], found["held_out_trained_best"]) == ([0.1, 0.9], [1.0, 1.0])
    hacked = held_out_metrics(SCORED[:1] * 12, [{"held_out_pairs": [[0.1, 0.5]] * 12}, {}])
    assert hacked["drift_significant"] == 1
    assert hacked["drift_evidence"] > 40
    assert (hacked["drift"], hacked["drift_low"], hacked["drift_share"]) == (1.0, 1.0, 0.2)
    nothing = held_out_metrics([], [])
    assert (nothing["held_out_rate"], nothing["drift"], nothing["drift_significant"]) == (None, None, 0)
    assert (nothing["fall"], nothing["fall_significant"]) == (None, 0)


def test_the_page_shows_both_curves_and_names_the_flagged_steps() -> None:
    none = {"held_out_rate": None}
    lines = [{"step": 1, **held_out_metrics(SCORED * 6, [])}]
    lines.append({"step": 2, **held_out_metrics(SCORED[:1] * 24, lines)})
    assert _of_held_out([none]) == []
    # Steps before `pass_rate_fall` was measured.
    assert len(_of_held_out([{key: value for key, value in lines[0].items() if not key.startswith("fall")}])) == 2
    rates, drifts = _of_held_out([none, *lines])
    assert "held-out judge" in str(rates.drawing)
    assert "Significant after step 2" in drifts.note


def test_a_run_warns_or_stops_as_it_is_told() -> None:
    line = {"step": 4, "drift": 0.31, "drift_low": 0.2, "drift_high": 0.42, "drift_share": 0.4, "drift_significant": 1}
    said: list[str] = []
    Watchdog(WatchConfig()).check_drift(line, said.append)
    Watchdog(WatchConfig(drift="off")).check_drift(line, said.append)
    Watchdog(WatchConfig(drift="stop")).check_drift(line | {"drift_significant": 0}, said.append)
    Watchdog(WatchConfig(drift="stop")).check_drift({"step": 4}, said.append)
    assert len(said) == 1
    assert said[0].startswith(
        "step 4: the held-out judge passes less than 40% of the criteria in more of the best-rewarded rollouts than of "
        "those with a middle reward, by 31 points (95 % interval 20 to 42)"
    )
    fallen = {"step": 4, "fall": 0.2, "fall_low": 0.1, "fall_high": 0.3, "fall_significant": 1}
    Watchdog(WatchConfig()).check_drift(fallen, said.append)
    assert said[-1].startswith(
        "step 4: the held-out judge passes 20 points less in the better-rewarded half than in earlier steps (95 % "
        "interval 10 to 30): the policy may"
    )
    with pytest.raises(RunStopped, match=r"watch\.drift=stop"):
        Watchdog(WatchConfig(drift="stop")).check_drift(line, said.append)
