"""Ray's workers that are forked: they are workers like any, share no chance, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.support.autoscaling import until

DRIVER = """
import json, logging, os, sys
import ray
from draco_ray.workers.forked import forked_workers

with forked_workers([*sys.argv[1:], "colorsys", "no_such_module", "numpy"], {"OF_THE_IMPORTS": "1"}):
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
    # Defines actors, and so would draw of Ray's chance.
    with driving("ray.train.torch") as one:
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


def test_nothing_outlives_a_driver_that_is_killed(driver: Driver) -> None:
    """The last to have it."""
    (told, *_) = driver.another()
    worker, server = psutil.Process(told["pid"]), psutil.Process(told["parent"])
    # Ray ends a worker by its group, which is that of the process that Ray has started.
    client = psutil.Process(os.getpgid(worker.pid))
    assert "ask_fork_server.py" in " ".join(client.cmdline())
    driver.process.kill()
    driver.process.wait()
    psutil.wait_procs([worker, client, server])


def test_imports_may_take_longer_than_ray_waits_and_without_its_fork_server_it_starts_workers_itself(
    tmp_path: Path,
) -> None:
    """It forgets workers that register late, and the driver's start would wait for the first of them for ever."""
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(5)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with driving("slow_to_import", PYTHONPATH=path, RAY_worker_register_timeout_seconds="1") as driver:
        (first,) = driver.another()
        assert first["has"]
        psutil.Process(first["parent"]).send_signal(signal.SIGKILL)
        before, new = driver.another()
        assert before["pid"] == first["pid"]
        assert not new["has"]


STARTING = """
import ray._private.worker
from draco_ray.config.load import load_config
from draco_ray.interruption import ended_as_interrupted
from draco_ray.training import cluster

cluster.ACTORS, cluster.OF_ENGINES, cluster.OF_JUDGES, cluster.OF_LEARNERS = ("waits_for_the_test",), (), (), ()
join = ray._private.worker.connect

def told(*arguments, **named):
    print("joining", flush=True)
    input()
    return join(*arguments, **named)

ray._private.worker.connect = told
with ended_as_interrupted():
    try:
        cluster.connect(load_config("sandbox", ["ray.dashboard=false"]))
    except KeyboardInterrupt:
        print("interrupted")
"""
"""A run's start, whose fork server imports a module that waits; it says when Ray has started, and waits to be told to
join."""


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A driver that starts Ray, and what its fork server waits for in the midst of its imports until it is closed."""
    os.mkfifo(waited_for := tmp_path / "fifo")
    (tmp_path / "waits_for_the_test.py").write_text(f"open({str(waited_for)!r}).read()\n")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", STARTING]
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, stderr=-1, text=True) as driver:
        try:
            # Opened once the other end is.
            with waited_for.open("w") as pipe:
                yield driver, pipe
        finally:
            driver.kill()


def thread_names(pid: int) -> set[str]:
    found = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            found.add(thread.read_text().strip())
    return found


def waits_for(pid: int, number: signal.Signals) -> bool:
    """Whether a process has yet to take a signal that it was sent."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) & 1 << number - 1)


def test_a_start_is_interrupted_while_modules_are_imported(starting: tuple[subprocess.Popen[str], IO[str]]) -> None:
    driver, _ = starting
    driver.send_signal(signal.SIGINT)
    assert driver.communicate() == ("interrupted\n", "")
    assert driver.returncode == 0


async def test_sigterm_while_the_node_does_not_answer_interrupts_the_start(
    starting: tuple[subprocess.Popen[str], IO[str]],
) -> None:
    driver, importing = starting
    assert driver.stdin is not None
    assert driver.stdout is not None
    importing.close()
    assert driver.stdout.readline() == "joining\n"
    (raylet,) = (each for each in psutil.Process(driver.pid).children() if each.name() == "raylet")
    raylet.suspend()
    try:
        driver.stdin.write("\n")
        driver.stdin.flush()
        # A thread of a driver that joins: from here on no Python runs in it until the node answers.
        await until(lambda: "global.accessor" in thread_names(driver.pid))
        assert "global.accessor" in thread_names(driver.pid)
        driver.send_signal(signal.SIGTERM)
        await until(lambda: driver.poll() is not None or not waits_for(driver.pid, signal.SIGTERM))
    finally:
        raylet.resume()
    assert driver.communicate() == ("interrupted\n", "")
    assert driver.returncode == 0
