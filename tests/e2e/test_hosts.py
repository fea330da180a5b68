"""The cluster guide (docs/cluster.md) on three hosts: head with the driver, engines and slots, judges."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.runs.checkpoints import ADAPTER, ADAPTER_CONFIG, COUNTERS, OPTIMIZER
from draco_ray.runs.directory import RunDirectory
from tests.support import hosts
from tests.support.cluster_of_hosts import HEAD, JUDGE, NODE, HostsCluster, cluster_of_hosts
from tests.support.hosts import FOLDER, HOME, Host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deployment,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(hosts.why_unavailable() is not None, reason=str(hosts.why_unavailable())),
]

PROMPTS, GROUP = 1, 2
SHARED, OWN = FOLDER / "shared", FOLDER / "own"
PRIVATE_RUNS = HOME / ".cache" / "draco-ray" / "runs"
DRACO = (sys.executable, "-m", "draco_ray.cli")


@pytest.fixture(scope="module")
def shared(sandbox_root: Path, starter_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As an operator fills the shared folder."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(sandbox_root, folder / "world")
    shutil.copytree(starter_model, folder / "model")
    (folder / "runs").mkdir()
    return folder


@pytest.fixture(scope="module")
def own(sandbox_root: Path, starter_model: Path) -> dict[Path, Path]:
    """What a host has of its own."""
    return {OWN / "world": sandbox_root, OWN / "model": starter_model}


@pytest.fixture(scope="module")
def cluster(shared: Path, own: dict[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    folders = {HEAD: {SHARED: shared, **own}, NODE: {SHARED: shared, **own}, JUDGE: {SHARED: shared}}
    with cluster_of_hosts(folders, tmp_path_factory.mktemp("ray")) as made:
        yield made


def words(cluster: HostsCluster, files: Path, name: str) -> list[str]:
    """A run small enough for a test; ``files``: where data and model are."""
    return [
        *(*DRACO, "train", "sandbox", "ray.address=auto", f"run.name={name}"),
        *(f"data.root={files / 'world'}", f"model.path={files / 'model'}"),
        *("judge.rule_judge.start=false", "judge.model=openai/rule-judge", f"judge.api_base={cluster.judge}"),
        *("judge.api_key_env=NO_KEY_IS_ASKED_FOR", "train.evaluate_before_after=false", "train.steps=1"),
        *(f"train.prompts_per_step={PROMPTS}", f"algorithm.group_size={GROUP}", "learner.minibatch_prompts=1"),
        *("environment.slots=2", "environment.slots_per_worker=2"),
    ]


def hosts_of(log: Path) -> set[str]:
    """Which hosts have written into a log."""
    return {json.loads(line)["host"] for line in log.read_text(encoding="utf-8").splitlines()}


def private_run(host: Host, name: str) -> Path | None:
    """Where a run of an object store works on a host."""
    return next(host.path(PRIVATE_RUNS).glob(f"*/{name}"), None)


def brought(host: Host, name: str, to: Path) -> Path:
    """A copy of it: SQLite opens no file by a path that leads through another host's root."""
    found = private_run(host, name)
    assert found is not None
    return Path(shutil.copytree(found, to / host.name / name))


def complete(run: RunDirectory) -> None:
    """Assert that all of the one step is there, and nothing was lost."""
    assert run.table("trajectories").num_rows == PROMPTS * GROUP
    assert [line["rollouts_lost"] for line in run.metrics()] == [0]
    assert run.checkpoint_steps() == [1]
    assert {file.name for file in run.checkpoint(1).iterdir()} == {ADAPTER, ADAPTER_CONFIG, OPTIMIZER, COUNTERS}
    # Every reply that the judges' host was given is in the database beside the driver.
    assert len(ReplyCache(run.judge_cache)) == run.table("judge_calls").num_rows > 0


def test_a_run_with_nothing_in_common_but_ray_and_an_object_store(
    cluster: HostsCluster, shared: Path, tmp_path: Path
) -> None:
    before = sorted(shared.rglob("*"))
    root = f"run.root={cluster.bucket}{cluster.options}"
    done = cluster.do(*words(cluster, OWN, "apart"), root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(shared.rglob("*")) == before
    here = brought(cluster.network[HEAD], "apart", tmp_path)
    complete(RunDirectory.open(here))
    # Only what runs on the driver's host has its log there; other hosts have made no such folder.
    logs = {log.stem: hosts_of(log) for log in (here / "logs").glob("*.jsonl")}
    assert set().union(*logs.values()) == {HEAD}
    assert [name for name in (NODE, JUDGE) if private_run(cluster.network[name], "apart")] == []
    # A driver on another host goes on from what is in the store: nothing is left to do.
    again = cluster.do(*words(cluster, OWN, "apart"), root, "--resume-or-start", name=NODE)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "already finished at step" in again.stdout
    complete(RunDirectory.open(brought(cluster.network[NODE], "apart", tmp_path)))


def test_a_run_in_a_shared_folder(cluster: HostsCluster, shared: Path) -> None:
    done = cluster.do(*words(cluster, SHARED, "together"), f"run.root={SHARED / 'runs'}")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory.open(shared / "runs" / "together")
    complete(run)
    # Each process wrote its log where all see it, from the host that it ran on.
    logs = {log.stem: hosts_of(log) for log in (run.path / "logs").glob("*.jsonl")}
    assert logs["driver"] == {HEAD}
    assert {NODE} in logs.values()
