"""The canary: after every weight sync, prove that the engine samples from what the learner trained.

An adapter that is not live fails silently: names that do not map are passed over, a stale path serves old weights, and
rollouts go on from the wrong policy. So a few token sequences are scored by both sides, and the run stops if they
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draco_ray.errors import CanaryFailed
from draco_ray.records import FloatArray


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
    """Mean |engine - learner|, adapter on: what the tolerance bounds."""
    gap_max: float
    shift_mean: float
    """Mean |adapter on - adapter off| in the engine: how far training has moved the policy on the probes."""
    shift_max: float
    noise_max: float
    """Largest difference between two equal passes of the engine; 0 where its arithmetic repeats exactly."""


async def run_canary(
    engine: Scorer,
    probes: Sequence[Sequence[int]],
    learner_logprobs: Sequence[FloatArray],
    *,
    version: int,
    moved: bool,
    tolerance: float,
) -> CanaryReading:
    """Score the probes on the engine and compare, see `judge_canary`.

    Args:
        engine: scores with and without its current adapter.
        probes: token ids, each at least 2 tokens.
        learner_logprobs: the learner's log-probs of each probe's ``token_ids[1:]``, adapter on, temperature 1.
        version: adapter version that was just loaded, for the message.
        moved: whether the adapter differs from the base model at all; before the first update it does not.
        tolerance: of the mean gap, nats.
    Raises: CanaryFailed.
    """
    on: list[list[float]] = []
    off: list[list[float]] = []
    again: list[list[float]] = []
    # One after the other: batches of another composition round differently, and that is not what is measured.
    for probe in probes:
        on.append(await engine.logprobs(list(probe), adapter=True))
        off.append(await engine.logprobs(list(probe), adapter=False))
        again.append(await engine.logprobs(list(probe), adapter=False))
    return judge_canary(
        engine.name,
        np.concatenate([np.asarray(values) for values in on]),
        np.concatenate([np.asarray(values) for values in off]),
        np.concatenate([np.asarray(values) for values in again]),
        np.concatenate([np.asarray(values) for values in learner_logprobs]),
        version=version,
        moved=moved,
        tolerance=tolerance,
    )


def judge_canary(
    engine: str,
    on_T: FloatArray,
    off_T: FloatArray,
    off_again_T: FloatArray,
    learner_T: FloatArray,
    *,
    version: int,
    moved: bool,
    tolerance: float,
) -> CanaryReading:
    """Decide from log-probs of the same T tokens whether an engine's adapter is live and is the learner's.

    Args:
        on_T: the engine with its adapter.
        off_T: the engine without it, and ``off_again_T`` a second time: their difference is the noise floor that an
            adapter's effect has to exceed.
        learner_T: the learner with its adapter.
        moved: see `run_canary`.
        tolerance: of the mean |on - learner|, nats.
    Returns: the reading.
    Raises: CanaryFailed when lengths differ, a value is not finite, a moved adapter has no effect, or the mean gap
        exceeds the tolerance.

    >>> same = np.array([-1.0, -2.0])
    >>> judge_canary("engine-0", same - 0.5, same, same, same - 0.5, version=3, moved=True, tolerance=0.05).shift_mean
    0.5
    """
    where = f"engine {engine}, adapter version {version}"
    if not len(on_T) == len(off_T) == len(off_again_T) == len(learner_T) or len(on_T) == 0:
        raise CanaryFailed(
            f"{where}: the engine scored {len(on_T)} probe tokens and the learner {len(learner_T)}; expected the same "
            "tokens, at least one; check that both score token_ids[1:]"
        )
    if not all(np.all(np.isfinite(values)) for values in (on_T, off_T, learner_T)):
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
        shift_mean=float(shift_T.mean()),
        shift_max=float(shift_T.max()),
        noise_max=float(np.abs(off_T - off_again_T).max()),
    )
    if moved and reading.shift_max <= reading.noise_max:
        raise CanaryFailed(
            f"{where}: the adapter has no effect, log-probs with and without it are equal (largest shift "
            f"{reading.shift_max:.2g}, noise {reading.noise_max:.2g}); expected a trained adapter to change them; "
            "compare the adapter's tensor names with the engine's modules"
        )
    if reading.gap_mean > tolerance:
        raise CanaryFailed(
            f"{where}: engine and learner differ by {reading.gap_mean:.4f} nats a token on average (largest "
            f"{reading.gap_max:.4f}); expected at most engine.canary_tolerance = {tolerance}; "
            "the engine serves other weights than the learner trained"
        )
    return reading
