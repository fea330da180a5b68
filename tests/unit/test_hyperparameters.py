"""The default configuration is the paper's Table "hparams" (appendix "Training Hyperparameters"), key by key."""

from __future__ import annotations

from typing import Any

import pytest

from draco_ray.config.load import load_config
from draco_ray.environments.appworld.slot import soft_cell_timeout
from draco_ray.training.trainer import TaskOrder

# Typed from the table; the comment is the row's name there.
PAPER: dict[str, Any] = {
    "learner.kl_coefficient": 0.01,  # KL coefficient (k3, loss term)
    "train.prompts_per_step": 16,  # Prompts per step
    "algorithm.group_size": 6,  # Group size G
    "learner.minibatch_prompts": 8,  # Minibatch size
    "train.epochs": 20,  # Training length
    "train.checkpoint_every": 1,  # Checkpoint interval
    "learner.learning_rate": 5e-5,  # Learning rate
    "learner.weight_decay": 0.01,  # Weight decay
    "learner.max_grad_norm": 1.0,  # Gradient clipping
    "learner.clip_low": 0.2,  # Clip range (low / high)
    "learner.clip_high": 0.2,
    "learner.dual_clip": 3.0,  # Dual-clip constant
    "learner.entropy_coefficient": 0.0,  # Entropy bonus
    "engine.temperature": 1.0,  # Temperature
    "engine.top_p": 1.0,  # Top-p
    "engine.top_k": -1,  # top-k, unrestricted
    "agent.max_turns": 50,  # Max assistant turns
    "agent.max_prompt_length": 4096,  # Max prompt length
    "agent.max_response_length": 24576,  # Max response length
    "agent.max_turn_tokens": None,  # no limit of a turn's own
    "learner.lora_rank": 16,  # Rank / alpha
    "learner.lora_alpha": 32,
    "learner.lora_target": "all-linear",  # Target modules
    "model.path": "Qwen/Qwen3.6-27B",  # Base models
    # Section "Training and Implementation" and appendix "Prompts".
    "judge.temperature": 0.1,
    "judge.max_stage1_criteria": 15,
    "judge.max_stage2_criteria": 10,
    "judge.max_union_criteria": 24,
    "algorithm.rule": "draco",
    "algorithm.reward": "rubric",
    "algorithm.rubric": "dynamic",
}


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("key", PAPER)
def test_the_default_is_the_papers(key: str) -> None:
    assert _value(load_config(), key) == PAPER[key]


@pytest.mark.parametrize(("preset", "steps", "thinking"), [("qwen3.6-27b", 100, True), ("qwen2.5-32b", 75, False)])
def test_the_ready_configurations_train_as_long_as_the_paper_on_eight_gpus(
    preset: str, steps: int, thinking: bool
) -> None:
    config = load_config(preset)
    order = TaskOrder([str(task) for task in range(90)], config.train.prompts_per_step, config.seed)
    assert config.train.epochs * order.steps_per_epoch == steps
    assert config.agent.thinking is thinking
    gpus = config.engine.engines * config.engine.gpus_per_engine
    assert gpus + config.learner.workers * config.learner.gpus_per_worker == 8
    for key in PAPER:
        if not key.startswith(("model.", "train.epochs")):
            assert _value(config, key) == PAPER[key]


@pytest.mark.parametrize(("preset", "seconds"), [("qwen3.6-27b", 100), ("qwen2.5-32b", 100), ("sandbox", 24)])
def test_a_cell_of_the_papers_runs_has_appworlds_own_time(preset: str, seconds: int) -> None:
    """AppWorld's default ``timeout_seconds`` is 100; the sandbox's cells take milliseconds."""
    assert soft_cell_timeout(load_config(preset).environment) == seconds


@pytest.mark.parametrize(
    ("model", "input_price", "output_price"),
    [("gpt-5.4", 2.5, 15.0), ("Qwen3.6-27B", 0.289, 0.9), ("Qwen2.5-32B-Instruct", 0.66, 0.8)],
)
def test_the_reference_prices_ship(model: str, input_price: float, output_price: float) -> None:
    price = load_config().judge.prices[model]
    assert (price.input, price.output) == (input_price, output_price)


@pytest.mark.parametrize(
    ("setting", "reward", "rubric", "rule"),
    [
        ("draco", "rubric", "dynamic", "draco"),
        ("no-credit", "rubric", "dynamic", "grpo"),
        ("static-credit", "rubric", "static", "draco"),
        ("static", "rubric", "static", "grpo"),
        ("outcome", "outcome", None, "grpo"),
        ("random", "random", None, "grpo"),
    ],
)
def test_a_setting_is_one_word(setting: str, reward: str, rubric: str | None, rule: str) -> None:
    algorithm = load_config(None, [], setting).algorithm
    assert (algorithm.reward, algorithm.rule) == (reward, rule)
    assert rubric is None or algorithm.rubric == rubric
