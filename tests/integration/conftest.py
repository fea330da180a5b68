"""What integration tests of several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.core_server import forked_cores


@pytest.fixture(scope="module")
def cores_forked() -> Iterator[None]:
    """Engine cores of this file are forked; new interpreters they are in test_engine_tensor_parallel and others."""
    with forked_cores():
        yield
