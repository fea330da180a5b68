"""Pass shares of judged traces: absolute, by criterion, and against an earlier judgement."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from draco_ray.cli import main
from draco_ray.commands.grade import baseline_difference, criterion_table, read_lines
from draco_ray.commands.printing import with_interval
from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.pass_share import pass_share
from draco_ray.lab.report.page import write_report
from draco_ray.lab.runs.show import show
from draco_ray.runs.directory import RunDirectory
from draco_ray.traces.library import judge_sync
from draco_ray.traces.load import groups_of, load_traces
from tests.support import canned_judge
from tests.unit.test_traces_judging import Canned
from tests.unit.test_traces_load import FILES

TRACES = Path(__file__).parents[2] / "examples" / "traces"
TITLES = ("Looks first", "Tells the truth")


def line(task: str, *verdicts: str) -> dict[str, object]:
    passes, fails = verdicts.count("PASS"), verdicts.count("FAIL")
    return {
        "task_id": task,
        "pass_share": passes / (passes + fails) if passes + fails else None,
        "verdicts": [{"title": title, "verdict": name} for title, name in zip(TITLES, verdicts, strict=False)],
    }


def test_three_perfect_traces_have_a_pass_share_of_one() -> None:
    """Their reward, which is relative to the group, is 0."""
    share = pass_share([line("a", "PASS", "PASS")] * 3)
    assert share is not None
    assert share.mean == 1.0


def test_tasks_count_alike_and_criteria_that_do_not_apply_count_nowhere() -> None:
    lines = [line("a", "PASS", "PASS"), line("a", "FAIL", "NOT_APPLICABLE"), line("b", "FAIL", "FAIL")]
    share = pass_share([*lines, line("c", "NOT_APPLICABLE", "NOT_APPLICABLE")])
    assert share is not None
    assert (share.mean, share.clusters) == (0.25, 2)
    table = Console(width=80)
    with table.capture() as shown:
        table.print(criterion_table(lines))
    rows = [row.split("│") for row in shown.get().splitlines() if "%" in row]
    assert [(title.strip(), shared.strip()) for _, title, shared, *_ in rows] == [
        ("Looks first", "33%"),
        ("Tells the truth", "50%"),
    ]


def test_one_judgement_has_one_pass_share_wherever_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task's traces count as much as the single trace of another task."""

    def chat(flight: str) -> dict[str, object]:
        call = {"id": "c", "function": {"name": "book", "arguments": json.dumps({"flight": flight})}}
        said = [
            {"role": "user", "content": "Book the cheapest flight."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": f"booked {flight}"},
        ]
        return {"id": flight, "task_id": "other" if flight == "UA2" else "cheap", "messages": said}

    out = tmp_path / "judged"
    judge_sync(groups_of([chat("DL9"), chat("UA1"), chat("UA2")]), "canned", complete=Canned(), out=out)
    lines = read_lines(out)
    assert [each["pass_share"] for each in lines] == [1.0, 0.5, 0.5]
    share = pass_share(lines)
    assert share is not None
    assert share.mean == 0.625
    show(out)
    assert "pass share 62.5%" in capsys.readouterr().out
    write_report(RunDirectory.open(out), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<dt>pass share</dt><dd title="62%">' in page


def test_a_quotation_with_other_line_separators_can_be_read_again(tmp_path: Path) -> None:
    def quoted(prompt: str) -> str:
        return canned_judge.answer(prompt).replace("as it says", "one\u2028two\x85three")

    out = tmp_path / "judged"
    judge_sync(load_traces(FILES / "openai_chat.jsonl"), "canned", complete=Canned(score=quoted), out=out)
    assert {each["evidence"] for line in read_lines(out) for each in line["verdicts"]} == {"one\u2028two\x85three"}
    show(out)
    write_report(RunDirectory.open(out), tmp_path / "report.html")


def test_criteria_that_apply_to_no_trace_are_no_failure_to_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "judged"
    words = ["judge", str(TRACES), "--judge", "rules", "--rubric", "static", "--out", str(out)]
    with pytest.raises(SystemExit):
        main(words)
    for file in (out / "judged").glob("*.json"):
        group = json.loads(file.read_text(encoding="utf-8"))
        for trace in group["rollouts"]:
            trace["pass_share"] = None
            trace["verdicts"] = [{**each, "verdict": "NOT_APPLICABLE"} for each in trace["verdicts"]]
        file.write_text(json.dumps(group), encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--fail-under", "0.8"])
    assert stopped.value.code == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "no criterion of the rubric applies to any trace, so there is no pass share to compare" in said


def test_a_judge_that_fails_says_nothing_about_the_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "judge.py").write_text("def answer(prompt):\n    return None, 'I cannot.'\n")
    (tmp_path / "config.yaml").write_text("extends: sandbox\njudge: {rule_judge: {use: './judge.py:answer'}}\n")
    words = ["judge", str(TRACES), "--config", str(tmp_path / "config.yaml"), "--rubric", "static", "--fail-under", "0"]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--out", str(tmp_path / "judged")])
    assert stopped.value.code == 4
    assert "no trace could be judged, so there is no pass share to compare" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "written"), [(-1e-9, "0.000"), (-0.25, "-0.250"), (None, "-")])
def test_a_printed_zero_has_no_sign(value: float | None, written: str) -> None:
    assert with_interval(value, None, None) == written


def test_a_worse_judgement_is_below_its_baseline() -> None:
    good = [line(f"task {n}", "PASS", "PASS") for n in range(30)]
    bad = [line(f"task {n}", "FAIL", "PASS" if n % 2 else "FAIL") for n in range(30)]
    change, tasks = baseline_difference(bad, good)
    assert (change.mean, change.high < 0, tasks) == (-0.75, True, 30)
    change, tasks = baseline_difference(good[:2], [*good, line("only there", "FAIL", "FAIL")])
    assert (change.mean, tasks) == (0.0, 2)


def test_a_trace_with_many_verdicts_is_no_coin_flip() -> None:
    def lines(tasks: int, passed: int) -> list[dict[str, object]]:
        verdicts = [{"title": str(n), "verdict": "PASS" if n < passed else "FAIL"} for n in range(10)]
        return [{"task_id": str(n), "pass_share": passed / 10, "verdicts": verdicts} for n in range(tasks)]

    change, _ = baseline_difference(lines(8, passed=6), lines(8, passed=8))
    assert change.high < 0
    # A difference that a few verdicts could make is not.
    assert baseline_difference(lines(4, passed=6), lines(4, passed=7))[0].high > 0


def test_a_baseline_that_cannot_be_used_is_said_before_anything_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judged.jsonl").write_text(json.dumps(line("a", "PASS", "PASS")) + "\n", encoding="utf-8")
    for baseline, said in (("nowhere.jsonl", "cannot be read"), ("judged.jsonl", "judged by another rubric")):
        words = ["judge", str(TRACES), "--judge", "rules", "--rubric", "static", "--out", str(tmp_path / "out")]
        with pytest.raises(SystemExit):
            main([*words, "--baseline", str(tmp_path / baseline)])
        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changed",
    [
        *({"pass_share": share} for share in (math.nan, 2.0, "1", True)),
        *(
            {"verdicts": verdicts}
            for verdicts in (None, "PASS", [{"verdict": "PASS"}], [{"title": "a", "verdict": "?"}])
        ),
        {"task_id": 1},
    ],
)
def test_what_no_judgement_writes_is_no_baseline(changed: dict[str, object], tmp_path: Path) -> None:
    """A comparison with NaN would never be below zero."""
    file = tmp_path / "judged.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (line("a", "PASS"), line("b", "PASS") | changed)))
    with pytest.raises(ConfigError, match=r"judged\.jsonl, trace 2: .*one judged trace per line"):
        read_lines(file)
    for text in ("", json.dumps([line("a", "PASS")]), json.dumps({"reward": 1}), "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--baseline"):
            read_lines(file)


def test_a_threshold_that_is_reached_is_not_missed_by_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, shares = tmp_path / "judged", {"0": 1.0, "1": 0.4, "2": 1.0}
    traces = [json.loads(each) for each in (TRACES / "meeting_room.jsonl").read_text().splitlines()[:3]]
    (tmp_path / "traces.jsonl").write_text(
        "\n".join(json.dumps(each | {"task_id": str(n)}) for n, each in enumerate(traces))
    )
    words = ["judge", str(tmp_path / "traces.jsonl"), "--judge", "rules", "--rubric", "static", "--out", str(out)]
    with pytest.raises(SystemExit):
        main(words)
    for file in (out / "judged").glob("*.json"):
        group = json.loads(file.read_text(encoding="utf-8"))
        group["rollouts"][0]["pass_share"] = shares[group["task_id"]]
        file.write_text(json.dumps(group), encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--fail-under", "0.8"])
    assert stopped.value.code == 0
    assert "pass share 80.0%" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--fail-under", "0.80001"])
    assert stopped.value.code == 3
    assert "pass share 0.8 is below --fail-under 0.80001" in capsys.readouterr().out
    other = tmp_path / "other.jsonl"
    other.write_text((out / "judged.jsonl").read_text().replace('"task_id": "', '"task_id": "x'))
    with pytest.raises(SystemExit) as stopped:
        main([*words[:-1], str(tmp_path / "new"), "--baseline", str(other)])
    # Before anything is judged.
    assert (stopped.value.code, (tmp_path / "new").exists()) == (2, False)
    assert "has no task in common" in capsys.readouterr().err


def test_a_baseline_by_criteria_of_other_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rubric, baseline = tmp_path / "rubric.yaml", tmp_path / "baseline"
    words = ["judge", str(TRACES), "--judge", "rules", "--rubric", str(rubric)]
    rubric.write_text(json.dumps([canned_judge.CHEAPEST, canned_judge.SEARCHES]), encoding="utf-8")
    with pytest.raises(SystemExit):
        main([*words, "--out", str(baseline)])
    for rewritten, stopped_with in ((canned_judge.CHEAPEST, 3), ({**canned_judge.CHEAPEST, "description": "New."}, 2)):
        # Their order does not matter: it is judged, and by the offline judge nothing applies.
        rubric.write_text(json.dumps([canned_judge.SEARCHES, rewritten]), encoding="utf-8")
        out = tmp_path / f"out {stopped_with}"
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--out", str(out), "--baseline", str(baseline)])
        assert stopped.value.code == stopped_with
    assert "were judged by criteria that have the same titles but other texts" in capsys.readouterr().err
    assert not out.exists()


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    good = [line("a", "PASS", "PASS")]
    renamed = [{**good[0], "verdicts": [{"title": "Another", "verdict": "PASS"}] * 2}]
    with pytest.raises(ConfigError, match="judged by another rubric"):
        baseline_difference(good, renamed)
    with pytest.raises(ConfigError, match="no task in common"):
        baseline_difference(good, [line("b", "PASS", "PASS")])
    with pytest.raises(ConfigError, match="none with a pass share"):
        baseline_difference(good, [line("a", "NOT_APPLICABLE", "NOT_APPLICABLE")])
    with pytest.raises(ConfigError, match="no trace of the baseline was judged"):
        baseline_difference(good, [{**good[0], "pass_share": None, "verdicts": []}])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lines(tmp_path / "nowhere.jsonl")
