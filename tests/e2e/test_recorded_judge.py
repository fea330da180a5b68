"""A frontier LLM's recorded judgement of planted faults (examples/judgements), on today's prompts and world."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from draco_ray.cli import main
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.deployment]
RECORD = REPOSITORY / "examples" / "judgements" / "attribution-bench"
WORLD = REPOSITORY / ".cache" / "sandbox"


def test_a_recorded_frontier_judge_names_the_planted_faults(tmp_path: Path) -> None:
    bench = ["attribution-bench", "--tasks", "15", "--world", str(WORLD), "--judge", f"files:{RECORD}"]
    for words in (["sandbox", "build", "--out", str(WORLD)], [*bench, "--out", str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code in (None, 0)
    (table,) = tmp_path.glob("*/measures.csv")
    with table.open(encoding="utf-8", newline="") as file:
        found = {row["measure"]: float(row["value"]) for row in csv.DictReader(file) if row["scope"] == "all"}
    assert found["accuracy"] == 1.0
    assert found["citation_precision"] > 0.95
    assert found["push_share"] > 0.85
    assert found["grpo_share"] < 0.2
