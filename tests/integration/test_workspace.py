"""Programs of agents in workspaces: what they get, what is kept of them, and what a hostile policy cannot reach."""

from __future__ import annotations

import asyncio
import json
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from draco_ray.environments.base import GuardedWorld
from draco_ray.errors import ConfigError, EnvironmentCrashed, IsolationUnavailable
from draco_ray.records import EpisodeEnd, Trajectory
from tests.conftest import NEEDS_BUBBLEWRAP
from tests.support.coding_agents import Workspaces
from tests.support.endpoint_episode import END, ScriptedSampler

FIX = "sed -i s/-.b/+\\ b/ add.py"
ASK = """
ask() { curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer ${2:-$OPENAI_API_KEY}" \\
    -d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}]}"; }
"""
LEVELS = ["namespaces", pytest.param("bubblewrap", marks=NEEDS_BUBBLEWRAP), "rlimits"]


async def play(at: Workspaces, script: str, *, name: str = "agent.sh", rollout: int = 0, **agent: Any) -> Trajectory:
    """A rollout of a shell script that can ``ask`` the policy, which always says the same."""
    (at.folder / name).write_text(ASK + script)
    sampler = ScriptedSampler(lambda prompt: f"Done.{END}")
    return await at.play(sampler, rollout=rollout, command=f"sh {name}", **agent)


def printed(played: Trajectory) -> str:
    return played.turns[-1].text


@pytest.mark.parametrize("level", LEVELS)
async def test_a_program_works_in_a_copy_of_the_reference_and_its_diff_is_kept(tmp_path: Path, level: str) -> None:
    at = Workspaces(tmp_path, isolation=level, setup="echo made > made.txt", teardown="rm trash.txt")
    script = f"ask one; cat; cat made.txt; git log --oneline | wc -l; {FIX}; touch trash.txt; echo new > new.txt; pwd"
    played = await play(at, script)
    assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None)
    assert "Fix add.\nmade\n1\n" in printed(played)
    diff = at.kept["diff.patch"]
    assert "+    return a + b" in diff
    assert diff.count("diff --git") == 2
    assert diff.rstrip().endswith("+new")
    # The judge sees it, and neither the tests nor the solution.
    assert printed(played).endswith(f"What it changed:\n{diff}")
    assert at.verdict is not None
    assert at.verdict.success
    if level != "rlimits":
        assert "\n/workspace\n" in printed(played)


async def test_repositories_may_be_tar_files_and_folders_and_the_test_may_fail(tmp_path: Path) -> None:
    Workspaces(tmp_path)
    (tmp_path / "plain").mkdir()
    shutil.copy(tmp_path / "repo" / "add.py", tmp_path / "plain")
    with tarfile.open(tmp_path / "repo.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "plain", ".")
    for number, source in enumerate(["plain", "repo.tar.gz"]):
        at = Workspaces(tmp_path, repository=source)
        played = await play(at, "ask one; cat add.py; echo broken > add.py", rollout=number)
        assert "return a + b" in printed(played)
        assert at.verdict is not None
        assert not at.verdict.success
        assert "ended with exit code 1" in at.verdict.failures[0]
    at = Workspaces(tmp_path)
    assert "It changed no file." in printed(await play(at, "ask one", rollout=2))
    assert at.kept == {}


async def test_what_is_wrong_with_a_task_is_said_in_one_line(tmp_path: Path) -> None:
    async def said(kind: type[Exception], isolation: str = "namespaces", **options: Any) -> str:
        with pytest.raises(kind) as caught:
            await Workspaces(tmp_path, isolation=isolation, **options).environment().open("1")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    nowhere = f"repository: {tmp_path / 'nowhere'} is not a git repository, tar file or folder"
    assert nowhere in await said(ConfigError, repository="nowhere")
    assert "git archive" in await said(EnvironmentCrashed, reference="no-such-tag")
    assert "the set-up command ended with exit code 3; its last output: no" in await said(
        EnvironmentCrashed, setup="echo no; exit 3"
    )
    assert "landlock: this level cannot limit" in await said(IsolationUnavailable, isolation="landlock")
    assert "command_secnds" in await said(ConfigError, command_secnds=3)


async def test_what_a_hostile_policy_reaches(tmp_path: Path) -> None:
    at = Workspaces(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("the key")
    script = f"""
    ask one > /dev/null
    cat {secret} {tmp_path}/tasks.jsonl {tmp_path}/hidden/test_add.py && echo READ
    echo x > /usr/x && echo WROTE
    ls /run/draco/tests && echo TESTS
    ln -s {secret} link; cat link && echo LINKED
    python3 - <<'EOF'
import socket
for place in (("127.0.0.1", 22), ("10.0.0.1", 80), ("1.1.1.1", 53)):
    try:
        socket.create_connection(place, timeout=2)
        print("CONNECTED")
    except OSError as error:
        print("refused", error.errno)
EOF
    ask two no-key
    """
    played = await play(at, script)
    text = printed(played)
    assert played.ended is EpisodeEnd.FINISHED
    assert text.count("refused") == 3
    assert not any(each in text for each in ("READ", "WROTE", "TESTS", "LINKED", "CONNECTED", "the key"))
    assert "wrong key" in text
    assert played.usage.calls == 1
    # A link is kept as a link.
    assert "new file mode 120000" in at.kept["diff.patch"]


async def test_git_of_the_host_runs_nothing_that_the_program_left(tmp_path: Path) -> None:
    at = Workspaces(tmp_path)
    script = f"""
    ask one > /dev/null
    git config core.fsmonitor 'touch {tmp_path}/ran'; git config diff.external 'touch {tmp_path}/ran'
    git config filter.f.clean 'touch {tmp_path}/ran'; echo '* filter=f diff=f' > .gitattributes
    printf '#!/bin/sh\\ntouch {tmp_path}/ran' > .git/hooks/post-commit; chmod +x .git/hooks/post-commit
    mkfifo pipe; mkdir -p a/.git; chmod 0 a
    {FIX}
    """
    played = await play(at, script)
    assert "+    return a + b" in printed(played)
    assert not (tmp_path / "ran").exists()
    assert at.verdict is not None
    assert at.verdict.success


async def test_git_of_the_host_enters_no_repository_inside_the_workspace(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    commit = "git -c user.name=a -c user.email=a commit -q --allow-empty -m a"
    script = f"""
    ask one > /dev/null
    cp -r inner own && mv inner away && mv own inner && cd inner/.git || exit 1
    echo "date > {ran}; echo" > evil
    chmod 755 evil
    cp evil hooks/post-index-change
    git config core.fsmonitor .git/evil && echo SET
    """
    at = Workspaces(tmp_path, setup=f"git init -q inner && cd inner && {commit}")
    played = await play(at, script)
    assert "\nSET\nWhat it changed:" in printed(played)
    assert not ran.exists()


async def test_processes_that_were_left_end_with_the_rollout(tmp_path: Path) -> None:
    at = Workspaces(tmp_path)
    mark = str(1_000_000 + time.time_ns() % 1_000_000)
    await play(at, f"ask one; (setsid nohup sleep {mark} &) ; sleep 0.2")
    await play(at, f"ask one; setsid env -i sleep {mark}", name="b.sh", rollout=1, timeout_seconds=4)

    def left() -> list[psutil.Process]:
        running = psutil.process_iter(["cmdline", "status"])
        return [each for each in running if mark in (each.info["cmdline"] or ()) and each.info["status"] != "zombie"]

    # The kernel may still be ending them.
    psutil.wait_procs(left(), timeout=600)
    assert left() == []


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("head -c 900M /dev/zero | tail", {"memory_mib": 300}, "environment.max_memory_mib=300|memory exhausted"),
        (
            "for n in 1 2 3 4 5 6; do head -c 9M /dev/zero > $n; done; sleep 600",
            {"disk_mib": 20},
            "environment.options.disk_mib=20",
        ),
        ("head -c 90M /dev/zero > one && echo FIT", {"disk_mib": 20}, "File size limit|File too large"),
        ("for n in $(seq 300); do sleep 30 & done; wait", {"processes": 60}, "fork"),
    ],
)
async def test_limits_end_a_program_and_it_is_judged_as_it_stands(
    tmp_path: Path, script: str, options: dict[str, Any], said: str
) -> None:
    at = Workspaces(tmp_path, **options)
    played = await play(at, f"ask one\n{script}")
    assert played.ended is EpisodeEnd.CRASHED
    assert len(played.steps) == 1
    text = f"{printed(played)} {played.error}"
    assert any(each in text for each in said.split("|"))
    assert "FIT" not in text


async def test_rollouts_side_by_side_do_not_meet(tmp_path: Path) -> None:
    at = Workspaces(tmp_path)

    async def one(number: int) -> str:
        at_one = Workspaces(tmp_path)
        played = await play(
            at_one, f"ask one\necho {number} > add.py; sleep 1; cat add.py", name=f"{number}.sh", rollout=number
        )
        assert played.ended is EpisodeEnd.FINISHED
        return at_one.kept["diff.patch"]

    diffs = await asyncio.gather(*(one(number) for number in range(20)))
    assert at.verdict is None
    assert [f"+{number}\n" in diff for number, diff in enumerate(diffs)] == [True] * 20


async def test_outcome_blind_workers_run_no_test_and_never_tell_it(tmp_path: Path) -> None:
    at = Workspaces(tmp_path, test="touch /workspace/tested")
    world = GuardedWorld(await at.environment(ground_truth=False).open("1"), "test", 60.0)
    try:
        with pytest.raises(Exception, match="without ground truth"):
            await world.evaluate()
        assert "hidden" not in json.dumps([world.task.instruction, dict(world.task.fields)])
    finally:
        await world.close()
