"""Stand-in for tau2.knowledge.embedders.openrouter_embedder."""

from __future__ import annotations

import os
from typing import Any


class OpenAI:
    """Stores its arguments."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


class OpenRouterEmbedder:
    """Makes its client as tau2 does."""

    SUPPORTED_MODELS = {"qwen3-embedding-8b": {"api_string": "qwen/qwen3-embedding-8b", "dimension": 4096}}  # noqa: RUF012

    def __init__(self) -> None:
        self.model = self.SUPPORTED_MODELS["qwen3-embedding-8b"]["api_string"]
        self.client = OpenAI(api_key=os.getenv("OPENROUTER_API_KEY"), base_url="https://openrouter.ai/api/v1")
