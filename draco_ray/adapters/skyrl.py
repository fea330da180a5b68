"""Step credit in SkyRL's trainer, whole trajectories and step-wise ones.

    credit = SkyRLCredit("openai/gpt-5.4", budget=20.0)

    class Experiment(BasePPOExp):
        def get_trainer(self, *arguments, **options):
            return credit.trainer(RayPPOTrainer)(*arguments, **options)

The judge's reward replaces the environment's. SkyRL's own estimator (GRPO, RLOO, MAXRL) computes an advantage A_i from
it, which is then spread over the sampled tokens of each step. With ``step_wise_trajectories`` it is spread over all
rows of a trajectory, on which SkyRL itself would repeat A_i. A trajectory that could not be judged is masked out of the
loss and counts in no baseline.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from draco_ray.adapters.credit import CreditJudge, conversation_of_tokens
from draco_ray.adapters.verdicts import TrajectoryKey, digest
from draco_ray.errors import ConfigError


class SkyRLCredit(CreditJudge):
    """A judge of SkyRL's generator outputs."""

    _failed: frozenset[TrajectoryKey] | set[TrajectoryKey] = frozenset()
    """Keys of those trajectories in the latest generator output that could not be judged and so have no reward.

    These keys are made from all response tokens, not only from the sampled ones.
    """

    def trainer(self, base: Any) -> type:
        """Add step credit to ``base``, a RayPPOTrainer of SkyRL.

        Raises: ConfigError: a version of SkyRL that computes advantages elsewhere.
        """
        for name in ("postprocess_generator_output", "compute_advantages_and_returns"):
            if not hasattr(base, name):
                raise ConfigError(
                    f"skyrl {version('skyrl')}: {base.__name__} has no {name}, by which step credit reaches the loss; "
                    "expected skyrl 0.3"
                )
        credit = self

        class StepCreditTrainer(base):
            """Judges the generated trajectories, and spreads the advantages that SkyRL computes."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                _check(self.cfg)

            def postprocess_generator_output(
                self, generator_output: Any, uids: list[str], *arguments: Any, **options: Any
            ) -> Any:
                failed = credit.reward(generator_output, uids, self.tokenizer.decode)
                output, uids = super().postprocess_generator_output(generator_output, uids, *arguments, **options)
                # SkyRL may have merged rows, but keeps the order of trajectories.
                trajectories = _trajectories(len(uids), output.get("is_last_step"))
                credit._failed = {
                    _key(uids[rows[0]], [output["response_ids"][row] for row in rows])
                    for rows in (trajectories[number] for number in failed)
                }
                return output, uids

            def compute_advantages_and_returns(self, data: Any) -> Any:
                last, uids = data.metadata.get("is_last_step"), list(data.metadata["uids"])
                mask = data["loss_mask"].cpu().numpy()
                ids = data["sequences"].cpu().numpy()[:, -mask.shape[1] :]
                shown = data["response_mask"].cpu().numpy() != 0
                # Put a trajectory without reward in a group of its own, so that it does not count in the baseline.
                data.metadata["uids"] = groups = uids.copy()
                for rows in _trajectories(len(uids), last):
                    if _key(uids[rows[0]], [ids[row][shown[row]] for row in rows]) in credit._failed:
                        for row in rows:
                            groups[row] = f"{uids[row]}, not judged: {rows[0]}"
                data = super().compute_advantages_and_returns(data)
                data.metadata["uids"] = uids
                spread = credit.spread(data["advantages"].cpu().numpy(), shown, mask, ids, uids, last)
                data["advantages"] = data["advantages"].new_tensor(spread)
                return data

        return StepCreditTrainer

    def reward(self, output: Any, uids: Sequence[str], decode: Any) -> list[int]:
        """Judge a generator's output, and write rewards and masks into it.

        Args:
            output: SkyRL's GeneratorOutput.
            uids: the prompt's id of each row.
            decode: token ids to text.

        Returns: indices of the trajectories that could not be judged.
        """
        words = functools.partial(decode, skip_special_tokens=True)
        trajectories = _trajectories(len(uids), output.get("is_last_step"))
        keys, records, tokens = [], [], []
        for rows in trajectories:
            messages, counts = _conversation(output, rows, words)
            ids = [np.asarray(output["response_ids"][row])[np.asarray(output["loss_masks"][row]) != 0] for row in rows]
            keys.append(_key(uids[rows[0]], ids))
            records.append({"task_id": uids[rows[0]], "messages": messages})
            tokens.append(counts)
        verdicts = self.judge_sync(keys, records, tokens)
        rewards = [0.0] * len(uids)
        masks = [list(mask) for mask in output["loss_masks"]]
        for rows, verdict in zip(trajectories, verdicts, strict=True):
            for row in rows:
                rewards[row] = verdict.reward or 0.0
                masks[row] = [0] * len(masks[row]) if verdict.reward is None else masks[row]
        output["rewards"], output["loss_masks"] = rewards, masks
        return [number for number, verdict in enumerate(verdicts) if verdict.reward is None]

    def spread(
        self, advantages: Any, shown: Any, mask: Any, ids: Any, uids: Sequence[str], last: Sequence[bool] | None
    ) -> Any:
        """Spread the advantage of each trajectory over its rows' steps.

        Args:
            advantages: (B, T), the same number on all response tokens of a trajectory.
            shown: (B, T) whether the token belongs to the response.
            mask: (B, T) 1 where the policy sampled the token.
            ids: (B, T) tokens.
            uids: the prompt's id of each row; rows that pad the batch have none.
            last: for each row, whether it is the last of its trajectory; None: every row is one trajectory.

        Returns: (B, T) float32. Raises: see `VerdictStore.spread`.
        """
        found = np.zeros(mask.shape, dtype=np.float32)
        for rows in _trajectories(len(uids), last):
            # Join the rows into one for the store; an unsampled token keeps the turns of two rows apart.
            joined = np.concatenate([np.append(mask[row], 0) for row in rows])
            advantage = float(advantages[rows[0]][shown[rows[0]].argmax()])
            key = _key(uids[rows[0]], [ids[row][mask[row] != 0] for row in rows])
            spread = self.store.spread([key], [advantage], joined[None])[0].reshape(len(rows), -1)
            found[rows] = spread[:, :-1]
        return found


def _check(config: Any) -> None:
    """Raise ConfigError for settings with which credit would be lost or wrong."""
    algorithm, name = config.trainer.algorithm, f"skyrl {version('skyrl')}: trainer."
    if algorithm.advantage_estimator not in ("grpo", "rloo", "maxrl"):
        raise ConfigError(
            f"{name}algorithm.advantage_estimator={algorithm.advantage_estimator} computes no advantage "
            "within a group; expected grpo, rloo or maxrl"
        )
    for setting, used in (
        ("algorithm.dynamic_sampling.type", algorithm.dynamic_sampling.type),
        ("fully_async.sample_full_batch", config.trainer.fully_async.sample_full_batch),
    ):
        if used:
            raise ConfigError(
                f"{name}{setting}={used} drops groups by the environment's rewards, before "
                "they are judged; leave it out"
            )


def _key(uid: str, ids: Sequence[Any]) -> TrajectoryKey:
    return TrajectoryKey(str(uid), "", digest([int(each) for row in ids for each in row]))


def _trajectories(rows: int, last: Sequence[bool] | None) -> list[list[int]]:
    """Rows of each trajectory; SkyRL keeps them together and in order."""
    found: list[list[int]] = [[]]
    for row in range(rows):
        found[-1].append(row)
        if last is None or last[row]:
            found.append([])
    return [each for each in found if each]


def _conversation(output: Any, rows: Sequence[int], decode: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages of a trajectory and its turns' token counts; a step-wise row's prompt repeats the history."""
    messages: list[dict[str, Any]] = []
    counts: list[int] = []
    history: list[int] = []
    for row in rows:
        prompt, response = list(output["prompt_token_ids"][row]), list(output["response_ids"][row])
        new = prompt[len(history) :] if prompt[: len(history)] == history else prompt
        said, tokens = conversation_of_tokens(decode(new), response, output["loss_masks"][row], decode)
        messages += said
        counts += tokens
        history = prompt + response
    return messages, counts
