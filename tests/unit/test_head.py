"""A run whose cluster has lost its head."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draco_ray.config.load import load_config
from draco_ray.errors import ClusterError, EngineError
from draco_ray.runs.directory import RunDirectory
from draco_ray.training import cluster as head_module
from draco_ray.training import run as run_module
from draco_ray.training.cluster import head_answers, stop_unless_head_lost, wait_for_head_failure
from draco_ray.training.resume import StartPoint
from draco_ray.training.trainer import TaskOrder
from draco_ray.training.watchdog import cancel_on_loss


async def test_a_head_that_answers_is_there_and_one_that_does_not_is_gone() -> None:
    looked = asyncio.Event()
    looks = 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            looked.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    watch = asyncio.create_task(wait_for_head_failure(f"127.0.0.1:{port}", look=0.01, gone=0.05))
    await looked.wait()
    assert not watch.done()
    server.close()
    with pytest.raises(ClusterError, match=rf"the Ray cluster's head at 127.0.0.1:{port} has not answered for 0.05 s"):
        await watch


async def test_a_head_that_comes_back_in_time_was_never_gone() -> None:
    seen = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    # Far more looks than the test lasts.
    watch = asyncio.create_task(wait_for_head_failure(f"127.0.0.1:{port}", look=0.01, gone=600))
    await seen.wait()
    server.close()
    await server.wait_closed()
    seen.clear()
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await seen.wait()
    assert not watch.done()
    watch.cancel()
    server.close()


LISTENING = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"hello")
"""


@pytest.fixture
def listening() -> Iterator[subprocess.Popen[str]]:
    """A process that prints its port, and says something to everybody who connects."""
    with subprocess.Popen([sys.executable, "-c", LISTENING], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_a_head_that_is_stopped_does_not_answer_although_it_takes_connections(
    listening: subprocess.Popen[str],
) -> None:
    assert listening.stdout is not None
    address = f"127.0.0.1:{int(listening.stdout.readline())}"
    assert await head_answers(address, 60)
    listening.send_signal(signal.SIGSTOP)
    assert not await head_answers(address, 0.5)
    with pytest.raises(ClusterError, match=f"head at {address} has not answered for 0.1 s"):
        await wait_for_head_failure(address, look=0.02, gone=0.1)
    listening.send_signal(signal.SIGCONT)
    assert await head_answers(address, 60)


LEAVING = """
import sys, time, ray
from draco_ray.training import cluster

def hanging():
    time.sleep(600)

# Stands for a Ray whose shutdown waits for its head.
ray.is_initialized, ray.shutdown, cluster.head_address = (lambda: True), hanging, (lambda: sys.argv[1])
cluster.leave_ray(0.2)
print("left")
"""


def test_a_process_whose_ray_cannot_be_left_ends_without_it(listening: subprocess.Popen[str]) -> None:
    assert listening.stdout is not None
    address = f"127.0.0.1:{int(listening.stdout.readline())}"
    listening.send_signal(signal.SIGSTOP)
    ended = subprocess.run([sys.executable, "-c", LEAVING, address], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("left\n", 1), ended.stderr


async def test_the_first_loss_ends_the_work() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def never() -> None:
        await asyncio.Event().wait()

    async def lost() -> None:
        raise EngineError("lost")

    with pytest.raises(EngineError, match="lost"):
        await cancel_on_loss(work(), never(), lost())
    assert ended == ["work"]


async def test_work_that_ends_is_not_waited_for_by_what_watches_it() -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    async def never() -> None:
        await asyncio.Event().wait()

    await cancel_on_loss(work(), never(), never())

    async def fails() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await cancel_on_loss(fails(), never())


async def test_actors_of_a_head_that_is_gone_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(head_module, "head_address", lambda: f"127.0.0.1:{port}")
    stopped = []

    async def stop() -> None:
        stopped.append("stopped")

    await stop_unless_head_lost(stop)
    server.close()
    await server.wait_closed()
    await stop_unless_head_lost(stop)
    assert stopped == ["stopped"]


async def test_a_head_that_is_gone_while_a_run_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and learner would be waited for until watch.start_seconds."""
    starting, ended, said = asyncio.Event(), [], io.StringIO()

    @contextlib.asynccontextmanager
    async def session(*given: Any) -> AsyncIterator[None]:
        starting.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.append("session")

    async def gone() -> None:
        await starting.wait()
        raise ClusterError("the Ray cluster's head at 127.0.0.1:1 has not answered for 30 s")

    monkeypatch.setattr(run_module, "training_session", session)
    monkeypatch.setattr(run_module, "wait_for_head_failure", gone)
    config = load_config(None, ["train.steps=1"])
    order = TaskOrder(["a_1"], 1, 0)
    run = RunDirectory.create(tmp_path / "run", "")
    with pytest.raises(ClusterError, match="has not answered for 30 s"):
        await run_module._run(config, {}, order, run, StartPoint(), Console(file=said))
    assert ended == ["session"]
    assert "has not answered" in said.getvalue()
