"""Shared by the scripts for verl: scripted runs, and gradients of verl's policy loss for their advantages."""

from __future__ import annotations

import json
from typing import Any

from tests.support.adapters import booking_messages

FLIGHTS = ("DL9", "UA1", "UA1", "XX0")
LENGTHS = (3, 2, 4, 2, 2)
"""Tokens of the messages of a run: three turns, and tool results between them."""
TEXTS: list[str] = [json.dumps(message) for flight in FLIGHTS for message in booking_messages(flight)]


def token_ids(session: int) -> list[int]:
    """Tokens of a run; the first token of a message identifies the message."""
    parts = [[100 + 5 * session + n] + [1] * (length - 1 + session % 2) for n, length in enumerate(LENGTHS)]
    return [token for part in parts for token in part]


def mask_of(session: int) -> list[int]:
    """1 where the policy sampled the token."""
    return [int(n % 2 == 0) for n, length in enumerate(LENGTHS) for _ in range(length + session % 2)]


def text_of(ids: Any, **_: Any) -> str:
    """The messages of a token sequence."""
    return " ".join(TEXTS[each - 100] for each in ids if each >= 100)


def rows_of(data: Any, keys: list[str]) -> list[dict[str, Any]]:
    """Advantages of each turn, and the gradient of verl's policy loss for each token's log-probability."""
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
