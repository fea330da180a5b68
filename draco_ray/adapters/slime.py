"""Step credit in slime through two of its function paths; a YAML file configures the judge.

    --custom-reward-post-process-path draco_ray.adapters.slime.rewards
    --custom-advantage-function-path draco_ray.adapters.slime.advantages
    --custom-config-path draco.yaml       # draco: {model: openai/gpt-5.4, budget: 50, store: /data/run/verdicts.sqlite}

The process that has all samples of a step judges them and computes GRPO's advantage A_i from the judge's reward
(`--disable-grpo-std-normalization` is respected). Each training process then spreads the A_i of its samples over the
tokens of their steps. A sample that could not be judged is removed from the loss and counts in no baseline.
All processes need access to the store, so they run on one machine.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from draco_ray.adapters.credit import CreditJudge, conversation_of_tokens
from draco_ray.adapters.verdicts import TrajectoryKey, VerdictStore, digest
from draco_ray.algorithm.equations import group_advantages_G
from draco_ray.errors import ConfigError


def rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Judge all samples of a step.

    Args:
        args: slime's arguments, with ``draco``: the arguments of `CreditJudge`.
        samples: ``slime.utils.types.Sample``; those that could not be judged are marked as removed.

    Returns: the reward and A_i of each sample; 0 if it could not be judged.

    Raises: as `draco_ray.judge`; ConfigError: settings that lose credit, or a rollout split into several samples.
    """
    if args.custom_advantage_function_path is None:
        raise ConfigError(
            "slime: without --custom-advantage-function-path credit would be uniform; expected "
            "draco_ray.adapters.slime.advantages"
        )
    if "check_reward_nonzero_std" in (args.dynamic_sampling_filter_path or ""):
        raise ConfigError(
            f"slime: --dynamic-sampling-filter-path {args.dynamic_sampling_filter_path} drops groups by the "
            "environment's rewards, before they are judged; leave it out"
        )
    judge, words = _judge(json.dumps(_settings(args), sort_keys=True)), _decoder(args.hf_checkpoint)
    groups, keys, records, tokens = [], [], [], []
    for sample in samples:
        first = len(sample.tokens) - sample.response_length
        asked, ids = list(sample.tokens)[:first], list(sample.tokens)[first:]
        messages, counts = conversation_of_tokens(sample.prompt, ids, sample.loss_mask or [1] * len(ids), words, asked)
        groups.append(str(sample.group_index))
        keys.append(_key(sample.tokens))
        records.append({"task_id": groups[-1], "messages": messages})
        tokens.append(counts)
    parts = Counter(each.rollout_id for each in samples if each.rollout_id is not None)
    if parts and max(parts.values()) > 1:
        raise ConfigError(
            f"slime: rollout {parts.most_common(1)[0][0]} is split into several samples whose turns are unknown, so "
            "it gets no step credit; expected one sample per rollout"
        )
    found = np.array([v.reward for v in judge.judge_sync(keys, records, tokens)], dtype=float)
    advantages_B = np.zeros(len(found))
    for group in set(groups):
        rows = [n for n, name in enumerate(groups) if name == group and np.isfinite(found[n])]
        if args.grpo_std_normalization:
            advantages_B[rows] = group_advantages_G(found[rows])
        elif rows:
            advantages_B[rows] = found[rows] - found[rows].mean()
    for sample, reward in zip(samples, found, strict=True):
        sample.remove_sample = bool(sample.remove_sample or np.isnan(reward))
    return np.nan_to_num(found).tolist(), advantages_B.tolist()


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Spread A_i (``rewards``) over the steps of one process's samples, into ``advantages`` and ``returns``.

    Args:
        args: slime's arguments, with ``draco``.
        rollout_data: slime's batch, with tensors of each sample.

    Raises: MissingVerdict: see `VerdictStore.spread`.
    """
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    settings = _settings(args)
    store = VerdictStore(settings["store"], missing=settings.get("missing", "error"))
    columns = (rollout_data[name] for name in ("tokens", "rewards", "loss_masks", "total_lengths", "response_lengths"))
    found = []
    for kl, (ids, advantage, mask, *lengths) in zip(rollout_data["kl"], zip(*columns, strict=True), strict=True):
        row = store.spread([_key(ids)], [advantage], mask.cpu().numpy()[None])[0]
        # With context parallelism this process has only a part of the row.
        found.append(slice_log_prob_with_cp(kl.new_tensor(row), *lengths))
    rollout_data["advantages"], rollout_data["returns"] = found, [each.clone() for each in found]


def _settings(args: Any) -> dict[str, Any]:
    found = getattr(args, "draco", None)
    if not isinstance(found, dict) or "store" not in found:
        raise ConfigError(
            "slime: draco.store is missing; expected --custom-config-path with a file of, for example, "
            "draco: {model: openai/gpt-5.4, store: /data/run/verdicts.sqlite}"
        )
    return found


@functools.cache
def _judge(settings: str) -> CreditJudge:
    """One judge for all steps of this process, so that its budget covers all of them."""
    return CreditJudge(**json.loads(settings))


@functools.cache
def _decoder(checkpoint: str) -> Any:
    from slime.utils.processing_utils import load_tokenizer

    return functools.partial(load_tokenizer(checkpoint, trust_remote_code=True).decode, skip_special_tokens=True)


def _key(ids: Any) -> TrajectoryKey:
    return TrajectoryKey("slime", "", digest([int(each) for each in ids]))
