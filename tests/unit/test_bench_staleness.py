"""The table of the staleness bench, from what there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draco_ray.records import EpisodeEnd, Evaluation
from tests.support.jobs import JOBS, load_job


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(JOBS))
    return load_job("bench_staleness")


def evaluated(successes: int) -> list[Evaluation]:
    return [
        Evaluation(
            task_id=f"t{task}",
            scenario=f"s{task}",
            run=0,
            success=task < successes,
            passed_tests=0,
            total_tests=1,
            turns=1,
            ended=EpisodeEnd.FINISHED,
        )
        for task in range(10)
    ]


def test_finished_runs_make_the_table_and_unfinished_ones_are_left_out(
    job: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = __import__("measured")
    for staleness, after, hourly in ((0, 8, 40.0), (2, 6, 70.0)):
        of = job.wanted(staleness, 0, 4, 1, ())  # type: ignore[attr-defined]
        made = measured.Measured(
            evaluations={0: evaluated(4), 4: evaluated(after)},
            spent={0: measured.Spend(), 4: measured.Spend()},
            policy="policy",
        )
        measured.write(tmp_path / f"{of.name}.jsonl", of.words, made)
        job.speed_file(tmp_path, of).write_text(json.dumps({"steps_an_hour": hourly, "behind": [0, 0, 0, staleness]}))  # type: ignore[attr-defined]
    job.main(steps=4, measured=tmp_path, print_only=True)  # type: ignore[attr-defined]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if line]
    assert [(row[0], row[1], row[5]) for row in rows[2:]] == [("0", "1", "40.0"), ("2", "1", "70.0")]
    assert [row[6] for row in rows[2:]] == ["0.00 (0)", "0.50 (2)"]
    assert rows[2][3].startswith("+40.0")
    assert rows[2][4] == "-"
    assert rows[3][4].startswith("-20.0")


def test_a_run_that_is_made_has_its_speed_kept_before_it_is_shown(
    job: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = __import__("measured")
    kept = []

    def make(of: object, root: Path, folder: Path) -> object:
        figures = {0: evaluated(4), 4: evaluated(8)}
        made = measured.Measured(figures, dict.fromkeys(figures, measured.Spend()), "policy")
        measured.write(folder / f"{of.name}.jsonl", of.words, made)  # type: ignore[attr-defined]
        return made

    def keep_speed(root: Path, folder: Path, of: object) -> None:
        kept.append(of.name)  # type: ignore[attr-defined]
        job.speed_file(folder, of).write_text('{"steps_an_hour": 12.5}')  # type: ignore[attr-defined]

    monkeypatch.setattr(measured.Wanted, "make", make)
    monkeypatch.setattr(job, "keep_speed", keep_speed)
    for shown in (1 + 2, 2):
        job.main(steps=4, seeds=1, staleness="0 2", root=tmp_path, overrides=["engine.engines=2"])  # type: ignore[attr-defined]
        assert capsys.readouterr().out.count("| 12.5 | - |") == shown
    assert kept == ["draco-seed0-steps4", "draco-staleness2-seed0-steps4"]


def test_without_any_run_it_says_where_it_looked(job: object, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no measurements yet"):
        job.main(measured=tmp_path, print_only=True)  # type: ignore[attr-defined]
