"""Drives the real judge pool on the cluster of RAY_ADDRESS and prints what it saw, for `test_judge_autoscaling`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from draco_ray.config.load import load_config
from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.example import RUBRIC
from draco_ray.judging.judge import CallContext, Judgement
from draco_ray.judging.phases import Stage1
from draco_ray.judging.pool import JudgePool, judge_starter
from draco_ray.lab.rubric_authoring.reduction import Reduction
from draco_ray.records import Message
from draco_ray.sandbox.judge_server import MODEL_NAME, JudgeServer
from draco_ray.training.cluster import connect_ray
from tests.support.autoscaling import PATIENCE_SECONDS, added_nodes, poll_until

ASKERS = 20
"""Concurrent calls: more than all workers together take."""
LATENCY = 2.0
"""Seconds per reply."""
MOST = 4
IDLE_SECONDS = 2.0
"""Idle time after which a worker is removed, in the part that tests this."""


async def grow_and_shrink(config: JudgeConfig) -> dict[str, Any]:
    """Make many calls at once, then stop a worker, then make no calls."""
    pool = JudgePool(judge_starter(config, None, None, "autoscaling"), config)
    pool.open()
    await pool.ready()
    seen: dict[str, Any] = {"up_at_first": pool.workers.up, **await with_more_calls_than_room(pool)}
    seen |= await with_a_silent_worker(pool)
    pool.workers._idle_seconds = IDLE_SECONDS
    await poll_until(lambda: pool.workers.up == 1 and len(added_nodes()) == 1)
    pool.close()
    return seen | {"up_at_last": pool.workers.up, "nodes_at_last": len(added_nodes())}


async def with_more_calls_than_room(pool: JudgePool) -> dict[str, Any]:
    """Make more calls than fit, until the maximum number of workers and nodes is there."""
    numbers, answered, enough = itertools.count(), list[Judgement](), asyncio.Event()

    async def keep_asking() -> None:
        while True:
            answered.append(await ask(pool, next(numbers)))
            if enough.is_set():
                return

    asking = [asyncio.create_task(keep_asking()) for _ in range(ASKERS)]
    merging = asyncio.create_task(merge(pool))
    places = pool.workers.pooled
    await poll_until(lambda: pool.workers.up == MOST and all(place.calls for place in places))
    most, nodes, busy = pool.workers.up, added_nodes(), [place for place in places if place.calls]
    enough.set()
    await asyncio.gather(*asking)
    summaries = [judgement.summary for judgement in answered]
    judged, archived = await asyncio.gather(answered[0].judged, answered[0].archived)
    return {
        "calls_beside_a_value": len(judged.calls),
        "calls_archived": len(archived.calls),
        "same_value": judged.value == archived.value is not None,
        "most_up": most,
        "nodes_added": len(nodes),
        "nodes_that_judged": len({await place.worker.up.remote() for place in busy}),
        "errors": [summary.error for summary in summaries if summary.error],
        "calls": len(summaries),
        "requests": sum(summary.requests for summary in summaries),
        "merged": (await merging).summary.phase,
    }


async def with_a_silent_worker(pool: JudgePool) -> dict[str, Any]:
    """Make as many calls as the workers hold, and suspend one of the workers: it neither answers nor dies."""
    pool.timeout_seconds, pool.ping_seconds = 10.0, 0.2
    place = pool.workers.pooled[0]
    process = await place.worker.__ray_call__.remote(_process_id)
    calls = [asyncio.create_task(ask(pool, -1 - number)) for number in range(2 * MOST)]
    await poll_until(lambda: place.calls == 2)
    held = place.calls
    os.kill(process, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            answered = await asyncio.gather(*calls)
        await poll_until(lambda: pool.workers.up == MOST)
    finally:
        # The worker is gone by now, unless something is wrong.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    return {
        "held_by_the_silent": held,
        "answered_elsewhere": sum(call.ok for call in answered),
        "up_again": pool.workers.up,
        "in_a_new_process": await place.worker.__ray_call__.remote(_process_id) != process,
    }


def _process_id(actor: Any) -> int:
    return os.getpid()


async def merge(pool: JudgePool) -> Judgement:
    """Ask a union with a prompt of this test."""
    context = CallContext(group="merge", task_id="merge")
    return await pool.ask(
        Reduction, context, messages=(), candidates=list(RUBRIC), trajectories=(), text="Merge nothing."
    )


async def ask(pool: JudgePool, number: int) -> Judgement:
    """Ask for the rubric of a task of its own."""
    text = f"Task {number}: like every song of my playlist number {number}."
    context = CallContext(group=f"step1/t{number}", task_id=f"t{number}")
    return await pool.ask(Stage1, context, messages=(Message(role="user", content=text),))


def main(folder: Path) -> None:
    """Prints one JSON object; ``folder`` takes the reply cache."""
    # One slot is too little for three actors, but the autoscaler adds more.
    resources = connect_ray(load_config("sandbox", ["environment.slots=1", "judge.workers=2"]))
    with JudgeServer(latency=LATENCY) as server:
        config = JudgeConfig(
            model=f"openai/{MODEL_NAME}",
            api_base=server.base_url,
            api_key_env="DRACO_TEST_KEY",
            cache=folder / "cache",
            workers=1,
            max_workers=MOST,
            concurrency_per_worker=2,
            # No worker may go before the calls end, however long a busy machine takes between two calls.
            idle_seconds=600.0,
        )
        seen = asyncio.run(grow_and_shrink(config))
    print(json.dumps({"judge_slots_at_first": resources["judge"], **seen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
