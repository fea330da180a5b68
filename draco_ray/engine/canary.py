"""The canary: after every weight sync, prove that the engine samples from what the learner trained.

An adapter that is not live fails silently: names that do not map are passed over, a stale path serves old weights, and
rollouts go on from the wrong policy. So tokens that the policy sampled are scored by both sides, with the adapter and
without it, and the run stops if they differ by more than rounding explains.

What rounding explains is not known beforehand: healthy engines and learners in bfloat16 differ by some hundredths of a
nat, more where either holds its numbers in 8 bits. So the band is the run's own, from the first step and from what the
two differ by without any adapter, and an adapter that is not live is found by which of the learner's two policies the
engine's answers are nearer to, however wide the band is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from draco_ray.errors import CanaryFailed
from draco_ray.records import BoolArray, FloatArray

BAND = 2.0
"""Largest gap, in multiples of the first step's and of that without the adapter, that is taken for rounding."""
OTHER_BASE = 4.0
"""Gap without the adapter, in multiples of the tolerance, that rounding of one and the same base model never makes."""
CERTAIN = 6.0
"""Standard errors by which the engine's answers must be nearer to one of the learner's two policies."""


class Scorer(Protocol):
    """An engine, as far as the canary is concerned."""

    @property
    def name(self) -> str:
        """Identity of the engine."""
        ...

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """Log-prob of each of ``token_ids[1:]`` given what precedes it, with or without the adapter."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """What one probe of one engine showed; all values in nats a token."""

    engine: str
    version: int
    tokens: int
    gap_mean: float
    """Mean |engine - learner|, adapter on: what the band bounds."""
    gap_max: float
    base_gap_mean: float
    """The same without the adapter: what rounding and other kernels alone make of one base model."""
    shift_mean: float
    """Mean |adapter on - adapter off| in the engine: how far training has moved the policy on the probes."""
    shift_max: float
    noise_max: float
    """Largest difference between two equal passes of the engine; 0 where its arithmetic repeats exactly."""
    nearness: float
    """How much nearer the engine's answers are to the learner with the adapter than to it without, in standard errors;
    negative where they are nearer to the base model. Around 0 the adapter's effect is less than rounding."""

    @property
    def live(self) -> bool:
        """Whether the adapter has an effect that is not rounding."""
        return self.nearness > CERTAIN or self.shift_max > self.noise_max == 0


class Probe(NamedTuple):
    """Tokens that engine and learner are compared on."""

    token_ids: list[int]
    """At least 2."""
    compared_T: BoolArray
    """Of ``token_ids[1:]``, those that count: what the policy sampled."""
    learner_T: FloatArray
    """The learner's log-prob of each of ``token_ids[1:]``, adapter on, temperature 1."""
    learner_off_T: FloatArray
    """Those of its base model."""


async def run_canary(
    engine: Scorer, probes: Sequence[Probe], *, version: int, moved: bool, tolerance: float, first: float | None = None
) -> CanaryReading:
    """Score the probes on the engine and compare, see `judge_canary`.

    Args:
        engine: scores with and without its current adapter.
        probes: what is scored.
        version: adapter version that was just loaded, for the message.
        moved: whether the adapter differs from the base model at all; before the first update it does not.
        tolerance: of the mean gap, nats.
        first: mean gap of the run's first step, nats; None: this is it.
    Raises: CanaryFailed.
    """
    on: list[FloatArray] = []
    off: list[FloatArray] = []
    again: list[FloatArray] = []
    # One after the other: batches of another composition round differently, and that is not what is measured.
    for probe in probes:
        for adapter, scores in ((True, on), (False, off), (False, again)):
            scores.append(np.asarray(await engine.logprobs(list(probe.token_ids), adapter=adapter)))
    scored = [len(scores) for scores in on]
    wanted = [len(probe.compared_T) for probe in probes]
    if scored != wanted or not sum(int(probe.compared_T.sum()) for probe in probes):
        raise CanaryFailed(
            f"engine {engine.name}, adapter version {version}: the engine scored {sum(scored)} probe tokens and the "
            f"learner {sum(wanted)}; expected the same tokens, at least one of which the policy sampled; check that "
            "both score token_ids[1:]"
        )

    def compared(arrays: Sequence[FloatArray]) -> FloatArray:
        return np.concatenate([array[probe.compared_T] for array, probe in zip(arrays, probes, strict=True)])

    return judge_canary(
        engine.name,
        compared(on),
        compared(off),
        compared(again),
        compared([probe.learner_T for probe in probes]),
        compared([probe.learner_off_T for probe in probes]),
        version=version,
        moved=moved,
        tolerance=tolerance,
        first=first,
    )


def judge_canary(
    engine: str,
    on_T: FloatArray,
    off_T: FloatArray,
    off_again_T: FloatArray,
    learner_T: FloatArray,
    learner_off_T: FloatArray,
    *,
    version: int,
    moved: bool,
    tolerance: float,
    first: float | None = None,
) -> CanaryReading:
    """Decide from log-probs of the same T tokens whether an engine's adapter is live and is the learner's.

    Args:
        on_T: the engine with its adapter.
        off_T: the engine without it, and ``off_again_T`` a second time: their difference is the engine's noise.
        learner_T: the learner with its adapter, and ``learner_off_T`` without.
        moved: see `run_canary`.
        tolerance: of the mean |on - learner|, nats: less is never held against a run.
        first: see `run_canary`.
    Returns: the reading.
    Raises: CanaryFailed when a value is not finite, the base models differ, the adapter has no effect where the
        learner's has one, the mean gap is above both the tolerance and `BAND` times the larger of the first step's and
        of the gap without the adapter, or the engine's answers are nearer to the base model's.

    >>> base = np.array([-1.0, -2.0])
    >>> reading = judge_canary(
    ...     "engine-0", base - 0.5, base, base, base - 0.5, base, version=3, moved=True, tolerance=0.05
    ... )
    >>> reading.shift_mean, reading.live
    (0.5, True)
    """
    where = f"engine {engine}, adapter version {version}"
    if not all(np.all(np.isfinite(values)) for values in (on_T, off_T, learner_T, learner_off_T)):
        raise CanaryFailed(
            f"{where}: a log-prob is not finite; stop and inspect the last update, its weights are broken"
        )
    gap_T = np.abs(on_T - learner_T)
    shift_T = np.abs(on_T - off_T)
    reading = CanaryReading(
        engine=engine,
        version=version,
        tokens=len(on_T),
        gap_mean=float(gap_T.mean()),
        gap_max=float(gap_T.max()),
        base_gap_mean=float(np.abs(off_T - learner_off_T).mean()),
        shift_mean=float(shift_T.mean()),
        shift_max=float(shift_T.max()),
        noise_max=float(np.abs(off_T - off_again_T).max()),
        nearness=_nearness(on_T, learner_T, learner_off_T),
    )
    if reading.base_gap_mean > OTHER_BASE * tolerance:
        raise CanaryFailed(
            f"{where}: without any adapter engine and learner differ by {reading.base_gap_mean:.4f} nats a token on "
            f"average; expected at most {OTHER_BASE:g} times engine.canary_tolerance = {tolerance}; "
            "they hold other base models: compare what model.path leads to on their nodes"
        )
    silent = reading.shift_max == reading.noise_max == 0 and bool(np.any(learner_T != learner_off_T))
    if moved and silent:
        raise CanaryFailed(
            f"{where}: the adapter has no effect, log-probs with and without it are equal, which the learner's are not"
            "; compare the adapter's tensor names with the engine's modules"
        )
    band = max(tolerance, BAND * max(reading.base_gap_mean, first or 0.0))
    if reading.gap_mean > band:
        usual = "" if first is None else f", {first:.4f} at the first step"
        raise CanaryFailed(
            f"{where}: engine and learner differ by {reading.gap_mean:.4f} nats a token on average (largest "
            f"{reading.gap_max:.4f}; {reading.base_gap_mean:.4f} without the adapter{usual}); expected at most "
            f"{band:.4g}, {BAND:g} times the larger of these or engine.canary_tolerance = {tolerance}; "
            "the engine serves other weights than the learner trained"
        )
    if reading.nearness < -CERTAIN:
        raise CanaryFailed(
            f"{where}: the engine's answers are nearer to the base model than to what was trained, by "
            f"{-reading.nearness:.1f} standard errors (gap {reading.gap_mean:.4f} nats a token, "
            f"{reading.base_gap_mean:.4f} without the adapter): its adapter is not live, or not this one; compare the "
            "adapter's tensor names with the engine's modules"
        )
    return reading


def _nearness(on_T: FloatArray, learner_T: FloatArray, learner_off_T: FloatArray) -> float:
    """By how many standard errors the engine is nearer to the learner with the adapter than to it without.

    Distances are compared token by token. Rounding is in both of them alike, so it widens the error and moves nothing;
    no token counts for more than the adapter's effect on it, nor for more than one standard error.
    """
    nearer_T = np.abs(on_T - learner_off_T) - np.abs(on_T - learner_T)
    error = float(np.sqrt((nearer_T**2).sum()))
    return float(nearer_T.sum()) / error if error > 0 else 0.0
