"""verl's advantages and policy loss of a real DataProto batch; the actor's step, which needs a GPU, is not run.

Two of verl's workers of agent loops judge a group each. They are made without Ray; a dictionary stands in for
TransferQueue, and a script for the agent loop.
"""

from __future__ import annotations

import asyncio
import tempfile
import types
from pathlib import Path
from typing import Any

from tests.support.adapters import ASK, PartlyFailingCompleter, emit
from tests.support.adapters.verl_runs import FLIGHTS, mask_of, rows_of, text_of, token_ids


class Queue:
    """Stands in for TransferQueue."""

    def __init__(self) -> None:
        self.rewards: dict[str, float] = {}
        self.status: dict[str, str] = {}

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, str]) -> None:
        """Record a prompt's status."""
        self.status[f"{partition_id} {key}"] = tag["status"]

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: Any, partition_id: str) -> None:
        """Record rewards."""
        for key, row in zip(keys, fields, strict=True):
            self.rewards[f"{partition_id} {key}"] = float(row["rm_scores"].sum()) if "rm_scores" in row else -9.0


def output_of(session: int) -> Any:
    """What an agent loop of verl's returns."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    ids, mask = token_ids(session), mask_of(session)
    return AgentLoopOutput(prompt_ids=[7], response_ids=ids, response_mask=mask, metrics=AgentLoopMetrics())


def worker(config: Any) -> Any:
    """The parts of a worker that judging needs."""
    from draco_ray.adapters import verl as adapter

    made = object.__new__(adapter.StepCreditWorker)
    made.config, made.tokenizer = config, types.SimpleNamespace(decode=text_of)
    made._credit = adapter.CreditJudge(
        "canned", store=config.draco.store, complete=PartlyFailingCompleter(unscored="booked XX0")
    )
    made._groups = {}
    made.processor = made.reward_loop_worker_handles = None
    made.mm_processor_kwargs, made.distillation_enabled = {}, False

    async def run_agent_loop(_: Any, trajectory: Any, session_id: int, trace: bool, **prompt: Any) -> None:
        await made._agent_loop_postprocess(
            output_of(session_id), trajectory["validate"], session_id=session_id, **prompt
        )

    setattr(made, "_run_agent_loop", run_agent_loop)  # noqa: B010
    return made


def prompt_of(uid: str) -> dict[str, Any]:
    """A prompt as verl's data set has it."""
    return {"uid": uid, "raw_prompt": [{"role": "user", "content": ASK + uid}], "global_steps": 1}


async def play(workers: list[Any]) -> dict[str, float]:
    """Judge both groups, and play one more prompt for validation; returns the rewards that verl gets."""
    from verl.trainer.ppo.v1 import agent_loop_tq

    agent_loop_tq.tq = queue = Queue()
    numbered = (("prompt_0", 0), ("prompt_1", 1), ("unseen", 1))
    await asyncio.gather(
        *(workers[n]._run_prompt(prompt_of(uid), {}, {"validate": uid == "unseen"}) for uid, n in numbered)
    )
    expected = {"train prompt_0": "finished", "train prompt_1": "finished", "val unseen": "finished"}
    assert queue.status == expected, queue.status
    return queue.rewards


def main() -> None:
    """Print the advantages and the resulting gradients of the loss."""
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.v1 import trainer_base

    from draco_ray.adapters import verl as adapter

    config = OmegaConf.create(
        {
            "draco": {"store": str(Path(tempfile.mkdtemp()) / "verdicts.sqlite")},
            "actor_rollout_ref": {"rollout": {"n": 4, "val_kwargs": {"n": 1}}},
        }
    )
    rewards = asyncio.run(play([worker(config), worker(config)]))
    store = adapter.attach_verdict_store(config)
    rows = [(uid, session) for uid in range(2) for session in range(len(FLIGHTS))]
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    masks = [mask_of(rows[n][1]) for n in order]
    width = max(map(len, masks))
    mask = torch.tensor([row + [0] * (width - len(row)) for row in masks])
    scores = torch.zeros(mask.shape)
    scores[:, -1] = torch.tensor([rewards[f"train prompt_{rows[n][0]}_{rows[n][1]}_0"] for n in order])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": mask},
        non_tensors={"uid": [f"prompt_{rows[n][0]}" for n in order]},
    )
    keys = [f"prompt_{rows[n][0]}_{rows[n][1]}_0" for n in order]
    # As verl's PPOTrainer._compute_advantage calls it.
    data = trainer_base.compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator="draco", num_repeat=4, norm_adv_by_std_in_grpo=True, config=config
    )
    found = {"rows": rows_of(data.batch, keys), "rewards": rewards, "counts": store.counts}
    for row in data.batch["response_mask"][:1]:
        row[: width // 2] = 0
    try:
        adapter.compute_advantage(trainer_base.compute_advantage_for_multi_trajectories.args[0], data, keys, "draco")
    except adapter.MissingVerdict as error:
        found["stale"] = str(error)
    emit(found)


if __name__ == "__main__":
    main()
