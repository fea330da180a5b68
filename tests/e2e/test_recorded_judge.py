"""A frontier LLM's recorded judgement of planted faults (examples/judgements), on today's prompts and world."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from draco_ray.cli import main
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.deployment]
RECORDS = REPOSITORY / "examples" / "judgements"
WORLD = REPOSITORY / ".cache" / "sandbox"


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    run("sandbox", "build", "--out", str(WORLD))


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code in (None, 0)


def measured(out: Path, *words: str) -> dict[str, float]:
    """The bench's measures over all planted faults, by name."""
    run("attribution-bench", "--world", str(WORLD), "--out", str(out), *words)
    (table,) = out.glob("*/measures.csv")
    with table.open(encoding="utf-8", newline="") as file:
        return {row["measure"]: float(row["value"]) for row in csv.DictReader(file) if row["scope"] == "all"}


def test_a_recorded_frontier_judge_names_the_planted_faults(tmp_path: Path) -> None:
    found = measured(tmp_path, "--tasks", "15", "--judge", f"files:{RECORDS / 'attribution-bench'}")
    assert found["accuracy"] == 1.0
    assert found["citation_precision"] > 0.95
    assert found["push_share"] > 0.85
    assert found["grpo_share"] < 0.2


def test_the_hard_half_is_not_saturated_by_it(tmp_path: Path) -> None:
    found = measured(tmp_path, "--hard", "--tasks", "6", "--judge", f"files:{RECORDS / 'attribution-bench-hard'}")
    assert 0.5 < found["citation_precision"] < 0.9
    assert found["false_blame"] == 0.0
