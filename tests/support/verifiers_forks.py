"""verifiers imported once for tests that ask a bridge what there is: each question is a fork of that process.

As new interpreters, which is what users have, bridges are asked in tests that do not use it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from draco_ray.environments.verifiers import process
from draco_ray.environments.verifiers.options import VerifiersOptions, verifiers_python

PROGRAM = """
import gc, io, json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import bridge
import renderers.base, renderers.qwen3, verifiers.v1.envs.single_agent, verifiers.v1.serve, verifiers.v1.utils.loaders
gc.freeze()
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    order = json.loads(line)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(writing, 1)
            sys.argv[:], sys.stdin = order["command"], io.StringIO(order["input"])
            code = exec(sys.argv[1]) or 0 if sys.argv[0] == "-c" else bridge.main()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps({"returncode": status, "stdout": text}), file=said, flush=True)
os._exit(0)
"""


@contextmanager
def forked_bridges() -> Iterator[None]:
    """Whoever asks a bridge in this process and waits for it, or verifiers' Python by ``-c``, asks a fork."""
    python, bridge = verifiers_python(VerifiersOptions()), process._BRIDGE
    asked = subprocess.Popen(
        [python, "-c", PROGRAM, str(bridge.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=process._environment(python, ()),
    )
    run = subprocess.run

    def run_here(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        if command[:2] not in ([python, str(bridge)], [python, "-c"]):
            return run(command, **options)
        assert asked.stdin is not None
        assert asked.stdout is not None
        asked.stdin.write(json.dumps({"command": command[1:], "input": options.get("input", "")}) + "\n")
        asked.stdin.flush()
        return subprocess.CompletedProcess(command, **json.loads(asked.stdout.readline()), stderr="")

    with asked, pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run_here)
        yield
