"""One real step of TRL's GRPOTrainer whose per-token advantages are ours."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

from tests.support.adapters import ASK, Canned, emit, said

FLIGHTS = ("DL9", "UA1")
TURNS = ((3, 1), (2, 0), (4, 1), (2, 0), (2, 1))
"""Tokens of each message, and whether the policy sampled them."""


def main() -> None:
    """Train once; print what the loss was given, the mask and the loss."""
    from trl import import_utils

    import_utils.is_vllm_available = lambda *_, **__: False
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from draco_ray.adapters.trl import StepCredit

    bench: Any = importlib.import_module("jobs.bench_learner")
    tiny = bench.SHAPES["small"] | {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    tiny |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = Path(tempfile.mkdtemp())
    bench.build_model(folder / "model", tiny)
    given: dict[str, Any] = {}

    def recorded(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        ids = [[(7 * row + place) % 200 + 1 for place in range(13)] for row in range(2)]
        mask = [sampled for count, sampled in TURNS for _ in range(count)]
        return {
            "prompt_ids": [[1, 2, 3]] * 2,
            "completion_ids": ids,
            "logprobs": [[0.0] * 13] * 2,
            "env_mask": [mask] * 2,
            "messages": [said(flight) for flight in FLIGHTS],
        }

    class Recording(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            given.update(
                advantages=inputs["advantages"].tolist(),
                mask=(inputs["completion_mask"] * inputs["tool_mask"]).tolist(),
                loss=float(loss),
            )
            return loss

    credit = StepCredit("canned", complete=Canned())
    trainer = credit.trainer(Recording)(
        model=str(folder / "model"),
        reward_funcs=credit,
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=16,
            max_steps=1,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [ASK]}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        rollout_func=recorded,
    )
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    trainer.train()
    moved = any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.named_parameters())
    emit({**given, "moved": moved, "rewards": [each.trace.reward for each in credit._latest if each]})


if __name__ == "__main__":
    main()
