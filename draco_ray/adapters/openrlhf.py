"""Step credit in OpenRLHF's trainer (0.11).

    OpenRLHFCredit("openai/gpt-5.4", budget=50.0, store="verdicts.sqlite").install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")

The judge's reward replaces the agent function's. OpenRLHF's estimator (rloo, reinforce_baseline, group_norm or dr_grpo)
computes an advantage A_i from it, which is then spread over the sampled tokens of each step. A sample that could not be
judged gets advantage 0 and counts in no baseline; only the whitening of reinforce_baseline includes it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from draco_ray.adapters.credit import CreditJudge, conversation_of_tokens
from draco_ray.adapters.verdicts import TrajectoryKey, digest
from draco_ray.errors import ConfigError

CORRECTIONS = {
    "rloo": lambda size, judged: judged * (size - 1) / ((judged - 1) * size),
    "group_norm": lambda size, judged: ((judged - 1) / (size - 1)) ** 0.5,
    "reinforce_baseline": lambda size, judged: 1.0,
    "dr_grpo": lambda size, judged: 1.0,
}
"""Estimator -> factor that corrects A_i if ``size - judged`` samples of a group had no reward and got the mean."""


class OpenRLHFCredit(CreditJudge):
    """A judge of OpenRLHF's samples."""

    def install(self) -> None:
        """Patch OpenRLHF's synchronous trainer to use step credit; call this before the trainer starts.

        Starting the asynchronous trainer raises ConfigError.
        """
        import ray
        from openrlhf.trainer import ppo_trainer, ppo_trainer_async

        credit, maker = self, ppo_trainer.RemoteExperienceMaker
        host: Any = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class

        class StepCreditTrainer(host):
            """OpenRLHF's trainer. Its Ray process finds the experience maker by name, so the name is rebound there."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                ppo_trainer.RemoteExperienceMaker = credit.experience_maker(maker)
                super().__init__(*arguments, **options)

        ppo_trainer.PPOTrainer = ray.remote(StepCreditTrainer)
        ppo_trainer_async.PPOTrainerAsync = _Asynchronous

    def experience_maker(self, base: Any) -> type:
        """Add step credit to ``base``, OpenRLHF's RemoteExperienceMaker.

        The new class's constructor raises ConfigError for settings with which step credit cannot be used.
        """
        credit = self

        class StepCreditExperienceMaker(base):
            """Judges the samples of a step, and spreads the advantages that OpenRLHF computes."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                _check(self.args)

            def make_experience_batch(self, rollout_samples: Any) -> Any:
                credit.reward(rollout_samples, self.args.rollout.n_samples_per_prompt, self.tokenizer.decode)
                return super().make_experience_batch(rollout_samples)

            def compute_advantages_and_returns(self, experiences: Any) -> Any:
                found = super().compute_advantages_and_returns(experiences)
                credit.spread(found, self.args.rollout.n_samples_per_prompt, self.advantage_estimator)
                return found

        return StepCreditExperienceMaker

    def reward(self, samples: Sequence[Any], size: int, decode: Any) -> None:
        """Judge samples, and write rewards into them.

        Args:
            samples: OpenRLHF's Experiences of one sample each; every ``size`` consecutive ones are a group.
            size: number of samples per prompt.
            decode: token ids to text.
        """
        import torch

        words = functools.partial(decode, skip_special_tokens=True)
        keys, records, tokens = [], [], []
        for number, sample in enumerate(samples):
            ids, mask = sample.sequences[0].tolist(), [0, *sample.action_mask[0].tolist()]
            first = int(np.argmax(mask))
            messages, counts = conversation_of_tokens(words(ids[:first]), ids[first:], mask[first:], words)
            keys += _keys(sample)
            records.append({"task_id": str(number // size), "messages": messages})
            tokens.append(counts)
        verdicts = self.judge_sync(keys, records, tokens)
        for begin in range(0, len(samples), size):
            rewards = [verdict.reward for verdict in verdicts[begin : begin + size]]
            # OpenRLHF needs groups of equal size: a sample without a reward gets the mean, which changes no baseline.
            known = [reward for reward in rewards if reward is not None]
            mean = sum(known) / max(len(known), 1)
            for sample, reward in zip(samples[begin : begin + size], rewards, strict=True):
                sample.rewards = torch.tensor([mean if reward is None else reward], dtype=torch.float32)
                sample.info["reward"] = sample.rewards

    def spread(self, experiences: Sequence[Any], size: int, estimator: str) -> None:
        """Spread A_i, so far the same on all tokens of a row, over the row's steps.

        Args:
            experiences: OpenRLHF's Experiences, with ``advantages`` (B, T) and ``index``.
            size: number of samples per prompt.
            estimator: OpenRLHF's name of the advantage estimator.

        Raises: MissingVerdict: see `VerdictStore.spread`.
        """
        keys = [_keys(each) for each in experiences]
        failed = [[v is not None and v.reward is None for v in self.store.get(each)] for each in keys]
        judged = Counter(
            index // size
            for each, lost in zip(experiences, failed, strict=True)
            for index, gone in zip(each.index, lost, strict=True)
            if not gone
        )
        for each, names, lost in zip(experiences, keys, failed, strict=True):
            mask = each.action_mask.cpu().numpy()
            uniform = each.advantages.cpu().numpy()[np.arange(len(mask)), mask.argmax(axis=1)]
            for row, (index, gone) in enumerate(zip(each.index, lost, strict=True)):
                count = judged[index // size]
                uniform[row] *= 0.0 if gone or count < 2 else CORRECTIONS[estimator](size, count)
            each.advantages = each.advantages.new_tensor(self.store.spread(names, uniform, mask))
            each.returns = each.advantages.clone()


class _Asynchronous:
    """Replaces OpenRLHF's asynchronous trainer, which trains without step credit; starting it raises ConfigError."""

    @staticmethod
    def remote(*_: Any, **__: Any) -> Any:
        """Raise ConfigError, because the asynchronous trainer is being started."""
        raise ConfigError(
            f"openrlhf {version('openrlhf')}: --train.async_enable trains without step credit; leave it out"
        )


def _keys(experience: Any) -> list[TrajectoryKey]:
    """A key for each row, made from its tokens."""
    rows = zip(experience.sequences, experience.attention_mask, strict=True)
    return [TrajectoryKey("openrlhf", "", digest(ids[shown.bool()].tolist())) for ids, shown in rows]


def _check(args: Any) -> None:
    estimator = args.algo.advantage.estimator
    if estimator not in CORRECTIONS:
        raise ConfigError(
            f"openrlhf {version('openrlhf')}: --algo.advantage.estimator={estimator} computes no advantage within "
            f"a group; expected {', '.join(CORRECTIONS)}"
        )
    if args.algo.dynamic_filtering_enable:
        raise ConfigError(
            f"openrlhf {version('openrlhf')}: --algo.dynamic_filtering_enable drops groups by the agent's own scores, "
            "before they are judged; leave it out"
        )
    if args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss:
        raise ConfigError(
            f"openrlhf {version('openrlhf')}: with KL in the reward each token has its own advantage, so step credit "
            "cannot be used; expected --algo.kl.use_loss, or --algo.kl.init_coef=0"
        )
