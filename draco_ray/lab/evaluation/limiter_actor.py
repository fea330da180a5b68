"""Rate limits and budget of an evaluated API model: the judge's limiter, with the dollars kept beside the results.

A budget can end an evaluation in the middle of rollouts, whose cost is in no result. So the dollars of every settled
request are written, and the same command, given again, starts from them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from draco_ray.config.schema import JudgeConfig, JudgeLimits
from draco_ray.judging.limiter import Ended
from draco_ray.judging.limiter_actor import LimiterActor, LimiterClient, start_limiter
from draco_ray.judging.outage import Next

BOOK = "spent.json"
"""In the evaluation directory."""


class EvaluationLimiterActor(LimiterActor):
    """The limiter of an evaluation, which writes the dollars spent after each request."""

    def __init__(self, config: JudgeConfig, book: Path) -> None:
        super().__init__(config, dollars_spent(book))
        self._book = book

    async def settle(self, number: str, ended: Ended) -> Next:
        """See `LimiterActor.settle`."""
        verdict = await super().settle(number, ended)
        self._keep()
        return verdict

    def abandon(self, number: str) -> None:
        """See `LimiterActor.abandon`."""
        super().abandon(number)
        self._keep()

    def _keep(self) -> None:
        temporary = self._book.with_name(f".{self._book.name}.unfinished")
        temporary.write_text(json.dumps({"dollars": self.limiter.spent}), encoding="utf-8")
        os.replace(temporary, self._book)


def dollars_spent(book: Path) -> float:
    """Dollars that an evaluation has cost so far, unfinished rollouts included; 0 if none were written."""
    return float(json.loads(book.read_text(encoding="utf-8"))["dollars"]) if book.is_file() else 0.0


def start_evaluation_limiter(
    config: JudgeConfig, directory: Path, run_name: str
) -> tuple[object, LimiterClient] | None:
    """The limiter actor of an evaluation and a client of it for the workers; None if nothing is limited.

    Args:
        config: of the API model; its ``limits`` hold.
        directory: of the evaluation.
        run_name: part of the actor's name.
    """
    if config.limits == JudgeLimits():
        return None
    return start_limiter(EvaluationLimiterActor, config, directory / BOOK, run_name)
