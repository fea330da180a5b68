"""The Ray side of workers that come and go: actors with a method ``up``, restarted by Ray as often as it takes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from draco_ray.workers.silence import Away, Gone

AnswerT = TypeVar("AnswerT")


async def up(worker: Any) -> None:
    """Return once an actor answers. Raises: `Away`, `Gone`."""
    try:
        await worker.up.remote()
    except ActorUnavailableError as error:
        raise Away(str(error)) from error
    except RayActorError as error:
        raise Gone from error
    except RayError as error:
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
