"""What the soak says of a run's processes."""

from __future__ import annotations

import mmap
import os
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.jobs import load_job


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return load_job("soak")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["ray::RunStoreActor.finish_step"], "RunStore"),
        (["ray::_AutoscalingCoordinatorActor"], "_AutoscalingCoordinator"),
        (["ray::RolloutWorkerActor.rollout"], "RolloutWorker"),
        (["ray::score"], None),
        (["ray::PolicyEngineActor"], "PolicyEngine"),
        (["ray::CommandLog"], "CommandLog"),
        (["ray::IDLE", "", ""], "Ray: idle workers"),
        (["VLLM::EngineCore"], "engine core"),
        (["/x/ray/core/src/ray/gcs/gcs_server", "--log_dir=/y"], "Ray: GCS"),
        (["/x/ray/core/src/ray/raylet/raylet", "--raylet_socket_name=/y"], "Ray: raylet"),
        (["python", "-m", "draco_ray.environments.appworld.world_template"], "AppWorld"),
        (["sleep", "1"], None),
        ([], None),
    ],
)
def test_processes_are_called_by_what_they_are(soak: ModuleType, words: list[str], kind: str | None) -> None:
    assert soak.kind_of(words) == kind


def test_growth_is_of_the_second_half(soak: ModuleType) -> None:
    """The first steps load what later ones use."""
    warm = {step: 100.0 + min(step, 20) for step in range(1, 41)}
    assert soak.growth(warm) == pytest.approx(0.0, abs=1e-9)
    assert soak.growth({step: mib + 0.25 * step for step, mib in warm.items()}) == pytest.approx(25.0)
    assert soak.growth({1: 5.0}) == 0.0


def test_the_largest_is_first_and_a_process_that_was_not_there_has_no_figure(soak: ModuleType) -> None:
    lines = soak.table({"small": {1: 1.0, 3: 1.0}, "large": {1: 2.0, 2: 2.0, 3: 52.0}}, [1, 2, 3])
    assert lines[0] == "| MiB after step | 1 | 2 | 3 | growth in 100 steps |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["large", "small"]
    assert lines[2] == "| large | 2 | 2 | 52 | +5000.0 |"
    assert lines[3] == "| small | 1 |  | 1 | +0.0 |"


def test_what_a_process_has_for_itself_is_read(soak: ModuleType) -> None:
    before = soak.own_mib(os.getpid())
    # Of the kernel, not of an allocator that may still have as much from tests before.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"x" * len(held))
        assert soak.own_mib(os.getpid()) - before > 50
    assert soak.own_mib(2**22 + 1) == 0.0
    assert soak.Run(os.getpid()).memory()["driver"] == pytest.approx(soak.own_mib(os.getpid()), rel=0.2)


def test_an_actor_keeps_its_name_while_a_call_hides_it(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    called = iter(["ray::JudgeWorkerActor", "ray::score"])
    child = SimpleNamespace(pid=7, cmdline=lambda: [next(called)])
    monkeypatch.setattr(soak.psutil, "Process", lambda pid: SimpleNamespace(children=lambda recursive: [child]))
    monkeypatch.setattr(soak, "own_mib", lambda pid: float(pid))
    run = soak.Run(1)
    assert run.memory() == run.memory() == {"driver": 1.0, "JudgeWorker": 7.0}
