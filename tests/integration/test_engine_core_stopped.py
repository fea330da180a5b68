"""An engine core that is stopped under a request, and the sockets between it and its front end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from draco_ray.engine.adapter_files import AdapterFiles
from draco_ray.engine.vllm_engine import socket_env_vars
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.slow

ACTOR = """
import asyncio, json, sys
from pathlib import Path
import psutil
from draco_ray.config.schema import EngineConfig, ModelConfig
from draco_ray.engine.actor import PolicyEngineActor

async def main():
    actor = PolicyEngineActor(
        EngineConfig(
            gpus_per_engine=0, kv_cache_gib=0.1, max_num_seqs=2, adapter_directory=Path(sys.argv[2]), stall_seconds=5
        ),
        ModelConfig(path=sys.argv[1], dtype="float32"),
        max_model_len=256, lora_rank=8, seed=0, name="engine-0",
    )
    await actor.start()
    await actor.serve()
    first = await actor.sample(list(range(20, 60)), 8, seed=5)
    seen = {"tokens": len(first.token_ids), "iterations": (await actor.statistics()).iterations}
    print(json.dumps({**seen, "children": [c.pid for c in psutil.Process().children(recursive=True)]}), flush=True)
    sys.stdin.readline()
    await actor.sample(list(range(20, 60)), 8, seed=5)

asyncio.run(main())
"""


def test_a_core_that_is_stopped_under_a_request_is_ended_and_its_front_end_with_it(tmp_path: Path) -> None:
    """It neither dies nor answers, as one that hangs in a kernel; Ray then starts another process.

    The sockets of the two, which nobody has closed, go with the next start.
    """
    model = build_tiny_model(tmp_path / "model")
    # The path of a socket has 107 bytes at most, and pytest's folders have long names.
    with tempfile.TemporaryDirectory() as short:
        adapters, elsewhere = Path(short, "a"), Path(short, "t")
        adapters.mkdir()
        elsewhere.mkdir()
        with subprocess.Popen(
            [sys.executable, "-c", ACTOR, str(model), str(adapters)],
            env={**os.environ, "TMPDIR": str(elsewhere)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as front:
            assert front.stdout is not None
            try:
                line = front.stdout.readline()
                assert line, "the engine's process ended before it served"
                seen = json.loads(line)
                cores = [psutil.Process(pid) for pid in seen["children"]]
                names = [" ".join(core.cmdline()) for core in cores]
                for core in cores:
                    os.kill(core.pid, signal.SIGSTOP)
                front.communicate("\n")
            finally:
                front.kill()
        assert front.returncode == 1
        assert any("EngineCore" in name for name in names)
        _, alive = psutil.wait_procs(cores, timeout=600)
        assert not alive
        # What it does is counted, or any wait would be too long.
        assert seen["iterations"] >= seen["tokens"] == 8
        left = [path for path in Path(short).rglob("*") if path.is_socket()]
        assert left
        assert {path.parent.parent.parent for path in left} == {adapters}
        AdapterFiles(adapters).open()
        assert not any(path.is_socket() for path in Path(short).rglob("*"))


def test_sockets_whose_paths_would_be_too_long_stay_where_vllm_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    longest = Path("/", "d" * 69)
    assert socket_env_vars(longest) == {"VLLM_RPC_BASE_PATH": str(longest)}
    assert len(f"{longest}/{uuid.uuid4()}") == 107
    assert socket_env_vars(Path(f"{longest}d")) == {}
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/tmp")
    assert socket_env_vars(Path("/d")) == {}
