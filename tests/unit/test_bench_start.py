"""What the bench of a run's start prints of what it measured."""

from __future__ import annotations

from tests.support.jobs import load_job


def test_the_middle_of_each_way_and_the_ratio() -> None:
    job = load_job("bench_start")
    plain = [job.Cost(90.0, 50.0, 6.0), job.Cost(100.0, 60.0, 6.0), job.Cost(500.0, 10.0, 6.0)]
    forked = [job.Cost(50.0, 40.0, 4.0)]
    assert job.table({"plain": plain, "forked": forked}).splitlines()[2:] == [
        "| plain | 100.0 | 50.0 | 6.0 |",
        "| forked | 50.0 | 40.0 | 4.0 |",
        "| ratio | 2.00 | 1.25 | 1.50 |",
    ]
