"""The Ray side of workers that come and go: actors with a method ``up``, restarted by Ray as often as it takes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from draco_ray.workers.silence import Away, Gone

AnswerT = TypeVar("AnswerT")


def comes_back(error: RayActorError) -> bool:
    """Whether an actor that Ray restarts without end is only away.

    Once its node was asked to go, Ray says "died" instead of "unavailable" of a call that is cut off: on spot nodes,
    and where the autoscaler has asked a node that was no longer idle, which refused and stays.
    """
    return isinstance(error, ActorUnavailableError) or error.preempted


async def up(worker: Any) -> None:
    """Return once an actor answers. Raises: `Away`, `Gone`."""
    try:
        await worker.up.remote()
    except RayError as error:
        if isinstance(error, RayActorError) and not comes_back(error):
            raise Gone from error
        raise Away(str(error)) from error


async def answer(call: Awaitable[AnswerT]) -> AnswerT:
    """The answer to a call. Raises: `Away`, and what the call raises."""
    try:
        return await call
    except RayActorError as error:
        raise Away(str(error)) from error


def renew(worker: Any) -> None:
    """End an actor's process; Ray starts another."""
    ray.kill(worker, no_restart=False)
