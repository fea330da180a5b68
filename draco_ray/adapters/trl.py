"""A reward function and per-token advantages for TRL's GRPOTrainer and AsyncGRPOTrainer.

    from trl import GRPOTrainer
    from draco_ray.adapters.trl import StepCredit

    credit = StepCredit("openai/gpt-5.4", budget=20.0)
    trainer = credit.trainer(GRPOTrainer)(model=..., reward_funcs=credit, ...)
    trainer.train()

The reward is the rubric's, in [-1, 1]. TRL computes its own advantage A_i from this and any other reward functions; the
trainer then spreads A_i over the tokens of each step (Eq. `credit`), keeping its sum. If a conversation's tokens do not
match the turns of its messages (for example, because it was truncated), every token keeps A_i.

Groups that TRL splits over processes are gathered: the first process judges them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from draco_ray.adapters.credit import CreditJudge, prompt_messages, trajectory_key
from draco_ray.adapters.verdicts import StepVerdict, TrajectoryKey, digest
from draco_ray.errors import ConfigError
from draco_ray.records import FloatArray


class StepCredit(CreditJudge):
    """A reward function for TRL, whose verdicts `trainer` spreads over tokens."""

    __name__ = "draco"
    _keys: Sequence[TrajectoryKey] = ()
    """Keys of the latest call's completions, in order."""

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        messages: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Rewards of one generation; None where a conversation could not be judged.

        Args:
            prompts: text, or messages. Equal prompts form a group.
            completions: text, or messages, tool calls and results included.
            completion_ids: token ids of each completion, tool results included.
            messages: whole conversations, if ``rollout_func`` returns them; used instead of ``completions``.
        """
        records = [
            {"task_id": repr(prompt), "messages": [*prompt_messages(prompt), *_after(prompt, said)]}
            for prompt, said in zip(prompts, messages or completions, strict=True)
        ]
        names = completion_ids or [record["messages"] for record in records]
        self._keys = [trajectory_key(*each) for each in zip(prompts, names, strict=True)]
        return [each.reward for each in self._judge_everywhere(records)]

    def _judge_everywhere(self, records: list[dict[str, Any]]) -> list[StepVerdict]:
        """Judge the records of all processes in the first process, so that every group is complete."""
        torch = sys.modules.get("torch")
        dist = getattr(torch, "distributed", None)
        if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return self.judge_sync(self._keys, records)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (self._keys, records))
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [self.judge_sync(*([each for part in parts for each in part[n]] for n in (0, 1)))]
            except Exception as error:  # Send the error: the other processes wait for an answer.
                answer = [error]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        begin = sum(len(part[0]) for part in parts[: dist.get_rank()])
        verdicts: list[StepVerdict] = answer[0][begin : begin + len(records)]
        self.store.put(dict(zip(self._keys, verdicts, strict=True)))
        return verdicts

    def advantages(
        self, advantages: ArrayLike, mask: ArrayLike, completion_ids: Sequence[Sequence[int]] | None = None
    ) -> FloatArray:
        """Spread A_i over the tokens of the latest call's sequences.

        Args:
            advantages: (B,).
            mask: (B, T), 1 where the policy sampled the token.
            completion_ids: token ids of each sequence, to detect sequences that the call did not judge.

        Returns: (B, T) float32. Raises: see `VerdictStore.spread`.
        """
        mask_BT = np.asarray(mask)
        keys = list(self._keys)
        if len(keys) != len(mask_BT):
            keys = [
                TrajectoryKey(f"{len(keys)} sequences judged, {len(mask_BT)} trained", "", str(n))
                for n, _ in enumerate(mask_BT)
            ]
        elif completion_ids is not None:
            keys = [key._replace(sample=digest(list(ids))) for key, ids in zip(keys, completion_ids, strict=True)]
        return self.store.spread(keys, advantages, mask_BT)

    def trainer(self, base: type) -> type:
        """Add step credit to ``base``, a GRPOTrainer or an AsyncGRPOTrainer.

        Raises: ConfigError: a trainer, or a version of TRL, whose losses take no per-token advantages.
        """
        if any(each.__name__ == "AsyncGRPOTrainer" for each in base.__mro__):
            from draco_ray.adapters.trl_async import async_trainer

            return async_trainer(self, base)
        # Find TRL's class that defines the loss. RLOOTrainer and GMPOTrainer define losses that average the advantages
        # of a row.
        losses = [each for each in base.__mro__ if each.__module__.startswith("trl.") and "_compute_loss" in vars(each)]
        if not losses or losses[0].__name__ != "GRPOTrainer" or not hasattr(base, "_generate_and_score_completions"):
            raise ConfigError(
                f"trl {version('trl')}: the loss of {base.__name__} takes no per-token advantages; expected "
                "GRPOTrainer or AsyncGRPOTrainer"
            )
        return _sync_trainer(self, base)


def _sync_trainer(credit: StepCredit, base: Any) -> type:
    class StepCreditTrainer(base):
        """Replaces the advantage of each sequence by per-token advantages, which TRL's losses accept."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            credit._keys = ()
            output = super()._generate_and_score_completions(inputs)
            shown = output["completion_mask"].bool()
            mask = shown * output["tool_mask"] if "tool_mask" in output else shown
            uniform = output["advantages"]
            ids = [row[there].tolist() for row, there in zip(output["completion_ids"], shown, strict=True)]
            before = credit.store.counts.copy()
            output["advantages"] = uniform.new_tensor(credit.advantages(uniform.tolist(), mask.cpu().numpy(), ids))
            for name, count in (credit.store.counts - before).items():
                self._metrics["train" if self.model.training else "eval"][f"draco/{name}"].append(count)
            return output

    return StepCreditTrainer


def _after(prompt: Any, said: Any) -> list[Any]:
    """The messages of a completion, or of a whole conversation after its prompt."""
    if isinstance(said, str):
        return [{"role": "assistant", "content": said}]
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return list(said[len(given) :] if list(said[: len(given)]) == given else said)
