"""Pooled workers as Ray actors: they have a method ``up``, and Ray restarts them without a limit."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from draco_ray.workers.monitor import WorkerLost, WorkerUnavailable

AnswerT = TypeVar("AnswerT")


def is_temporary(error: RayActorError) -> bool:
    """Whether an actor with unlimited restarts is only temporarily unavailable.

    For a call to a node that is being drained Ray reports "died" instead of "unavailable": on spot nodes, and where the
    autoscaler tried to drain a node that was no longer idle.
    """
    return isinstance(error, ActorUnavailableError) or error.preempted


async def up(worker: Any) -> None:
    """Return once an actor answers. Raises: `WorkerUnavailable`, `WorkerLost`."""
    try:
        await worker.up.remote()
    except RayError as error:
        if isinstance(error, RayActorError) and not is_temporary(error):
            raise WorkerLost from error
        raise WorkerUnavailable(str(error)) from error


async def answer(call: Awaitable[AnswerT]) -> AnswerT:
    """Return the answer to a call. Raises: `WorkerUnavailable`, and what the call raises."""
    try:
        return await call
    except RayActorError as error:
        raise WorkerUnavailable(str(error)) from error


def restart(worker: Any) -> None:
    """Kill an actor's process; Ray starts another."""
    ray.kill(worker, no_restart=False)
