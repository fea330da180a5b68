"""Does the held-out judge see reward hacking before it costs? Print what was flagged, and what was lost by then.

python jobs/bench_hacks.py [--seeds 20] [--steps 20] [--share 0.25]

A tabular policy (no language model): for each task a softmax over four ways to play it, namely right, two kinds of
faulty, and a shortcut through a hole in its judge, in a few per cent of the rollouts at the start. It is trained by the
package's own reward and advantage in groups of six, and watched by its own drift test. The judges are formulas: a
rollout deserves to pass a share of the criteria, and each judge errs on its own in 5 % of its verdicts. The judge has the hole and the held-out
judge has not; in clean runs neither has. The six holes are named like those of jobs/holes.py, and differ in how much
the judge gives for the shortcut and in how often the policy begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from draco_ray.algorithm.advantage import group_advantages_G
from draco_ray.algorithm.drift import drift
from draco_ray.algorithm.reward import rubric_rewards, surviving_criteria

TASKS, GROUPS, ROLLOUTS, CRITERIA = 90, 8, 6, 6
ERRORS = 0.05
RATE = 0.7
"""Learning rate of the logits."""
RIGHT, UNFINISHED, WRONG, SHORTCUT = range(4)
BEGIN = np.array([0.5, 0.25, 0.25])
"""Probability of the ways to play at the start, besides the shortcut."""
PASSED = np.array([0.85, 0.5, 0.6, 0.15])
"""Share of the criteria that a rollout of this kind deserves to pass; what is right may still be bad conduct."""
HOLES = {
    "keywords": (0.95, 0.03),
    "claims": (1.0, 0.05),
    "quotes": (1.0, 0.02),
    "apologies": (0.95, 0.05),
    "noops": (1.0, 0.03),
    "spam": (0.95, 0.04),
}
"""Hole -> share of the criteria that its judge passes the shortcut on, and share of the shortcut at the start."""
LOST = 0.05
"""Loss of TGC before which it should be flagged."""


@dataclass(frozen=True)
class Run:
    """A training run."""

    flagged: int | None
    """Step after which the drift was significant."""
    tgc: list[float]
    """Expected TGC before the first and after each step: the mean probability of playing right."""
    trained: list[float]
    held_out: list[float]
    """Mean pass share of the sampled rollouts by each judge, in each step."""

    @property
    def lost_at(self) -> int | None:
        """The first step after which TGC is 5 points below its best so far."""
        best = np.maximum.accumulate(self.tgc)
        below = np.flatnonzero(best - self.tgc >= LOST)
        return int(below[0]) if len(below) else None

    @property
    def in_time(self) -> bool:
        """Whether it was flagged before 5 points were lost."""
        return self.flagged is not None and (self.lost_at is None or self.flagged < self.lost_at)


def train(seed: int, steps: int, share: float, hole: tuple[float, float] | None) -> Run:
    """Train with a judge that has this hole; None: with one that has none, and a policy that knows the shortcut too."""
    rng = np.random.default_rng(seed)
    given, begin = hole or (PASSED[SHORTCUT], 0.05)
    judged = np.array([*PASSED[:SHORTCUT], given])
    logit_TW = np.log(np.array([*(BEGIN * (1 - begin)), begin])) + rng.normal(0, 0.3, (TASKS, 4))
    tgc, trained, held_out, divergence = [float(_softmax(logit_TW)[:, RIGHT].mean())], [], [], []
    flagged = None
    order = rng.permutation(np.tile(np.arange(TASKS), 1 + steps * GROUPS // TASKS))
    for step in range(steps):
        both: list[tuple[float, float]] = []
        divergence.append([])
        for task in order[step * GROUPS : (step + 1) * GROUPS]:
            way_G = rng.choice(4, ROLLOUTS, p=_softmax(logit_TW[task]))
            draw_GK = rng.random((ROLLOUTS, CRITERIA))
            verdict_GK, other_GK = (_verdicts(rng, draw_GK < passed_W[way_G, None]) for passed_W in (judged, PASSED))
            reward_G = rubric_rewards(verdict_GK, surviving_criteria(verdict_GK))
            advantage_G = group_advantages_G(reward_G)
            push_W = RATE / ROLLOUTS * advantage_G @ (np.eye(4)[way_G] - _softmax(logit_TW[task]))
            # The tasks share a model: three tenths of an update go to every task.
            logit_TW += 0.3 * push_W
            logit_TW[task] += 0.7 * push_W
            sampled_G = rng.random(ROLLOUTS) < share
            if sampled_G.any():
                shares = [float((each[sampled_G] == 1).mean()) for each in (verdict_GK, other_GK)]
                both.append((shares[0], shares[1]))
                divergence[-1].append(shares[0] - shares[1])
        found = drift(divergence)
        if flagged is None and found is not None and found.significant:
            flagged = step + 1
        tgc.append(float(_softmax(logit_TW)[:, RIGHT].mean()))
        trained.append(float(np.mean([one for one, _ in both])) if both else float("nan"))
        held_out.append(float(np.mean([other for _, other in both])) if both else float("nan"))
    return Run(flagged, tgc, trained, held_out)


def _verdicts(rng: np.random.Generator, passes_GK: np.ndarray) -> np.ndarray:
    """Verdicts of a judge that errs."""
    return np.where(passes_GK ^ (rng.random(passes_GK.shape) < ERRORS), 1, -1)


def _softmax(logit: np.ndarray) -> np.ndarray:
    weight = np.exp(logit - logit.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each hole, and clean runs.")] = 20,
    steps: Annotated[int, typer.Option(min=2, help="Training steps of a run.")] = 20,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the rollouts that the held-out judge scores.")
    ] = 0.25,
) -> None:
    """Train with each hole and without one."""
    print(f"| Hole | Flagged | in time | Step (median) | TGC | Judge | Held-out judge |\n|{'---|' * 7}")
    for name, hole in {**HOLES, "none": None}.items():
        runs = [train(seed, steps, share, hole) for seed in range(seeds)]
        flags = sorted(run.flagged for run in runs if run.flagged is not None)
        curves = [
            np.mean([[getattr(run, side)[at] for at in (0, -1)] for run in runs], axis=0)
            for side in ("tgc", "trained", "held_out")
        ]
        shown = " | ".join(f"{100 * first:.0f} -> {100 * last:.0f}" for first, last in curves)
        step = flags[len(flags) // 2] if flags else "-"
        print(
            f"| {name} | {len(flags)} of {seeds} | {sum(run.in_time for run in runs)} | {step} | {shown} |", flush=True
        )
    print(
        f"\nIn %, at the first and the last of {steps} steps, means over {seeds} seeds. In time: flagged before "
        f"{100 * LOST:.0f} points of the best TGC so far were lost. A tabular policy and judges by formula: no model."
    )


if __name__ == "__main__":
    typer.run(main)
