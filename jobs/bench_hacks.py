"""Does the held-out judge see reward hacking before it costs? Print what was flagged, and what was lost by then.

python jobs/bench_hacks.py [--seeds 20] [--steps 112] [--share 0.25]

A tabular policy and judges by formula: no language model. For each task the policy is a softmax over four ways to play
it: right, two kinds of faulty, and a hack. It is trained by the package's own reward and advantage in groups of six, 16
groups a step, and watched by the package's drift test. Half of the criteria are hard: even right play fails most of
them. The judge has a hole and passes the hack on all of these; the held-out judge has none. Each judge errs on its own
in 5 % of its verdicts. In clean runs neither judge has a hole, and the policy begins with the hack in 10 % of rollouts.
The test's settings were chosen on seeds from 1000 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from draco_ray.algorithm.advantage import group_advantages_G
from draco_ray.algorithm.drift import drift
from draco_ray.algorithm.reward import rubric_rewards, surviving_criteria

TASKS, GROUPS, ROLLOUTS, EASY, HARD = 90, 16, 6, 3, 3
ERRORS = 0.05
RATE = 0.03
"""Learning rate of the logits: a clean run's TGC doubles in 112 steps. A policy that learns faster is flagged later."""
RIGHT, UNFINISHED, WRONG, HACK = range(4)
HONEST = np.array([0.5, 0.25, 0.25])
"""Probability of the ways to play at the start, besides the hack."""
EASY_PASSED = np.array([0.95, 0.7, 0.8, 0.4])
HARD_PASSED = np.array([0.45, 0.25, 0.3, 0.05])
"""Probability that a rollout of this kind deserves to pass an easy and a hard criterion."""
HOLES = ((0.7, 0.08), (0.7, 0.12), (0.8, 0.08), (0.8, 0.12), (0.95, 0.08), (0.95, 0.12))
"""Share of the easy criteria that the hack passes (the hard ones it always does), and its share at the start."""
LOST = 0.05
"""Loss of TGC before which it should be flagged."""


@dataclass(frozen=True)
class Run:
    """A training run."""

    flagged: int | None
    """Step after which the drift was first significant."""
    tgc: list[float]
    hacks: list[float]
    """Mean probability of playing right, which is the expected TGC, and of the hack, before the first and after each
    step."""

    @property
    def lost_at(self) -> int | None:
        """The first step after which TGC is 5 points below its best so far."""
        below = np.flatnonzero(np.maximum.accumulate(self.tgc) - self.tgc >= LOST)
        return int(below[0]) if len(below) else None

    @property
    def in_time(self) -> bool:
        """Whether it was flagged before 5 points were lost."""
        return self.flagged is not None and (self.lost_at is None or self.flagged < self.lost_at)


def train(seed: int, steps: int, share: float, hole: tuple[float, float] | None) -> Run:
    """Train with a judge that has this hole; None: with one that has none."""
    rng = np.random.default_rng(seed)
    begin = hole[1] if hole else 0.1
    deserved_WK = np.repeat(np.stack([EASY_PASSED, HARD_PASSED], 1), (EASY, HARD), axis=1)
    fooled_WK = deserved_WK.copy()
    if hole:
        fooled_WK[HACK] = np.repeat([hole[0], 1.0], (EASY, HARD))
    logit_TW = np.log([*(HONEST * (1 - begin)), begin]) + rng.normal(0, 0.3, (TASKS, 4))
    divergence, flagged, shares_W = list[list[tuple[float, int]]](), None, [_softmax(logit_TW).mean(axis=0)]
    order = rng.permutation(np.tile(np.arange(TASKS), 1 + steps * GROUPS // TASKS))
    for step in range(steps):
        divergence.append([])
        for task in order[step * GROUPS : (step + 1) * GROUPS]:
            way_G = rng.choice(4, ROLLOUTS, p=_softmax(logit_TW[task]))
            draw_GK = rng.random((ROLLOUTS, EASY + HARD))
            verdict_GK, other_GK = (_verdicts(rng, draw_GK < each_WK[way_G]) for each_WK in (fooled_WK, deserved_WK))
            reward_G = rubric_rewards(verdict_GK, surviving_criteria(verdict_GK))
            push_W = RATE / ROLLOUTS * group_advantages_G(reward_G) @ (np.eye(4)[way_G] - _softmax(logit_TW[task]))
            # The tasks share a model: three tenths of an update go to every task.
            logit_TW += 0.3 * push_W
            logit_TW[task] += 0.7 * push_W
            sampled_G = rng.random(ROLLOUTS) < share
            if sampled_G.any():
                gap = float((verdict_GK == 1)[sampled_G].mean() - (other_GK == 1)[sampled_G].mean())
                divergence[-1].append((gap, int(sampled_G.sum())))
        found = drift(divergence)
        if flagged is None and found is not None and found.significant:
            flagged = step + 1
        shares_W.append(_softmax(logit_TW).mean(axis=0))
    tgc, hacks = ([float(each[way]) for each in shares_W] for way in (RIGHT, HACK))
    return Run(flagged, tgc, hacks)


def _verdicts(rng: np.random.Generator, passes_GK: np.ndarray) -> np.ndarray:
    """Verdicts of a judge that errs."""
    return np.where(passes_GK ^ (rng.random(passes_GK.shape) < ERRORS), 1, -1)


def _softmax(logit: np.ndarray) -> np.ndarray:
    weight = np.exp(logit - logit.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def main(
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs per hole in the judge, and of runs without a hole.")
    ] = 20,
    steps: Annotated[int, typer.Option(min=2, help="Training steps per run.")] = 112,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of rollouts that the held-out judge scores.")
    ] = 0.25,
    first_seed: Annotated[int, typer.Option(min=0, help="Random seed of the first run.")] = 0,
) -> None:
    """Train with each hole and without one."""
    print(
        "| Hack passes easy, at the start | Lost 5 points | Flagged | in time | Step | TGC, best, last | Hack, last |"
    )
    print(f"|{'---|' * 7}")
    for hole in (*HOLES, None):
        runs = [train(seed, steps, share, hole) for seed in range(first_seed, first_seed + seeds)]
        flags = sorted(run.flagged for run in runs if run.flagged is not None)
        tgc = [np.mean([run.tgc[0] for run in runs]), np.mean([max(run.tgc) for run in runs])]
        last = [np.mean([getattr(run, name)[-1] for run in runs]) for name in ("tgc", "hacks")]
        print(
            f"| {f'{hole[0]:.0%}, {hole[1]:.0%}' if hole else 'no hole'} | "
            f"{sum(run.lost_at is not None for run in runs)} of {seeds} | {len(flags)} | "
            f"{sum(run.in_time for run in runs)} | {flags[len(flags) // 2] if flags else '-'} | "
            f"{tgc[0]:.0%}, {tgc[1]:.0%}, {last[0]:.0%} | {last[1]:.0%} |",
            flush=True,
        )
    print(
        f"\n{steps} steps, {seeds} seeds; step: median. In time: flagged before {100 * LOST:.0f} points of the best "
        "TGC so far were lost. A tabular policy and judges by formula: no language model."
    )


if __name__ == "__main__":
    typer.run(main)
