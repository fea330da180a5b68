"""The bill's other side: what savings kept from being asked, and what each may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from draco_ray.lab.runs.cost import show_cost
from draco_ray.lab.runs.savings import Saving, savings
from draco_ray.records import JudgeCall
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.schema import TABLES


def call(phase: str, task: str, rollout: int | None = None, *, requests: int = 1) -> tuple[int, JudgeCall]:
    return 1, JudgeCall(
        call_id="x",
        phase=phase,
        group=f"step1/{task}",
        task_id=task,
        rollout=rollout,
        model="m",
        prompt="",
        reply="",
        finish_reason="stop",
        input_tokens=60,
        cached_tokens=0,
        output_tokens=40,
        dollars=0.5,
        started_at=0.0,
        seconds=1.0,
        requests=requests,
        error=None,
    )


def written(folder: Path, tables: dict[str, list[dict[str, Any]]], **algorithm: object) -> RunDirectory:
    """A run directory of step 1."""
    default = {
        "reward": "rubric",
        "rule": "draco",
        "skip_useless_credit_calls": True,
        "skip_inert_credit_calls": True,
        "credit_surviving_only": True,
    }
    run = RunDirectory.create(folder / "run", yaml.safe_dump({"algorithm": default | algorithm}))
    for name, rows in tables.items():
        path = run.tables / name / "step00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        full = [{"training_step": 1} | row for row in rows]
        pq.write_table(pa.Table.from_pylist(full, schema=TABLES[name]), path)
    return run


ADVANTAGES = [
    {"task_id": task, "rollout": rollout, "reward": reward}
    for task, rewards in {"spread": (0.0, 0.5, 1.0), "even": (0.0, 0.0, 0.0)}.items()
    for rollout, reward in enumerate(rewards)
]
CRITERIA = [{"task_id": "spread", "criterion": k, "survived": k < 2} for k in range(3)]
CALLS = [
    call("stage1", "spread", requests=0),
    call("stage1", "even"),
    call("score", "spread", 0, requests=0),
    call("credit", "spread", 0),
    call("credit", "spread", 1),
]


def by_switch(found: list[Saving]) -> dict[str, Saving]:
    return {saving.switch.rpartition(".")[2]: saving for saving in found}


def test_what_was_not_asked_is_counted_and_priced(tmp_path: Path) -> None:
    run = written(tmp_path, {"advantages": ADVANTAGES, "criteria": CRITERIA})
    found = by_switch(savings(run, CALLS))
    stage1 = found["stage1_across_epochs"]
    assert (stage1.calls, stage1.tokens, stage1.dollars) == (1, 100, 0.5)
    assert (found[""].calls, found[""].what) == (1, "answers kept: equal requests (score)")
    useless = found["skip_useless_credit_calls"]
    assert (useless.calls, useless.tokens, useless.dollars) == (3, 300, 1.5)
    inert = found["skip_inert_credit_calls"]
    assert (inert.calls, inert.tokens, inert.dollars) == (1, 100, 0.5)
    # Two calls sent two of three criteria: each would have written half as much again.
    fewer = found["credit_surviving_only"]
    assert "2 of 6 criteria" in fewer.what
    assert (fewer.calls, fewer.tokens) == (0, 40)
    assert fewer.dollars == pytest.approx(2 * 0.5 * 0.4 / 2)


def test_each_saving_says_what_it_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a call that could not have changed the update is free; nothing is called lossless."""
    run = written(tmp_path, {"advantages": ADVANTAGES, "criteria": CRITERIA})
    found = by_switch(savings(run, CALLS))
    free = {name for name, saving in found.items() if saving.changes.startswith("no update")}
    assert free == {"skip_useless_credit_calls"}
    show_cost(run.path)
    printed = capsys.readouterr().out
    assert all(f"(changes: {saving.changes})" in printed for saving in found.values())


def test_a_group_with_spread_whose_rollouts_are_all_unanimous_is_saved_by_their_switch(tmp_path: Path) -> None:
    run = written(tmp_path, {"advantages": ADVANTAGES, "criteria": CRITERIA})
    found = by_switch(savings(run, CALLS[:2]))
    assert (found["skip_useless_credit_calls"].calls, found["skip_inert_credit_calls"].calls) == (3, 3)


def test_nothing_is_claimed_for_a_switch_that_is_off(tmp_path: Path) -> None:
    off = dict.fromkeys(("skip_useless_credit_calls", "skip_inert_credit_calls", "credit_surviving_only"), False)
    run = written(tmp_path, {"advantages": ADVANTAGES, "criteria": CRITERIA}, **off)
    assert [saving.tokens for saving in savings(run, CALLS)] == [100, 100, 0, 0, 0]


def test_settings_without_rubric_or_credit_have_nothing_to_save(tmp_path: Path) -> None:
    assert savings(written(tmp_path / "a", {}, reward="outcome"), []) == []
    assert len(savings(written(tmp_path / "b", {"advantages": ADVANTAGES}, rule="grpo"), CALLS[:2])) == 2
