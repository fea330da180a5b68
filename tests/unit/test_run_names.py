"""Names of runs that were given none."""

from __future__ import annotations

from datetime import datetime

from draco_ray.config.load import load_config
from draco_ray.training.run import name_of


def test_runs_that_begin_in_the_same_second_have_names_of_their_own() -> None:
    begins = datetime(2026, 11, 25, 6, 52, 35)
    names = {name_of("no-credit", begins) for _ in range(20)}
    assert len(names) > 15
    assert all(name.startswith("no-credit-20261125-065235-") for name in names)
    # A name that may be given may also be made.
    assert [load_config("sandbox", [f"run.name={name}"]).run.name for name in names] == [*names]
