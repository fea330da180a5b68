"""The fork server of the jails, without a jail: orders, answers, and how processes end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from draco_ray.environments.jail.fork_client import ForkClient

SERVER = """
import os, socket, subprocess, sys, time
from draco_ray.environments.jail import linux
from draco_ray.environments.jail.fork_server import ForkServer

class Server(ForkServer):
    def begin(self, order, channel):
        while (asked := channel.receive()) is not None:
            if "exit" in asked:
                os._exit(asked["exit"])
            if "raise" in asked:
                raise ValueError(asked["raise"])
            if "write" in asked:
                channel.connection.send(asked["write"].encode())
            channel.answer({"order": order, "child": subprocess.Popen(["sleep", "600"], start_new_session=True).pid})

linux.adopt_orphans()
Server(socket.socket(fileno=int(sys.argv[1])), 0.0).run()
"""


@pytest.fixture
def client() -> Iterator[ForkClient]:
    """Ends the server, which ends all that it started."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    words = [sys.executable, "-c", SERVER, str(theirs.fileno())]
    with subprocess.Popen(words, pass_fds=[theirs.fileno()], env={**os.environ}) as server:
        theirs.close()
        client = ForkClient(control)
        yield client
        client.close()
        assert server.wait(600) == 0


async def ask(client: ForkClient, **order: object) -> dict[str, object]:
    answer: dict[str, object] = json.loads(await client.exchange(order, 600, 1000))
    return answer


async def test_an_order_ends_the_process_before_and_all_that_it_started(client: ForkClient) -> None:
    assert await client.order("first", 600, fork=True) == (None, 0.0)
    first = await ask(client)
    assert first["order"] == "first"
    # It was running, so it was killed.
    assert (await client.order("second", 600, fork=True))[0] is None
    assert not psutil.pid_exists(int(str(first["child"])))
    assert (await ask(client))["order"] == "second"


@pytest.mark.parametrize(("order", "status"), [({"exit": 7}, 7), ({"exit": 0}, 0), ({"raise": "x"}, 1)])
async def test_the_status_of_a_process_that_ends_by_itself(
    client: ForkClient, order: dict[str, object], status: int
) -> None:
    await client.order("task", 600, fork=True)
    with pytest.raises(EOFError, match="ended its process"):
        await ask(client, **order)
    assert (await client.order("end", 600, fork=False))[0] == status
    with pytest.raises(EOFError, match="ended its process"):
        await ask(client)


@pytest.mark.parametrize("text", ["forged\n", '1 {"forged": 1}\n', "2"])
async def test_anything_but_one_answer_is_refused(client: ForkClient, text: str) -> None:
    await client.order("task", 600, fork=True)

    async def ask_twice() -> None:
        await ask(client, write=text)
        await ask(client)

    with pytest.raises(EOFError, match="sent unexpected output"):
        await ask_twice()


async def test_an_answer_over_the_limit_is_refused_even_in_one_part(client: ForkClient) -> None:
    await client.order("task", 600, fork=True)
    with pytest.raises(EOFError, match="sent an answer of more than 10 bytes"):
        await client.exchange({}, 600, 10)
