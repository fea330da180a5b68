"""verl's advantages and policy loss of a real DataProto batch; the actor's step, which needs a GPU, is not run.

Two of verl's workers of agent loops, made without Ray, judge two groups, each of which is split over both.
"""

from __future__ import annotations

import asyncio
import tempfile
import types
from pathlib import Path
from typing import Any

from tests.support.adapters import ASK, CannedOnce, emit
from tests.support.adapters.verl_trainer import FLIGHTS, mask_of, rows_of, text_of, token_ids


def worker(config: Any) -> Any:
    """A worker as far as judging needs one."""
    from draco_ray.adapters import verl as adapter

    made = object.__new__(adapter.StepCreditWorker)
    made.config, made.tokenizer, made._timeout = config, types.SimpleNamespace(decode=text_of), 60.0
    made._credit = adapter.CreditJudge("canned", store=config.draco.store, complete=CannedOnce(unscored="booked XX0"))
    made._sizes = {"prompt_0": 4, "prompt_1": 4}
    return made


async def play(workers: list[Any]) -> list[float]:
    """Judge both groups; returns the rewards that verl is given."""
    outputs, judging = [], []
    for uid in ("prompt_0", "prompt_1"):
        for session in range(len(FLIGHTS)):
            output = types.SimpleNamespace(
                response_ids=token_ids(session), response_mask=mask_of(session), reward_score=None, extra_fields={}
            )
            kwargs = {"uid": uid, "session_id": session, "raw_prompt": [{"role": "user", "content": ASK + uid}]}
            judging.append(workers[session % 2]._judge([output], kwargs))
            outputs.append(output)
    await asyncio.gather(*judging)
    return [output.reward_score for output in outputs]


def main() -> None:
    """Print advantages and what the loss makes of them."""
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.v1 import trainer_base

    from draco_ray.adapters import verl as adapter

    config = OmegaConf.create({"draco": {"store": str(Path(tempfile.mkdtemp()) / "verdicts.sqlite")}})
    rewards = asyncio.run(play([worker(config), worker(config)]))
    store = adapter.attach(config)
    rows = [(uid, session) for uid in range(2) for session in range(len(FLIGHTS))]
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    masks = [mask_of(rows[n][1]) for n in order]
    width = max(map(len, masks))
    mask = torch.tensor([row + [0] * (width - len(row)) for row in masks])
    scores = torch.zeros(mask.shape)
    scores[:, -1] = torch.tensor([rewards[n] for n in order])
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
