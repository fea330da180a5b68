"""What an evaluation of an API model has spent is kept beside its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draco_ray.config.schema import JudgeConfig, JudgeLimits, Price
from draco_ray.errors import BudgetSpent, ConfigError
from draco_ray.judging.limiter import LOST, LeaseRequest, RequestResult
from draco_ray.judging.pricing import check_budget
from draco_ray.lab.evaluation.api_policy import (
    SPENT_FILE,
    EvaluationLimiterActor,
    dollars_spent,
    start_evaluation_limiter,
)

LIMITS = JudgeLimits(dollars=1.0)
CONFIG = JudgeConfig(limits=LIMITS)


def asked(dollars: float) -> LeaseRequest:
    return LeaseRequest(input_tokens=50, output_tokens=50, dollars=dollars)


async def test_the_next_process_goes_on_with_the_book_of_the_last(tmp_path: Path) -> None:
    book = tmp_path / SPENT_FILE
    assert dollars_spent(book) == 0.0
    first = EvaluationLimiterActor(CONFIG, book)
    for cost in (0.25, 0.5):
        await first.settle(await first.lease(asked(0.5)), RequestResult(dollars=cost))
    assert dollars_spent(book) == 0.75
    second = EvaluationLimiterActor(CONFIG, book)
    with pytest.raises(BudgetSpent, match=r"\$0\.7500 of judge\.limits\.dollars=1 is spent"):
        await second.lease(asked(0.5))
    await second.settle(await second.lease(asked(0.25)), LOST)
    # Nobody knows what became of it: it may be billed.
    assert json.loads(book.read_text()) == {"dollars": 1.0}


def test_without_limits_there_is_no_limiter(tmp_path: Path) -> None:
    assert start_evaluation_limiter(JudgeConfig(), tmp_path, "evaluation") is None


def test_a_budget_needs_a_price() -> None:
    judge = JudgeConfig(limits=LIMITS, prices={"known": Price(input=1.0, output=2.0)})
    check_budget(judge, "openai/known")
    check_budget(JudgeConfig(), "openai/unknown")
    with pytest.raises(ConfigError, match="the price of openai/unknown is unknown"):
        check_budget(judge, "openai/unknown")
