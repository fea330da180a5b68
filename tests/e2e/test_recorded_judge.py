"""A frontier LLM's recorded judgements (examples/judgements) of planted faults and of rollouts, on today's prompts."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from itertools import permutations
from pathlib import Path

import pytest

from draco_ray.cli import main
from tests.conftest import REPOSITORY
from tests.support.jobs import load_job

pytestmark = [pytest.mark.slow, pytest.mark.deployment]
RECORDS = REPOSITORY / "examples" / "judgements"
WORLD = REPOSITORY / ".cache" / "sandbox"


@pytest.fixture(scope="module")
def world() -> None:
    run("sandbox", "build", "--out", str(WORLD))


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code in (None, 0)


def measured(out: Path, *words: str) -> dict[str | tuple[str, str], float]:
    """The bench's measures over all planted faults, by name; with ``low`` and ``high``, the ends of their intervals."""
    before = set(out.glob("*/measures.csv"))
    run("attribution-bench", "--world", str(WORLD), "--out", str(out), *words)
    (table,) = set(out.glob("*/measures.csv")) - before
    found: dict[str | tuple[str, str], float] = {}
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["scope"] == "all":
                found[row["measure"]] = float(row["value"])
                found |= {(row["measure"], end): float(row[end]) for end in ("low", "high")}
    return found


@pytest.mark.usefixtures("world")
def test_a_recorded_frontier_judge_names_the_planted_faults(tmp_path: Path) -> None:
    found = measured(tmp_path, "--tasks", "15", "--judge", f"files:{RECORDS / 'attribution-bench'}")
    assert found["accuracy"] == 1.0
    assert found["citation_precision"] > 0.95
    assert found["push_share"] > 0.85
    assert found["grpo_share"] < 0.2


@pytest.mark.usefixtures("world")
def test_the_hard_half_separates_the_recorded_llm_from_the_rule_judge(tmp_path: Path) -> None:
    hard = ("--hard", "--tasks", "14", "--judge")
    found = measured(tmp_path, *hard, f"files:{RECORDS / 'attribution-bench-hard'}")
    assert found["citation_precision"] < 0.7
    assert found["false_blame"] > 0.4
    rules = measured(tmp_path, *hard, "rules")
    assert found["push_share", "high"] < rules["push_share", "low"]


def test_its_rewards_order_rollouts_of_the_shop_as_the_evaluator_does(tmp_path: Path) -> None:
    """It saw three rollouts of each of 40 tasks, and neither their outcomes nor the expected end."""
    run("judge", str(RECORDS / "shop"), "--replay", "--set", "judge.plan=lean", "--out", str(tmp_path / "judged"))
    groups = defaultdict(list)
    for line in (tmp_path / "judged" / "judged.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups[row["task_id"]].append((row["outcome"], row["reward"]))
    assert (len(groups), sum(map(len, groups.values()))) == (40, 120)
    pairs = [(a, b) for rollouts in groups.values() for a, b in permutations(rollouts, 2) if a[0] > b[0]]
    assert len(pairs) == 44
    assert all(right[1] > wrong[1] for right, wrong in pairs)


def test_plans_with_fewer_calls_reverse_no_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """15 groups of a small language model's rollouts under each plan: pairs are tied, but never reversed."""
    folder = RECORDS / "plans"
    load_job("bench_judge_plans").compare(
        folder / "run", ["paper", "default", "lean"], visits=1, most=15, judge=f"files:{folder}", out=None
    )
    rows = re.findall(r"^\| (\w+) .* (\d+) of 101, (\d+) tied \| ([\d.]+) \|$", capsys.readouterr().out, re.MULTILINE)
    found = {plan: (int(alike), int(tied)) for plan, alike, tied, _ in rows}
    assert found == {"paper": (101, 0), "default": (101, 0), "lean": (93, 8)}
    assert min(float(correlation) for *_, correlation in rows) > 0.9
