"""Estimated cost of judging, from the lengths of the traces: calls, tokens and dollars by phase.

Input is estimated at `CHARACTERS_PER_TOKEN`. Reply lengths are those of judges on AppWorld's tasks (`REPLY_TOKENS`,
and `CRITERION_TOKENS` per criterion), with `ASSUMED_CRITERIA` criteria in a rubric that the judge writes. Prompt
caching and retries are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draco_ray.config.schema import DracoConfig, Price
from draco_ray.judging.phases import PHASES, Credit, Proposals, Score, Stage1, Stage2, Union, Verdicts
from draco_ray.judging.pricing import REQUEST_TOKENS, reply_cost
from draco_ray.judging.prompts import Prompts
from draco_ray.records import Criterion
from draco_ray.traces.judging import MOST_IN_UNION
from draco_ray.traces.model import TraceGroup, TraceSummary

CHARACTERS_PER_TOKEN = 4
ASSUMED_CRITERIA = 10
CRITERION_TOKENS = 150
REPLY_TOKENS = {
    Stage1.name: 2000,
    Stage2.name: 800,
    Proposals.name: 2000,
    Union.name: 2000,
    Score.name: 100,
    Verdicts.name: 100,
    Credit.name: 100,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """The estimate of one phase, over all groups."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    dollars: float | None = None
    """Estimated cost in dollars; None if no price is known."""
    largest: float = 0.0
    """Maximum cost of one call in dollars, at one token per character and with the longest reply."""

    @property
    def budget(self) -> float | None:
        """Smallest sufficient budget, in whole cents: total cost plus the maximum cost of one call."""
        return None if self.dollars is None else math.ceil(100 * (self.dollars + self.largest)) / 100

    def __add__(self, other: PhaseEstimate) -> PhaseEstimate:
        known = self.dollars is not None and other.dollars is not None
        return PhaseEstimate(
            calls=self.calls + other.calls,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            dollars=(self.dollars or 0.0) + (other.dollars or 0.0) if known else None,
            largest=max(self.largest, other.largest),
        )


def estimate_cost(
    groups: Sequence[TraceGroup],
    config: DracoConfig,
    prompts: Prompts,
    room: int,
    price: Price | None,
    *,
    rubric: Sequence[Criterion] | None,
) -> dict[str, PhaseEstimate]:
    """Calls, tokens and dollars of judging ``groups``, by phase.

    Args:
        room: maximum length of a prompt, in characters.
        rubric: the criteria; None: the judge writes them.
    """
    found = {phase: PhaseEstimate(dollars=None if price is None else 0.0) for phase in PHASES}
    algorithm = config.algorithm

    def add(phase: str, characters: int, reply: int, calls: int = 1) -> None:
        template = prompts.length(phase) if phase in prompts.templates else 0
        tokens = (template + characters) // CHARACTERS_PER_TOKEN
        dollars = None if price is None else calls * reply_cost(price, tokens, 0, reply)
        bound = template + characters + REQUEST_TOKENS
        found[phase] += PhaseEstimate(
            calls=calls,
            input_tokens=calls * tokens,
            output_tokens=calls * reply,
            dollars=dollars,
            largest=0.0 if price is None else reply_cost(price, bound, 0, config.judge.max_tokens),
        )

    verdicts = (ASSUMED_CRITERIA if rubric is None else len(rubric)) * CRITERION_TOKENS
    criteria = verdicts * CHARACTERS_PER_TOKEN
    for group in groups:
        lengths = [min(_read(each), room) for each in group.summaries]
        if rubric is None:
            prompt = group.summaries[0].prompt_characters
            add(Stage1.name, prompt, REPLY_TOKENS[Stage1.name])
            shown, merged = min(sum(lengths[:MOST_IN_UNION]), room), algorithm.merge_proposals and len(group) > 1
            if merged:
                add(Proposals.name, shown + criteria, REPLY_TOKENS[Proposals.name])
            for length in () if merged else lengths:
                add(Stage2.name, length + criteria, REPLY_TOKENS[Stage2.name])
            if len(group) > 1:
                add(Union.name, shown + (1 + len(group)) * criteria // 2, REPLY_TOKENS[Union.name])
        for length in lengths:
            votes = config.judge.score_votes
            scoring = Verdicts.name if algorithm.merge_verdicts else Score.name
            add(scoring, length + criteria, REPLY_TOKENS[scoring] + verdicts, calls=votes)
            if scoring == Score.name:
                add(Credit.name, length + 2 * criteria, REPLY_TOKENS[Credit.name] + verdicts)
    return found


def _read(summary: TraceSummary) -> int:
    """Number of characters that a trace adds to a judge prompt.

    The agent's prompt counts twice: it is part of the trace, and the judge prompt repeats it as the task.
    """
    return summary.characters + summary.prompt_characters
