"""Drives the real judge pool on the cluster of RAY_ADDRESS and prints what it saw, for `test_judge_autoscaling`.

A process of its own, because Ray reads its authentication token once a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from draco_ray.actors import pools
from draco_ray.actors.elastic import Place
from draco_ray.actors.judge_worker import Policy, judge_starter
from draco_ray.actors.pools import Judgement, JudgePool
from draco_ray.config import JudgeConfig
from draco_ray.configuration import load_config
from draco_ray.offline.judge_server import MODEL_NAME, JudgeServer
from draco_ray.records import Message
from draco_ray.training.cluster import connect

CALLS = 20
LATENCY = 2.0
"""Seconds of a reply: with two calls a worker at a time, one worker alone would need 20 s for all."""
MOST = 4
SHRINK_SECONDS = 60.0


def judge_nodes() -> set[str]:
    """Nodes that are up beside the head."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {FAKE_HEAD_NODE_ID}


async def grow_and_shrink(config: JudgeConfig) -> dict[str, Any]:
    """Many calls at once, then none."""
    pool = JudgePool(judge_starter(config, Policy(samplers=(), model_path="none"), None, "autoscaling"), config)
    pool.open()
    await pool.ready()
    seen: dict[str, Any] = {"up_at_first": pool.up}
    nodes: set[str] = set()
    busy: set[Place[Any]] = set()
    most = 0
    calls = [asyncio.create_task(ask(pool, number)) for number in range(CALLS)]
    merging = asyncio.create_task(pool.merge("merge", "Merge nothing."))
    while not all(call.done() for call in calls):
        most = max(most, pool.up)
        nodes |= judge_nodes()
        busy |= {place for place in pool._workers.places if place.calls}
        await asyncio.sleep(0.2)
    answered = [call.result().summary for call in calls]
    seen |= {
        "most_up": most,
        "nodes_added": len(nodes),
        "nodes_that_judged": len({await place.worker.up.remote() for place in busy}),
        "errors": [summary.error for summary in answered if summary.error],
        "requests": sum(summary.requests for summary in answered),
        "merged": (await merging).summary.phase.value,
    }
    seen |= await with_a_silent_worker(pool)
    deadline = time.monotonic() + SHRINK_SECONDS
    while (pool.up > 1 or len(judge_nodes()) > 1) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    pool.close()
    return seen | {"up_at_last": pool.up, "nodes_at_last": len(judge_nodes())}


async def with_a_silent_worker(pool: JudgePool) -> dict[str, Any]:
    """As many calls as the workers hold, one of which is stopped under them: neither dead nor alive."""
    pools.SILENT_SECONDS, pools.LOOK_SECONDS = 1.5, 0.2
    place = pool._workers.places[0]
    process = await place.worker.__ray_call__.remote(_process_id)
    calls = [asyncio.create_task(ask(pool, CALLS + number)) for number in range(2 * pool.up)]
    await asyncio.sleep(LATENCY / 4)
    held = place.calls
    os.kill(process, signal.SIGSTOP)
    try:
        async with asyncio.timeout(SHRINK_SECONDS):
            answered = await asyncio.gather(*calls)
            up = pool.up
    finally:
        os.kill(process, signal.SIGCONT)
    return {"held_by_the_silent": held, "answered_elsewhere": sum(call.ok for call in answered), "up_meanwhile": up}


def _process_id(actor: Any) -> int:
    return os.getpid()


async def ask(pool: JudgePool, number: int) -> Judgement:
    """A rubric for a task that nobody else asks about."""
    text = f"Task {number}: like every song of my playlist number {number}."
    return await pool.stage1(f"step1/t{number}", f"t{number}", (Message(role="user", content=text),))


def main(folder: Path) -> None:
    """Prints one JSON object; ``folder`` takes the reply cache."""
    # One slot for three actors; but an autoscaler brings more.
    resources = connect(load_config("sandbox", ["environment.slots=1", "judge.workers=2"]))
    with JudgeServer(latency=LATENCY) as server:
        config = JudgeConfig(
            model=f"openai/{MODEL_NAME}",
            api_base=server.base_url,
            api_key_env="DRACO_TEST_KEY",
            cache=folder / "cache",
            workers=1,
            max_workers=MOST,
            concurrency_per_worker=2,
            idle_seconds=2.0,
        )
        seen = asyncio.run(grow_and_shrink(config))
    print(json.dumps({"judge_slots_at_first": resources["judge"], **seen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
