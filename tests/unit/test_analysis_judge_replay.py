"""Sending archived judge calls to another judge: what is sent, what is compared, and what a useless reply counts as."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draco_ray.cli import main
from draco_ray.config.schema import JudgeConfig, RuleJudgeConfig
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.phases import Credit, Score
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.analysis.judges import NamedJudge, RuleCompleter, judge_config
from draco_ray.lab.analysis.replay import (
    REPLAYED_SCHEMA,
    VERDICT_PHASES,
    WITH_INTERVAL,
    agreement_table,
    archived_calls,
    repeated_reliability,
    replay,
)
from draco_ray.records import Attribution, Criterion, JudgeCall, ScoredCriterion, Verdict
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.sandbox.world.scripts import Fault
from tests.support.rule_judge_runs import instruction, scripted_run, trajectory_of

FAMILY = "count_library_songs"
# A credit prompt does not state the task: the criterion does.
LOOK = "Look at every step."
RUBRIC = [
    Criterion(title="Reads every page of the list", description="All of it.", evaluator_instruction=LOOK),
    Criterion(title="Closes the task after the work", description="Once.", evaluator_instruction=LOOK),
]
# As the rule judge says; the second criterion of the second rollout is recorded the other way round.
RECORDED = ((Verdict.PASS, Verdict.PASS), (Verdict.FAIL, Verdict.FAIL))


UNUSED = "of another rollout"


def call(phase: str, rollout: int, prompt: str) -> JudgeCall:
    return JudgeCall(
        call_id=f"{phase}-{rollout}-{len(prompt)}",
        phase=phase,
        group="step1/task_1",
        task_id="task_1",
        rollout=rollout,
        model="openai/original",
        prompt=prompt,
        reply="[]",
        finish_reason="stop",
        input_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        dollars=0.0,
        started_at=0.0,
        seconds=0.0,
        requests=1,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    store = RunStore(RunDirectory.create(tmp_path_factory.mktemp("archive") / "archived", "seed: 0\n"))
    prompts = load_prompts(Path("prompts/judge"))
    store.write("criteria", 1, "task_1", rows.criterion_rows(1, "task_1", RUBRIC, None))
    for rollout, faults in enumerate(((), (Fault.FIRST_PAGE_ONLY,))):
        trajectory = trajectory_of(scripted_run(FAMILY, *faults), instruction(FAMILY), rollout)
        scores = [ScoredCriterion(verdict=verdict) for verdict in RECORDED[rollout]]
        # Only the first criterion went to the credit call.
        cited = [Attribution(criterion=0, verdict=RECORDED[rollout][0], steps=(1, 4))]
        key = f"task_1-{rollout}"
        store.write("trajectories", 1, key, rows.trajectory_rows(1, trajectory))
        store.write("verdicts", 1, key, rows.verdict_rows(1, "task_1", rollout, scores))
        store.write("citations", 1, key, rows.citation_rows(1, "task_1", rollout, cited))
        score = Score(trajectory, RUBRIC).prompt(prompts)
        calls = [
            call("score", rollout, score + "\n\n[REPLY]\nno\n\n[ASKED AGAIN]\nagain"),
            call("score", rollout, score),
            call("credit", rollout, Credit(trajectory, RUBRIC[:1], scores[:1]).prompt(prompts)),
            # Paid for, about a rollout that was played again.
            call("score", rollout, UNUSED),
            # Of an attempt that failed, and was needed no longer.
            replace(call("score", 2, UNUSED), error="no JSON"),
        ]
        store.write("judge_calls", 1, key, rows.call_rows(1, calls))
    store.write("verdicts", 1, "task_1-2", rows.verdict_rows(1, "task_1", 2, scores))
    store.finish_step(1, {"step": 1})
    return store.directory


class Scripted:
    """Answers every request with the same text, and remembers what it was asked."""

    def __init__(self, text: str, error: str | None = None) -> None:
        self.text, self.error = text, error
        self.prompts: list[str] = []

    async def __call__(self, request: Request) -> Completion:
        assert len(request.messages) == 1
        self.prompts.append(request.messages[0].content)
        return Completion(
            text=self.text,
            finish_reason="error" if self.error else "stop",
            model="other",
            input_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            dollars=0.02,
            started_at=0.0,
            seconds=0.0,
            requests=1,
            error=self.error,
        )

    async def forget(self, request: Request) -> None: ...

    async def check(self) -> None: ...


def scores(*verdicts: int) -> str:
    return json.dumps(
        [{"rubric_index": n, "rubric_title": RUBRIC[n].title, "score": verdict} for n, verdict in enumerate(verdicts)]
    )


async def test_the_first_prompt_is_sent_verbatim_and_once(run: RunDirectory) -> None:
    judge = Scripted(scores(1, 1))
    calls = archived_calls(run, None, ["score"])
    table = await replay(run, judge, calls, "other")
    archive = run.table("judge_calls").to_pylist()
    assert sorted(judge.prompts) == sorted(
        row["prompt"]
        for row in archive
        if row["phase"] == "score" and "[ASKED AGAIN]" not in row["prompt"] and row["prompt"] != UNUSED
    )
    assert [(row["reference"], row["verdict"]) for row in table.to_pylist()] == [(1, 1), (1, 1), (-1, 1), (-1, 1)]
    assert sum(row["dollars"] for row in table.to_pylist()) == pytest.approx(0.04)
    (overall, first) = agreement_table(table).to_pylist()
    assert (overall["training_step"], first["training_step"]) == (None, 1)
    assert (overall["agreement"], overall["false_pass"], overall["false_fail"]) == (0.5, 1.0, 0.0)
    assert (overall["kappa"], overall["always_pass"]) == (0.0, 0.5)
    assert (overall["judgments"], overall["passes"], overall["fails"]) == (4, 2, 2)
    # One group: nothing is known of the spread between groups.
    assert overall["kappa_low"] is None


def test_what_a_strong_judge_was_asked_about_some_criteria_is_not_sent(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "panel", "seed: 0\n"))
    prompts, trajectory = (
        load_prompts(Path("prompts/judge")),
        trajectory_of(scripted_run(FAMILY), instruction(FAMILY), 0),
    )
    whole, part = (Score(trajectory, rubric).prompt(prompts) for rubric in (RUBRIC, RUBRIC[1:]))
    scores = [ScoredCriterion(verdict=Verdict.PASS)] * 2
    store.write("criteria", 1, "task_1", rows.criterion_rows(1, "task_1", RUBRIC, None))
    store.write("trajectories", 1, "task_1", rows.trajectory_rows(1, trajectory))
    store.write("verdicts", 1, "task_1", rows.verdict_rows(1, "task_1", 0, scores))
    store.write("judge_calls", 1, "task_1", rows.call_rows(1, [call("score", 0, each) for each in (whole, part)]))
    (archived,) = archived_calls(store.directory, None, ["score"])
    assert archived.prompt == whole


async def test_every_measure_of_two_groups_has_an_interval(run: RunDirectory) -> None:
    rows = (await replay(run, RuleCompleter(), archived_calls(run, None, VERDICT_PHASES), "rules")).to_pylist()
    table = pa.Table.from_pylist([*rows, *({**row, "task_id": "another"} for row in rows)], schema=REPLAYED_SCHEMA)
    overall = {row["phase"]: row for row in agreement_table(table).to_pylist() if row["training_step"] is None}
    # Twice the same group: no spread between groups is seen, which is no proof that there is none.
    for phase, name in (*(("score", name) for name in WITH_INTERVAL), ("credit", "citation_overlap")):
        low, value, high = (overall[phase][f"{name}{part}"] for part in ("_low", "", "_high"))
        assert low <= value <= high, name
        assert high - low > 0.1, name


def test_citations_that_another_judge_repeats_are_reliable() -> None:
    def table(*repeated: list[int]) -> pa.Table:
        row = {"training_step": 1, "reference_steps": [2], "rollout_steps": 4, "error": None}
        rows = [{**row, "task_id": f"t{n}_1", "steps": steps} for n, steps in enumerate(repeated)]
        # What was not answered, and a scoring call, which cites nothing, say nothing.
        more = [
            {**row, "task_id": "t9_1", "steps": [], "error": "no"},
            {**row, "task_id": "t9_1", "reference_steps": []},
        ]
        return pa.Table.from_pylist([*rows, *more], schema=REPLAYED_SCHEMA)

    assert repeated_reliability(table(*[[2]] * 30)) == pytest.approx(0.997, abs=0.001)
    assert repeated_reliability(table([3], [3], [1])) == 0.0
    assert repeated_reliability(table()) is None


@pytest.mark.parametrize("judge", [Scripted("I cannot say."), Scripted("", error="prompt too long")])
async def test_a_useless_reply_leaves_every_criterion_unanswered(run: RunDirectory, judge: Scripted) -> None:
    table = await replay(run, judge, archived_calls(run, [1], VERDICT_PHASES), "other")
    assert {row["verdict"] for row in table.to_pylist()} == {None}
    assert all(row["error"] for row in table.to_pylist())
    for row in agreement_table(table).to_pylist():
        assert (row["unanswered"], row["agreement"], row["kappa"]) == (1.0, 0.0, None)


def test_the_rule_judge_is_asked_about_just_what_the_prompt_asked(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run.path), "--judge", "rules", "--out", str(tmp_path)])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "4 archived prompts to rules" in printed
    table = pq.read_table(tmp_path / "rules" / "replayed.parquet").to_pylist()
    scored = [(row["reference"], row["verdict"]) for row in table if row["phase"] == "score"]
    assert scored == [(1, 1), (1, 1), (-1, -1), (-1, 1)]
    credited = [row for row in table if row["phase"] == "credit"]
    assert [row["criterion"] for row in credited] == [0, 0]
    assert credited[1]["steps"] == [4]
    # Of one group nothing is known.
    assert "algorithm.reliability of the run's judge, if all citations by rules are correct: 0.000" in printed
    agreed = {row["phase"]: row for row in pq.read_table(tmp_path / "rules" / "agreement.parquet").to_pylist()}
    assert agreed["score"]["agreement"] == 0.75
    assert agreed["score"]["false_pass"] == 0.5
    assert 0 < agreed["credit"]["citation_overlap"] < 1
    assert "1 4" in (tmp_path / "rules" / "replayed.csv").read_text()


def test_another_model_takes_nothing_of_the_old_endpoint() -> None:
    offline = JudgeConfig(
        rule_judge=RuleJudgeConfig(start=True),
        model="openai/old",
        api_base="http://127.0.0.1:1/v1",
        extra_body={"thinking": False},
        temperature=0.3,
    )
    other = judge_config(offline, NamedJudge(model="anthropic/new"), None)
    assert (other.model, other.api_base, other.key_variable) == ("anthropic/new", None, "ANTHROPIC_API_KEY")
    assert (other.temperature, other.extra_body, other.rule_judge.start) == (0.3, {}, False)


def test_the_same_model_is_asked_at_the_configured_endpoint() -> None:
    private = JudgeConfig(model="openai/p", api_base="http://x/v1", api_key_env="K")
    for asked, found in (
        (NamedJudge(model="openai/p"), "http://x/v1"),
        (NamedJudge(model="openai/p", api_base="http://y/v1"), "http://y/v1"),
    ):
        settled = judge_config(private, asked, None)
        assert (settled.api_base, settled.key_variable) == (found, "K")
