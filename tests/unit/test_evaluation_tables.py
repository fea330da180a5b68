"""The paper's tables from invented evaluations: shapes, numbers, formats, and comparisons that are refused."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from draco_ray.commands.evaluate import curve_table, print_tables
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.comparison import holm
from draco_ray.lab.evaluation.rendering import Cell, Column, Shown, Table, TableFormat, best_rows, render
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
from tests.support.evaluations import TASKS, a_plan, write_evaluation

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


def headers(table: Table) -> list[str]:
    return [" ".join(part for part in column.path if part) for column in table.columns]


def test_the_main_table_has_the_papers_columns_and_averages_whole_rows_only(directories: list[str]) -> None:
    settings = read_settings(directories)
    table = main_table(settings)
    assert headers(table) == [
        *(f"AppWorld TN {metric} p^{k}" for metric in ("TGC", "SGC") for k in (1, 2, 3)),
        *(f"τ-bench SR p^{k}" for k in (1, 2, 3)),
        *(f"Average p^{k}" for k in (1, 2, 3)),
    ]
    (base_label, base), (draco_label, draco) = table.rows
    assert (base_label, draco_label) == ("Base", "draco")
    assert base[6:] == (None,) * 6
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
    assert headers(efficiency) == ["AppWorld TN", "τ-bench", "Avg."]
    assert efficiency.rows[0][1][1:] == (None, None)
    difficulty = difficulty_table(settings)
    sizes = {level: sum(each == level for each in TASKS.values()) for level in (1, 2, 3)}
    assert headers(difficulty)[:4] == [
        f"AppWorld TN Easy ({sizes[1]}) TGC",
        f"AppWorld TN Easy ({sizes[1]}) SGC",
        f"AppWorld TN Medium ({sizes[2]}) TGC",
        f"AppWorld TN Medium ({sizes[2]}) SGC",
    ]
    frontier = frontier_table(settings)
    dollars, per_task = frontier.rows[0][1][2], frontier.rows[0][1][3]
    assert dollars is not None
    assert per_task is not None
    assert dollars.mean == pytest.approx(0.25 * len(TASKS))
    assert per_task.mean == pytest.approx(0.25)
    for make in TABLES.values():
        for form in TableFormat:
            for shown in Shown:
                assert render(make(settings), form, shown).endswith("\n")


def test_text_aligns_and_says_an_outer_header_once() -> None:
    lines = render(SMALL, TableFormat.TEXT).splitlines()
    assert lines[0] == "A 50% test & more"
    assert lines[1].split() == ["TN"]
    assert lines[3].split() == ["Setting", "p^1", "p^2", "Turns"]
    assert lines[5].split() == ["Base_1", "61.2", "-", "9.0"]
    assert lines[6].split() == ["DRACO", "61.2", "1,234.5", "8.5"]
    assert len(lines[3]) == len(lines[5]) == len(lines[6])
    shown = render(SMALL, TableFormat.TEXT, Shown.INTERVAL)
    assert "61.2 [50.0, 70.2]" in shown
    assert "bootstrap interval" in shown


def test_markdown_marks_the_best_and_ties_are_both_best() -> None:
    assert best_rows(SMALL, 0) == {0, 1}
    assert best_rows(SMALL, 1) == set()
    assert best_rows(SMALL, 2) == {1}
    text = render(SMALL, TableFormat.MARKDOWN, Shown.STD)
    assert "| Base_1 | **61.2 ±1.1** | - | 9.0 |" in text
    assert "| DRACO | **61.2** | 1,234.5 | **8.5 ±0.5** |" in text


def test_csv_has_every_number_unrounded() -> None:
    rows = list(csv.DictReader(io.StringIO(render(SMALL, TableFormat.CSV))))
    assert rows[0]["TN TGC p^1"] == "61.24"
    assert rows[0]["TN TGC p^1 high"] == "70.25"
    assert rows[0]["TN TGC p^2"] == ""
    assert rows[1]["Turns std"] == "0.5"


def test_latex_is_escaped_and_spans_headers() -> None:
    text = render(SMALL, TableFormat.LATEX, Shown.STD)
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
    spread = render(replace(SMALL, title="pass^k is p^k"), TableFormat.LATEX, Shown.STD)
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
    assert [(each.one, each.other) for each in found] == [
        ("small::DRACO", "small::Base"),
        ("large::DRACO", "large::Base"),
    ]
    small, large = (
        {label: settings[f"{block}::{label}"]["AppWorld TN"] for label in ("Base", "DRACO")}
        for block in ("small", "large")
    )
    for each, of_block in zip(found, (small, large), strict=True):
        assert each.difference.mean == pytest.approx(of_block["DRACO"].tgc[0].mean - of_block["Base"].tgc[0].mean)
    assert [label for label, _ in comparison_table(found).rows] == [
        "small::DRACO - Base on AppWorld TN",
        "large::DRACO - Base on AppWorld TN",
    ]
    across = compare(settings, "small::Base")
    assert comparison_table(across).rows[2][0] == "large: DRACO - small: Base on AppWorld TN"
    del settings["large::Base"]
    with pytest.raises(ConfigError, match="--against 'Base': no such setting in block large"):
        compare(settings, "Base")


def test_rows_of_different_tasks_are_said_to_be_so(directories: list[str], tmp_path: Path) -> None:
    fewer = dict(list(TASKS.items())[:6])
    part = write_evaluation(tmp_path / "part", a_plan(tasks=fewer))
    settings = read_settings([*directories, f"part={part}"])
    warning = "AppWorld TN: the rows were measured on different tasks (6 or 24 of them) and do not compare."
    for name in ("main", "efficiency", "difficulty", "frontier", "consistency", "cost", "terminations"):
        assert warning in TABLES[name](settings).notes
        assert warning not in TABLES[name](read_settings(directories)).notes
    assert "AppWorld TN Easy (3 or 9) TGC" in headers(difficulty_table(settings))


def test_other_limits_and_simulators_are_named(directories: list[str], tmp_path: Path) -> None:
    short = write_evaluation(tmp_path / "a", a_plan(label="short", settings={"agent.max_turns": 30, "seed": 1}))
    long = write_evaluation(tmp_path / "b", a_plan(label="long", settings={"agent.max_turns": 100, "seed": 2}))
    settings = read_settings([str(short), str(long)])
    table = TABLES["main"](settings)
    said = "AppWorld TN: the rows were measured under different protocols (agent.max_turns 30 or 100)."
    assert said in table.notes
    assert said.replace("_", r"\_") in render(table, TableFormat.LATEX)
    comparisons = comparison_table(compare(settings, "short"))
    assert comparisons.notes[1] == (
        "long - short on AppWorld TN: measured under different protocols (agent.max_turns 30 or 100)."
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
        *(f"AppWorld TN {metric} pass{kind}{k}" for metric in ("TGC", "SGC") for kind in "^@" for k in (1, 2, 3)),
        *(f"τ-bench SR pass{kind}{k}" for kind in "^@" for k in (1, 2, 3)),
    ]
    cells = dict(zip(headers(table), table.rows[1][1], strict=True))
    normal, bank = settings["draco"]["AppWorld TN"], settings["draco"]["τ-bench"]
    for name, rate in (
        ("AppWorld TN TGC pass@3", normal.tgc_at[2]),
        ("AppWorld TN SGC pass^2", normal.sgc[1]),
        ("AppWorld TN SGC pass@2", normal.sgc_at[1]),
        ("τ-bench SR pass@2", bank.tgc_at[1]),
    ):
        cell = cells[name]
        assert cell is not None
        assert cell.mean == pytest.approx(100 * rate.mean)
    assert headers(frontier_table(settings))[4:] == ["τ-bench SR", "τ-bench Cost ($)", "τ-bench $/task"]


def test_retention_is_what_all_runs_keep_of_one(directories: list[str]) -> None:
    settings = read_settings(directories)
    table = TABLES["retention"](settings)
    assert headers(table) == ["AppWorld TN TGC", "AppWorld TN SGC", "τ-bench SR"]
    normal = settings["draco"]["AppWorld TN"]
    task, scenario, _ = table.rows[1][1]
    assert task is not None
    assert scenario is not None
    assert task.mean == pytest.approx(100 * normal.tgc[2].mean / normal.tgc[0].mean)
    assert scenario.mean == pytest.approx(100 * normal.sgc[2].mean / normal.sgc[0].mean)
    assert task.mean < 100


def test_retention_of_nothing_is_not_zero(tmp_path: Path) -> None:
    none = write_evaluation(tmp_path / "none", a_plan(label="none"), 9, 0.0)
    assert TABLES["retention"](read_settings([str(none)])).rows[0][1] == (None, None)


def test_a_setting_is_compared_with_the_baseline_on_every_common_split(directories: list[str], tmp_path: Path) -> None:
    third = write_evaluation(tmp_path / "third", a_plan(label="third"), 9, 0.65)
    settings = read_settings([*directories, str(third)])
    found = compare(settings, "Base")
    assert [(each.one, each.other, each.split) for each in found] == [
        ("draco", "Base", "AppWorld TN"),
        ("third", "Base", "AppWorld TN"),
    ]
    assert [each.adjusted_p for each in found] == pytest.approx(holm([each.p_value for each in found]))
    draco, base = settings["draco"]["AppWorld TN"], settings["Base"]["AppWorld TN"]
    assert found[0].difference.mean == pytest.approx(draco.tgc[0].mean - base.tgc[0].mean)
    assert (found[0].tasks, found[0].clusters) == (24, 8)
    assert len(comparison_table(found).rows) == 2


def test_what_is_not_paired_is_refused_with_the_reason(tmp_path: Path) -> None:
    base = str(write_evaluation(tmp_path / "base", a_plan(label="Base")))
    fewer = {task: level for task, level in TASKS.items() if task != "a_1"}
    for changes, words in (
        ({"tasks": fewer}, "0 tasks only in the first, 1 only in the second"),
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
    with pytest.raises(ConfigError, match="give it another label"):
        read_settings([str(base), f"draco={base}"])
    EvaluationDirectory.begin(tmp_path / "begun", a_plan())
    with pytest.raises(ConfigError, match="0 of 72 rollouts are there"):
        read_settings([str(tmp_path / "begun")])
    with pytest.raises(ConfigError, match="not an evaluation directory"):
        read_settings([str(tmp_path / "nothing")])


def test_tables_are_written_in_every_format(directories: list[str], tmp_path: Path) -> None:
    out = tmp_path / "tables"
    print_tables(directories[:2], tables=["main"], form=TableFormat.TEXT, shown=Shown.STD, against="Base", out=out)
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{suffix}" for name in ("main", "comparison") for suffix in ("txt", "md", "csv", "tex")
    }
    with pytest.raises(ConfigError, match="--table 'mean'|--table mean"):
        print_tables(directories, tables=["mean"], form=TableFormat.TEXT, shown=Shown.STD, against=None, out=None)


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
