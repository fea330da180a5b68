"""OpenRLHF's experience maker and policy loss, on the samples that its generator makes of two groups' rollouts.

Stand-ins: DeepSpeed, FlashAttention and vLLM, which its modules import, are empty modules; the group of actors answers
each forward pass with the same log-probability. So the optimizer's step, which needs a GPU, is not run.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import peft  # noqa: F401
import transformers.trainer  # noqa: F401
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer  # noqa: F401

from tests.support.adapters import ASK, PartlyFailingCompleter, emit, missing_verdict_error
from tests.support.adapters.verl_runs import mask_of, text_of, token_ids

# Import these after transformers and peft, which would check the versions of the empty modules.
for name in (
    "deepspeed",
    "deepspeed.runtime",
    "deepspeed.runtime.zero",
    "deepspeed.runtime.zero.offload_config",
    "deepspeed.runtime.zero.partition_parameters",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
    "vllm",
    "vllm.inputs",
    "vllm.utils",
):
    sys.modules[name] = MagicMock(__name__=name, __path__=[], __spec__=None)

PROMPT = [7]


class StubTokenizer:
    """A tokenizer in which the first token of a message identifies the message."""

    pad_token_id = 0

    def decode(self, ids: Any, **_: Any) -> str:
        """The messages of a token sequence."""
        return ASK if 7 in ids else text_of(ids)


class Actors:
    """The actors, whose policy has not changed."""

    def async_run_method_batch(self, method_name: str, sequences: Any, **_: Any) -> Any:
        """Log-probabilities of each batch's tokens."""
        import torch

        return [[torch.full(each[:, 1:].shape, -1.0)] for each in sequences]


def arguments(estimator: str) -> Any:
    """The arguments of OpenRLHF that its experience maker reads."""
    from openrlhf.utils.config import hierarchize

    return hierarchize(
        SimpleNamespace(
            **{
                "algo.advantage.estimator": estimator,
                "algo.advantage.gamma": 1.0,
                "algo.advantage.lambd": 1.0,
                "algo.advantage.no_std_norm": False,
                "algo.dynamic_filtering_enable": False,
                "algo.kl.init_coef": 0.0,
                "algo.kl.target": None,
                "algo.kl.use_loss": False,
                "ckpt.best_metric_key": "",
                "critic.model_name_or_path": None,
                "ds.ring_attn_size": 1,
                "ds.tensor_parallel_size": 1,
                "logger.tensorboard_dir": None,
                "logger.wandb.key": None,
                "reward.clip_range": None,
                "reward.overlong_buffer_len": None,
                "reward.stop_properly_penalty_coef": None,
                "rollout.max_new_tokens": 64,
                "rollout.micro_batch_size": 3,
                "rollout.n_samples_per_prompt": 4,
                "train.colocate_actor_ref": False,
                "train.colocate_all": False,
                "train.dynamic_batch_enable": False,
            }
        )
    )


def samples() -> list[Any]:
    """Two groups in different orders, as samples made by OpenRLHF's generator."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    made = []
    for prompt, sessions in enumerate(((3, 0, 2, 1), (1, 2, 0, 3))):
        for session in sessions:
            start = [7, 8 + prompt]
            mask = [0] * len(start) + mask_of(session)
            edges = [n for n in range(len(mask) + 1) if (mask[n - 1 : n] or [0]) != (mask[n : n + 1] or [0])]
            response = {
                "prompt": ASK,
                "label": "",
                "observation_tokens": start + token_ids(session),
                "action_ranges": list(zip(edges[::2], edges[1::2], strict=True)),
                "rollout_log_probs": None,
                "reward": -9.0,
            }
            made.append(SamplesGenerator._process_response_into_experience(None, response, max_len=64))
    return made


def loss_gradient(experience: Any) -> list[Any]:
    """Gradient of OpenRLHF's policy loss with respect to each token's log-probability."""
    import torch
    from openrlhf.models.loss import PolicyLoss

    log_probs = torch.full(experience.action_mask.shape, -1.0, requires_grad=True)
    loss = PolicyLoss()(log_probs, log_probs.detach(), experience.advantages, action_mask=experience.action_mask)[0]
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return (-gradient * experience.action_mask.sum()).tolist()


def main() -> None:
    """Print the loss's gradients for each estimator, then the error for a stale sample."""
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ppo_utils import experience_maker, split_experience_batch

    from draco_ray.adapters.openrlhf import OpenRLHFCredit
    from draco_ray.errors import ConfigError

    experience_maker.ray = SimpleNamespace(put=lambda value: value, get=lambda value: value)
    ppo_trainer.get_tokenizer = lambda *_, **__: StubTokenizer()
    ppo_trainer.prepare_datasets = lambda *_: (None, None, 1)
    found: dict[str, Any] = {}
    hosts = ppo_trainer.PPOTrainer, ppo_trainer.RemoteExperienceMaker
    for estimator in ("group_norm", "rloo", "dr_grpo", "reinforce_baseline"):
        ppo_trainer.PPOTrainer, ppo_trainer.RemoteExperienceMaker = hosts
        credit = OpenRLHFCredit("canned", complete=PartlyFailingCompleter(unscored="booked XX0"))
        credit.install()
        args = arguments(estimator)
        args.eval, args.data = SimpleNamespace(steps=1), SimpleNamespace(disable_fast_tokenizer=True)
        args.ckpt.save_steps = 1
        trainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class(
            "", SimpleNamespace(args=args), Actors(), None, None, None, None
        )
        experiences = trainer.experience_maker.make_experience_batch(samples())
        # Of a batch of three samples, one is of another group.
        rows = [
            {
                "session": next(int(token) - 100 for token in sample.sequences if token >= 100) // 5,
                "mask": sample.action_mask.tolist(),
                "advantages": sample.advantages.tolist(),
                "pushed": push,
            }
            for each in experiences
            for push, sample in zip(loss_gradient(each), split_experience_batch(each), strict=True)
        ]
        found[estimator] = {"rows": rows, "counts": credit.store.counts}
    stale = trainer.experience_maker.make_experience(trainer.experience_maker.split_rollout_samples(samples()))
    stale[0].sequences[0, 2] += 50
    found["stale"] = missing_verdict_error(trainer.experience_maker.compute_advantages_and_returns, stale)
    filtered = arguments("rloo")
    filtered.algo.dynamic_filtering_enable = True
    maker = credit.experience_maker(experience_maker.RemoteExperienceMaker)
    found["refused"] = []
    for make in (
        lambda: maker(None, None, None, None, None, SimpleNamespace(args=arguments("gae")), StubTokenizer()),
        lambda: maker(None, None, None, None, None, SimpleNamespace(args=filtered), StubTokenizer()),
        # As openrlhf.cli.train_ppo_ray starts it.
        lambda: ppo_trainer_async.PPOTrainerAsync.remote(""),
    ):
        try:
            make()
        except ConfigError as error:
            found["refused"].append(str(error))
    emit(found)


if __name__ == "__main__":
    main()
