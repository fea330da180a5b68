"""The report page: what it holds, what it must not let through, and where it is written."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from draco_ray.cli import main
from draco_ray.commands.report import write_reports
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan
from draco_ray.lab.report.groups import pack, packed_groups, unpack
from draco_ray.lab.report.measured import packed_evaluations, packed_judged
from draco_ray.lab.report.page import INERT, KIND_COLORS, QUALITY, REWARD, pass_rate_ceiling_note, write_report
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from tests.support.evaluations import a_result
from tests.support.measured_run import HELD_OUT, evaluated_run, judged_run
from tests.support.small_run import CODE, HOSTILE, PROMPT, TASKS, a_call, a_trajectory, small_run, write_group


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return small_run(tmp_path_factory.mktemp("report") / "small")


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> str:
    path = run.path / "report.html"
    write_report(run, path)
    return path.read_text(encoding="utf-8")


def text(data: dict, numbers: list[int]) -> str:
    return "\n".join(data["lines"][number] for number in numbers)


def test_the_page_holds_every_group_and_an_index(page: str) -> None:
    packed = re.findall(r'<script type="text/plain" id="(\w+)">([\w+/=]*)</script>', page)
    assert [name for name, _ in packed] == ["w1", "w2", *(f"g{place}" for place in range(6)), "index"]
    index = unpack(packed[-1][1])
    trained = [(step, task) for step in (1, 2) for task in TASKS]
    assert [(group["step"], group["task"]) for group in index["groups"]] == [*trained, *((2, task) for task in TASKS)]
    assert unpack(packed[4][1])["rollouts"][1]["share"]["reward"] == -1.0


def test_evaluated_rollouts_are_groups_of_their_measurement(run: RunDirectory) -> None:
    solved, failed = packed_evaluations(run)
    assert (solved.summary["key"], solved.summary["split"], solved.summary["task"]) == (
        "test after step 2",
        "test",
        TASKS[0],
    )
    assert solved.summary["rollouts"] == [[0, "finished", None, None, None, None, True]]
    data = unpack(failed.data)
    assert data["rollouts"][0]["outcome"] == {"success": False, "tests": [1, 2], "failures": []}
    assert text(data, data["rollouts"][0]["turns"][0]["action"]) == CODE


def test_every_measured_step_has_its_groups_and_a_point_with_an_interval(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path / "run")
    assert [group.summary["key"] for group in packed_evaluations(run)] == [
        *["test before training"] * 2,
        *["test after step 1"] * 2,
        *["test after step 2"] * 2,
    ]
    path = tmp_path / "report.html"
    write_report(run, path)
    page = path.read_text(encoding="utf-8")
    hints = re.findall(r"<title>run, test, step (\d): (\d+)% \[(\d+)%, (\d+)%\]</title>", page)
    assert [(step, rate) for step, rate, _, _ in hints] == [("0", "0"), ("1", "100"), ("2", "50")]
    assert all(int(low) <= int(rate) <= int(high) and low != high for _, rate, low, high in hints)
    # A word of ours is explained where it stands.
    assert re.findall(r"<figcaption>((?:Credit of a rollout is inert|Quality)[^<]*)</figcaption>", page) == [
        INERT,
        QUALITY,
    ]
    # However often it was measured, the facts name the ends.
    assert re.findall(r"<dt>(TGC [^<]*)</dt><dd[^>]*>([^<]*)</dd>", page) == [
        ("TGC on test, before and after step 2", "0% → 50%")
    ]


def test_rollouts_that_the_judge_scored_for_want_of_an_evaluator_are_in_the_page(tmp_path: Path) -> None:
    run = judged_run(tmp_path / "run")
    # Before, about a rollout that was played again after a kill.
    gone = a_call("score", 0, HELD_OUT, 0)
    reply = json.dumps([{"rubric_index": 0, "rubric_title": "Polite", "score": 1, "justification": "Of the gone one."}])
    gone = replace(gone, call_id="gone", prompt="Grade the gone run.", reply=reply, started_at=0.0)
    kept = [*rows.part_rows(run, "heldout_calls", 0, f"{HELD_OUT}-score-0"), *rows.call_rows(0, [gone])]
    RunStore(run).write("heldout_calls", 0, f"{HELD_OUT}-score-0", kept)
    inside = judged_run(run.path / "evaluations" / "last", steps=(2,))
    (inside.path / "evaluations").mkdir()
    before, *others = packed_judged(run)
    keys = ["dev before training", "dev after step 1", "dev after step 2", "last dev after step 2"]
    assert [group.summary["key"] for group in (before, *others)] == keys
    # One run of the task passes one of two applicable criteria, the other was not scored.
    assert [rollout[6] for rollout in before.summary["rollouts"]] == [0.5, None]
    data = unpack(before.data)
    assert [criterion["title"] for criterion in data["criteria"]] == ["Polite", "Right", "Brief"]
    scored, unscored = data["rollouts"]
    assert scored["verdicts"] == {
        "0": [1, HOSTILE, "It says please. Asked once more: pass."],
        "1": [-1, "", "Asked once more: pass."],
        "2": [0, "", "Asked once more: not applicable."],
    }
    assert scored["outcome"] == {"success": 0.5, "judged": True}
    assert unscored["outcome"] == {"success": None, "judged": "no criterion"}
    assert [call["phase"] for call in scored["calls"]] == ["score"] * 3
    assert [call["phase"] for call in data["calls"]] == ["stage1"]
    assert text(data, scored["turns"][0]["action"]) == CODE
    path = tmp_path / "report.html"
    write_report(run, path)
    assert "<title>run, dev, step 1: 50%" in path.read_text(encoding="utf-8")


def test_evaluations_of_a_finished_run_are_in_the_page(tmp_path: Path) -> None:
    run = small_run(tmp_path / "small", steps=1)
    plan = EvaluationPlan(
        benchmark="appworld",
        split="dev",
        label="l",
        policy="p",
        runs=1,
        measurements=("step00001",),
        tasks={TASKS[0]: 1},
    )
    directory = EvaluationDirectory.begin(run.path / "evaluations" / "last", plan)
    directory.add("step00001", a_result(TASKS[0], 0, True))
    directory.write_trajectory("step00001", a_trajectory(1, TASKS[0], 0))
    *_, last = packed_evaluations(run)
    assert (last.summary["key"], last.summary["step"], last.summary["split"]) == ("last step00001", 1, "dev")
    assert last.summary["rollouts"][0][6] is True
    # One that another program wrote is no reason not to show the run.
    (run.path / "evaluations" / "last" / "evaluation.json").write_text("{}")
    assert [group.summary["split"] for group in packed_evaluations(run)] == ["test", "test"]


def test_every_step_has_its_timeline_in_the_same_colours(run: RunDirectory, page: str) -> None:
    drawings = [unpack(found) for found in re.findall(r'id="w\d">([\w+/=]*)<', page)]
    assert all(f"Step {step}: what ran when" in drawing for step, drawing in enumerate(drawings, 1))
    colors = [set(re.findall(r'fill="(#[0-9a-f]{6})"', drawing)) for drawing in drawings]
    assert colors == [{KIND_COLORS[kind] for kind in ("rollout", "score", "learning", "sync")}] * 2
    # A merged phase has the colour of the one that it replaces, and never stands beside it.
    assert len(set(KIND_COLORS.values())) == len(KIND_COLORS) - 2


def test_the_ceiling_of_a_pass_rate_is_said_where_there_is_one(run: RunDirectory, page: str, tmp_path: Path) -> None:
    # Of the default group size.
    assert page.count("5 of 6 rollouts pass a surviving criterion and the ceiling is 83%") == 2
    other = RunDirectory.create(tmp_path / "other", "algorithm: {rule: no_dropout}\n")
    assert pass_rate_ceiling_note(other) == ""
    assert "3 of 4" in pass_rate_ceiling_note(RunDirectory.create(tmp_path / "four", "algorithm: {group_size: 4}\n"))
    # Dropped criteria are in the rates: of the third one all verdicts pass.
    assert "it includes verdicts on dropped criteria" in pass_rate_ceiling_note(run)


@pytest.mark.parametrize(
    ("config", "said", "unsaid"),
    [
        ("algorithm: {group_size: 4}", ["plays each task 4 times", "names the steps", "KL to the base"], []),
        ("algorithm: {rule: grpo}", ["plays each task 6 times", REWARD], ["names the steps"]),
        ("algorithm: {reward: outcome, rule: grpo}", ["KL to the base"], ["A judge gives", REWARD]),
        (
            "setting: traces",
            ["Traces of one task"],
            ["The policy plays", REWARD, "KL to the base", "Seconds per stage", "seed"],
        ),
    ],
)
def test_the_first_page_says_what_it_is_about(tmp_path: Path, config: str, said: list[str], unsaid: list[str]) -> None:
    run = RunDirectory.create(tmp_path / "run", config + "\n")
    write_report(run, tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8")).partition("<script")[0]
    assert [words for words in said if words not in page] == []
    assert [words for words in unsaid if words in page] == []


def test_both_spreads_of_quality_are_told_apart(page: str) -> None:
    # 0.5 over the active rollout of each group, 0.25 over both.
    table = page.partition("Where credit acts")[2].partition("</section>")[0]
    assert re.findall(r'<th class="n">([^<]*)</th>', table)[1:] == ["spread of Q, active rollouts", "of all"]
    assert re.findall(r'<td class="n">([\d.]+)</td>', table)[:2] == ["0.500", "0.250"]


def test_lost_rollouts_are_counted_in_the_list(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "run", "{}\n"))
    write_group(store, 1, TASKS[0])
    group = {"state": "credited", "rollouts": 2, "lost": 1, "unscored": 0, "credit_failures": 0, "reason": None}
    store.write("groups", 1, TASKS[0], [{"training_step": 1, "task_id": TASKS[0], **group}])
    assert [group.summary["lost"] for group in packed_groups(store.directory)] == [1]


def test_nothing_in_the_page_is_loaded_from_elsewhere(page: str) -> None:
    assert not re.findall(r"https?://|url\(|@import|<link(?! rel=\"icon\" href=\"data:,\")", page)
    assert "default-src 'none'" in page


def test_hostile_text_never_becomes_markup(page: str) -> None:
    # Two timelines, six groups, the index and the page's own script.
    assert page.lower().count("</script") == page.lower().count("<script") == 10
    assert "<img" not in page
    assert "<i>" not in page
    assert "Never &lt;i&gt;fails&lt;/i&gt;" in page
    # The configuration is shown on the first page, escaped.
    assert "&lt;/script&gt;&lt;script&gt;window.hacked = 1" in page


def test_a_group_reads_back_with_its_texts_and_numbers(run: RunDirectory) -> None:
    group = next(iter(packed_groups(run)))
    data = unpack(group.data)
    winner, loser = data["rollouts"]
    first, second, closing = winner["turns"]
    assert text(data, first["action"]) == CODE
    assert text(data, first["before"]) == f"I look. {HOSTILE}"
    assert text(data, first["observation"]) == HOSTILE
    assert (first["tokens"], second["tokens"], closing["tokens"]) == (2, 4, 1)
    assert (first["push"], second["push"]) == (0.0, 1.0)
    assert closing["step"] is None
    assert "push" not in closing
    assert [turn["push"] for turn in loser["turns"][:2]] == [0.5, 0.5]
    assert [turn["cited"] for turn in loser["turns"][:2]] == [False, True]
    assert winner["credit"]["1"] == {"verdict": -1, "steps": [1, 2], "explanation": ""}
    assert loser["verdicts"]["0"] == [-1, HOSTILE, f"Because {TASKS[0]}."]
    assert [call["phase"] for call in data["calls"]] == ["stage1", "union"]
    assert text(data, winner["calls"][0]["prompt"]) == PROMPT
    assert [criterion["survived"] for criterion in data["criteria"]] == [True, True, False]


def test_a_line_that_a_prompt_repeats_is_kept_once(run: RunDirectory) -> None:
    data = unpack(next(iter(packed_groups(run))).data)
    assert len(data["lines"]) == len(set(data["lines"]))
    assert data["lines"].count(CODE.split("\n")[0]) == 1


def test_the_summary_is_what_the_list_filters_by(run: RunDirectory) -> None:
    summary = next(iter(packed_groups(run))).summary
    assert summary["signal"] is True
    assert summary["dropped"] == [2]
    assert summary["rollouts"][1] == [1, "turn_limit", -1.0, -0.7, True, "none"]
    assert summary["dollars"] == pytest.approx(0.12)
    assert summary["asked"].startswith(f"Do {TASKS[0]}.")


def test_packing_keeps_any_text() -> None:
    value = {"a": ["\u2028</script>", "☃ \ud7ff", None, 0.1], "b": {}}
    assert unpack(pack(value)) == value
    assert not set(pack(value)) & set("<>&\"'")


def test_a_run_under_way_has_a_page(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "going", "{}\n"))
    store.write("trajectories", 1, "a", rows.trajectory_rows(1, a_trajectory(1, TASKS[0], 0)))
    store.write("steps", 1, "a", rows.step_rows(1, a_trajectory(1, TASKS[0], 0)))
    (path,) = write_reports([store.directory.path], figures=False, tables=False, out=None)
    (group,) = packed_groups(store.directory)
    assert group.summary["state"] == "in progress"
    assert group.summary["rollouts"] == [[0, "finished", None, None, None, None]]
    page = path.read_text(encoding="utf-8")
    assert "nothing recorded" in page
    # A judge that was not asked yet has no cost, and no missing price.
    assert re.findall(r"<dt>(?:judge cost|time)</dt><dd[^>]*>([^<]*)</dd>", page) == ["–", "–"]
    assert "prices unknown" not in page


def test_sampled_tokens_are_in_the_page_when_asked_for(run: RunDirectory) -> None:
    group = next(packed_groups(run, tokens=True))
    first, second, closing = unpack(group.data)["rollouts"][0]["turns"]
    # The model of this run is nowhere, so tokens are numbers.
    assert first["sampled"] == [[f"#{number} ", 0.0] for number in range(1, 1 + first["tokens"])]
    assert [len(turn["sampled"]) for turn in (second, closing)] == [second["tokens"], closing["tokens"]]
    assert "sampled" not in unpack(next(packed_groups(run)).data)["rollouts"][0]["turns"][0]
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run.path), "--tokens", "--figures"])


def test_the_command_says_what_it_wrote(run: RunDirectory, tmp_path: Path) -> None:
    assert write_reports([run.path], figures=False, tables=False, out=tmp_path / "deep" / "a.html") == [
        tmp_path / "deep" / "a.html"
    ]
    figures = write_reports([run.path], figures=True, tables=False, out=None)
    assert {path.parent for path in figures} == {run.path / "figures"}
    assert {path.stem for path in figures} >= {
        "terminations",
        "pass_rate",
        "pass_rate_by_criterion",
        "judge_cost_by_phase",
    }
    both = write_reports([run.path], figures=True, tables=True, out=tmp_path / "both")
    assert {path.suffix for path in both} == {".svg", ".parquet", ".csv"}
    assert not list(run.path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directories": ["no-run"]}, "not a run directory"),
        ({"directories": ["empty"]}, "no rows yet"),
        (
            {"directories": ["small", "other"]},
            "a page shows one run, found 2; to compare runs add --figures or --tables",
        ),
        ({"directories": ["small", "copy/small"], "figures": True}, "two runs have the name small"),
        ({"directories": ["small"], "out": "small/config.yaml/x.html"}, "cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_said_in_one_line(tmp_path: Path, arguments: dict, message: str) -> None:
    small_run(tmp_path / "small", steps=1)
    small_run(tmp_path / "other", steps=1)
    (tmp_path / "copy").mkdir()
    small_run(tmp_path / "copy" / "small", steps=1)
    RunDirectory.create(tmp_path / "empty", "{}\n")
    out = tmp_path / arguments["out"] if "out" in arguments else None
    with pytest.raises(ConfigError, match=message) as error:
        write_reports(
            [tmp_path / name for name in arguments["directories"]],
            figures=arguments.get("figures", False),
            tables=False,
            out=out,
        )
    assert "\n" not in str(error.value)


def test_several_runs_share_figures_and_keep_their_own(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / name, steps=1).path for name in ("one", "two")]
    written = write_reports(runs, figures=True, tables=False, out=tmp_path / "figures")
    names = {path.stem for path in written}
    assert names == {
        "terminations-one",
        "terminations-two",
        "pass_rate_by_criterion-one",
        "pass_rate_by_criterion-two",
        "pass_rate",
        "inert_share",
        "judge_cost_by_phase",
        "success",
    }


def test_draco_report_prints_the_file(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as done:
        main(["report", str(run.path), "--out", str(page)])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.stat().st_size > 10_000
