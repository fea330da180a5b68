"""A Ray head that the runs of a file join, and a policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import load_job
from tests.support.scripted_policy import build_scripted_policy


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`jobs.chaos.Head`: started by ``ray start``, without a dashboard."""
    with load_job("chaos").ray_head(tmp_path_factory.mktemp("ray")) as head:
        yield head


@pytest.fixture(scope="module")
def joined_ray(ray_head: Any) -> Iterator[None]:
    """Commands of this file join it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            patch.setenv(name, ray_head.environment[name])
        yield


@pytest.fixture(scope="module")
def scripted_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    return build_scripted_policy(tmp_path_factory.mktemp("scripted") / "policy")
