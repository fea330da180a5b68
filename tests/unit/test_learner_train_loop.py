"""How the workers of Ray Train's loop begin, where one asks the log and all are told the same; and one that hangs."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed

from draco_ray.config.schema import LearnerConfig
from draco_ray.learner import lora_learner, train_loop, worker
from draco_ray.learner.command_log import Command, StartPosition
from draco_ray.learner.train_loop import _run, _start
from draco_ray.observability import logs

BEGIN = StartPosition(checkpoint="first", position=3)


class Group:
    """Two workers, one after the other in this process; what the first is told is carried to the second."""

    def __init__(self, patch: pytest.MonkeyPatch, answer: StartPosition | Exception | None) -> None:
        self.asked = 0
        self._answer, self._patch = answer, patch
        self._carried: list[StartPosition | None] = []
        self._log = SimpleNamespace(start=SimpleNamespace(remote=self._ask))
        patch.setattr(ray, "get", self._get)
        patch.setattr(ray.train.torch, "get_device", lambda: "cuda:1")
        patch.setattr(torch.distributed, "broadcast_object_list", self._broadcast)

    def begin(self) -> list[StartPosition | None]:
        """Where each begins."""
        found = []
        for self._rank in range(2):
            context = SimpleNamespace(get_world_rank=lambda: self._rank, get_world_size=lambda: 2)
            self._patch.setattr(ray.train, "get_context", lambda context=context: context)
            found.append(_start(self._log))
        return found

    def _ask(self) -> str:
        self.asked += 1
        return "where to begin"

    def _get(self, reference: str) -> StartPosition | None:
        assert reference == "where to begin"
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def _broadcast(self, told: list[Any], device: str) -> None:
        # NCCL: all would take the first GPU of their node if none were named.
        assert device == "cuda:1"
        if self._rank == 0:
            self._carried = list(told)
        told[:] = self._carried


@pytest.mark.parametrize("answer", [BEGIN, None])
def test_one_worker_asks_where_to_begin_and_all_are_told_the_same(
    monkeypatch: pytest.MonkeyPatch, answer: StartPosition | None
) -> None:
    group = Group(monkeypatch, answer)
    assert group.begin() == [answer, answer]
    assert group.asked == 1


def test_where_the_log_is_lost_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, ray.exceptions.ActorDiedError())
    assert group.begin() == [None, None]


def test_a_worker_that_hangs_in_a_command_says_so_and_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    killed = threading.Event()

    class Worker:
        def __init__(self, *ignored: Any, **named: Any) -> None: ...

        def step(self) -> None:
            assert killed.wait(60)

    commands = [Command("step"), None]
    log = SimpleNamespace(
        next=SimpleNamespace(remote=lambda position: commands[position]),
        finish=SimpleNamespace(remote=lambda *result: None),
        report_failure=SimpleNamespace(remote=said.append),
    )
    config = LearnerConfig(workers=1, gpus_per_worker=0, hang_seconds=0.003)
    given: Any = SimpleNamespace(log=log, model=None, config=config, seed=0)
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    policy = SimpleNamespace(progress=7)
    monkeypatch.setattr(ray, "get", lambda reference: reference)
    monkeypatch.setattr(ray, "wait", lambda references, timeout: (references, []))
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(logs, "set_private_umask", lambda: None)
    monkeypatch.setattr(lora_learner, "LoraLearner", lambda *_, **__: SimpleNamespace(policy=policy))
    monkeypatch.setattr(worker, "LearnerWorker", Worker)
    monkeypatch.setattr(train_loop, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(os, "kill", lambda process, number: killed.set())
    _run(given, StartPosition(checkpoint=None, position=0))
    assert killed.is_set()
    assert said == ["a worker completed no layer for learner.hang_seconds=0.003, so a kernel probably hangs"]
