"""Running ``draco`` as a user does: a process of its own, its exit code and what it prints.

`draco_here` is for commands that start nothing: importing everything in another process takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil

from draco_ray.cli import main

DRACO = [sys.executable, "-m", "draco_ray.cli"]


def draco(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; it is killed with its children if the test's time is over."""
    process = start_draco(arguments, environment=environment)
    try:
        stdout, stderr = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def draco_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command by its entry point in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def start_draco(arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, outputs piped."""
    return subprocess.Popen(
        [*DRACO, *arguments],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(pid: int, words: str) -> list[psutil.Process]:
    """Running processes below ``pid`` whose command line contains ``words``, parents before children."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile, or is a zombie
            if words in " ".join(process.cmdline()):
                found.append(process)
    return found
