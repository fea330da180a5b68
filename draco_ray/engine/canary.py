"""The canary: after every weight sync, check that the engine samples from the weights that the learner trained.

An adapter that is not live fails silently: the engine ignores tensor names that it does not know, or serves old weights
from a stale path, and rollouts continue with the wrong policy. So engine and learner both score tokens that the policy
sampled, with and without the adapter, and the run stops if they differ by more than rounding explains.

How much rounding explains is not known in advance: healthy engines and learners in bfloat16 differ by some hundredths
of a nat, and by more in 8 bits. So the tolerance band comes from the run itself: from the gap of its first step and
from the gap without the adapter. Independently of the band, an adapter that is not live is detected because the
engine's log-probs are then closer to the learner's base model than to its policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from draco_ray.errors import CanaryFailed
from draco_ray.records import BoolArray, FloatArray

MAX_GAP_RATIO = 2.0
"""Maximum gap that counts as rounding, as a multiple of a reference gap: the gap at the first step or the gap without
the adapter, whichever is larger."""
OTHER_BASE = 4.0
"""Maximum gap without the adapter, as a multiple of the tolerance; a larger gap means different base models."""
MIN_STANDARD_ERRORS = 6.0
"""Minimum difference, in standard errors, between the engine's distances to the learner's policy and to its base model;
smaller differences count as rounding."""


class Scorer(Protocol):
    """An engine that can score tokens."""

    @property
    def name(self) -> str:
        """Identity of the engine."""
        ...

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """Log-prob of each of ``token_ids[1:]`` given the tokens before it, with or without the adapter."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """Result of the canary for one engine; gaps and shifts are in nats per token."""

    engine: str
    version: int
    tokens: int
    gap_mean: float
    """Mean |engine - learner| with the adapter; the tolerance band limits it."""
    gap_max: float
    base_gap_mean: float
    """Mean |engine - learner| without the adapter: the effect of rounding and of different kernels alone."""
    shift_mean: float
    """Mean |with adapter - without adapter| in the engine: how far training has moved the policy."""
    shift_max: float
    noise_max: float
    """Maximum difference between two equal requests to the engine; 0 if its arithmetic is deterministic."""
    nearness: float
    """By how many standard errors the engine is closer to the learner's policy than to the learner's base model;
    negative if it is closer to the base model. Near 0, the adapter's effect is smaller than rounding."""

    @property
    def live(self) -> bool:
        """Whether the adapter certainly has an effect: it changes the engine's log-probs by more than rounding does."""
        return self.nearness > MIN_STANDARD_ERRORS or self.shift_max > self.noise_max == 0


class Probe(NamedTuple):
    """Tokens on which engine and learner are compared."""

    token_ids: list[int]
    """At least 2 token ids."""
    compared_T: BoolArray
    """Mask over ``token_ids[1:]`` of the compared tokens, which the policy sampled."""
    learner_T: FloatArray
    """The learner's log-prob of each of ``token_ids[1:]``, with the adapter, at temperature 1."""
    learner_off_T: FloatArray
    """The learner's log-probs of the same tokens without the adapter."""


async def run_canary(
    engine: Scorer, probes: Sequence[Probe], *, version: int, moved: bool, tolerance: float, first: float | None = None
) -> CanaryReading:
    """Score the probes on the engine, and decide whether its adapter is live and is the learner's.

    Args:
        engine: scores with and without its current adapter.
        probes: the tokens to score.
        version: adapter version that was just loaded, for messages.
        moved: whether the adapter differs from the base model; before the first update it does not.
        tolerance: mean gap that is always accepted, nats.
        first: mean gap of the run's first step, nats; None: this is the first step.
    Raises: CanaryFailed if a value is not finite, the base models differ, the adapter has no effect in the engine but
        one in the learner, the mean gap is above both the tolerance and `MAX_GAP_RATIO` times the larger of the first
        step's gap and the gap without the adapter, or the engine is closer to the learner's base model.
    """
    where = f"engine {engine.name}, adapter version {version}"
    on: list[FloatArray] = []
    off: list[FloatArray] = []
    again: list[FloatArray] = []
    # Score sequentially, because other requests in the batch change the rounding.
    for probe in probes:
        for adapter, scores in ((True, on), (False, off), (False, again)):
            scores.append(np.asarray(await engine.logprobs(list(probe.token_ids), adapter=adapter)))
    scored = [len(scores) for scores in on]
    wanted = [len(probe.compared_T) for probe in probes]
    if scored != wanted or not sum(int(probe.compared_T.sum()) for probe in probes):
        raise CanaryFailed(
            f"{where}: the engine scored {sum(scored)} probe tokens, but the learner {sum(wanted)}; expected the same "
            "tokens and at least one sampled token; check that both score token_ids[1:]"
        )

    def compared(arrays: Sequence[FloatArray]) -> FloatArray:
        return np.concatenate([array[probe.compared_T] for array, probe in zip(arrays, probes, strict=True)])

    on_T, off_T = compared(on), compared(off)
    learner_T = compared([probe.learner_T for probe in probes])
    learner_off_T = compared([probe.learner_off_T for probe in probes])
    if not all(np.all(np.isfinite(values)) for values in (on_T, off_T, learner_T, learner_off_T)):
        raise CanaryFailed(
            f"{where}: a log-prob is not finite, so the weights of the last update are broken; stop the run and "
            "inspect this update"
        )
    gap_T = np.abs(on_T - learner_T)
    shift_T = np.abs(on_T - off_T)
    reading = CanaryReading(
        engine=engine.name,
        version=version,
        tokens=len(on_T),
        gap_mean=float(gap_T.mean()),
        gap_max=float(gap_T.max()),
        base_gap_mean=float(np.abs(off_T - learner_off_T).mean()),
        shift_mean=float(shift_T.mean()),
        shift_max=float(shift_T.max()),
        noise_max=float(np.abs(off_T - compared(again)).max()),
        nearness=_nearness(on_T, learner_T, learner_off_T),
    )
    if reading.base_gap_mean > OTHER_BASE * tolerance:
        raise CanaryFailed(
            f"{where}: without the adapter, engine and learner differ by {reading.base_gap_mean:.4f} nats per token "
            f"on average; expected at most {OTHER_BASE:g} times engine.canary_tolerance = {tolerance}; they probably "
            "loaded different base models, so compare the files of model.path on their nodes"
        )
    silent = reading.shift_max == reading.noise_max == 0 and bool(np.any(learner_T != learner_off_T))
    if moved and silent:
        raise CanaryFailed(
            f"{where}: the adapter has no effect in the engine: log-probs with and without it are equal, but the "
            "learner's differ; compare the adapter's tensor names with the engine's modules"
        )
    band = max(tolerance, MAX_GAP_RATIO * max(reading.base_gap_mean, first or 0.0))
    if reading.gap_mean > band:
        usual = "" if first is None else f", {first:.4f} at the first step"
        raise CanaryFailed(
            f"{where}: engine and learner differ by {reading.gap_mean:.4f} nats per token on average (largest "
            f"{reading.gap_max:.4f}; {reading.base_gap_mean:.4f} without the adapter{usual}); expected at most "
            f"{band:.4g}: {MAX_GAP_RATIO:g} times the difference without the adapter or at the first step, whichever "
            f"is larger, but at least engine.canary_tolerance = {tolerance}; the engine does not serve the weights "
            "that the learner trained"
        )
    if reading.nearness < -MIN_STANDARD_ERRORS:
        raise CanaryFailed(
            f"{where}: the engine's log-probs are closer to the base model than to the trained policy, by "
            f"{-reading.nearness:.1f} standard errors (gap {reading.gap_mean:.4f} nats per token, "
            f"{reading.base_gap_mean:.4f} without the adapter): the engine has loaded no adapter or a wrong one; "
            "compare "
            "the adapter's tensor names with the engine's modules"
        )
    return reading


def _nearness(on_T: FloatArray, learner_T: FloatArray, learner_off_T: FloatArray) -> float:
    """By how many standard errors the engine is closer to the learner with the adapter than to the learner without it.

    For each token, the engine's distances to the learner's two log-probs are compared; the differences are summed and
    divided by their standard error. Rounding affects both distances alike, so it increases the error but adds no bias.
    A token's difference is at most the adapter's effect on its log-prob in the learner, and a single token contributes
    at most one standard error.
    """
    nearer_T = np.abs(on_T - learner_off_T) - np.abs(on_T - learner_T)
    error = float(np.sqrt((nearer_T**2).sum()))
    return float(nearer_T.sum()) / error if error > 0 else 0.0
