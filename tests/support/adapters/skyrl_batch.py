"""SkyRL's trainer from a generator's output to its policy loss, on a real batch; no actor, which needs a GPU."""

from __future__ import annotations

import json
import typing
from itertools import chain
from typing import Any

import typing_extensions

# SkyRL 0.3.0 has TypedDicts that pydantic 2.14 refuses on Python 3.11.
typing.TypedDict = typing_extensions.TypedDict

from tests.support.adapters import ASK, PartlyFailingCompleter, booking_messages, emit, missing_verdict_error  # noqa: E402

FLIGHTS = ("DL9", "UA1", "UA1", "XX0")
LENGTHS = (3, 2, 4, 2, 2)
TEXTS = [json.dumps(message) for flight in FLIGHTS for message in booking_messages(flight)]


class StubTokenizer:
    """A tokenizer in which the first token of a message identifies the message."""

    pad_token_id = 0
    padding_side = "right"

    def decode(self, ids: Any, **_: Any) -> str:
        return ASK if 7 in ids else " ".join(TEXTS[each - 100] for each in ids if each >= 100)


def tokens(run: int) -> list[list[int]]:
    """Tokens of each message of a run."""
    return [[100 + 5 * run + n] + [1] * (length - 1 + run % 2) for n, length in enumerate(LENGTHS)]


def output(step_wise: bool) -> tuple[dict[str, Any], list[str]]:
    """Three groups whose trajectories come in any order, whole or in a row for each turn."""
    from skyrl.train.generators.base import TrajectoryID

    names = ("prompt_token_ids", "response_ids", "loss_masks", "is_last_step", "trajectory_ids")
    found: dict[str, Any] = {name: [] for name in names}
    uids = []
    # In the last group one of four runs can be judged.
    runs = ((3, 1), (0, 1), (2, 1), (1, 1), (2, 0), (0, 0), (3, 0), (1, 0), (3, 2), (1, 2), (3, 2), (3, 2))
    for number, (run, prompt) in enumerate(runs):
        parts, start = tokens(run), [7, 8 + prompt]
        if step_wise:
            rows = [([*start, *chain(*parts[:n])], parts[n], [1] * len(parts[n])) for n in (0, 2, 4)]
        else:
            rows = [(start, [*chain(*parts)], [int(n % 2 == 0) for n, part in enumerate(parts) for _ in part])]
        for n, (before, response, mask) in enumerate(rows):
            found["prompt_token_ids"].append(before)
            found["response_ids"].append(response)
            found["loss_masks"].append(mask)
            found["is_last_step"].append(n == len(rows) - 1)
            found["trajectory_ids"].append(TrajectoryID(f"prompt_{prompt}", number))
            uids.append(f"prompt_{prompt}")
    if not step_wise:
        found["is_last_step"] = None
    rows_of = len(uids)
    return {**found, "rewards": [0.0] * rows_of, "stop_reasons": ["stop"] * rows_of, "rollout_logprobs": None}, uids


def refused() -> list[str]:
    """Error messages for settings with which credit would be lost."""
    from skyrl.train.config import SkyRLTrainConfig

    from draco_ray.adapters.skyrl import SkyRLCredit
    from draco_ray.errors import ConfigError

    class Host:
        postprocess_generator_output = compute_advantages_and_returns = None

        def __init__(self, cfg: Any) -> None:
            self.cfg = cfg

    said = []
    for estimator, sampling in (("gae", None), ("grpo", "filter")):
        cfg = SkyRLTrainConfig()
        cfg.trainer.algorithm.advantage_estimator = estimator
        cfg.trainer.algorithm.dynamic_sampling.type = sampling
        try:
            SkyRLCredit("canned", complete=PartlyFailingCompleter("")).trainer(Host)(cfg)
        except ConfigError as error:
            said.append(str(error))
    return said


def main() -> None:
    """Print for each form the gradients of SkyRL's policy loss for each row's log-probabilities."""
    import torch
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer

    from draco_ray.adapters.skyrl import SkyRLCredit

    found = []
    for step_wise, merged in ((False, False), (True, False), (True, True)):
        credit = SkyRLCredit("canned", complete=PartlyFailingCompleter(unscored="booked XX0"))
        trainer: Any = object.__new__(credit.trainer(RayPPOTrainer))
        trainer.cfg, trainer.tokenizer, trainer.all_metrics = SkyRLTrainConfig(), StubTokenizer(), {}
        trainer.cfg.generator.step_wise_trajectories = step_wise
        trainer.cfg.generator.merge_stepwise_output = merged
        trainer.cfg.generator.n_samples_per_prompt = 4
        trainer.cfg.trainer.train_batch_size = trainer.cfg.trainer.policy_mini_batch_size = 3
        trainer.cfg.trainer.critic.model.path = None
        trainer.dispatch = type("Dispatch", (), {"get_lcm_dp_size": lambda self: 1})()
        generated, uids = trainer.postprocess_generator_output(*output(step_wise))
        batch = trainer.convert_to_training_input(generated, uids)
        batch["values"] = None  # As a run without a critic has it.
        batch = trainer.compute_advantages_and_returns(batch)
        mask = batch["loss_mask"].float()
        log_probs = torch.full(mask.shape, -1.0, requires_grad=True)
        loss, _ = PolicyLossRegistry.get("regular")(
            log_probs, log_probs.detach(), batch["advantages"], config=trainer.cfg.trainer.algorithm, loss_mask=mask
        )
        (gradient,) = torch.autograd.grad(loss, log_probs)
        scale = float((-gradient / batch["advantages"])[(mask * batch["advantages"]) != 0].mean())
        found.append(
            {
                "uids": uids,
                "ids": [row[row > 0].tolist() for row in batch["sequences"][:, -mask.shape[1] :]],
                "mask": mask.tolist(),
                "pushed": (-gradient / scale).tolist(),
                "counts": credit.store.counts.copy(),
            }
        )
        # Sampled tokens that were not judged.
        batch["sequences"][:, -mask.shape[1] :][mask != 0] += 1
        found[-1]["stale"] = missing_verdict_error(trainer.compute_advantages_and_returns, batch)
        found[-1]["refused"] = refused()
    emit(found)


if __name__ == "__main__":
    main()
