"""The policy as judge of its own run: the checkpoint that acted in a step answers that step's archived prompts.

This is the previous step's checkpoint (appendix "Self-judge"); for the first step, the model without an adapter. A vLLM
engine with the run's own `engine` section serves the checkpoints one after the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.model_directory import load_tokenizer
from draco_ray.errors import ConfigError
from draco_ray.judging.completion import Completer
from draco_ray.judging.judge_context import self_judge_context_length
from draco_ray.judging.self_judge import SelfJudgeClient
from draco_ray.lab.evaluation.policies import Checkpoint, checkpoints, load_adapter, lora_rank
from draco_ray.runs.checkpoints import check_adapter
from draco_ray.runs.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class CheckpointJudge:
    """The policy that acted in a training step, as judge (`draco_ray.judging.completion.Completer`).

    Call `at` in ascending order of steps.
    """

    engine: Any
    """A `VllmEngine` without an adapter: the model that acted in step 1."""
    complete: Completer
    """Answers with the policy that the engine serves."""
    kept: Sequence[Checkpoint]
    """The run's checkpoints (`checkpoints_before`)."""

    async def at(self, training_step: int) -> Completer:
        """Load the policy that acted in that step; returns the judge for the step's prompts.

        Raises:
            DamagedRun: the adapter is damaged.
            EngineError: the engine rejects the adapter.
        """
        if self.engine.policy_version != training_step - 1:
            (checkpoint,) = (each for each in self.kept if each.version == training_step - 1)
            await self.engine.load_adapter(load_adapter(checkpoint))
        return self.complete


def checkpoints_before(run: RunDirectory, steps: Sequence[int]) -> list[Checkpoint]:
    """The checkpoints that acted in these training steps; step 1 has none.

    Raises:
        ConfigError: one of them was not kept.
        DamagedRun: one of them is damaged.
    """
    kept = {checkpoint.version: checkpoint for checkpoint in checkpoints(run)}
    wanted = sorted({step - 1 for step in steps if step > 1})
    if absent := [version for version in wanted if version not in kept]:
        raise ConfigError(
            f"{run.path}: no checkpoint after step {absent[0]}, which is the policy of step {absent[0] + 1}; choose "
            "other steps with --step, or train with train.checkpoint_every=1"
        )
    for version in wanted:
        check_adapter(run.checkpoint(version))
    return [kept[version] for version in wanted]


@asynccontextmanager
async def open_checkpoints(
    config: DracoConfig, run: RunDirectory, steps: Sequence[int]
) -> AsyncIterator[CheckpointJudge]:
    """Serve, on this machine, the checkpoints that were the policy in the given training steps.

    Args:
        config: the run's configuration, with the model, the engine and the self-judge's settings.
        run: the run with the checkpoints.
        steps: training steps whose prompts will be sent.

    Raises:
        ConfigError: a checkpoint was not kept.
        DamagedRun: a checkpoint is damaged.
        EngineError: the model cannot be loaded.
    """
    from draco_ray.engine.model_directory import check_model_directory

    kept = checkpoints_before(run, steps)
    check_model_directory(config.model.path, config.model.chat_template)
    # Imported here because these imports take seconds and other judges do not need them.
    from transformers import AutoConfig

    from draco_ray.engine.vllm_engine import VllmEngine

    path = config.model.path
    # A multimodal model has the context length in its text config.
    positions = int(AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings)
    engine = VllmEngine(
        config.engine,
        config.model,
        max_model_len=min(self_judge_context_length(config), positions),
        lora_rank=max([config.learner.lora_rank, *(lora_rank(run.checkpoint(each.version)) for each in kept)]),
        seed=config.seed,
        name="replay",
    )
    await engine.start()
    try:
        tokenizer = load_tokenizer(path, config.model.chat_template)
        complete = SelfJudgeClient([engine], tokenizer, config.judge, model=f"self/{run.path.name}")
        yield CheckpointJudge(engine, complete, kept)
    finally:
        await engine.stop()
