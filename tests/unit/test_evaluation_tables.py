"""The paper's tables from invented evaluations: shapes, numbers, formats, and comparisons that are refused."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from draco_ray.commands.evaluate import curve_table, print_tables
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.measures import holm
from draco_ray.lab.evaluation.rendering import Cell, Column, ShownUncertainty, Table, TableFormat, best_rows, render
from draco_ray.lab.evaluation.results import EvaluationDirectory, protocol_differences
from draco_ray.lab.evaluation.tables import (
    TABLES,
    compare,
    comparison_table,
    difficulty_table,
    efficiency_table,
    frontier_table,
    main_table,
    read_settings,
)
from draco_ray.records import LOST_ROLLOUT, Termination
from tests.support.evaluations import TASKS, a_plan, a_result, measurement, write_evaluation

SMALL = Table(
    name="small",
    title="A 50% test & more",
    row_header="Setting",
    columns=(Column(("TN", "TGC", "p^1"), best="high"), Column(("TN", "TGC", "p^2")), Column(("Turns",), best="low")),
    rows=(
        ("Base_1", (Cell(61.24, 1.06, 50, 70.25), None, Cell(9.0))),
        ("DRACO", (Cell(61.21), Cell(1234.5), Cell(8.5, 0.5))),
    ),
    notes=("A note.",),
)


@pytest.fixture
def directories(tmp_path: Path) -> list[str]:
    """Two settings on the normal split, one of them on τ-bench as well."""
    draco = write_evaluation(tmp_path / "draco", a_plan(measurements=("step00005", "step00010")), 1, 0.8)
    base = write_evaluation(tmp_path / "base", a_plan(label="Base"), 2, 0.5)
    bank = a_plan(
        benchmark="tau-banking",
        split="full",
        scenarios=False,
        tasks={f"task_{n:03}": None for n in range(9)},
        world="t",
    )
    return [f"Base={base}", str(draco), str(write_evaluation(tmp_path / "bank", bank, 3, 0.3))]


TN = "AppWorld TN (24 of 168 tasks)"
BANK = "τ-bench (9 of 97 tasks)"


def headers(table: Table) -> list[str]:
    return [" ".join(part for part in column.path if part) for column in table.columns]


def test_the_main_table_has_the_papers_columns_and_averages_whole_rows_only(directories: list[str]) -> None:
    settings = read_settings(directories)
    table = main_table(settings)
    assert headers(table) == [
        *(f"{TN} {metric} p^{k}" for metric in ("TGC", "SGC") for k in (1, 2, 3)),
        *(f"{BANK} SR p^{k}" for k in (1, 2, 3)),
        *(f"Average p^{k}" for k in (1, 2, 3)),
        "Lost",
    ]
    (base_label, base), (draco_label, draco) = table.rows
    assert (base_label, draco_label) == ("Base", "draco")
    assert base[6:] == (*(None,) * 6, Cell(0.0))
    for k in range(3):
        columns = [draco[k], draco[3 + k], draco[6 + k]]
        average = draco[9 + k]
        assert average is not None
        assert average.mean == pytest.approx(sum(cell.mean for cell in columns if cell) / 3)
    tgc = settings["draco"]["AppWorld TN"].tgc[2]
    assert draco[2] is not None
    assert draco[2].mean == pytest.approx(100 * tgc.mean)
    assert draco[2].std == pytest.approx(100 * (tgc.std or 0))


def test_the_other_tables_say_turns_difficulty_and_cost(directories: list[str]) -> None:
    settings = read_settings(directories)
    efficiency = efficiency_table(settings)
    assert headers(efficiency) == [TN, BANK, "Avg.", "Lost"]
    assert efficiency.rows[0][1][1:3] == (None, None)
    for (label, cells), seeds, chance in zip(efficiency.rows, ((2,), (1, 2)), (0.5, 0.8), strict=True):
        played = [each for seed in seeds for each in measurement(a_plan(), seed, chance)]
        turns = [each.evaluation.turns for each in played if each.evaluation.turns]
        assert cells[0] is not None
        assert cells[0].mean == pytest.approx(sum(turns) / len(turns)), label
    difficulty = difficulty_table(settings)
    sizes = {level: sum(each == level for each in TASKS.values()) for level in (1, 2, 3)}
    assert headers(difficulty)[:4] == [
        f"{TN} Easy ({sizes[1]}) TGC",
        f"{TN} Easy ({sizes[1]}) SGC",
        f"{TN} Medium ({sizes[2]}) TGC",
        f"{TN} Medium ({sizes[2]}) SGC",
    ]
    for label, cells in difficulty.rows:
        strata = settings[label]["AppWorld TN"].difficulty
        shown = [cell.mean for cell in cells[:6] if cell is not None]
        assert shown == pytest.approx(
            [100 * rate.mean for level in (1, 2, 3) for rate in (strata[level].tgc, strata[level].sgc) if rate]
        )
    frontier = frontier_table(settings)
    dollars, per_task = frontier.rows[0][1][2], frontier.rows[0][1][3]
    assert dollars is not None
    assert per_task is not None
    assert dollars.mean == pytest.approx(0.25 * len(TASKS))
    assert per_task.mean == pytest.approx(0.25)
    for make in TABLES.values():
        for form in TableFormat:
            for spread in ShownUncertainty:
                assert render(make(settings), form, spread).endswith("\n")


def test_text_aligns_and_says_an_outer_header_once() -> None:
    lines = render(SMALL, TableFormat.TEXT).splitlines()
    assert lines[0] == "A 50% test & more"
    assert lines[1].split() == ["TN"]
    assert lines[3].split() == ["Setting", "p^1", "p^2", "Turns"]
    assert lines[5].split() == ["Base_1", "61.2", "-", "9.0"]
    assert lines[6].split() == ["DRACO", "61.2", "1,234.5", "8.5"]
    assert len(lines[3]) == len(lines[5]) == len(lines[6])
    shown = render(SMALL, TableFormat.TEXT, ShownUncertainty.INTERVAL)
    assert "61.2 [50.0, 70.2]" in shown
    assert "95 % interval over scenarios" in shown


def test_markdown_marks_the_best_and_ties_are_both_best() -> None:
    assert best_rows(SMALL, 0) == {0, 1}
    assert best_rows(SMALL, 1) == set()
    assert best_rows(SMALL, 2) == {1}
    text = render(SMALL, TableFormat.MARKDOWN, ShownUncertainty.STD)
    assert "| Base_1 | **61.2 ±1.1** | - | 9.0 |" in text
    assert "| DRACO | **61.2** | 1,234.5 | **8.5 ±0.5** |" in text


def test_csv_has_every_number_unrounded() -> None:
    rows = list(csv.DictReader(io.StringIO(render(SMALL, TableFormat.CSV))))
    assert rows[0]["TN TGC p^1"] == "61.24"
    assert rows[0]["TN TGC p^1 high"] == "70.25"
    assert rows[0]["TN TGC p^2"] == ""
    assert rows[1]["Turns std"] == "0.5"


def test_latex_is_escaped_and_spans_headers() -> None:
    text = render(SMALL, TableFormat.LATEX, ShownUncertainty.STD)
    assert r"\multicolumn{2}{c}{TN}" in text
    assert r"\cmidrule(lr){2-3}" in text
    assert r"Base\_1 & \textbf{61.2}$_{\pm 1.1}$ & -- & 9.0 \\" in text
    assert r"Setting & $p^1$ & $p^2$ & Turns \\" in text
    assert r"\caption{A 50\% test \& more. A note." in text
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    spans = [
        sum(int(span) for span in re.findall(r"multicolumn\{(\d)\}", line)) or 1
        for line in body.splitlines()
        if line.endswith(r"\\")
    ]
    ands = [line.count("&") for line in body.splitlines() if line.endswith(r"\\")]
    # A span of n stands for n cells.
    assert [many + span - 1 for many, span in zip(ands, spans, strict=True)] == [3] * 5


def test_no_label_is_read_as_an_argument_or_as_another_sign_by_latex() -> None:
    table = replace(SMALL, rows=tuple((name, SMALL.rows[0][1]) for name in ("a", "[b] c", "*d", "e<f>|g")))
    lines = render(table, TableFormat.LATEX).splitlines()
    assert [line.partition(" & ")[0] for line in lines if "61.2" in line] == [
        "a",
        "{}[b] c",
        "{}*d",
        r"e\textless{}f\textgreater{}\textbar{}g",
    ]


def test_every_row_of_every_latex_table_has_as_many_cells_as_its_tabular(directories: list[str]) -> None:
    """A row with a cell too many does not compile, one with a cell too few is read in the wrong columns."""
    settings = read_settings([*directories, f"Block::x={directories[1]}"])
    made = [make(settings) for make in TABLES.values()]
    widest = 0
    for table in [*made, comparison_table(compare(read_settings(directories), "Base"))]:
        for shown in ShownUncertainty:
            text = render(table, TableFormat.LATEX, shown)
            (columns,) = re.findall(r"\\begin\{tabular\}\{(l?c+)\}", text)
            widest = max(widest, len(columns))
            body = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
            for line in (line for line in body.splitlines() if line.endswith(r"\\")):
                spans = [int(span) - 1 for span in re.findall(r"\\multicolumn\{(\d+)\}", line)]
                cells = len(re.findall(r"(?<!\\)&", line)) + 1
                assert cells + sum(spans) == len(columns), line
            # Whatever its width: it is scaled to the page's.
            assert text.count(r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%") == 1
    assert widest >= 20


ROLES = {
    "agent": {"input_tokens": 10, "output_tokens": 1, "dollars": 0.9},
    "user": {"input_tokens": 20, "output_tokens": 2, "dollars": 1.8},
    "judge": {"input_tokens": 30, "output_tokens": 3, "dollars": 2.7},
}


def test_the_cost_of_a_conversation_is_that_of_all_its_roles(directories: list[str]) -> None:
    bank = Path(directories[2])
    (bank / "summary.json").write_text(json.dumps({"measurements": {"starter": {"costs": ROLES}}}), encoding="utf-8")
    settings = read_settings(directories)
    result = settings["draco"]["τ-bench"]
    # Three runs: a pass is a third.
    assert result.role_dollars == pytest.approx({"agent": 0.3, "user": 0.6, "judge": 0.9})
    frontier = frontier_table(settings)
    cells = dict(zip(headers(frontier), frontier.rows[1][1], strict=True))
    cost, per_task, own = cells[f"{BANK} Cost ($)"], cells[f"{BANK} $/task"], cells[f"{TN} Cost ($)"]
    assert cost is not None
    assert per_task is not None
    assert own is not None
    assert (cost.mean, per_task.mean) == (pytest.approx(1.8), pytest.approx(0.2))
    # AppWorld has one role, whose cost is in its results.
    assert own.mean == pytest.approx(0.25 * len(TASKS))
    assert "τ-bench: the cost of agent, user, judge together." in frontier.notes
    unpriced = {**ROLES, "judge": {**ROLES["judge"], "dollars": None}}
    (bank / "summary.json").write_text(json.dumps({"measurements": {"starter": {"costs": unpriced}}}), encoding="utf-8")
    result = read_settings(directories)["draco"]["τ-bench"]
    assert (result.pass_dollars, result.dollars_per_task) == (None, None)


def test_latex_is_scaled_to_the_page_and_its_braces_close(directories: list[str]) -> None:
    """A table of two benchmarks with intervals is three pages wide."""
    wide = main_table(read_settings(directories))
    for table in (wide, SMALL):
        text = render(table, TableFormat.LATEX, ShownUncertainty.INTERVAL)
        before, inside, after = re.split(r"\\begin\{tabular\}|\\end\{tabular\}", text)
        assert [name in before for name in (r"\textwidth", r"\textheight")] == [True, True]
        assert before.count(r"\resizebox") == 2
        # What is scaled is the tabular alone: the caption keeps its size.
        assert after.splitlines()[:2] == ["%", "}}"]
        assert r"\caption" in after
        for part, opened in ((before, 2), (inside, 0), (after, -2)):
            plain = re.sub(r"\\[{}]", "", part)
            assert plain.count("{") - plain.count("}") == opened


BLOCKS = Table(
    name="blocks",
    title="p^k of 2 models",
    row_header="Setting",
    columns=(Column(("TGC",), best="high"), Column(("Turns",), best="low")),
    rows=(
        ("Qwen_2.5::Base", (Cell(35.7), Cell(16.4))),
        ("Qwen3.6-27B::Base", (Cell(69.4), Cell(18.7))),
        ("Qwen_2.5::DRACO", (Cell(62.9), Cell(19.6))),
        ("Qwen3.6-27B::DRACO", (Cell(85.3), Cell(14.7))),
    ),
)


def test_rows_stand_in_blocks_each_with_its_own_best() -> None:
    text = render(BLOCKS, TableFormat.TEXT).splitlines()
    assert [line.split()[0] for line in text[3:]] == ["Qwen_2.5", "Base", "DRACO", "Qwen3.6-27B", "Base", "DRACO"]
    markdown = render(BLOCKS, TableFormat.MARKDOWN)
    assert "| *Qwen_2.5* | | |\n| Base | 35.7 | **16.4** |\n| DRACO | **62.9** | 19.6 |\n| *Qwen3.6" in markdown
    assert "| DRACO | **85.3** | **14.7** |" in markdown
    rows = list(csv.DictReader(io.StringIO(render(BLOCKS, TableFormat.CSV))))
    assert [(row["Block"], row["Setting"], row["TGC"]) for row in rows] == [
        ("Qwen_2.5", "Base", "35.7"),
        ("Qwen_2.5", "DRACO", "62.9"),
        ("Qwen3.6-27B", "Base", "69.4"),
        ("Qwen3.6-27B", "DRACO", "85.3"),
    ]
    latex = render(BLOCKS, TableFormat.LATEX)
    assert "\\midrule\n\\multicolumn{3}{l}{\\texttt{Qwen\\_2.5}} \\\\\nBase & 35.7 & \\textbf{16.4} \\\\" in latex
    assert latex.count(r"\midrule") == 2
    assert r"\caption{$p^k$ of 2 models." in latex
    spread = render(replace(SMALL, title="pass^k is p^k"), TableFormat.LATEX, ShownUncertainty.STD)
    assert r"\caption{$\mathrm{pass}^k$ is $p^k$. A note. $\pm$: sample" in spread
    assert "Block" not in render(SMALL, TableFormat.CSV)


def test_each_block_is_compared_with_its_own_baseline(tmp_path: Path) -> None:
    directories = [
        f"{block}::{label}={write_evaluation(tmp_path / block / label, a_plan(), seed, chance)}"
        for seed, (block, label, chance) in enumerate(
            [("small", "Base", 0.2), ("small", "DRACO", 0.5), ("large", "Base", 0.5), ("large", "DRACO", 0.8)]
        )
    ]
    settings = read_settings(directories)
    found = compare(settings, "Base")
    assert [(each.one.label, each.other.label, each.measure) for each in found] == [
        (f"{block}::DRACO", f"{block}::Base", measure) for block in ("small", "large") for measure in MEASURES
    ]
    small, large = (
        {label: settings[f"{block}::{label}"]["AppWorld TN"] for label in ("Base", "DRACO")}
        for block in ("small", "large")
    )
    for each, of_block in zip(found[:: len(MEASURES)], (small, large), strict=True):
        assert each.difference.mean == pytest.approx(of_block["DRACO"].tgc[0].mean - of_block["Base"].tgc[0].mean)
    assert [label for label, _ in comparison_table(found).rows] == [
        f"{block}::DRACO - Base on AppWorld TN, {measure}" for block in ("small", "large") for measure in MEASURES
    ]
    across = compare(settings, "small::Base")
    assert comparison_table(across).rows[-1][0] == "large: DRACO - small: Base on AppWorld TN, turns"
    del settings["large::Base"]
    with pytest.raises(ConfigError, match="--against 'Base': no such setting in block large"):
        compare(settings, "Base")


def test_rows_of_different_tasks_are_said_to_be_so(directories: list[str], tmp_path: Path) -> None:
    fewer = dict(list(TASKS.items())[:6])
    part = write_evaluation(tmp_path / "part", a_plan(tasks=fewer))
    settings = read_settings([*directories, f"part={part}"])
    warning = "AppWorld TN: the rows were measured on different tasks (6 or 24 tasks) and cannot be compared."
    for name in ("main", "efficiency", "difficulty", "frontier", "consistency", "cost", "terminations"):
        assert warning in TABLES[name](settings).notes
        assert warning not in TABLES[name](read_settings(directories)).notes
    assert "AppWorld TN (24 of 168 tasks or 6 of 168 tasks) Easy (3 or 9) TGC" in headers(difficulty_table(settings))


def test_terminations_are_the_modes_of_the_paper_and_unknown_where_one_was_not_recorded(tmp_path: Path) -> None:
    modes = [Termination.GAVE_UP, Termination.GAVE_UP, Termination.NO_ACTION, Termination.SUBMITTED]
    plan = a_plan(tasks=dict.fromkeys(["a_1", "a_2", "b_1", "b_2"]), runs=1)

    def written(name: str, told: list[Termination | None]) -> str:
        directory = EvaluationDirectory.begin(tmp_path / name, plan)
        for task, mode in zip(plan.tasks, told, strict=True):
            result = a_result(task, 0, True)
            # The loop ended in the same way for all of them.
            directory.add(
                plan.measurements[0], replace(result, evaluation=replace(result.evaluation, termination=mode))
            )
        return f"{name}={directory.path}"

    table = TABLES["terminations"](read_settings([written("new", [*modes])]))
    shares = dict(zip((column.path[-1] for column in table.columns), table.rows[0][1], strict=True))
    found = {mode: cell.mean for mode, cell in shares.items() if cell is not None and mode != "Lost"}
    # `finished` is the word of other environments.
    own = [mode for mode in Termination if mode is not Termination.FINISHED]
    assert found == {mode.value.replace("_", " "): 25.0 * modes.count(mode) for mode in own}
    old = written("old", [*modes[:3], None])
    file = tmp_path / "old" / "results" / f"{plan.measurements[0]}.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        # As evaluations were written before.
        del line["evaluation"]["termination"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    table = TABLES["terminations"](read_settings([old]))
    cells = {column.path[-1]: cell for column, cell in zip(table.columns, table.rows[0][1], strict=True)}
    # Its kind of agent is not known either.
    assert {name for name, cell in cells.items() if cell is None} == {mode.replace("_", " ") for mode in own[2:]}
    assert "Termination modes were not recorded: old on AppWorld TN." in table.notes


def test_other_limits_and_simulators_are_named(directories: list[str], tmp_path: Path) -> None:
    short = write_evaluation(tmp_path / "a", a_plan(label="short", settings={"agent.max_turns": 30, "seed": 1}))
    long = write_evaluation(tmp_path / "b", a_plan(label="long", settings={"agent.max_turns": 100, "seed": 2}))
    settings = read_settings([str(short), str(long)])
    table = TABLES["main"](settings)
    said = "AppWorld TN: the rows were measured under different protocols (agent.max_turns 30 or 100)."
    assert said in table.notes
    assert said.replace("_", r"\_") in render(table, TableFormat.LATEX)
    comparisons = comparison_table(compare(settings, "short"))
    assert "long - short on AppWorld TN: measured under different protocols (agent.max_turns 30 or 100)." in (
        comparisons.notes
    )
    assert not any("protocols" in note for note in TABLES["main"](read_settings(directories)).notes)
    simulators = [
        a_plan(settings={"max_turns": 100, "user": {"model": model, "temperature": 0.0}})
        for model in ("one", "another")
    ]
    assert protocol_differences(simulators) == ["user.model one or another"]
    assert protocol_differences(simulators[:1] * 2) == []
    limits = [a_plan(settings={"episode_timeout_seconds": limit}) for limit in (None, 60.0)]
    assert protocol_differences(limits) == ["episode_timeout_seconds 60.0 or none"]
    # An AppWorld plan beside them has no such key.
    assert protocol_differences([limits[0], a_plan(settings={"agent.max_turns": 50})]) == []


def test_discovery_and_consistency_of_tasks_and_scenarios(directories: list[str]) -> None:
    settings = read_settings(directories)
    table = TABLES["consistency"](settings)
    assert headers(table) == [
        *(f"{TN} {metric} pass{kind}{k}" for metric in ("TGC", "SGC") for kind in "^@" for k in (1, 2, 3)),
        *(f"{BANK} SR pass{kind}{k}" for kind in "^@" for k in (1, 2, 3)),
        "Lost",
    ]
    cells = dict(zip(headers(table), table.rows[1][1], strict=True))
    normal, bank = settings["draco"]["AppWorld TN"], settings["draco"]["τ-bench"]
    for name, rate in (
        (f"{TN} TGC pass@3", normal.tgc_at[2]),
        (f"{TN} SGC pass^2", normal.sgc[1]),
        (f"{TN} SGC pass@2", normal.sgc_at[1]),
        (f"{BANK} SR pass@2", bank.tgc_at[1]),
    ):
        cell = cells[name]
        assert cell is not None
        assert cell.mean == pytest.approx(100 * rate.mean)
    assert headers(frontier_table(settings))[4:] == [f"{BANK} SR", f"{BANK} Cost ($)", f"{BANK} $/task", "Lost"]


def test_retention_is_what_all_runs_keep_of_one(directories: list[str]) -> None:
    settings = read_settings(directories)
    table = TABLES["retention"](settings)
    assert headers(table) == [f"{TN} TGC", f"{TN} SGC", f"{BANK} SR", "Lost"]
    normal = settings["draco"]["AppWorld TN"]
    task, scenario, *_ = table.rows[1][1]
    assert task is not None
    assert scenario is not None
    assert task.mean == pytest.approx(100 * normal.tgc[2].mean / normal.tgc[0].mean)
    assert scenario.mean == pytest.approx(100 * normal.sgc[2].mean / normal.sgc[0].mean)
    assert task.mean < 100


def test_retention_of_nothing_is_not_zero(tmp_path: Path) -> None:
    none = write_evaluation(tmp_path / "none", a_plan(label="none"), 9, 0.0)
    assert TABLES["retention"](read_settings([str(none)])).rows[0][1] == (None, None, Cell(0.0))


MEASURES = ("TGC p^1", "TGC p^3", "SGC p^1", "SGC p^3", "turns")


def test_a_setting_is_compared_with_the_baseline_in_every_measure(directories: list[str], tmp_path: Path) -> None:
    third = write_evaluation(tmp_path / "third", a_plan(label="third"), 9, 0.65)
    settings = read_settings([*directories, str(third)])
    found = compare(settings, "Base")
    assert [(each.one.label, each.other.label, each.split, each.measure) for each in found] == [
        (label, "Base", "AppWorld TN", measure) for label in ("draco", "third") for measure in MEASURES
    ]
    assert [each.adjusted_p for each in found] == pytest.approx(holm([each.p_value for each in found]))
    draco, base = settings["draco"]["AppWorld TN"], settings["Base"]["AppWorld TN"]
    assert [each.difference.mean for each in found[:4]] == pytest.approx(
        [
            (ours[k].mean - theirs[k].mean)
            for ours, theirs in ((draco.tgc, base.tgc), (draco.sgc, base.sgc))
            for k in (0, 2)
        ]
    )
    assert draco.turns is not None
    assert base.turns is not None
    assert found[4].difference.mean == pytest.approx(draco.turns.mean - base.turns.mean, abs=0.3)
    assert (len(found[0].one.plan.tasks), found[0].one.clusters) == (24, 8)
    table = comparison_table(found)
    points, turns = table.rows[0][1][0], table.rows[4][1][0]
    assert points is not None
    assert turns is not None
    assert points.mean == pytest.approx(100 * found[0].difference.mean)
    assert turns.mean == pytest.approx(found[4].difference.mean)
    assert any(note.startswith("With one training seed") for note in table.notes)
    for each in found:
        assert each.difference.low < each.difference.mean < each.difference.high


def lossy(directory: Path, share: int) -> Path:
    """Turn one in ``share`` rollouts of every measurement into a lost one."""
    for file in (directory / "results").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines[::share]:
            line["evaluation"] |= {"success": False, "turns": 0, "ended": "server_error", "failures": [LOST_ROLLOUT]}
            line["error"] = "the world crashed"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_every_table_says_what_a_row_lost(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", a_plan(label="Base"), 1, 0.7)
    draco = lossy(write_evaluation(tmp_path / "draco", a_plan(), 2, 0.7), 5)
    settings = read_settings([str(base), str(draco)])
    result = settings["draco"]["AppWorld TN"]
    assert (result.lost, result.rollouts) == (15, 72)
    best = result.measures["TGC p^1"].at_best.mean
    said = (
        f"draco on AppWorld TN: 15 of 72 rollouts (20.8 %) were lost and count as failures; TGC p^1 is "
        f"{100 * result.tgc[0].mean:.1f}, and would be {100 * best:.1f} if all lost rollouts had succeeded; intervals "
        "cover both."
    )
    for make in TABLES.values():
        table = make(settings)
        assert table.columns[-1].path == ("Lost",)
        assert [cells[-1] for _, cells in table.rows] == [Cell(0.0), Cell(15.0)]
        assert said in table.notes
        for form in TableFormat:
            assert "Lost" in render(table, form)
    assert result.tgc[0].high is not None
    assert result.tgc[0].high > best


def test_a_comparison_does_not_take_lost_rollouts_for_a_difference(tmp_path: Path) -> None:
    """The case of a row with 18 % lost that was printed with p = 0.0001."""
    tasks = {f"{scenario:03}_{number}": 1 for scenario in range(56) for number in (1, 2, 3)}
    base = write_evaluation(tmp_path / "base", a_plan(label="Base", tasks=tasks), 1, 0.6)
    draco = lossy(write_evaluation(tmp_path / "draco", a_plan(tasks=tasks), 2, 0.6), 5)
    found = compare(read_settings([str(base), str(draco)]), "Base")
    rate = found[0]
    assert rate.difference.mean < -0.08
    assert rate.lost == (pytest.approx(0.2, abs=0.01), 0.0)
    assert (rate.p_value, rate.adjusted_p) == (1.0, 1.0)
    assert rate.difference.low < rate.difference.mean < 0 < rate.difference.high
    table = comparison_table(found)
    assert any(note.startswith("draco - Base on AppWorld TN: 20.0 % and 0.0 % of the rollouts") for note in table.notes)
    assert [cell.mean for cell in table.rows[0][1][-2:] if cell] == pytest.approx([20.0, 0.0], abs=0.1)


def test_a_generated_world_and_a_part_of_a_split_are_in_the_title_and_in_the_header(tmp_path: Path) -> None:
    whole = {f"{number // 3:07x}_{number % 3 + 1}": 1 for number in range(168)}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"tasks": whole}, ""),
        ({"tasks": whole, "split_size": 168}, ""),
        ({"tasks": whole, "generated": True, "split_size": 168}, "generated world, 168 tasks"),
        ({"generated": True, "split_size": 24}, "generated world, 24 tasks"),
        ({"generated": True, "split_size": 45}, "generated world, 24 of 45 tasks"),
        ({"split_size": 168}, "24 of 168 tasks"),
        # A data root whose split is another than AppWorld's, whatever it is called.
        ({"split_size": 24}, "24 of 168 tasks"),
        ({"generated": True}, "generated world, 24 tasks"),
        ({"benchmark": "another", "split": "part"}, "24 tasks"),
    )
    for number, (changes, played) in enumerate(cases):
        plan = a_plan(**{"runs": 1, **changes})
        settings = read_settings([str(write_evaluation(tmp_path / str(number), plan))])
        [split] = settings["draco"]
        for name, make in TABLES.items():
            table = make(settings)
            header = f"{split} ({played})" if played else split
            assert table.columns[0].path[0] == header, (name, changes)
            latex = render(table, TableFormat.LATEX)
            assert header in latex.split(r"\midrule")[0]
            assert (f"; {split}: {played}." in latex.split(r"\caption")[1]) == bool(played)
            assert render(table, TableFormat.TEXT).splitlines()[0].endswith(f"; {split}: {played}") == bool(played)


def seeded(tmp_path: Path, seed: int, chance: float, **changes: Any) -> Path:
    plan = a_plan(settings={"engine.temperature": 1.0, "adapter fingerprint of starter": f"weights {seed}"}, **changes)
    return write_evaluation(tmp_path / f"seed{seed}", plan, seed, chance)


def test_directories_of_one_label_are_training_seeds(tmp_path: Path) -> None:
    seeds = [seeded(tmp_path, seed, chance) for seed, chance in ((1, 0.9), (2, 0.6), (3, 0.3))]
    base = write_evaluation(tmp_path / "base", a_plan(label="Base"), 7, 0.5)
    settings = read_settings([*map(str, seeds), str(base)])
    result = settings["draco"]["AppWorld TN"]
    alone = [read_settings([str(seed)])["draco"]["AppWorld TN"] for seed in seeds]
    assert result.seeds == 3
    assert result.tgc[0].mean == pytest.approx(mean(each.tgc[0].mean for each in alone))
    assert result.tgc[0].std == pytest.approx(stdev(each.tgc[0].mean for each in alone))
    width, one_width = ((each.tgc[0].high or 0) - (each.tgc[0].low or 0) for each in (result, alone[1]))
    assert width > 1.5 * one_width
    notes = main_table(settings).notes
    assert (
        "Training seeds: draco 3, Base 1; intervals are over seeds and scenarios. With one seed the interval does not "
        "cover the variation between training runs." in notes
    )
    one_seed = (
        "One training seed per row: intervals and comparisons cover the choice of scenarios but not the variation "
        "between training runs."
    )
    assert one_seed in main_table(read_settings([str(seeds[0]), str(base)])).notes
    found = compare(settings, "Base")
    assert (found[0].one.seeds, found[0].other.seeds) == (3, 1)
    assert any("3 and 1 training seeds" in note for note in comparison_table(found).notes)
    lucky, many = compare(read_settings([str(seeds[0]), str(base)]), "Base")[0], found[0]
    assert many.p_value > lucky.p_value


def test_seeds_that_were_not_measured_alike_are_refused(tmp_path: Path) -> None:
    first = str(seeded(tmp_path, 1, 0.5))
    fewer = dict(list(TASKS.items())[:6])
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"tasks": fewer}, "with other tasks"),
        ({"world": "another"}, "with other tasks"),
        ({"runs": 2}, "with other runs"),
        ({"measurements": ("starter", "again")}, "with other checkpoints"),
    )
    for number, (changes, words) in enumerate(cases):
        other = seeded(tmp_path, 2 + number, 0.5, **changes)
        with pytest.raises(ConfigError, match=words) as refusal:
            read_settings([first, str(other)])
        assert "\n" not in str(refusal.value)


def test_what_is_not_paired_is_refused_with_the_reason(tmp_path: Path) -> None:
    base = str(write_evaluation(tmp_path / "base", a_plan(label="Base")))
    fewer = {task: level for task, level in TASKS.items() if task != "a_1"}
    for changes, words in (
        ({"tasks": fewer}, "0 tasks are only in the first, 1 only in the second"),
        ({"world": "another"}, "two generated worlds"),
        ({"split": "test_challenge"}, "no split in common"),
    ):
        other = write_evaluation(tmp_path / words.replace(" ", "_"), a_plan(label="other", **changes))
        with pytest.raises(ConfigError, match=words) as refusal:
            compare(read_settings([base, str(other)]), "Base")
        assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match="no such setting"):
        compare(read_settings([base]), "Bass")


def test_directories_that_cannot_be_a_table_are_refused(tmp_path: Path) -> None:
    base = write_evaluation(tmp_path / "base", a_plan())
    with pytest.raises(ConfigError, match="choose another label"):
        read_settings([str(base), f"draco={base}"])
    EvaluationDirectory.begin(tmp_path / "begun", a_plan())
    with pytest.raises(ConfigError, match="0 of 72 rollouts are finished"):
        read_settings([str(tmp_path / "begun")])
    with pytest.raises(ConfigError, match="not an evaluation directory"):
        read_settings([str(tmp_path / "nothing")])


def test_tables_are_written_in_every_format(directories: list[str], tmp_path: Path) -> None:
    out = tmp_path / "tables"
    print_tables(
        directories[:2], tables=["main"], form=TableFormat.TEXT, shown=ShownUncertainty.STD, against="Base", out=out
    )
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{suffix}" for name in ("main", "comparison") for suffix in ("txt", "md", "csv", "tex")
    }
    with pytest.raises(ConfigError, match="--table 'mean'|--table mean"):
        print_tables(
            directories, tables=["mean"], form=TableFormat.TEXT, shown=ShownUncertainty.STD, against=None, out=None
        )


def test_a_curve_has_a_row_a_checkpoint(tmp_path: Path) -> None:
    plan = a_plan(split="train", measurements=("step00000", "step00010"), runs=1)
    directory = EvaluationDirectory.open(write_evaluation(tmp_path, plan))
    table = curve_table(directory)
    assert [label for label, _ in table.rows] == ["0", "10"]
    results = directory.results("step00010")
    cell = table.rows[1][1][0]
    assert cell is not None
    assert cell.mean == pytest.approx(100 * sum(each.evaluation.success for each in results) / len(results))
    with pytest.raises(ConfigError, match="a training curve"):
        read_settings([str(tmp_path)])
