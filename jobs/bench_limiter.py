"""Simulate the judge's limiter: what share of a token limit it uses, and whether any minute exceeds the limit.

python jobs/bench_limiter.py [--seeds 10] [--minutes 40] [--limits 300000 ...] [--judges usual ...]

`draco_ray.judging.limiter.LimiterQueue` serves groups that judge one phase after the other, on an event loop whose
clock jumps to the next event. Some request is always waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import random
import selectors
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from draco_ray.config.schema import JudgeLimits
from draco_ray.judging.limiter import WINDOW_SECONDS, LeaseRequest, Limiter, LimiterQueue, RequestResult

MAX_TOKENS = 16_384
"""judge.max_tokens of the paper's presets."""
TOKENS_OF_A_GROUP = 30_000
"""Tokens of the limit per concurrently judged group; so few that some group always waits."""
ROLLOUTS = 6
PHASES = (("stage1", 1), ("stage2", ROLLOUTS), ("union", 1), ("score", ROLLOUTS), ("credit", ROLLOUTS))
PROMPTS = {
    "stage1": (1500, 2500),
    "stage2": (4000, 26000),
    "union": (24000, 120_000),
    "score": (4500, 27000),
    "credit": (5000, 28000),
}
"""Minimum and maximum prompt length, in tokens, for trajectories of 2,000 to 20,000."""
REPLIES = {"stage1": (6.9, 0.3), "stage2": (6.3, 0.6), "union": (7.6, 0.3), "score": (7.6, 0.4), "credit": (7.3, 0.5)}
"""Mean and standard deviation of the logarithm of a reply's tokens, from the rule judge and the paper."""
SETTLED_MINUTES = 20


class Sent(NamedTuple):
    """A request that was sent."""

    at: float
    tokens: int


Length = Callable[[random.Random, str, int], int]
"""(random numbers, phase, number of earlier replies) -> tokens of a reply."""


def usual(dice: random.Random, phase: str, before: int) -> int:
    """Hundreds to thousands of tokens, with a long tail."""
    return int(dice.lognormvariate(*REPLIES[phase]))


def heavy(dice: random.Random, phase: str, before: int) -> int:
    """A tail so long that one reply in a hundred and fifty is cut."""
    mean, spread = REPLIES[phase]
    return int(dice.lognormvariate(mean - 0.2, 2 * spread))


def growing(dice: random.Random, phase: str, before: int) -> int:
    """A judge that begins to think at length in the middle of a run."""
    mean, spread = REPLIES[phase]
    return int(dice.lognormvariate(mean - 1.0 + min(1.5, before / 800), spread))


def running_away(dice: random.Random, phase: str, before: int) -> int:
    """One reply in thirty writes until it is cut."""
    return MAX_TOKENS if dice.random() < 0.03 else usual(dice, phase, before)


def running_away_at_times(dice: random.Random, phase: str, before: int) -> int:
    """400 `usual` replies, then 100 `running_away` and 100 `usual` ones in turn."""
    return (running_away if before >= 300 and before % 200 < 100 else usual)(dice, phase, before)


JUDGES: dict[str, Length] = {
    each.__name__: each for each in (usual, heavy, growing, running_away, running_away_at_times)
}


class _Jump(selectors.SelectSelector):
    """A selector whose clock jumps by the timeout instead of waiting."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return []


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances only by waits, which end at once."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds on its own clock."""
        return self._jump.now


def simulate(limit: float, length: Length, *, minutes: float, seed: int) -> list[Sent]:
    """The requests sent under a token limit, in order; the time starts at 0."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(_judge(limit, length, minutes * 60.0, random.Random(seed)))


async def _judge(limit: float, length: Length, seconds: float, dice: random.Random) -> list[Sent]:
    clock = asyncio.get_running_loop().time
    line = LimiterQueue(Limiter(JudgeLimits(tokens_per_minute=limit), clock=clock))
    start, sent = clock(), list[Sent]()

    async def call(phase: str, rank: int, prompt: int, bytes_per_token: float) -> None:
        number = await line.lease(
            LeaseRequest(
                input_tokens=round(prompt * bytes_per_token) + 512, output_tokens=MAX_TOKENS, kind=phase, rank=rank
            )
        )
        reply = min(MAX_TOKENS, length(dice, phase, len(sent)))
        sent.append(Sent(clock() - start, prompt + reply))
        await asyncio.sleep(dice.uniform(1, 10) + reply / dice.uniform(40, 120))
        await line.settle(number, RequestResult(tokens=prompt + reply, output_tokens=reply))

    async def group() -> None:
        while True:
            # All prompts of a group are about as long, and have about as many bytes per token.
            share, bytes_per_token = dice.random(), dice.uniform(3.7, 4.3)
            for rank, (phase, calls) in enumerate(PHASES):
                low, high = PROMPTS[phase]
                prompts = [int(low + (high - low) * min(1.0, max(0.0, dice.gauss(share, 0.15)))) for _ in range(calls)]
                calls_: list[Awaitable[None]] = [
                    call(phase, -rank, prompt, bytes_per_token * dice.gauss(1.0, 0.01)) for prompt in prompts
                ]
                await asyncio.gather(*calls_)

    tasks = [asyncio.create_task(group()) for _ in range(max(24, round(limit / TOKENS_OF_A_GROUP)))]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    for problem in ends:
        if not isinstance(problem, asyncio.CancelledError):
            raise RuntimeError("a group ended early") from problem
    return sent


def fullest(sent: Sequence[Sent]) -> int:
    """Tokens of the fullest minute; requests a minute apart, to the microsecond, are not in the same minute."""
    ends = [0, *itertools.accumulate(each.tokens for each in sent)]
    times = [each.at for each in sent]
    return max(
        ends[bisect.bisect_left(times, each.at + WINDOW_SECONDS - 1e-6)] - ends[number]
        for number, each in enumerate(sent)
    )


def share(sent: Sequence[Sent], limit: float, first: float, last: float) -> float:
    """Share of the limit that is used from minute ``first`` to minute ``last``."""
    return sum(each.tokens for each in sent if 60 * first <= each.at < 60 * last) / (limit * (last - first))


def _row(limit: float, judge: str, seed: int, minutes: float) -> tuple[float, float, float]:
    sent = simulate(limit, JUDGES[judge], minutes=minutes, seed=seed)
    return (
        share(sent, limit, 0, SETTLED_MINUTES),
        share(sent, limit, SETTLED_MINUTES, minutes),
        fullest(sent) / limit,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--limits", type=float, nargs="+", default=[300e3, 500e3, 1e6, 3e6])
    parser.add_argument("--judges", nargs="+", choices=JUDGES, default=list(JUDGES))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    print(f"{arguments.seeds} runs of {arguments.minutes:g} minutes each; shares of the limit: mean (lowest)")
    print(f"| tokens a minute | replies | first {SETTLED_MINUTES} minutes | later | fullest minute | runs over limit |")
    print("|---:|---|---|---|---:|---:|")
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = {
            (limit, judge): [
                pool.submit(_row, limit, judge, seed, arguments.minutes) for seed in range(arguments.seeds)
            ]
            for limit in arguments.limits
            for judge in arguments.judges
        }
        for (limit, judge), futures in rows.items():
            begun, settled, top = zip(*(future.result() for future in futures), strict=True)
            print(
                f"| {limit:,.0f} | {judge.replace('_', ' ')} | {_mean(begun)} | {_mean(settled)} | {max(top):.1%} "
                f"| {sum(each > 1 for each in top)} |",
                flush=True,
            )


def _mean(shares: Sequence[float]) -> str:
    return f"{sum(shares) / len(shares):.0%} ({min(shares):.0%})"


if __name__ == "__main__":
    main()
