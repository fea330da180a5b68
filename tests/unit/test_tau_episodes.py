"""tau2's result files: parsing, failures, costs, and success rates compared with brute force."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from draco_ray.benchmarks.tau.results import (
    cost_by_role_table,
    failure_table,
    read_episodes,
    read_judge_usage,
    rollout_result,
    simulation_files,
    summary,
)
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import TauBenchError
from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan
from draco_ray.lab.evaluation.setting import aggregate
from draco_ray.records import EpisodeEnd, Usage

USAGE = {"prompt_tokens": 1000, "completion_tokens": 50}


def message(role: str, usage: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": "text", "tool_calls": None, "turn_idx": 0, "cost": 0.0, "usage": usage, **more}


def simulation(task: str, trial: int, **fields: Any) -> dict[str, Any]:
    """A record with the schema of tau2-bench 1.0.1: a solved task, unless ``fields`` say otherwise."""
    messages = [
        message("assistant"),  # the greeting: no call
        message("user", USAGE),
        message("assistant", USAGE, tool_calls=[{"id": "1", "name": "get_user", "arguments": {}}]),
        message("tool", id="1", requestor="assistant", error=False),
        message("assistant", USAGE),
        message("user", USAGE),
    ]
    record = {
        "id": f"{task}-{trial}",
        "task_id": task,
        "timestamp": "2026-11-20T21:16:43.711270",
        "start_time": "2026-11-20T21:16:42.091190",
        "end_time": "2026-11-20T21:16:43.711257",
        "duration": 1.5,
        "termination_reason": "user_stop",
        "agent_cost": 0.0,
        "user_cost": 0.0,
        "reward_info": {"reward": 1.0, "reward_basis": ["DB"], "reward_breakdown": {"DB": 1.0}, "db_check": None},
        "messages": messages,
        "trial": trial,
        "seed": 626729,
        "mode": "half_duplex",
        "info": None,
    }
    return {**record, **fields}


def graded(**breakdown: float) -> dict[str, Any]:
    reward = 1.0
    for value in breakdown.values():
        reward *= value
    return {"reward": reward, "reward_basis": list(breakdown), "reward_breakdown": breakdown}


def infrastructure_error(task: str, trial: int, **fields: Any) -> dict[str, Any]:
    info = {"error": "bad agent", "error_type": "RuntimeError", "error_traceback": "…", "failed_after_attempts": 4}
    cut: dict[str, Any] = {
        "duration": 0.0,
        "agent_cost": None,
        "user_cost": None,
        "reward_info": None,
        "messages": [],
        "info": info,
    }
    return simulation(task, trial, termination_reason="infrastructure_error", **{**cut, **fields})


def a_plan_of(tasks: list[str], trials: int) -> EvaluationPlan:
    return EvaluationPlan(
        benchmark="tau-banking",
        split="full",
        label="x",
        policy="x",
        runs=trials,
        measurements=("x",),
        tasks=dict.fromkeys(tasks),
        scenarios=False,
    )


def write(folder: Path, simulations: list[dict[str, Any]]) -> Path:
    """In directory format."""
    (folder / "simulations").mkdir(parents=True)
    head = {"timestamp": "…", "info": {"num_trials": 3, "max_steps": 200, "seed": 300}, "tasks": []}
    (folder / "results.json").write_text(json.dumps(head))
    for number, record in enumerate(simulations):
        (folder / "simulations" / f"{record['id']}-{number}.json").write_text(json.dumps(record))
    return folder


def test_both_formats_give_the_same_episodes(tmp_path: Path) -> None:
    records = [simulation("task_001", trial) for trial in range(2)] + [infrastructure_error("task_002", 0)]
    several = write(tmp_path / "several", records)
    single = tmp_path / "single"
    single.mkdir()
    (single / "results.json").write_text(json.dumps({"info": {}, "tasks": [], "simulations": records}))
    tasks = ("task_001", "task_002")
    assert read_episodes(several, tasks, 2) == read_episodes(single, tasks, 2)


def test_an_episode_is_read(tmp_path: Path) -> None:
    [episode] = read_episodes(write(tmp_path / "r", [simulation("task_001", 0)]), ["task_001"], 1)
    assert (episode.task_id, episode.trial, episode.termination_reason) == ("task_001", 0, "user_stop")
    assert (episode.success, episode.failure, episode.duration) == (True, None, 1.5)
    for role in ("assistant", "user"):
        assert episode.usage(role) == Usage(calls=2, requests=2, input_tokens=2000, output_tokens=100)


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"reward_info": graded(DB=0.0)}, "DB"),
        ({"reward_info": graded(ACTION=0.0)}, "ACTION"),
        ({"reward_info": graded(DB=0.0, NL_ASSERTION=1.0)}, "DB"),
        ({"reward_info": graded(NL_ASSERTION=0.0, DB=0.0)}, "DB+NL_ASSERTION"),
        ({"termination_reason": "max_steps", "reward_info": {"reward": 0.0, "reward_breakdown": None}}, "max_steps"),
        ({"termination_reason": "context_window_exceeded", "reward_info": None}, "context_window_exceeded"),
        ({"reward_info": None}, "ungraded"),
        ({"reward_info": graded(DB=1.0 - 1e-5)}, "DB"),
        ({"reward_info": graded(DB=1.0 - 1e-7)}, None),
    ],
)
def test_failures_by_kind(tmp_path: Path, fields: dict[str, Any], failure: str | None) -> None:
    [episode] = read_episodes(write(tmp_path / "r", [simulation("task_001", 0, **fields)]), ["task_001"], 1)
    assert episode.failure == failure
    assert episode.success == (failure is None)


def test_errors_and_missing_episodes_count_as_failures(tmp_path: Path) -> None:
    """tau2 itself would report 1.0 here: it averages over graded episodes only."""
    records = [simulation(task, trial) for task in ("task_001", "task_002") for trial in range(3)]
    records += [infrastructure_error("task_003", 0), infrastructure_error("task_003", 1)]
    episodes = read_episodes(write(tmp_path / "r", records), ["task_001", "task_002", "task_003"], 3)
    assert [episode.failure for episode in episodes[6:]] == [
        "infrastructure_error (RuntimeError)",
        "infrastructure_error (RuntimeError)",
        "missing",
    ]
    assert sum(episode.success for episode in episodes) / len(episodes) == pytest.approx(2 / 3)


def test_a_repeated_episode_counts_once(tmp_path: Path) -> None:
    """The earliest record counts, infrastructure errors last; never the best one."""
    failed = simulation("task_001", 0, reward_info=graded(DB=0.0), timestamp="2026-11-20T10:00:00")
    solved = simulation("task_001", 0, timestamp="2026-11-20T11:00:00")
    broken = infrastructure_error("task_001", 0, timestamp="2026-11-20T09:00:00")
    [episode] = read_episodes(write(tmp_path / "r", [solved, broken, failed]), ["task_001"], 1)
    assert episode.failure == "DB"


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", [simulation("task_001", 0)])
    (folder / "simulations" / ".sim_x.json").write_text('{"id": "half')
    assert len(simulation_files(folder)) == 1
    assert read_episodes(folder, ["task_001"], 1)[0].success


@pytest.mark.parametrize(("task", "trial"), [("task_009", 0), ("task_001", 1)])
def test_episodes_of_another_run_are_refused(tmp_path: Path, task: str, trial: int) -> None:
    with pytest.raises(TauBenchError, match="which is not part of this evaluation"):
        read_episodes(write(tmp_path / "r", [simulation(task, trial)]), ["task_001"], 1)


@pytest.mark.parametrize("text", ["{", "[]", '{"id": 1}'])
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "r", [])
    (folder / "simulations" / "x.json").write_text(text)
    with pytest.raises(TauBenchError, match="not result files") as refusal:
        read_episodes(folder, ["task_001"], 1)
    assert "\n" not in str(refusal.value)


def test_judge_calls_are_summed_without_half_a_line_at_the_end(tmp_path: Path) -> None:
    line = json.dumps({"usage": {"prompt_tokens": 100, "completion_tokens": 10}}) + "\n"
    (tmp_path / "judge_calls.jsonl").write_text(line + line + '{"usage": {"prompt')
    assert read_judge_usage(tmp_path) == Usage(calls=2, requests=2, input_tokens=200, output_tokens=20)
    assert read_judge_usage(tmp_path / "nothing") == Usage()


def random_outcomes(tasks: int, trials: int, seed: int) -> dict[tuple[str, int], bool | None]:
    """(task, trial) -> solved, failed, or None: no record."""
    draw = random.Random(seed)
    places = itertools.product((f"task_{number:03d}" for number in range(tasks)), range(trials))
    return {place: draw.choice((True, True, False, None)) for place in places}


@pytest.mark.parametrize("trials", [1, 3, 4])
def test_rates_are_those_of_brute_force(tmp_path: Path, trials: int) -> None:
    """pass^k and pass@k by drawing every k of the n trials, over all tasks, missing ones included."""
    outcomes = random_outcomes(12, trials, seed=trials)
    tasks = sorted({task for task, _ in outcomes})
    records = [
        simulation(task, trial, reward_info=graded(DB=float(solved)))
        for (task, trial), solved in outcomes.items()
        if solved is not None
    ]
    episodes = read_episodes(write(tmp_path / "r", records), tasks, trials)
    result = aggregate(a_plan_of(tasks, trials), [[[rollout_result(episode, None) for episode in episodes]]])
    for k in range(1, min(trials, 3) + 1):
        every, some = [], []
        for task in tasks:
            draws = list(itertools.combinations([bool(outcomes[task, trial]) for trial in range(trials)], k))
            every.append(sum(map(all, draws)) / len(draws))
            some.append(sum(map(any, draws)) / len(draws))
        assert result.tgc[k - 1].mean == pytest.approx(sum(every) / len(tasks))
        assert result.tgc_at[k - 1].mean == pytest.approx(sum(some) / len(tasks))
    assert result.sgc == ()
    assert result.turns is not None
    assert result.turns.mean == 2.0  # of the episodes that were played


def test_endings_in_the_tables_of_all_benchmarks(tmp_path: Path) -> None:
    reasons = ("user_stop", "max_steps", "context_window_exceeded", "timeout")
    records = [simulation("task_001", trial, termination_reason=reason) for trial, reason in enumerate(reasons)]
    episodes = read_episodes(write(tmp_path / "r", records), ["task_001"], 5)
    assert [rollout_result(episode, None).evaluation.ended for episode in episodes] == [
        EpisodeEnd.FINISHED,
        EpisodeEnd.TURN_LIMIT,
        EpisodeEnd.RESPONSE_LIMIT,
        EpisodeEnd.SERVER_ERROR,
        EpisodeEnd.SERVER_ERROR,
    ]


def test_costs_by_role_at_configured_prices(tmp_path: Path) -> None:
    records = [simulation("task_001", trial) for trial in range(2)] + [infrastructure_error("task_002", 0)]
    episodes = read_episodes(write(tmp_path / "r", records), ["task_001", "task_002"], 2)
    config = DracoConfig.model_validate({"tau_bench": {"trials": 2}})
    found = summary(episodes, Usage(input_tokens=400, output_tokens=40), "some/where/Qwen3.6-27B", config, "a2c0247")
    dollars = {role: cost["dollars"] for role, cost in found["costs"].items()}
    # 4,000 tokens in and 200 out for agent and user; 0.289/0.9 and 2.5/15 dollars per million.
    assert dollars["agent"] == pytest.approx((4000 * 0.289 + 200 * 0.9) / 1e6)
    assert dollars["user"] == pytest.approx((4000 * 2.5 + 200 * 15) / 1e6)
    assert dollars["judge"] == pytest.approx((400 * 2.5 + 40 * 15) / 1e6)
    assert found["failures"] == {"infrastructure_error (RuntimeError)": 1, "missing": 1}
    assert (found["episodes"], found["successes"], found["infrastructure_errors"], found["missing"]) == (4, 2, 1, 1)

    measured = EvaluationDirectory.begin(tmp_path / "out", a_plan_of(["task_001", "task_002"], trials=2))
    for episode in episodes:
        measured.add("x", rollout_result(episode, None))
    measured.write_summary({"measurements": {"x": found}})
    costs = cost_by_role_table({"DRACO": [measured] * 2})
    cells = dict(zip((column.path for column in costs.columns), costs.rows[0][1], strict=True))
    tokens, paid = cells["agent", "input tokens"], cells["user", "dollars"]
    assert tokens is not None
    assert tokens.mean == 2000  # of one pass of four
    assert paid is not None
    assert paid.mean == pytest.approx(dollars["user"] / 2)
    total = cells["together", "dollars"]
    assert total is not None
    assert total.mean == pytest.approx(sum(dollars.values()) / 2)
    failures = failure_table({"DRACO": [measured]})
    shares = dict(zip((column.path[0] for column in failures.columns), failures.rows[0][1], strict=True))
    assert {kind: cell and cell.mean for kind, cell in shares.items()} == {
        "success": 50.0,
        "infrastructure_error (RuntimeError)": 25.0,
        "missing": 25.0,
    }


def test_an_unknown_price_is_no_price(tmp_path: Path) -> None:
    episodes = read_episodes(write(tmp_path / "r", [simulation("task_001", 0)]), ["task_001"], 1)
    found = summary(episodes, Usage(), "a/model-without-a-price", DracoConfig(), "unknown")
    assert found["costs"]["agent"]["dollars"] is None
    measured = EvaluationDirectory.begin(tmp_path / "out", a_plan_of(["task_001"], trials=1))
    measured.write_summary({"measurements": {"x": found}})
    cells = cost_by_role_table({"x": [measured]}).rows[0][1]
    assert (cells[2], cells[-1]) == (None, None)
    assert cells[5] is not None
