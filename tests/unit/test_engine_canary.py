"""The canary's verdicts, from log-probs alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from draco_ray.engine.canary import CanaryReading, Probe, run_canary
from draco_ray.errors import CanaryFailed
from draco_ray.records import FloatArray

BASE = np.array([-1.0, -2.0, -3.0])
TOLERANCE = 0.05
TOKENS = 512


class Replies:
    """An engine that answers with the adapter, without it, and without it again."""

    name = "engine-0"

    def __init__(self, *answers: FloatArray) -> None:
        self._answers = iter(answers)

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        return next(self._answers).tolist()


def judge(
    on: FloatArray,
    learner: FloatArray,
    *,
    off: FloatArray = BASE,
    again: FloatArray = BASE,
    learner_off: FloatArray = BASE,
    moved: bool = True,
    tolerance: float = TOLERANCE,
    first: float | None = None,
) -> CanaryReading:
    every = Probe(list(range(len(on) + 1)), np.ones(len(on), dtype=bool), learner, learner_off)
    reading = run_canary(Replies(on, off, again), [every], version=4, moved=moved, tolerance=tolerance, first=first)
    return asyncio.run(reading)


def test_a_live_adapter_that_agrees_passes_with_its_figures() -> None:
    reading = judge(BASE - [0.1, 0.2, 0.6], BASE - [0.1, 0.23, 0.6], learner_off=BASE + 0.004)
    assert reading.tokens == 3
    assert reading.gap_mean == pytest.approx(0.01)
    assert reading.gap_max == pytest.approx(0.03)
    assert reading.base_gap_mean == pytest.approx(0.004)
    assert reading.shift_mean == pytest.approx(0.3)
    assert reading.shift_max == pytest.approx(0.6)
    assert reading.noise_max == 0
    assert reading.live


def test_an_adapter_without_effect_fails_where_the_learners_has_one() -> None:
    with pytest.raises(CanaryFailed, match="engine engine-0, adapter version 4: the adapter has no effect"):
        judge(BASE, BASE - 0.001)


def test_where_no_effect_can_be_asked_for_none_is_right() -> None:
    assert judge(BASE, BASE, moved=False).shift_max == 0
    # Beside rollouts, or before the first update.
    assert not judge(BASE, BASE - 0.001, moved=False).live
    # An update too small for the learner's own rounding.
    assert not judge(BASE, BASE).live


def test_an_effect_within_the_engines_noise_stops_nothing_and_proves_nothing() -> None:
    assert not judge(BASE + 0.01, BASE + 0.01, again=BASE + 0.02).live


def test_a_gap_above_the_band_fails_and_says_how_much() -> None:
    with pytest.raises(
        CanaryFailed,
        match=r"differ by 0\.1000 nats.*largest 0\.3000; 0\.0000 without.*at most 0\.05.*canary_tolerance = 0\.05",
    ):
        judge(BASE - 0.5, BASE - [0.5, 0.5, 0.8])


def test_the_first_step_and_the_base_model_widen_the_band() -> None:
    """A gap of 0.1 nats is too much, unless the run began with as much, or has it without any adapter."""
    on, learner = BASE - 0.5, BASE - [0.5, 0.5, 0.8]
    with pytest.raises(CanaryFailed, match=r"0\.0490 at the first step\); expected at most 0\.098:"):
        judge(on, learner, first=0.049)
    assert judge(on, learner, first=0.051).gap_mean == pytest.approx(0.1)
    with pytest.raises(CanaryFailed, match=r"0\.0490 without the adapter"):
        judge(on, learner, learner_off=BASE + 0.049)
    assert judge(on, learner, learner_off=BASE + 0.051).gap_mean == pytest.approx(0.1)


def test_base_models_that_differ_are_told_whatever_the_first_step_said() -> None:
    with pytest.raises(CanaryFailed, match=r"without the adapter, .* differ by 0\.2100 nats .* 4 times .*model\.path"):
        judge(BASE - 0.5, BASE - 0.5, learner_off=BASE - 0.21, first=1.0)


def rounded(
    generator: np.random.Generator, *, effect: float, noise: float, again: float = 0.0
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """Log-probs of engine (on, off, off again) and learner (on, off), each rounded for itself, some tokens far more."""
    truth = -generator.exponential(1.0, TOKENS)
    moved = truth + effect * generator.standard_normal(TOKENS)

    def seen(values: FloatArray, size: float = noise) -> FloatArray:
        return values + size * generator.standard_t(3, TOKENS)

    off = seen(truth)
    return seen(moved), off, off + again * generator.standard_normal(TOKENS), seen(moved), seen(truth)


@pytest.mark.parametrize("again", [0.0, 0.01])
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.06])
@pytest.mark.parametrize("effect", [0.0, 0.001, 0.03, 0.3])
def test_healthy_runs_in_bfloat16_are_never_stopped(effect: float, noise: float, again: float) -> None:
    """At gaps of up to 0.09 nats, above what published runs have, and with any effect, however small."""
    gaps: list[float] = []
    for seed in range(100):
        on, off, off_again, learner, learner_off = rounded(
            np.random.default_rng(seed), effect=effect, noise=noise, again=again
        )
        first = gaps[0] if gaps else None
        gaps.append(judge(on, learner, off=off, again=off_again, learner_off=learner_off, first=first).gap_mean)
    assert np.mean(gaps) == pytest.approx(1.5 * noise, rel=0.15)


@pytest.mark.parametrize(("effect", "noise"), [(0.06, 0.01), (0.1, 0.03), (0.2, 0.06), (1.0, 0.06)])
def test_a_served_base_model_is_found_every_time_at_gaps_that_a_healthy_run_may_have(
    effect: float, noise: float
) -> None:
    """Also where an engine's passes differ, and where the band is wider than the effect."""
    for seed in range(100):
        _, off, again, learner, learner_off = rounded(
            np.random.default_rng(seed), effect=effect, noise=noise, again=0.01
        )
        with pytest.raises(CanaryFailed, match="closer to the base model"):
            judge(again, learner, off=off, again=off, learner_off=learner_off, moved=False, first=10.0)


@pytest.mark.parametrize("effect", [1e-6, 0.01, 1.0])
def test_a_served_base_model_is_found_at_any_effect_where_passes_repeat_exactly(effect: float) -> None:
    for seed in range(20):
        _, off, _, learner, learner_off = rounded(np.random.default_rng(seed), effect=effect, noise=0.03)
        with pytest.raises(CanaryFailed, match="no effect|closer to the base model"):
            judge(off, learner, off=off, again=off, learner_off=learner_off)


def test_a_broken_logprob_fails() -> None:
    for on, learner in ((BASE * np.nan, BASE), (BASE, np.array([-1.0, -np.inf, -3.0]))):
        with pytest.raises(CanaryFailed, match="a log-prob is not finite"):
            judge(on, learner)


class Recorder:
    name = "engine-7"

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        self.asked.append((len(token_ids), adapter))
        # The first token behind the prompt is not the policy's.
        return [-9.0] + [-1.0 - adapter] * (len(token_ids) - 2)


def probe(token_ids: list[int], compared: list[bool]) -> Probe:
    tokens = len(compared)
    return Probe(token_ids, np.array(compared, dtype=bool), np.full(tokens, -2.0), np.full(tokens, -1.0))


async def test_the_engine_is_asked_with_the_adapter_and_twice_without_and_sampled_tokens_count() -> None:
    engine = Recorder()
    reading = await run_canary(
        engine,
        [probe([1, 2, 3], [False, True]), probe([4, 5, 6, 7], [False, True, True])],
        version=1,
        moved=True,
        tolerance=0.05,
    )
    assert (reading.engine, reading.tokens, reading.gap_max, reading.shift_mean) == ("engine-7", 3, 0.0, 1.0)
    assert engine.asked == [(3, True), (3, False), (3, False), (4, True), (4, False), (4, False)]


async def test_different_or_no_tokens_fail() -> None:
    for compared in ([False, True, True], [False, False]):
        with pytest.raises(CanaryFailed, match="scored 2 probe tokens, but the learner"):
            await run_canary(Recorder(), [probe([1, 2, 3], compared)], version=1, moved=True, tolerance=0.05)
