"""Step credit in Tinker's training data, for any server that speaks Tinker's API.

    data = trajectory_to_data(trajectory, advantage)          # of the Tinker cookbook
    data = step_data(data, verdict)
    training_client.forward_backward(data, loss_fn="importance_sampling")

`datum` builds a datum without the cookbook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.adapters.per_token_advantages import sampled_spans, spread_rows
from draco_ray.adapters.verdicts import MissingVerdict, StepVerdict


def datum(
    prompt_ids: Sequence[int], response_ids: Sequence[int], mask: ArrayLike, logprobs: ArrayLike, advantages: ArrayLike
) -> Any:
    """A ``tinker.Datum`` with an advantage for each token, for the losses importance_sampling, ppo and cispo.

    Args:
        prompt_ids: at least one token.
        response_ids: (T,), the environment's answers included.
        mask: (T,) 1 where the policy sampled the token.
        logprobs: (T,) of the sampled tokens; values of other tokens are ignored.
        advantages: (T,), as returned by `VerdictStore.spread`.
    """
    import tinker

    tokens = [*prompt_ids, *response_ids]
    before = np.zeros(len(prompt_ids) - 1, dtype=np.float32)
    sampled = np.asarray(mask) != 0
    columns = {
        name: np.where(sampled, np.asarray(each, np.float32), 0)
        for name, each in (("logprobs", logprobs), ("advantages", advantages))
    }
    inputs: dict[str, Any] = {name: np.concatenate([before, each]).astype(np.float32) for name, each in columns.items()}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], dtype=np.int64), **inputs},
    )


def step_data(data: Sequence[Any], verdict: StepVerdict) -> list[Any]:
    """Spread the advantage of one trajectory over its steps.

    Args:
        data: result of ``tinker_cookbook.rl.data_processing.trajectory_to_data``: one datum, or several if the history
            was rewritten, with ``mask`` and the same advantage on all sampled tokens.
        verdict: verdict of this trajectory. Without citations, or if judging failed, the data are not changed.

    Returns: new data. Raises: MissingVerdict: the verdict is on another number of turns.
    """
    masks = [each.loss_fn_inputs["mask"].to_numpy() for each in data]
    turns = sum(len(sampled_spans(mask)) for mask in masks)
    if verdict.reward is not None and turns != len(verdict.acted):
        raise MissingVerdict(
            f"the data have {turns} sampled turns, {len(verdict.acted)} were judged; expected this trajectory's verdict"
        )
    values = np.concatenate(
        [each.loss_fn_inputs["advantages"].to_numpy()[mask != 0] for each, mask in zip(data, masks, strict=True)]
    )
    if not len(values):
        return list(data)
    spread = spread_rows(float(values[0]), verdict.quality, verdict.acted, masks)
    return [
        dataclasses.replace(each, loss_fn_inputs={**each.loss_fn_inputs, "advantages": row})
        for each, row in zip(data, spread, strict=True)
    ]
