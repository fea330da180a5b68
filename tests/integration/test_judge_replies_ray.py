"""The replies' actor in a real Ray: another process stores and reads, and the actor is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from draco_ray.config.load import load_config
from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import StoreError
from draco_ray.judging.actors import NamedActor, start_replies
from draco_ray.judging.pool import PolicyJudge, judge_starter
from draco_ray.judging.reply_cache import ReplyCache, read_cost_ledger
from draco_ray.rollout.worker import rollout_starter
from draco_ray.training.cluster import start_ray

pytestmark = pytest.mark.slow
NOTHING = "tests.support.rollout_autoscaling"


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    start_ray(num_cpus=1, resources={"judge": 1}, include_dashboard=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()


async def test_replies_and_their_book_outlive_the_actors_process(own_ray: None, tmp_path: Path) -> None:
    started = start_replies(JudgeConfig(cache=tmp_path), "kept")
    assert started is not None
    handle, client = started
    await client.begin("one", 0.5)
    await client.begin("two", 0.25)
    await client.settle("one", 0.4, ("key", {"text": "paid for"}))
    await client.claim("key", "a call")
    await client.release("key", "a call")
    await client.claim("key", "another")
    os.kill(await handle.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
    assert await NamedActor("JudgeReplies@kept").get("key") == {"text": "paid for"}
    await client.put("other", {"text": "also"})
    await client.forget("other")
    assert await client.get("other") is None
    book = read_cost_ledger(tmp_path)
    assert (book.settled, book.under_way) == ({"one": 0.4}, {"two": 0.25})
    assert await ReplyCache(tmp_path).get("key") == {"text": "paid for"}


def test_a_folder_that_cannot_be_used_is_one_line(own_ray: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StoreError, match="judge replies cannot be stored in .*file/replies") as refusal:
        start_replies(JudgeConfig(cache=tmp_path / "file" / "replies"), "refused")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["judge worker", "rollout worker"])
async def test_workers_with_a_large_tokenizer_restart(own_ray: None, tmp_path: Path, kind: str) -> None:
    start: Any
    tokenizer = os.urandom(1_000_000)
    if kind == "judge worker":
        judge = JudgeConfig(model="openai/none", api_base="http://127.0.0.1:9/v1", cache=tmp_path)
        start = judge_starter(judge, PolicyJudge(samplers=(), tokenizer=tokenizer, name="none"), None, "restarted")
    else:
        config = load_config(
            "sandbox",
            [
                f"environment.use={NOTHING}:Nothing",
                f"agent.use={NOTHING}:Waits",
                "environment.slots=1",
                "environment.cpus_per_worker=0",
            ],
        )
        start = rollout_starter(
            lambda agent: [tokenizer],  # type: ignore[list-item]
            agent=config.agent,
            environment=config.environment,
            data=config.data,
            ground_truth=False,
            run_name="restarted",
        )
    worker = start(0)
    await worker.up.remote()
    # Ray frees what nobody holds within a second.
    await asyncio.sleep(3)
    killed = await worker.__ray_call__.remote(lambda self: os.getpid())
    os.kill(killed, signal.SIGKILL)
    while True:
        try:
            await worker.up.remote()
        except ActorUnavailableError:
            continue
        break
    assert await worker.__ray_call__.remote(lambda self: os.getpid()) != killed
    ray.kill(worker)
