"""Stand-in for tau2.data_model.simulation."""

from __future__ import annotations

from typing import Any


class TextRunConfig:
    """Keeps what it is given, and knows which names there are."""

    KNOWN = frozenset(
        {"domain", "retrieval_config", "llm_agent", "llm_args_agent", "llm_user", "llm_args_user", "num_trials"}
        | {"max_steps", "max_concurrency", "max_retries", "timeout", "seed", "auto_resume", "workers"}
    )

    def __init__(self, **values: Any) -> None:
        if strange := values.keys() - self.KNOWN:
            raise TypeError(f"unknown: {strange}")
        self.values = values
