"""Ray's workers that are forked: they are workers like any, share no chance, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

DRIVER = """
import json, logging, os, sys
import ray
from draco_ray.workers.forked import forked_workers

with forked_workers([*sys.argv[1:], "colorsys", "no_such_module", "numpy", "ray.train.torch"], {"OF_THE_IMPORTS": "1"}):
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
             logging_level=logging.ERROR)

@ray.remote(num_cpus=0)
class Actor:
    def tell(self):
        import random
        import numpy
        from ray._raylet import JobID, TaskID
        # The last is what Ray's library draws for the tasks of a thread that executes none.
        chance = [random.random(), numpy.random.rand(), TaskID.for_fake_task(JobID.from_int(1)).hex()]
        return {"pid": os.getpid(), "parent": os.getppid(), "has": "colorsys" in sys.modules, "chance": chance,
                "variables": [os.environ.get(name) for name in ("OF_THE_IMPORTS", "ITS_OWN")],
                "job": ray.get_runtime_context().get_job_id()}

actors = []
for line in sys.stdin:
    variables = json.loads(line)
    actors.append(Actor.options(runtime_env={"env_vars": variables} if variables else None).remote())
    print(json.dumps([ray.get(actor.tell.remote()) for actor in actors]), flush=True)
"""


class Driver:
    """A program that starts Ray, and an actor for every line it is told."""

    def __init__(self, *modules: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *modules],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def another(self, **variables: str) -> list[dict[str, Any]]:
        """Start one more actor; returns what each says of itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(variables) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the driver has ended"
        told: list[dict[str, Any]] = json.loads(line)
        return told


@contextmanager
def driving(*modules: str, **variables: str) -> Iterator[Driver]:
    """A driver whose fork server imports these as well, ended with all that it has started."""
    driver = Driver(*modules, **variables)
    try:
        yield driver
    finally:
        # Without more to do it ends, and Ray with it.
        driver.process.communicate()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """One for tests that leave it as it was."""
    with driving() as one:
        yield one


def test_actors_are_forked_and_share_no_chance(driver: Driver) -> None:
    driver.another()
    first, second = driver.another()
    assert first["parent"] == second["parent"]
    assert "fork_server.py" in " ".join(psutil.Process(first["parent"]).cmdline())
    assert first["has"]
    assert second["has"]
    assert not set(map(str, first["chance"])) & set(map(str, second["chance"]))
    # What the imports were made under is not the workers'.
    assert first["variables"] == [None, None]
    assert first["job"] == "01000000"


def test_an_actor_has_variables_of_its_own_forked_or_not(driver: Driver) -> None:
    *_, forked = driver.another(ITS_OWN="1")
    *_, new = driver.another(ITS_OWN="2", PYTHONHASHSEED="1")
    assert (forked["variables"], forked["has"]) == ([None, "1"], True)
    assert (new["variables"], new["has"]) == ([None, "2"], False)


def test_nothing_outlives_a_driver_that_is_killed() -> None:
    with driving() as driver:
        (told,) = driver.another()
        worker, server = psutil.Process(told["pid"]), psutil.Process(told["parent"])
        # Ray ends a worker by its group, which is that of the process that Ray has started.
        client = psutil.Process(os.getpgid(worker.pid))
        assert "ask_fork_server.py" in " ".join(client.cmdline())
        driver.process.kill()
        driver.process.wait()
        psutil.wait_procs([worker, client, server])


def test_without_its_fork_server_ray_starts_workers_itself() -> None:
    with driving() as driver:
        (first,) = driver.another()
        psutil.Process(first["parent"]).send_signal(signal.SIGKILL)
        before, new = driver.another()
        assert before["pid"] == first["pid"]
        assert not new["has"]


def test_imports_may_take_longer_than_ray_waits_for_a_worker(tmp_path: Path) -> None:
    """It forgets workers that register late, and the driver's start would wait for the first of them for ever."""
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(5)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with driving("slow_to_import", PYTHONPATH=path, RAY_worker_register_timeout_seconds="1") as driver:
        (told,) = driver.another()
        assert told["has"]
