"""A Ray head for files with several runs, and a policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import load_job
from tests.support.scripted_policy import build_scripted_policy


@pytest.fixture(scope="module")
def joined_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A head started by ``ray start``, which commands of the file join."""
    with load_job("chaos").ray_head(tmp_path_factory.mktemp("ray")) as head, pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            patch.setenv(name, head.environment[name])
        yield


@pytest.fixture(scope="module")
def scripted_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    return build_scripted_policy(tmp_path_factory.mktemp("scripted") / "policy")
