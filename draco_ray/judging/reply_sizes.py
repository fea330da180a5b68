"""How many tokens the requests under way will come to: what was learned from those that have ended.

The replies under way are bounded together, not one by one: the sum of many is surer than each of them. Chernoff's bound
of the sum over the sizes that were seen,

    P(sum >= b) <= exp(sum_i log E[exp(t X_i)] - t b)   for every t > 0,

solved for the least b at which this is `RISK`. X_i of a reply that has been written for some seconds is distributed as
those replies of its kind that took longer. Prompts are measured in bytes; how many tokens these are is learned too.

The judge may do what was never seen. So there is always room as well for one reply under way that runs to its cut, and
for more while too few have ended to tell that several at once are rarer than `MORE_UNSEEN_RISK`, by Laplace's rule of
succession. Whatever is learned, this much of a limit stays unused: the most of a reply less its mean.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draco_ray.records import FloatArray

RISK = 1e-4
"""That the requests under way come to more than is held for them, each time that one is to be sent."""
UNSEEN_RISK = 3e-2
"""As `RISK`, where a reply that runs to its cut, as if none had been seen that did, comes on top."""
MORE_UNSEEN_RISK = 1e-3
"""That more replies run to their cut at the same time than there is such room for."""
LEARNED_AFTER = 12
"""Ended requests of a kind after which the next ones are expected to be like them; until then all that they may use."""
LEARNED_AFTER_ALL = 40
"""And of all kinds: the first ones to end are the shortest."""
MEMORY = 300
"""Latest ended requests of a kind that count."""
LATEST = 40
"""Of these, those that count alone where they are longer: replies may become longer within a run."""
CUTS = 1000
"""Latest ended requests of all kinds that tell how many replies run to their cut."""
CUT = 0.98
"""Of the most tokens, which a reply has that ran to its cut."""
FEW = 3
"""Fewer replies than these that took longer say nothing of one that is still being written: it counts with the most."""
EXPONENTS: FloatArray = 2.0 ** np.arange(2.0, 14.0, 0.5)
"""t, times the limit: from sums of thousands of replies to a single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is known of a request before its reply."""

    kind: str
    group: str
    input_bytes: float
    most_output: float
    """Tokens at which it is cut."""
    seconds: float = 0.0
    """Since it was sent."""


@dataclass(slots=True)
class _Share:
    """Mean and variance, the latest values weighing most."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        weight = 1.0 / min(self.count, MEMORY)
        step = value - self.mean
        self.mean += weight * step
        self.variance = (1.0 - weight) * (self.variance + weight * step * step)


class _Bytes:
    """Tokens of a byte of prompt; those of one group quote the same rollouts, and are alike."""

    def __init__(self) -> None:
        self._all = _Share()
        self._of_group: OrderedDict[str, float] = OrderedDict()
        """Tokens of a byte in the latest prompt of each group."""
        self._within = _Share()
        """How many times that the next prompt of the same group has."""

    def add(self, group: str, tokens_of_a_byte: float) -> None:
        if (before := self._of_group.pop(group, None)) and group:
            self._within.add(tokens_of_a_byte / before)
        self._all.add(tokens_of_a_byte)
        self._of_group[group] = tokens_of_a_byte
        if len(self._of_group) > MEMORY:
            self._of_group.popitem(last=False)

    def expect(self, group: str) -> tuple[float, float]:
        """Mean and variance; one token a byte where too little is known, which none exceeds."""
        before = self._of_group.get(group) if group else None
        if before and self._within.count >= LEARNED_AFTER:
            return before * self._within.mean, before**2 * self._within.variance
        return (self._all.mean, self._all.variance) if self._all.count >= LEARNED_AFTER else (1.0, 0.0)

    def growth_NT(self, sizes: Sequence[Size], t_T: FloatArray) -> FloatArray:
        """log E[exp(t X)] of prompts, as if tokens were normally distributed; at most one a byte."""
        mean_N, variance_N = np.array([self.expect(size.group) for size in sizes]).T
        bytes_NT: FloatArray = np.array([size.input_bytes for size in sizes])[:, None] * t_T
        growth_NT: FloatArray = mean_N[:, None] * bytes_NT + 0.5 * variance_N[:, None] * bytes_NT**2
        return np.minimum(bytes_NT, growth_NT)


class _Replies:
    """Lengths of the replies of a kind, and how long they took."""

    def __init__(self, t_T: FloatArray) -> None:
        self._t_T = t_T
        self._ended: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        self._seconds: FloatArray = np.zeros(0)
        self._after_NT: FloatArray = np.zeros((0, len(t_T)))
        """Log mean of exp(t X) over those that took at least as long, by their order in `_seconds`."""
        self._latest_T: FloatArray = np.zeros(len(t_T))
        self._mean = 0.0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def mean(self) -> float:
        return self._mean

    def add(self, seconds: float, tokens: float) -> None:
        self._ended.append((seconds, tokens))
        written_N = np.array([tokens for _, tokens in self._ended])
        self._mean = float(written_N.mean())
        log_NT = written_N[:, None] * self._t_T
        self._latest_T = _log_sum_T(log_NT[-LATEST:]) - math.log(len(log_NT[-LATEST:]))
        seconds_N = np.array([seconds for seconds, _ in self._ended])
        order = np.argsort(seconds_N)
        self._seconds = seconds_N[order]
        # Added up from the longest down, shifted so that nothing overflows.
        top_T = log_NT.max(axis=0)
        sums_NT = np.cumsum(np.exp(log_NT[order[::-1]] - top_T), axis=0)[::-1]
        self._after_NT = np.log(sums_NT / np.arange(len(order), 0, -1)[:, None] + 1e-300) + top_T

    def longer_N(self, seconds_N: FloatArray) -> FloatArray:
        """Share that took longer than each, at least one of them."""
        left_N = len(self._seconds) - np.searchsorted(self._seconds, seconds_N, side="right")
        share_N: FloatArray = np.maximum(left_N, 1) / max(1, len(self._seconds))
        return share_N

    def growth_NT(self, most_N: FloatArray, seconds_N: FloatArray) -> FloatArray:
        """log E[exp(t X)] of replies written for so many seconds; the most where too little is known."""
        most_NT: FloatArray = most_N[:, None] * self._t_T
        first_N = np.searchsorted(self._seconds, seconds_N, side="right")
        known_N = len(self._seconds) - first_N >= FEW
        if not known_N.any():
            return most_NT
        found_NT = self._after_NT[np.where(known_N, first_N, 0)]
        found_NT[first_N == 0] = np.maximum(self._after_NT[0], self._latest_T)
        growth_NT: FloatArray = np.where(known_N[:, None], np.minimum(found_NT, most_NT), most_NT)
        return growth_NT


def _log_sum_T(log_NT: FloatArray) -> FloatArray:
    top_T = log_NT.max(axis=0)
    sum_T: FloatArray = np.log(np.exp(log_NT - top_T).sum(axis=0)) + top_T
    return sum_T


@dataclass(slots=True)
class UnderWay:
    """The requests under way together."""

    growth_T: FloatArray
    """log E[exp(t X)] of all their tokens."""
    replies: dict[str, tuple[int, FloatArray]] = field(default_factory=dict)
    """By kind how many replies, and the log of the sum of their E[exp(t X)]."""
    most: float = 0.0
    """Tokens that they can use at most."""
    count: int = 0
    cut: int = 0
    """Of them, that have been written for longer than any that has ended."""
    surplus: float = 0.0
    """Most tokens by which one of them may exceed what its kind has used on average."""


class Sizes:
    """What has been learned of a judge's requests."""

    def __init__(self, limit: float) -> None:
        """
        Args:
            limit: tokens a minute; the sums that are asked for are of this order.
        """
        self._t_T = EXPONENTS / limit
        self._bytes = _Bytes()
        self._replies: dict[str, _Replies] = {}
        self._cuts: deque[bool] = deque(maxlen=CUTS)
        """Of the latest requests of all kinds, whether the reply ran to its cut."""
        self._longest = 0.0
        """Seconds of a reply that has ended."""

    def add(self, size: Size, *, input_tokens: float, output_tokens: float) -> None:
        """Learn from a request that has ended."""
        self._longest = max(self._longest, size.seconds)
        self._cuts.append(0 < CUT * size.most_output <= output_tokens)
        if size.input_bytes > 0:
            self._bytes.add(size.group, input_tokens / size.input_bytes)
        if size.most_output > 0:
            self._of(size).add(size.seconds, output_tokens)

    def expect(self, size: Size) -> float:
        """Tokens that a request will use on average, or all that it may where too little is known."""
        output = min(self._of(size).mean, size.most_output) if self._knows(size) else size.most_output
        return self._bytes.expect(size.group)[0] * size.input_bytes + output

    def under_way(self, sizes: Sequence[Size], within: float) -> UnderWay:
        """Add up what is under way; what was sent more than ``within`` seconds ago only tells how long replies are."""
        found = UnderWay(np.zeros(len(self._t_T)))
        found.cut = sum(size.seconds > self._longest for size in sizes)
        by_kind: dict[str, list[Size]] = defaultdict(list)
        for size in sizes:
            by_kind[size.kind].append(size)
        for kind, alike in by_kind.items():
            reply_NT = self._growth_NT(alike)
            counted_N = np.array([size.seconds < within for size in alike])
            growth_NT = self._with_cuts_NT(alike, reply_NT, self._cut_chance(found.cut)) + self._bytes.growth_NT(
                alike, self._t_T
            )
            found.growth_T = found.growth_T + growth_NT[counted_N].sum(axis=0)
            found.replies[kind] = len(alike), _log_sum_T(reply_NT)
            found.count += int(counted_N.sum())
            found.most += sum(size.input_bytes + size.most_output for size in alike if size.seconds < within)
            found.surplus = max(found.surplus, *map(self._surplus, alike))
        return found

    def bound(self, under_way: UnderWay, size: Size | None = None) -> float:
        """Tokens that those under way, and one more if there is one, will not exceed."""
        if size is None:
            return min(self._solve(under_way.growth_T, under_way.surplus, under_way.count), under_way.most)
        reply_T = self._growth_NT([size])[0]
        ended = max(1, len(self._of(size)))
        if size.kind in under_way.replies:
            # Short replies end first: those still under way belong to its like as much as those that have ended.
            writing, sum_T = under_way.replies[size.kind]
            reply_T = np.logaddexp(reply_T + math.log(ended), sum_T) - math.log(ended + writing)
        reply_T = self._with_cuts_NT([size], reply_T[None, :], self._cut_chance(under_way.cut))[0]
        growth_T = under_way.growth_T + reply_T + self._bytes.growth_NT([size], self._t_T)[0]
        found = self._solve(growth_T, max(under_way.surplus, self._surplus(size)), under_way.count + 1)
        return min(found, under_way.most + size.input_bytes + size.most_output)

    def _solve(self, growth_T: FloatArray, surplus: float, count: int) -> float:
        found = float(((growth_T - math.log(RISK)) / self._t_T).min())
        log_chance = 0.0
        for number in range(count):
            # Laplace's rule of succession: another one after none in all replies so far, and ``number`` now.
            log_chance += math.log(min(1.0, (count - number) / (len(self._cuts) + 1 + number)))
            if number and log_chance < math.log(MORE_UNSEEN_RISK):
                break
            rest = max(0.0, log_chance - math.log(UNSEEN_RISK))
            found = max(found, float(((growth_T + rest) / self._t_T).min()) + (number + 1) * surplus)
        return found

    def _growth_NT(self, alike: Sequence[Size]) -> FloatArray:
        most_N = np.array([size.most_output for size in alike])
        if not self._knows(alike[0]):
            return most_N[:, None] * self._t_T
        return self._of(alike[0]).growth_NT(most_N, np.array([size.seconds for size in alike]))

    def _cut_chance(self, writing: int) -> float:
        """The chance of running to the cut; ``writing`` more, that seem to do so, are taken for replies that did."""
        runs = sum(self._cuts) + writing
        return (runs + 1) / (len(self._cuts) + writing + 1) if runs else 0.0

    def _with_cuts_NT(self, alike: Sequence[Size], reply_NT: FloatArray, chance: float) -> FloatArray:
        """log E[exp(t X)] of replies that also run to their cut with a chance learned over all kinds.

        It is the higher for one the longer it has been written.
        """
        if not chance:
            return reply_NT
        seconds_N, most_N = np.array([(size.seconds, size.most_output) for size in alike]).T
        chance_N = np.minimum(0.999, chance / self._of(alike[0]).longer_N(seconds_N))[:, None]
        found_NT: FloatArray = np.logaddexp(
            reply_NT + np.log1p(-chance_N), most_N[:, None] * self._t_T + np.log(chance_N)
        )
        return found_NT

    def _knows(self, size: Size) -> bool:
        return len(self._cuts) >= LEARNED_AFTER_ALL and len(self._of(size)) >= LEARNED_AFTER

    def _surplus(self, size: Size) -> float:
        return max(0.0, size.most_output - self._of(size).mean) if self._knows(size) else 0.0

    def _of(self, size: Size) -> _Replies:
        if size.kind not in self._replies:
            self._replies[size.kind] = _Replies(self._t_T)
        return self._replies[size.kind]
