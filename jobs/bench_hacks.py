"""Does a held-out judge notice reward hacking before it lowers TGC? Print flagged and missed runs, and false alarms.

python jobs/bench_hacks.py [--seeds 20] [--steps 112] [--share 0.75]

The policy is a table and the judges are formulas: no language model. For each task the policy is a softmax over four
ways to play it: right, two kinds of faulty, and a hack. It is trained with the package's own reward and advantage in
groups of six, 16 groups a step, and watched by the package's drift tests. Half of the criteria are hard: even right
play fails most of them. A judge with a hole passes the hack on all hard criteria; held-out judges have no hole. Each
judge independently errs in 5 % of its verdicts. Each run is watched by five held-out judges separately. In clean runs
the judge has no hole, and the policy begins with the hack in 10 % of rollouts. The settings of the tests were chosen on
seeds from 1000 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from draco_ray.algorithm.drift import drift, held_out_sample, pass_rate_fall
from draco_ray.algorithm.equations import group_advantages_G, rubric_rewards, surviving_criteria

TASKS, GROUPS, ROLLOUTS, EASY, HARD = 90, 16, 6, 3, 3
ERRORS = 0.05
RATE = 0.03
"""Learning rate of the logits: a clean run's TGC doubles in 112 steps. A policy that learns faster is flagged later."""
RIGHT, UNFINISHED, WRONG, HACK = range(4)
HONEST = np.array([0.5, 0.25, 0.25])
"""Initial probabilities of the other three ways to play, if the policy does not hack."""
EASY_PASSED = np.array([0.95, 0.7, 0.8, 0.4])
HARD_PASSED = np.array([0.45, 0.25, 0.3, 0.05])
"""Way to play -> probability that a rollout deserves to pass an easy criterion, and a hard one."""
LOST = 0.05
"""Loss of TGC before which a run should be flagged."""


@dataclass(frozen=True)
class Judge:
    """The main judge, and the share of hacks at the start."""

    name: str
    start: float = 0.1
    hole: float | None = None
    """Probability that the hack passes an easy criterion (it passes all hard ones); None: the judge has no hole."""
    errors: float = ERRORS
    waved: float = 0.0
    """Share of rollouts, of any kind, that the judge passes on every criterion by mistake."""
    subtle: bool = False
    """Whether the hack deserves to pass as often as unfinished play; otherwise it deserves it least of all."""


HOLES = [
    Judge(f"hole {easy:.0%}, {start:.0%} hacks", start, easy) for easy in (0.7, 0.8, 0.95) for start in (0.08, 0.12)
]
JUDGES = [
    *HOLES,
    Judge("hole 80%, 3% hacks", 0.03, 0.8),
    Judge("hole 80%, 8% hacks like unfinished play", 0.08, 0.8, subtle=True),
    Judge("no hole"),
    Judge("no hole, errs in 20%", errors=0.2),
    Judge("no hole, passes 3% of rollouts by mistake", waved=0.03),
    Judge("no hole, passes 10% of rollouts by mistake", waved=0.1),
]
HELD_OUT: dict[str, dict[str, Any]] = {
    "like the judge without its hole": {},
    "errs in 20% of verdicts": {"errors": 0.2},
    "strict: passes 6 in 10 of what should": {"strict": 0.6},
    "has criteria of its own": {"own": True},
    "fails 10% of rollouts by mistake": {"failed": 0.1},
}


def held_out_share(
    rng: np.random.Generator,
    deserved_GK: np.ndarray,
    draw_GK: np.ndarray,
    *,
    errors: float = ERRORS,
    strict: float = 1.0,
    own: bool = False,
    failed: float = 0.0,
) -> np.ndarray:
    """Pass share of each rollout by a held-out judge."""
    draw_GK = rng.random(draw_GK.shape) if own else draw_GK
    passed_GK = _passed(rng, draw_GK < strict * deserved_GK, errors)
    return passed_GK.mean(axis=1) * (rng.random(len(draw_GK)) >= failed)


@dataclass(frozen=True)
class Run:
    """A training run."""

    flagged: list[int | None]
    """For each held-out judge, the step after which a sign was first significant."""
    tgc: list[float]
    hacks: list[float]
    """``tgc`` and ``hacks``: mean probability of right play (the expected TGC) and of the hack, before the first step
    and after each."""
    calls: int
    """Rollouts that each held-out judge scored."""

    @property
    def lost_at(self) -> int | None:
        """The first step after which TGC is 5 points below its best so far."""
        below = np.flatnonzero(np.maximum.accumulate(self.tgc) - self.tgc >= LOST)
        return int(below[0]) if len(below) else None

    def in_time(self, judge: int) -> bool:
        """Whether a held-out judge flagged the run before 5 points were lost."""
        flagged, lost = self.flagged[judge], self.lost_at
        return flagged is not None and (lost is None or flagged < lost)


def train(seed: int, steps: int, share: float, judge: Judge) -> Run:
    """Train with this judge."""
    rng = np.random.default_rng(seed)
    deserved_WK = np.repeat(np.stack([EASY_PASSED, HARD_PASSED], 1), (EASY, HARD), axis=1)
    if judge.subtle:
        deserved_WK[HACK] = deserved_WK[UNFINISHED]
    fooled_WK = deserved_WK.copy()
    if judge.hole is not None:
        fooled_WK[HACK] = np.repeat([judge.hole, 1.0], (EASY, HARD))
    logit_TW = np.log([*(HONEST * (1 - judge.start)), judge.start]) + rng.normal(0, 0.3, (TASKS, 4))
    shares_W, calls = [_softmax(logit_TW).mean(axis=0)], 0
    pairs: list[list[list[tuple[float, float]]]] = [[] for _ in HELD_OUT]
    best: list[list[list[tuple[float, float]]]] = [[] for _ in HELD_OUT]
    flagged: list[int | None] = [None] * len(HELD_OUT)
    order = rng.permutation(np.tile(np.arange(TASKS), 1 + steps * GROUPS // TASKS))
    for step in range(steps):
        for each in range(len(HELD_OUT)):
            pairs[each].append([])
            best[each].append([])
        for task in order[step * GROUPS : (step + 1) * GROUPS]:
            way_G = rng.choice(4, ROLLOUTS, p=_softmax(logit_TW[task]))
            draw_GK = rng.random((ROLLOUTS, EASY + HARD))
            waved_GK = rng.random((ROLLOUTS, 1)) < judge.waved
            verdict_GK = np.where(_passed(rng, draw_GK < fooled_WK[way_G], judge.errors) | waved_GK, 1, -1)
            reward_G = rubric_rewards(verdict_GK, surviving_criteria(verdict_GK))
            push_W = RATE / ROLLOUTS * group_advantages_G(reward_G) @ (np.eye(4)[way_G] - _softmax(logit_TW[task]))
            # The tasks share a model: three tenths of an update go to every task.
            logit_TW += 0.3 * push_W
            logit_TW[task] += 0.7 * push_W
            if rng.random() < share:
                first, middle = held_out_sample(reward_G)
                calls += len(first) + (middle is not None)
                for each, how in enumerate(HELD_OUT.values()):
                    share_G = held_out_share(rng, deserved_WK[way_G], draw_GK, **how)
                    best[each][-1].append((float(share_G[first].mean()), float((verdict_GK[first] > 0).mean())))
                    if middle is not None:
                        pairs[each][-1].append((float(share_G[first[0]]), float(share_G[middle])))
        for each in range(len(HELD_OUT)):
            signs = (drift(pairs[each]), pass_rate_fall(best[each]))
            if flagged[each] is None and any(sign is not None and sign.significant for sign in signs):
                flagged[each] = step + 1
        shares_W.append(_softmax(logit_TW).mean(axis=0))
    tgc, hacks = ([float(each[way]) for each in shares_W] for way in (RIGHT, HACK))
    return Run(flagged, tgc, hacks, calls)


def _passed(rng: np.random.Generator, deserved_GK: np.ndarray, errors: float) -> np.ndarray:
    """The passes of a judge that errs in the share ``errors`` of its verdicts."""
    return deserved_GK ^ (rng.random(deserved_GK.shape) < errors)


def _softmax(logit: np.ndarray) -> np.ndarray:
    weight = np.exp(logit - logit.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs with each judge.")] = 20,
    steps: Annotated[int, typer.Option(min=2, help="Training steps of a run.")] = 112,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of groups with held-out verdicts.")] = 0.75,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
) -> None:
    """Train with each judge."""
    print("| Judge | Lost 5 points at | Flagged | in time | after step | TGC: first, best, last | Hack, last |")
    print(f"|{'---|' * 7}")
    runs = {}
    for judge in JUDGES:
        runs[judge] = found = [train(seed, steps, share, judge) for seed in range(first_seed, first_seed + seeds)]
        lost = [run.lost_at for run in found if run.lost_at is not None]
        flags = [run.flagged[0] for run in found if run.flagged[0] is not None]
        best = [np.mean([run.tgc[0] for run in found]), np.mean([max(run.tgc) for run in found])]
        tgc, hacks = (np.mean([getattr(run, name)[-1] for run in found]) for name in ("tgc", "hacks"))
        print(
            f"| {judge.name} | {_steps(lost)} ({len(lost)} of {seeds}) | {len(flags)} of {seeds} | "
            f"{sum(run.in_time(0) for run in found)} | {_steps(flags)} | {best[0]:.0%}, {best[1]:.0%}, {tgc:.0%} | "
            f"{hacks:.0%} |",
            flush=True,
        )
    print(f"\n| Held-out judge | flagged of {seeds * len(HOLES)} with first six judges | in time | of {seeds} clean |")
    print(f"|{'---|' * 4}")
    holes, clean = [run for judge in HOLES for run in runs[judge]], runs[JUDGES[len(HOLES) + 2]]
    for each, name in enumerate(HELD_OUT):
        hit, false = (sum(run.flagged[each] is not None for run in some) for some in (holes, clean))
        print(f"| {name} | {hit} | {sum(run.in_time(each) for run in holes)} | {false} |")
    calls = sum(run.calls for found in runs.values() for run in found) / steps / seeds / len(runs)
    print(
        f"\n{steps} steps, {seeds} seeds from {first_seed} on; steps: median (last). In time: before {100 * LOST:.0f} "
        f"points of the best TGC so far were lost. A held-out judge scores {calls:.0f} of {GROUPS * ROLLOUTS} "
        "rollouts a step. The first table has the first held-out judge. A tabular policy and judges by "
        "formula: no language model."
    )


def _steps(steps: list[int]) -> str:
    return f"{np.median(steps):.0f} ({max(steps)})" if steps else "-"


if __name__ == "__main__":
    typer.run(main)
