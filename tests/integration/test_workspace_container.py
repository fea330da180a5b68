"""Programs of agents in containers: by Podman where it runs, and by a stand-in for an engine with a daemon."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from draco_ray.config.schema import AgentConfig
from draco_ray.environments import program
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import EpisodeEnd, Trajectory
from draco_ray.rollout.program_agent import ProgramAgent
from draco_ray.rollout.tokens import EnginePolicies
from draco_ray.temp_dirs import PrivateTempDir
from tests.support import stand_in_engine
from tests.support.coding_agents import Workspaces, leftover_processes, new_mark
from tests.support.endpoint_episode import END, ScriptedSampler
from tests.support.turns import AheadClock

MOUNTS = "-v {workspace}:/workspace -v {run}:/run/draco"
ROOT = Path(__file__).parents[2]
STAND_IN = f"{sys.executable} {stand_in_engine.__file__}"
ASK = """
ask() { curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer ${2:-$OPENAI_API_KEY}" \\
    -d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}]}"; }
"""
FIX = "sed -i s/-.b/+\\ b/ add.py"


@pytest.fixture(params=["stand-in", "podman"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """A template without network, whose image is this host's own file system."""
    stored = PrivateTempDir()
    if request.param == "stand-in":
        template, image = STAND_IN, ""
    else:
        if shutil.which("podman") is None:
            pytest.skip("no podman on PATH")
        storage = f"--root {stored.path}/all --runroot {stored.path}/now --storage-driver vfs"
        # Limits that a root without the right to raise them can set.
        options = "--rm -i --network none --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 --log-driver none"
        # crun refuses hosts that have both versions of control groups.
        runtime = "--runtime runc" if shutil.which("runc") else ""
        template = f"podman {storage} {runtime} --cgroup-manager cgroupfs run {options} -e IN_IMAGE=yes"
        image = " --rootfs /:O"
    started = subprocess.run(shlex.split(f"{template}{image} true"), capture_output=True, text=True)
    if started.returncode != 0:
        pytest.skip(f"no container can be started here: {started.stderr.strip()[-200:]}")
    yield f"{template} {MOUNTS}{image}"
    stored.remove()


async def play(at: Workspaces, script: str, container: str, task: str = "1") -> Trajectory:
    sampler = ScriptedSampler(lambda prompt: f"Done.{END}")
    command = f"sh -c {shlex.quote(ASK + script)}"
    return await at.play(sampler, command=command, container=container, task=task)


async def test_an_agent_its_set_up_and_its_tests_run_in_the_container(tmp_path: Path, engine: str) -> None:
    at = Workspaces(tmp_path, setup="echo $IN_IMAGE > made.txt", test='test "$IN_IMAGE" && python3 test_add.py')
    mark = new_mark()
    script = f"""
    ask one; cat; cat made.txt "$DRACO_TASK_FILE"; echo; {FIX}; pwd
    ask two no-key
    ls /run/draco/tests
    python3 -c 'import socket; socket.create_connection(("1.1.1.1", 53), timeout=2)'
    (setsid sleep {mark} &)
    """
    played = await play(at, script, engine)
    assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None), played.turns[-1].text
    said = played.turns[-1].text
    assert "Fix add.\nyes\n" in said
    assert '"instruction": "Fix add."' in said
    assert "\n/workspace\n" in said
    assert "wrong key" in said
    assert "OSError: [Errno 101]" in said
    assert "test_add" not in said.split("What it changed")[0]
    assert "+    return a + b" in at.kept["diff.patch"]
    assert at.verdict is not None
    assert at.verdict.success, at.verdict.failures
    assert leftover_processes(mark) == []


@pytest.mark.parametrize("how", ["limit", "cancelled", "disk"])
async def test_no_process_of_a_container_outlives_the_rollout(
    tmp_path: Path, engine: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = AheadClock()
    monkeypatch.setattr(program, "time", clock)
    at, mark = Workspaces(tmp_path, disk_mib=20), new_mark()
    fill = "for n in 1 2 3 4; do head -c 9M /dev/zero > $n; done;" if how == "disk" else ""
    script = f"ask one; (setsid sleep {mark} &); {fill} exec sleep {mark}"
    playing = asyncio.create_task(play(at, script, engine))
    while len(leftover_processes(mark)) < (1 if how == "disk" else 2) and not playing.done():  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    if how == "cancelled":
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        if how == "limit":
            await clock.jump(1200, when=lambda: True)
        played = await playing
        assert played.ended is EpisodeEnd.CRASHED
        assert ("agent.timeout_seconds=1200" if how == "limit" else "disk_mib=20") in str(played.error)
        assert len(played.steps) == 1
    # The kernel may still be ending them.
    psutil.wait_procs(leftover_processes(mark), timeout=600)
    assert leftover_processes(mark) == []


PLAY = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_workspace_container import play
from tests.support.coding_agents import Workspaces
asyncio.run(play(Workspaces(Path(sys.argv[1])), sys.argv[2], sys.argv[3]))
"""


def test_a_container_ends_when_its_host_process_is_killed(tmp_path: Path, engine: str) -> None:
    mark = new_mark()
    script = f"ask one; (setsid sleep {mark} &); exec sleep {mark}"
    with subprocess.Popen([sys.executable, "-c", PLAY, tmp_path, script, engine], cwd=ROOT) as playing:
        while len(leftover_processes(mark)) < 2 and playing.poll() is None:
            time.sleep(0.1)
        playing.kill()
    psutil.wait_procs(leftover_processes(mark), timeout=600)
    assert leftover_processes(mark) == []
    assert playing.returncode < 0


async def test_containers_that_do_not_confine_are_refused_in_one_line(tmp_path: Path, engine: str) -> None:
    async def said(kind: type[Exception], container: str) -> str:
        with pytest.raises(kind) as caught:
            await play(Workspaces(tmp_path), "ask one", container)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    if not engine.startswith(STAND_IN):
        open_network = engine.replace("--network none", "--network host")
        assert "use --network none" in await said(ConfigError, open_network)
        shared = engine.replace("--network none", "--network none --pid host")
        assert "use a PID namespace" in await said(ConfigError, shared)
        return
    assert "use --network none" in await said(ConfigError, f"{STAND_IN} --network {MOUNTS}")
    assert "use a PID namespace" in await said(ConfigError, f"{STAND_IN} --share-pids {MOUNTS}")
    assert "No module named" in await said(EnvironmentCrashed, f"{STAND_IN} -v {{workspace}}:/workspace")


def test_the_engine_has_to_be_there(tmp_path: Path) -> None:
    config = AgentConfig(use="command", harness="codex", container="no-such-engine run image")
    with pytest.raises(ConfigError, match="no program 'no-such-engine' on PATH"):
        ProgramAgent.check(config, EnginePolicies.__new__(EnginePolicies))
    # The agent's own program is looked for in the image alone.
    ProgramAgent.check(config.model_copy(update={"container": "true"}), EnginePolicies.__new__(EnginePolicies))
