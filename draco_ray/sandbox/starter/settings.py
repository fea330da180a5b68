"""Everything that decides what the starter policy becomes: demonstrations, tokenizer, architecture, optimisation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draco_ray.config.schema import Tree
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
"""Without any fault in 43 % of the demonstrations' draws. What a transcript shows plainly (later pages skipped, no
completion) is frequent, what only a close reader would notice (a wrong comparison) is rare."""

HARD_FAULT_RATES = FAULT_RATES | {
    Fault.FIRST_PAGE_ONLY: 0.5,
    Fault.WRONG_SOURCE: 0.2,
    Fault.WRONG_FILTER: 0.2,
    Fault.NO_COMPLETION: 0.4,
}
"""Of the hard variety: a fifth of the draws is without any fatal fault."""


class StarterSettings(Tree):
    """The starter policy's recipe. Together with the world and the seed it fixes the weights."""

    split: str = "train"
    """Split whose tasks, users and parameters are demonstrated; no other split is read. Each is asked for in every
    wording its family has, those that only held-out splits use included: that stands in for the language a pretrained
    model knows, of which two wordings teach a model of this size nothing."""
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
    """One that vLLM's CPU attention knows: 32, 64, 80, 96, 112, 128, ..."""
    positions: int = Field(4096, ge=128)
    """Longest sequence the model accepts, tokens."""
    epochs: int = Field(7, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    """Peak; linear warm-up, then cosine to a tenth of it."""
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
