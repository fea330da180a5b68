"""How the workers of Ray Train's loop begin: one asks the feed, all are told the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch.distributed

from draco_ray.learner.messages import Start
from draco_ray.learner.train_loop import _start

BEGIN = Start(checkpoint="first", position=3)


class Group:
    """Two workers, one after the other in this process; what the first is told is carried to the second."""

    def __init__(self, patch: pytest.MonkeyPatch, answer: Start | Exception | None) -> None:
        self.asked = 0
        self._answer, self._patch = answer, patch
        self._carried: list[Start | None] = []
        self._feed = SimpleNamespace(start=SimpleNamespace(remote=self._ask))
        patch.setattr(ray, "get", self._get)
        patch.setattr(ray.train.torch, "get_device", lambda: "cuda:1")
        patch.setattr(torch.distributed, "broadcast_object_list", self._broadcast)

    def begin(self) -> list[Start | None]:
        """Where each begins."""
        found = []
        for self._rank in range(2):
            context = SimpleNamespace(get_world_rank=lambda: self._rank, get_world_size=lambda: 2)
            self._patch.setattr(ray.train, "get_context", lambda context=context: context)
            found.append(_start(self._feed))
        return found

    def _ask(self) -> str:
        self.asked += 1
        return "where to begin"

    def _get(self, reference: str) -> Start | None:
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
    monkeypatch: pytest.MonkeyPatch, answer: Start | None
) -> None:
    group = Group(monkeypatch, answer)
    assert group.begin() == [answer, answer]
    assert group.asked == 1


def test_where_the_feed_is_lost_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(monkeypatch, ray.exceptions.ActorDiedError())
    assert group.begin() == [None, None]
