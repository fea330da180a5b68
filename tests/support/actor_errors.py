"""Ray's errors for a call to an actor that it restarts, by the state of the actor's node."""

from __future__ import annotations

from ray.core.generated.common_pb2 import (  # type: ignore[attr-defined]  # Not in its stubs.
    ActorDiedErrorContext,
    NodeDeathInfo,
)
from ray.exceptions import ActorDiedError, ActorUnavailableError

SOME_ACTOR = b"0" * 16
OUT_OF_REACH = ActorUnavailableError("its node does not answer", SOME_ACTOR)
ASKED_TO_GO = ActorDiedError(
    ActorDiedErrorContext(
        actor_id=SOME_ACTOR, node_death_info=NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED)
    )
)
"""An actor that died because its node was drained and then lost."""
