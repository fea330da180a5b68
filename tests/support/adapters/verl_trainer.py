"""verl's agent-loop workers, TransferQueue and trainer, as far as they run without a GPU: everything but the actor.

Two of verl's workers play two prompts with an agent loop whose tokens come from a script; the trainer's own step
computes advantages of the batch, which is shuffled; verl's policy loss is computed of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from tests.support.adapters import ASK, CannedOnce, emit, said

FLIGHTS = ("DL9", "UA1", "UA1", "XX0")
LENGTHS = (3, 2, 4, 2, 2)
"""Tokens of the messages of a run: three turns, and tool results between them."""
TEXTS: list[str] = [json.dumps(message) for flight in FLIGHTS for message in said(flight)]


def token_ids(session: int) -> list[int]:
    """A run's tokens; the first one of a message says which it is."""
    parts = [[100 + 5 * session + n] + [1] * (length - 1 + session % 2) for n, length in enumerate(LENGTHS)]
    return [token for part in parts for token in part]


def mask_of(session: int) -> list[int]:
    """1 where the policy sampled the token."""
    return [int(n % 2 == 0) for n, length in enumerate(LENGTHS) for _ in range(length + session % 2)]


def text_of(ids: Any, **_: Any) -> str:
    """The messages that tokens stand for."""
    return " ".join(TEXTS[each - 100] for each in ids if each >= 100)


def loop_class() -> type:
    """An agent loop of verl's whose tokens come from a script."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

    class ScriptedLoop(AgentLoopBase):
        async def run(self, sampling_params: Any, **kwargs: Any) -> Any:
            ids = token_ids(kwargs["session_id"])
            return AgentLoopOutput(
                prompt_ids=[7, 8],
                response_ids=ids,
                response_mask=mask_of(kwargs["session_id"]),
                response_logprobs=[-1.0] * len(ids),
                num_turns=3,
                metrics=AgentLoopMetrics(),
            )

    return ScriptedLoop


def worker_class() -> type:
    """verl's worker with step credit; the judge, the tokenizer's words and the agent loop are the test's."""
    from verl.experimental.agent_loop import agent_loop

    from draco_ray.adapters import verl as adapter

    class Worker(adapter.StepCreditWorker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._credit._judging._complete = CannedOnce(unscored="booked XX0")
            self.tokenizer.decode = text_of
            agent_loop._agent_loop_registry["scripted"] = {"_target_": "tests.support.adapters.verl_trainer.make_loop"}

    return Worker


def make_loop(**options: Any) -> Any:
    """Make the scripted agent loop as verl makes one."""
    return loop_class()(**options)


def settings(store: str) -> Any:
    """verl's own configuration, for a tiny model."""
    from hydra import compose, initialize_config_module

    from tests.support.tiny_model import build_tiny_model

    folder = build_tiny_model(Path(tempfile.mkdtemp()) / "model")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.rollout.agent.default_agent_loop=scripted",
                "actor_rollout_ref.rollout.agent.num_workers=2",
                "algorithm.adv_estimator=draco",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
                "+draco.model=canned",
                f"+draco.store={store}",
            ],
        )


def rows_of(data: Any, keys: list[str]) -> list[dict[str, Any]]:
    """Advantages of each turn, and what verl's policy loss passes on to each token's log-probability."""
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    advantages, mask = data["advantages"], data["response_mask"]
    log_probs = torch.full(mask.shape, -1.0, requires_grad=True)
    config = FSDPActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=4)
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=log_probs.detach(),
        log_prob=log_probs,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    pushed = (-gradient * mask.sum()).tolist()
    return [
        {"key": key, "mask": each_mask, "advantages": row, "pushed": push}
        for key, each_mask, row, push in zip(keys, mask.tolist(), advantages.tolist(), pushed, strict=True)
    ]


def main() -> None:
    """Play, compute advantages as the trainer does, and print them."""
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from draco_ray.adapters import verl as adapter

    config = settings(str(Path(tempfile.mkdtemp()) / "verdicts.sqlite"))
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=True)
    tq.init(config.transfer_queue)
    workers: list[Any] = [ray.remote(worker_class()).remote(config, None, None, None) for _ in range(2)]
    store = adapter.attach(config)
    for n, worker in enumerate(workers):
        prompt = TensorDict(
            {
                "uid": NonTensorStack(f"prompt_{n}"),
                "raw_prompt": NonTensorStack([{"role": "user", "content": f"{ASK} Passenger {n}."}]),
                "index": torch.tensor([n]),
            },
            batch_size=1,
        )
        prompt.set_non_tensor("global_steps", 1)
        ray.get(worker.generate_sequences.remote(prompt))
    import time

    for _ in range(600):
        tags = tq.kv_list("train").get("train", {})
        if sum(tag.get("status") in ("finished", "failure") for tag in tags.values()) == 2:
            break
        time.sleep(0.2)
    keys = sorted((key for key, tag in tags.items() if tag["status"] == "success"), key=lambda key: key[::-1])
    batch = KVBatchMeta(keys=keys, partition_id="train", tags=[tags[key] for key in keys])
    trainer = types.SimpleNamespace(config=config)
    trainer_base.PPOTrainer._compute_advantage(trainer, batch, {})
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages", "response_mask", "rm_scores"])
    data = data.to_padded_tensor()
    emit({"rows": rows_of(data, keys), "rewards": data["rm_scores"].sum(-1).tolist(), "counts": store.counts})
    sys.stdout.flush()
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
