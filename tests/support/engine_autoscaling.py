"""Drives the real engine fleet and clients on the cluster of RAY_ADDRESS, for `test_engine_autoscaling`.

The actors are the real ones; in each, a stand-in takes vLLM's place, which "samples" the version of its adapter.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import ray

from draco_ray.config.load import load_config
from draco_ray.engine import actor
from draco_ray.engine.actor import EngineClient, start_policy_engines
from draco_ray.engine.fleet import EngineFleet
from draco_ray.engine.sampler import Sample
from draco_ray.records import Adapter
from draco_ray.training.cluster import connect_ray
from tests.support.autoscaling import PATIENCE_SECONDS, added_nodes, lose_node, poll_until, preempt_node

RUN = "spot"
LONG = 1_000_000
"""Tokens of a request that does not end by itself."""


class StandIn:
    """Replaces `VllmEngine`; a request for `LONG` tokens lasts as long as the process."""

    dead = False

    def __init__(self) -> None:
        self.version = 0

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""

    async def load(self, adapter: Adapter) -> float:
        """Switch to another version."""
        self.version = adapter.version
        return 0.0

    async def sample(self, token_ids: list[int], *, max_tokens: int, **_: Any) -> Sample:
        """Two "tokens": the id of the answering process, and the version of its adapter."""
        if max_tokens == LONG:
            # Never answer.
            await asyncio.Event().wait()
        said = [os.getpid(), self.version]
        return Sample(token_ids=said, logprobs=[0.0, 0.0], finish_reason="stop", policy_version=self.version)

    async def logprobs(self, token_ids: list[int], *, adapter: bool) -> list[float]:
        """A single log-prob: the version of the adapter."""
        return [float(self.version)]

    async def stop(self) -> None:
        """Do nothing: there is nothing to end."""


class StandInEngineActor(actor.PolicyEngineActor):
    """The real actor with the stand-in as its engine."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        engine: Any = StandIn()
        self._engine = engine


async def lose_one(fleet: EngineFleet, clients: list[EngineClient]) -> dict[str, Any]:
    """Lose an engine's node during its requests, until another node has joined."""
    asked: list[str] = []

    async def canary(scorer: Any) -> float:
        asked.append(scorer.name)
        (version,) = await scorer.logprobs([1, 2], adapter=True)
        return float(version)

    await fleet.start()
    seen: dict[str, Any] = {"up_at_start": fleet.workers.up}
    await poll_until(lambda: fleet.workers.up == 2)
    seen["nodes"] = len(before := added_nodes())
    await fleet.load(ray.put(Adapter(version=1, config={}, tensors={})))
    seen["proven"] = await fleet.prove(canary)
    processes = [(await client.sample([1], max_tokens=1)).token_ids[0] for client in clients]
    seen["processes"] = len(set(processes))
    held = [asyncio.create_task(clients[0].sample([1], max_tokens=length)) for length in (LONG, LONG)]
    await asyncio.sleep(1)
    # From now on Ray reports that the actor died, not that it is unavailable.
    preempt_node(fleet._processes[0].node)
    lose_node(processes[0])
    # The held requests are sent to the other engine, which holds them, too; it answers a new request of this client.
    elsewhere = await clients[0].sample([1], max_tokens=1)
    seen["elsewhere"] = elsewhere.token_ids == [processes[1], 1]
    await poll_until(lambda: fleet.workers.up == 1)
    asked.clear()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await fleet.load(ray.put(Adapter(version=2, config={}, tensors={})))
        await fleet.prove(canary)
    seen["synced_while_lost"] = (await clients[1].sample([1], max_tokens=1)).token_ids == [processes[1], 2]
    await poll_until(lambda: fleet.workers.up == 2)
    seen["another_node"] = len(added_nodes() - before)
    seen["canary_asked"] = asked
    actor.HOME_SECONDS = 0.0
    again = await clients[0].sample([1], max_tokens=1)
    seen["joined"] = {"new_process": again.token_ids[0] not in processes, "version": again.token_ids[1]}
    seen["held_on"] = sum(not call.done() for call in held)
    for call in held:
        call.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await fleet.stop()
    return seen | {"replaced": fleet.replaced}


def main() -> None:
    """Prints one JSON object."""
    config = load_config(
        "sandbox",
        [
            *("engine.engines=2", "engine.min_engines=1", "engine.gpus_per_engine=0", "engine.cpus_per_engine=1"),
            # Losing a node does not count as an engine failure.
            *("engine.max_failures=0", "environment.cpus_per_worker=0", "learner.cpus_per_worker=0"),
        ],
    )
    connect_ray(config.updated(algorithm={"reward": "outcome"}))
    actor.PolicyEngineActor = StandInEngineActor  # type: ignore[misc]
    engines = start_policy_engines(config.engine, config.model, max_model_len=100, lora_rank=8, seed=0, run_name=RUN)
    fleet = EngineFleet(engines, config.engine)
    print(json.dumps(asyncio.run(lose_one(fleet, [EngineClient(index, RUN, 2) for index in range(2)]))))


if __name__ == "__main__":
    main()
