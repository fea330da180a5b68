"""The fork server without Ray: real processes in the places of the node manager, a client and a worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from draco_ray.workers.ask_fork_server import OWN_START, SOCKET, ask, wanted
from draco_ray.workers.forked import CLIENT, SERVER

WORKER = """
import json, os, sys
import colorsys
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgrp(), "folder": os.getcwd(), "nice": os.nice(0),
    "arguments": sys.argv[1:], "name": __name__, "given": os.environ.get("GIVEN"), "path": sys.path[0],
    "has": "fractions" in sys.modules, "server": os.environ.get("OF_THE_SERVER"),
}), flush=True)
word = sys.stdin.readline()
sys.exit(int(word))
"""
OWN = "import sys; print('own start', *sys.argv[1:])"


@dataclass
class Forks:
    """A fork server and what it belongs to."""

    socket: Path
    server: subprocess.Popen[bytes]
    raylet: subprocess.Popen[bytes]
    worker: Path
    own: Path

    def client(self, *arguments: str, language: str = "PYTHON", **context: Any) -> subprocess.Popen[str]:
        """Ask for a worker, as a node manager does."""
        words = [str(self.worker), *arguments, f"--serialized-runtime-env-context={json.dumps(context)}"]
        return subprocess.Popen(
            [sys.executable, str(CLIENT), *words, f"--language={language}"],
            env={**os.environ, SOCKET: str(self.socket), OWN_START: str(self.own), "GIVEN": "no"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            cwd=self.worker.parent,
        )


@contextmanager
def forking(folder: Path, modules: Sequence[str] = ("fractions",), **variables: str) -> Iterator[Forks]:
    """A fork server that lives with a process in the node manager's place."""
    worker, own, at = folder / "worker.py", folder / "own.py", folder / "socket"
    worker.write_text(WORKER)
    own.write_text(OWN)
    raylet = subprocess.Popen(["sleep", "infinity"])
    importing, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, open(held, "wb"):
        listener.bind(str(at))
        listener.listen(8)
        server = subprocess.Popen(
            [sys.executable, str(SERVER), str(listener.fileno()), str(held), *modules],
            env={**os.environ, "RAY_RAYLET_PID": str(raylet.pid), "OF_THE_SERVER": "1", **variables},
            pass_fds=[listener.fileno(), held],
            stderr=subprocess.PIPE,
        )
    try:
        yield Forks(at, server, raylet, worker, own)
    finally:
        os.close(importing)
        for process in (server, raylet):
            process.kill()
            process.communicate()


def said(client: subprocess.Popen[str]) -> dict[str, Any]:
    """What the worker of a client says of itself."""
    assert client.stdout is not None
    found: dict[str, Any] = json.loads(client.stdout.readline())
    return found


def test_a_worker_is_what_its_client_would_have_become(tmp_path: Path) -> None:
    with forking(tmp_path) as forks:
        client = forks.client("--some=word", env_vars={"GIVEN": "yes"})
        told = said(client)
        assert told["parent"] == forks.server.pid
        assert told["group"] == client.pid
        assert told["folder"] == told["path"] == str(tmp_path)
        assert (told["arguments"], told["name"], told["given"]) == (["--some=word"], "__main__", "yes")
        assert told["has"]
        assert told["server"] is None
        assert told["nice"] == os.nice(0)
        out, _ = client.communicate("3\n")
        assert (client.returncode, out) == (3, "")


ENDS = """
import atexit, os, signal, sys, threading, time

class Page:
    def __del__(self, write=os.write):
        write(1, b"taken down ")

sys.page = Page()
atexit.register(lambda: print("exit function", end=" "))
threading.Thread(target=lambda: (time.sleep(0.2), os.write(1, b"thread "))).start()
print("printed", end=" ")
{}
"""


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('for a reason')", 1, "for a reason\n"),
        ("raise ValueError('of no use')", 1, "ValueError: of no use\n"),
        # As Ray's handler, in a worker that is told to end while it ends.
        (
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
            "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
            "sys.exit(3)",
            3,
            "",
        ),
    ],
)
def test_a_worker_ends_as_the_interpreter_would_but_takes_nothing_down(
    tmp_path: Path, ends: str, code: int, says: str
) -> None:
    with forking(tmp_path) as forks:
        forks.worker.write_text(ENDS.format(ends))
        with forks.client() as client:
            said, complained = client.communicate(timeout=60)
    assert client.returncode == code
    assert sorted(said.split()) == ["exit", "function", "printed", "thread"]
    assert complained.endswith(says)


@pytest.mark.parametrize("dies", ["client", "worker"])
def test_a_worker_and_its_client_end_together(tmp_path: Path, dies: str) -> None:
    with forking(tmp_path) as forks:
        client, other = forks.client(), forks.client()
        worker, bystander = psutil.Process(said(client)["pid"]), said(other)
        os.kill(client.pid if dies == "client" else worker.pid, signal.SIGKILL)
        assert client.wait() == -signal.SIGKILL
        psutil.wait_procs([worker])
        # And nobody else with them.
        assert psutil.Process(bystander["pid"]).is_running()
        other.communicate("0\n")
        assert other.returncode == 0


def test_modules_that_draw_a_number_of_rays_are_refused(tmp_path: Path) -> None:
    """Workers that draw alike have tasks of one id, of which Ray's library aborts, and objects of one id."""
    (tmp_path / "draws.py").write_text("import ray\nray.ObjectRef.from_random()\nray.remote(type('Actor', (), {}))\n")
    (tmp_path / "defines.py").write_text("import ray\nray.remote(type('Actor', (), {}))\n")
    for module, forks_it in (("defines", True), ("draws", False)):
        folder = tmp_path / f"of_{module}"
        folder.mkdir()
        with forking(folder, [module], PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}") as forks:
            out, _ = forks.client().communicate("0\n")
            assert out.startswith("own start") != forks_it
            if not forks_it:
                assert forks.server.stderr is not None
                assert b"would draw alike" in forks.server.stderr.read()


def test_a_client_that_says_nothing_or_half_holds_nobody_up(tmp_path: Path) -> None:
    with forking(tmp_path) as forks, socket.socket(socket.AF_UNIX) as gone, socket.socket(socket.AF_UNIX) as half:
        gone.connect(str(forks.socket))
        gone.close()
        half.connect(str(forks.socket))
        socket.send_fds(half, [(100).to_bytes(4, "big")], [0, 1, 2])
        client = forks.client()
        assert said(client)["parent"] == forks.server.pid
        client.communicate("0\n")


def test_workers_end_with_the_node_manager(tmp_path: Path) -> None:
    with forking(tmp_path) as forks:
        client = forks.client()
        worker = psutil.Process(said(client)["pid"])
        forks.raylet.kill()
        forks.raylet.wait()
        # This one does not look whether its node manager is there, so it is ended after a while.
        assert forks.server.wait() == 0
        assert client.wait() == -signal.SIGKILL
        assert not worker.is_running()


def test_without_a_fork_server_ray_starts_its_worker(tmp_path: Path) -> None:
    with forking(tmp_path) as forks:
        waiting = forks.client()
        os.kill(forks.server.pid, signal.SIGSTOP)
        queued = forks.client()
        watcher = threading.Timer(0.5, forks.server.kill)
        watcher.start()
        out, error = queued.communicate()
        assert out.startswith("own start")
        assert "no forked worker" in error
        watcher.join()
        waiting.communicate("0\n")
        out, error = forks.client().communicate()
        assert out.startswith("own start")


@pytest.mark.parametrize(
    ("context", "language"),
    [
        ({"py_executable": "/usr/bin/python3"}, "PYTHON"),
        ({"command_prefix": ["podman", "run"]}, "PYTHON"),
        ({"override_worker_entrypoint": "/elsewhere.py"}, "PYTHON"),
        ({"env_vars": {"PYTHONPATH": "/elsewhere"}}, "PYTHON"),
        ({"env_vars": {"LD_PRELOAD": "some.so"}}, "PYTHON"),
        ({"env_vars": {"A": "${HOME}/a"}}, "PYTHON"),
        ({}, "JAVA"),
    ],
)
def test_a_worker_that_cannot_be_forked_is_left_to_ray(context: dict[str, Any], language: str) -> None:
    words = ["worker.py", f"--serialized-runtime-env-context={json.dumps(context)}", f"--language={language}"]
    assert wanted(words) is None


def test_variables_that_change_nothing_are_no_reason_for_an_interpreter() -> None:
    context = {"env_vars": {"PATH": os.environ["PATH"], "LD_X": "1"}, "py_executable": sys.executable}
    words = ["worker.py", f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON", "--a=b"]
    assert wanted(words) is None
    os.environ["LD_X"] = "1"
    try:
        assert wanted(words) == (["worker.py", "--a=b"], {})
    finally:
        del os.environ["LD_X"]


def test_a_fork_server_that_stands_still_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    with forking(tmp_path) as forks:
        os.kill(forks.server.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            ask(str(forks.socket), ["worker.py"], {}, seconds=0.1)
