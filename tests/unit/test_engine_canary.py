"""The canary's verdicts, from log-probs alone."""

from __future__ import annotations

import numpy as np
import pytest

from draco_ray.engine.canary import CanaryReading, judge_canary, run_canary
from draco_ray.errors import CanaryFailed
from draco_ray.records import FloatArray

BASE = np.array([-1.0, -2.0, -3.0])


def judge(
    on: FloatArray, learner: FloatArray, *, off: FloatArray = BASE, again: FloatArray = BASE, moved: bool = True
) -> CanaryReading:
    return judge_canary("engine-0", on, off, again, learner, version=4, moved=moved, tolerance=0.05)


def test_a_live_adapter_that_agrees_passes_with_its_figures() -> None:
    reading = judge(BASE - [0.1, 0.2, 0.6], BASE - [0.1, 0.23, 0.6])
    assert reading.tokens == 3
    assert reading.gap_mean == pytest.approx(0.01)
    assert reading.gap_max == pytest.approx(0.03)
    assert reading.shift_mean == pytest.approx(0.3)
    assert reading.shift_max == pytest.approx(0.6)
    assert reading.noise_max == 0


def test_a_trained_adapter_without_effect_fails_even_where_the_learner_agrees() -> None:
    with pytest.raises(CanaryFailed, match="engine engine-0, adapter version 4: the adapter has no effect"):
        judge(BASE, BASE)


def test_an_effect_within_the_engines_noise_is_none() -> None:
    with pytest.raises(CanaryFailed, match=r"no effect.*noise 0\.02"):
        judge(BASE + 0.01, BASE + 0.01, again=BASE + 0.02)


def test_before_the_first_update_no_effect_is_right() -> None:
    assert judge(BASE, BASE, moved=False).shift_max == 0


def test_a_gap_above_the_tolerance_fails_and_says_how_much() -> None:
    with pytest.raises(CanaryFailed, match=r"differ by 0\.1000 nats.*largest 0\.3000.*engine.canary_tolerance = 0\.05"):
        judge(BASE - 0.5, BASE - [0.5, 0.5, 0.8])


def test_a_broken_logprob_fails() -> None:
    for on, learner in ((BASE * np.nan, BASE), (BASE, np.array([-1.0, -np.inf, -3.0]))):
        with pytest.raises(CanaryFailed, match="a log-prob is not finite"):
            judge(on, learner)


def test_different_or_no_tokens_fail() -> None:
    with pytest.raises(CanaryFailed, match="scored 3 probe tokens and the learner 2"):
        judge(BASE, BASE[:2])
    with pytest.raises(CanaryFailed, match="at least one"):
        judge(BASE[:0], BASE[:0], off=BASE[:0], again=BASE[:0])


async def test_the_engine_is_asked_with_the_adapter_and_twice_without() -> None:
    class Recorder:
        name = "engine-7"

        def __init__(self) -> None:
            self.asked: list[tuple[int, bool]] = []

        async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
            self.asked.append((len(token_ids), adapter))
            return [-1.0 - adapter] * (len(token_ids) - 1)

    engine = Recorder()
    reading = await run_canary(
        engine, [[1, 2, 3], [4, 5]], [np.array([-2.0, -2.0]), np.array([-2.0])], version=1, moved=True, tolerance=0.05
    )
    assert (reading.engine, reading.tokens, reading.gap_max, reading.shift_mean) == ("engine-7", 3, 0.0, 1.0)
    assert engine.asked == [(3, True), (3, False), (3, False), (2, True), (2, False), (2, False)]
