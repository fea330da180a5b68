"""verl's own computation of advantages, with an estimator that spreads our rewards over steps."""

from __future__ import annotations

import asyncio
from typing import Any

from draco_ray.adapters.conversations import judge_conversations
from draco_ray.adapters.tokens import advantage_matrix
from tests.support.adapters import ASK, Canned, emit, said

# Three turns of 3, 4 and 2 tokens, tool output between them; the second response is padded by one.
MASK = [[1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0]]


def main() -> None:
    """Print the advantages that verl's batch holds afterwards."""
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import register_adv_est
    from verl.trainer.ppo.ray_trainer import compute_advantage

    asked = [{"role": "user", "content": ASK}]
    records = [{"task_id": "jfk-sfo", "messages": [*asked, *said(flight)]} for flight in ("DL9", "UA1")]
    answers = asyncio.run(judge_conversations(records, "canned", complete=Canned()))
    judged = [each for each in answers if each is not None]

    def draco(token_level_rewards: Any, response_mask: Any, **_: Any) -> tuple[Any, Any]:
        advantages = [each.trace.advantage or 0.0 for each in judged]
        qualities, acted = [each.quality for each in judged], [each.acted for each in judged]
        found = torch.as_tensor(advantage_matrix(advantages, qualities, acted, response_mask.cpu().numpy()))
        return found, found

    register_adv_est("draco")(draco)
    mask = torch.tensor(MASK)
    batch = DataProto.from_dict(
        tensors={"token_level_rewards": torch.zeros(mask.shape), "response_mask": mask},
        non_tensors={"uid": np.array(["jfk-sfo"] * 2, dtype=object)},
    )
    after = compute_advantage(batch, adv_estimator="draco")
    emit({"advantages": after.batch["advantages"].tolist(), "of_sequences": [each.trace.advantage for each in judged]})


if __name__ == "__main__":
    main()
