"""One Ray for the runs that need not start their own; one of `test_training`, `test_faults` and others start theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.standing_ray import joining, standing_ray


@pytest.fixture(scope="package")
def one_ray() -> Iterator[str]:
    """Its address."""
    with standing_ray() as address:
        yield address


@pytest.fixture(scope="module")
def joined_ray(one_ray: str) -> Iterator[None]:
    """Commands of this file join it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in joining(one_ray).items():
            patch.setenv(name, value)
        yield
