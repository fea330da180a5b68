"""slime's advantages and policy loss of two groups that two training processes share; nothing is trained.

DRACO_SLIME is a checkout. Stand-ins: `megatron.core.mpu` says that there is one process a model, the tokenizer is a
table, and the model's log-probabilities are given.
"""

from __future__ import annotations

import os
import sys
import tempfile
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, os.environ["DRACO_SLIME"])
MPU = SimpleNamespace(
    is_pipeline_last_stage=lambda: True,
    get_context_parallel_world_size=lambda: 1,
    get_context_parallel_rank=lambda: 0,
)
for name in ("megatron", "megatron.core"):
    sys.modules[name] = ModuleType(name)
sys.modules["megatron.core"].mpu = MPU  # type: ignore[attr-defined]

from tests.support.adapters import ASK, PartlyFailingCompleter, emit, missing_verdict_error  # noqa: E402
from tests.support.adapters.verl_runs import FLIGHTS, mask_of, text_of, token_ids  # noqa: E402


def samples() -> list[Any]:
    """Two groups, in any order."""
    from slime.utils.types import Sample

    return [
        Sample(
            group_index=group,
            index=number,
            rollout_id=number,
            prompt=f"{ASK}{group}",
            tokens=[7, 8 + group, *token_ids(session)],
            response_length=len(token_ids(session)),
            loss_mask=mask_of(session),
            reward=-9.0,
        )
        for number, (group, session) in enumerate(((1, 3), (0, 0), (1, 1), (0, 2), (0, 3), (1, 0), (0, 1), (1, 2)))
    ]


def arguments(store: str) -> Any:
    """The arguments of slime that its functions read."""
    return SimpleNamespace(
        draco={"model": "canned", "store": store},
        hf_checkpoint="table",
        advantage_estimator="grpo",
        calculate_per_token_loss=False,
        custom_advantage_function_path="draco_ray.adapters.slime.advantages",
        custom_reward_post_process_path="draco_ray.adapters.slime.rewards",
        custom_pg_loss_reducer_function_path=None,
        dynamic_sampling_filter_path=None,
        entropy_coef=0.0,
        eps_clip=0.2,
        eps_clip_high=0.2,
        eps_clip_c=None,
        get_mismatch_metrics=False,
        grpo_std_normalization=True,
        kl_coef=0.0,
        normalize_advantages=False,
        rollout_top_p=1.0,
        use_kl_loss=False,
        use_opd=False,
        use_opsm=False,
        use_rollout_logprobs=False,
        use_tis=False,
    )


def loss_gradient(args: Any, rows: list[Any], advantages: list[float]) -> list[Any]:
    """Gradient of slime's policy loss with respect to each token's log-probability, in one training process."""
    import torch
    from slime.backends.megatron_utils import loss
    from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

    masks = [torch.tensor([0 if row.remove_sample else each for each in row.loss_mask]) for row in rows]
    lengths = [row.response_length for row in rows]
    data: dict[str, Any] = {
        "tokens": [torch.tensor(row.tokens) for row in rows],
        "unconcat_tokens": None,
        "rewards": advantages,
        "loss_masks": masks,
        "response_lengths": lengths,
        "total_lengths": [len(row.tokens) for row in rows],
        "log_probs": [torch.full((length,), -1.0) for length in lengths],
    }
    loss.compute_advantages_and_returns(args, data)
    log_probs = [each.clone().requires_grad_() for each in data["log_probs"]]
    loss.get_log_probs_and_entropy = lambda *_, **__: (
        None,
        {"log_probs": log_probs, "entropy": [torch.zeros_like(each) for each in log_probs]},
    )
    mean = get_sum_of_sample_mean(data["total_lengths"], lengths, masks)
    value, _ = loss.policy_loss_function(args, data, torch.zeros(1), mean)
    gradients = torch.autograd.grad(value, log_probs)
    return [(-each * mask.sum()).tolist() for each, mask in zip(gradients, masks, strict=True)]


def refusal_of_settings(args: Any, made: list[Any]) -> str:
    """The error message for arguments with which credit would be lost."""
    from draco_ray.adapters import slime as adapter
    from draco_ray.errors import ConfigError

    try:
        adapter.rewards(args, made)
    except ConfigError as error:
        return str(error)
    raise AssertionError("not refused")


def main() -> None:
    """Print rewards and the loss's gradients, then the error for a stale sample."""
    from slime.utils import processing_utils
    from slime.utils.misc import load_function

    from draco_ray.adapters import slime as adapter
    from draco_ray.adapters.credit import CreditJudge

    store = f"{tempfile.mkdtemp()}/verdicts.sqlite"
    processing_utils.load_tokenizer = lambda *_, **__: SimpleNamespace(decode=text_of)
    judge = CreditJudge(**arguments(store).draco, complete=PartlyFailingCompleter(unscored="booked XX0"))
    setattr(adapter, "_judge", lambda settings: judge)  # noqa: B010
    args = arguments(store)
    made = samples()
    rewards, advantages = load_function(args.custom_reward_post_process_path)(args, made)
    found = []
    for part in (slice(0, None, 2), slice(1, None, 2)):
        for row, push in zip(made[part], loss_gradient(args, made[part], advantages[part]), strict=True):
            mask = [0 if row.remove_sample else each for each in row.loss_mask]
            session = (row.tokens[2] - 100) // 5
            found.append({"session": session, "mask": mask, "pushed": push})
    made[1].tokens[2] += 50
    stale = missing_verdict_error(loss_gradient, args, made[1:2], advantages[1:2])
    order = [FLIGHTS[(row.tokens[2] - 100) % 50 // 5] for row in made]
    args.dynamic_sampling_filter_path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    refused = [refusal_of_settings(args, made)]
    args.custom_advantage_function_path = None
    refused.append(refusal_of_settings(args, made))
    emit({"refused": refused, "rewards": rewards, "flights": order, "rows": found, "stale": stale})


if __name__ == "__main__":
    main()
