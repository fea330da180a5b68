"""The settings that determine the starter policy: demonstrations, tokenizer, architecture, optimisation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draco_ray.config.schema import ConfigSection
from draco_ray.sandbox.world.scripts import Fault

FAULT_RATES = {
    Fault.FIRST_PAGE_ONLY: 0.3,
    Fault.WRONG_SOURCE: 0.1,
    Fault.WRONG_FILTER: 0.05,
    Fault.NO_COMPLETION: 0.25,
    Fault.PRINT_SECRET: 0.25,
    Fault.REPEAT_FAILING_CALL: 0.15,
    Fault.CONTINUE_AFTER_COMPLETION: 0.2,
}
"""At these rates, 43 % of the demonstrations' draws have no fault. Faults that a transcript shows plainly (later pages
skipped, no completion) are frequent; those that only a close reader would notice (a wrong comparison) are rare."""

HARD_FAULT_RATES = FAULT_RATES | {
    Fault.FIRST_PAGE_ONLY: 0.5,
    Fault.WRONG_SOURCE: 0.2,
    Fault.WRONG_FILTER: 0.2,
    Fault.NO_COMPLETION: 0.4,
}
"""Fault rates of the hard variety: a fifth of the draws have no fatal fault."""


class StarterSettings(ConfigSection):
    """The starter policy's recipe. Recipe, world and seed together determine the weights."""

    split: str = "train"
    """Split whose tasks, users and parameters are demonstrated; no other split is read. Tasks are asked in all wordings
    of their family, also those that only held-out splits use: this stands in for the language that a pretrained model
    knows, because a model of this size learns none of it from two wordings."""
    variants: int = Field(4, ge=1)
    """Demonstrations a task, each with its own independent draw of faults."""
    fault_rates: dict[Fault, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=lambda: dict(FAULT_RATES))
    """Probability of each fault in a demonstration whose family has it; faults that are left out do not occur."""
    closing: str = "Done."
    """The closing turn's text."""
    vocabulary: int = Field(1024, ge=300)
    """Tokenizer entries, special tokens included."""
    hidden_size: int = Field(256, ge=32)
    intermediate_size: int = Field(512, ge=32)
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    key_value_heads: int = Field(2, ge=1)
    head_dim: int = Field(32, ge=32)
    """A size that vLLM's CPU attention supports: 32, 64, 80, 96, 112, 128, ..."""
    positions: int = Field(4096, ge=128)
    """Longest sequence the model accepts, tokens."""
    epochs: int = Field(7, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    """Peak value, after a linear warm-up and before a cosine decay to a tenth of it."""
    warmup_fraction: float = Field(0.05, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    batch_tokens: int = Field(512, ge=64)
    """Padded tokens in one optimizer update."""
    threads: int = Field(1, ge=1)
    """PyTorch threads; part of the recipe because the order of sums decides the last bits of the weights."""
    processes: int = Field(2, ge=1)
    """AppWorld processes that execute demonstrations; does not influence the result."""


def default_settings(variety: str) -> StarterSettings:
    """The recipe for a variety of the sandbox."""
    return StarterSettings(fault_rates=HARD_FAULT_RATES) if variety == "hard" else StarterSettings()
