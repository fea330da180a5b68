"""Starting Ray, and joining one: what fails is said in one line."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from typing import Any
from unittest.mock import patch

import pytest
import ray
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.errors import ClusterError, ConfigError
from draco_ray.training import progress
from draco_ray.training.cluster import START_ATTEMPTS, connect_ray, start_ray


def test_a_node_that_starts_late_is_started_again_and_one_that_never_starts_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = START_ATTEMPTS - 1
    started: list[dict[str, Any]] = []

    def init(**given: Any) -> None:
        started.append(given)
        if len(started) <= failures:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    text = io.StringIO()
    start_ray(Console(file=text))
    assert len(started) == START_ATTEMPTS
    assert text.getvalue().splitlines() == [
        "Ray timed out during startup; attempt 2 of 3",
        "Ray timed out during startup; attempt 3 of 3",
    ]
    failures = START_ATTEMPTS
    started.clear()
    with patch.dict(os.environ), pytest.raises(ClusterError, match="Ray does not start on this machine"):
        connect_ray(load_config("sandbox"))
    assert len(started) == START_ATTEMPTS


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "in progress: starting Ray 0:0"), (["ray.address=a:1"], "in progress: joining the Ray cluster at a:1 0:0")],
)
def test_a_job_log_says_that_ray_takes_long_to_start_and_that_it_still_does(
    monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    text = io.StringIO()

    def init(**given: Any) -> None:
        while text.getvalue().count("\n") < 2:
            time.sleep(0.01)
        raise Exception("no")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.01)
    with patch.dict(os.environ), pytest.raises(ClusterError, match="no"):
        connect_ray(load_config("sandbox", words), console=Console(file=text, width=200))
    assert all(line.startswith(said) for line in text.getvalue().splitlines())
    # Whoever answers at once is not spoken of.
    monkeypatch.setattr(progress, "SLOW_SECONDS", 60.0)
    monkeypatch.setattr(ray, "init", lambda **given: sys.exit(1))
    with patch.dict(os.environ), pytest.raises(KeyboardInterrupt):
        connect_ray(load_config("sandbox", words), console=Console(file=(quiet := io.StringIO())))
    assert not quiet.getvalue()


def test_sigterm_that_ray_answers_while_it_starts_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **given: sys.exit(signal.SIGTERM))
    with patch.dict(os.environ), pytest.raises(KeyboardInterrupt):
        connect_ray(load_config("sandbox"))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (
            "/tmp/ray/s/logs/dashboard.log",
            "\nThe last 20 lines of {} (it contains the error message from the dashboard): \n"
            + "2026-11-25 22:16:26,725 INFO utils.py:352 -- Available modules\n" * 20,
        ),
        ("/tmp/ray/s/logs/dashboard.err", "Failed to read dashboard.err file: [Errno 2] No such file: '{}'. Report it"),
    ],
)
def test_of_a_dashboard_that_does_not_come_up_the_log_is_named_and_not_printed(
    monkeypatch: pytest.MonkeyPatch, file: str, says: str
) -> None:
    def init(**given: Any) -> None:
        raise Exception(says.format(file))

    monkeypatch.setattr(ray, "init", init)
    with patch.dict(os.environ), pytest.raises(ClusterError) as error:
        connect_ray(load_config("sandbox"))
    assert str(error.value) == (
        f"Ray does not start on this machine: Ray's dashboard did not start; see {file}, or set ray.dashboard=false; "
        "try again when the machine has free CPUs and memory"
    )


@pytest.mark.parametrize(
    ("mode", "hint"), [(None, "; if the cluster requires a token, set RAY_AUTH_MODE=token"), ("token", "")]
)
def test_a_cluster_that_does_not_answer_may_want_a_token(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, hint: str
) -> None:
    def init(**given: Any) -> None:
        assert given["address"] == "10.0.0.1:6379"
        raise ConnectionError("Failed to connect\nto Ray")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    # What it sets for Ray's processes is not for other tests.
    with patch.dict(os.environ), pytest.raises(ConfigError) as error:
        connect_ray(load_config("sandbox", ["ray.address=10.0.0.1:6379"]))
    line = "ray.address 10.0.0.1:6379: no Ray cluster answers there: Failed to connect to Ray"
    assert str(error.value) == line + hint
