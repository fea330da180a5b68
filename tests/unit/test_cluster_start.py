"""A node that needs longer to come up than Ray waits."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
import ray._private.services

from draco_ray.config.load import load_config
from draco_ray.errors import ClusterError, ConfigError
from draco_ray.training.cluster import ERROR_SECONDS, _errors_in_turns, _fewer_daemons, _patient_start, connect


def test_a_node_that_comes_up_late_is_waited_for_and_one_that_never_does_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def get_node(address: str, node: str) -> str:
        asked.append(node)
        if len(asked) < 4:
            raise RuntimeError("no such node")
        return node

    monkeypatch.setattr(ray._private.services, "get_node", get_node)
    with _patient_start(seconds=60.0, every=0.0):
        assert ray._private.services.get_node("address", "n") == "n"
    assert len(asked) == 4
    assert ray._private.services.get_node is get_node
    asked.clear()
    with _patient_start(seconds=0.0, every=0.0), pytest.raises(RuntimeError, match="no such node"):
        ray._private.services.get_node("address", "n")
    assert len(asked) == 1


def test_ray_asks_through_the_name_that_is_replaced() -> None:
    """Ray's limit is in its code: where a new version asks in another way, the longer time has to be had in another."""
    assert "get_node" in ray._private.node.Node.__init__.__code__.co_names
    assert "RAY_DASHBOARD_STARTUP_TIMEOUT_S" in ray._private.services.start_api_server.__code__.co_names


@pytest.mark.parametrize(
    ("dashboard", "left_out"),
    [("true", {"start_log_monitor"}), ("false", {"start_log_monitor", "start_monitor", "start_api_server"})],
)
def test_processes_that_nobody_wants_are_not_started(dashboard: str, left_out: set[str]) -> None:
    node: Any = ray._private.node.Node
    names = {"start_log_monitor", "start_monitor", "start_api_server"}
    # Ray starts them by these names.
    assert names <= {*node.start_head_processes.__code__.co_names, *node.start_ray_processes.__code__.co_names}
    once = {name: getattr(node, name) for name in names}
    with _fewer_daemons(load_config("sandbox", [f"ray.dashboard={dashboard}"])):
        assert {name for name in names if getattr(node, name) is not once[name]} == left_out
    assert {name: getattr(node, name) for name in names} == once


def test_a_dashboard_that_comes_up_late_is_waited_for() -> None:
    constants = ray._private.ray_constants
    before = constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
    with _patient_start(seconds=before + 120.0):
        assert before + 120.0 == constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
    assert before == constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
    with _patient_start(seconds=before / 2):
        assert before == constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S


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
        connect(load_config("sandbox", ["ray.fork_workers=false"]))
    assert str(error.value) == (
        f"Ray does not start on this machine: its dashboard did not come up, see {file}; ray.dashboard=false does "
        "without; wait until the machine has CPU and memory to spare and try again"
    )


@pytest.mark.parametrize(
    ("mode", "hint"), [(None, "; one that wants a token answers with RAY_AUTH_MODE=token"), ("token", "")]
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
        connect(load_config("sandbox", ["ray.address=10.0.0.1:6379"]))
    line = "ray.address 10.0.0.1:6379: no Ray cluster answers there: Failed to connect to Ray"
    assert str(error.value) == line + hint


class Subscriber:
    """Of errors: it has these, and then none, however often it is asked, until Ray is shut down."""

    def __init__(self, *errors: dict[str, Any]) -> None:
        self.errors = list(errors)
        self.subscribed = False

    def subscribe(self) -> None:
        self.subscribed = True

    def poll(self) -> tuple[Any, Any]:
        return (b"key", self.errors.pop(0)) if self.errors else (None, None)


class Stopped:
    """Set after so many waits."""

    def __init__(self, waits: int) -> None:
        self.left = waits
        self.waited: list[float] = []

    def is_set(self) -> bool:
        return not self.left

    def wait(self, seconds: float) -> None:
        self.left -= 1
        self.waited.append(seconds)


def test_a_head_that_is_gone_is_asked_for_errors_in_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's own thread asks again and again, and one that is told to end does so at once."""
    driver, listen = ray._private.worker, ray._private.worker.listen_error_messages
    monkeypatch.setattr(driver, "_internal_kv_initialized", lambda: False)
    # Ray says only once what is alike but for a number.
    errors = [{"job_id": None, "error_message": message} for message in ("a node has died", "no memory is left")]
    subscriber, waits = Subscriber(*errors), Stopped(3)
    stopped: Any = waits
    worker: Any = SimpleNamespace(gcs_error_subscriber=subscriber, current_job_id=ray.JobID.from_int(1))
    with _errors_in_turns():
        driver.listen_error_messages(worker, stopped)
    assert driver.listen_error_messages is listen
    assert subscriber.subscribed
    assert waits.waited == [ERROR_SECONDS] * 3
    assert "a node has died" in (said := capsys.readouterr().out)
    assert "no memory is left" in said


def test_ray_starts_the_thread_that_is_replaced() -> None:
    assert "listen_error_messages" in inspect.unwrap(ray._private.worker.connect).__code__.co_names
    assert "gcs_error_subscriber" in ray._private.worker.listen_error_messages.__code__.co_names
