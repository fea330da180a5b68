"""One Ray for the runs that need not start their own, as that of `test_faults` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.scripted_policy import build_scripted_policy
from tests.support.standing_ray import joining, standing_ray

HERE = Path(__file__).parent
standing: dict[str, ExitStack] = {}
"""By its address the Ray that stands until the last test of this folder has ended: a fixture has no scope for that."""


@pytest.fixture(scope="module")
def one_ray() -> str:
    """Its address."""
    if not standing:
        stack = ExitStack()
        standing[stack.enter_context(standing_ray())] = stack
    return next(iter(standing))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """End the Ray with the last test here: what it holds is wanted by others, and it is never quite idle."""
    yield
    if standing and (nextitem is None or HERE not in nextitem.path.parents):
        _, stack = standing.popitem()
        stack.close()


@pytest.fixture(scope="module")
def joined_ray(one_ray: str) -> Iterator[None]:
    """Commands of this file join it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in joining(one_ray).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def scripted_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    return build_scripted_policy(tmp_path_factory.mktemp("scripted") / "policy")
