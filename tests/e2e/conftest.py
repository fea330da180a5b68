"""One Ray for the files whose runs need not start their own; `test_training`, `test_faults` and others start theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.standing_ray import standing_ray


@pytest.fixture(scope="package")
def _one_ray() -> Iterator[str]:
    with standing_ray() as address:
        yield address


@pytest.fixture(scope="module")
def joined_ray(_one_ray: str) -> Iterator[None]:
    """Commands of this file join a Ray that stands, as on a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", _one_ray)
        # A Ray that `ray.init` has started asks for the token that it has made in ~/.ray.
        patch.setenv("RAY_AUTH_MODE", "token")
        yield
