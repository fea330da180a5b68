"""Stand-in for tau2.utils.llm_utils: a call through LiteLLM, which drops what a model does not take."""

from __future__ import annotations

from typing import Any


def generate(model: str, messages: list[dict[str, str]], **arguments: Any) -> Any:
    """One completion."""
    import litellm

    return litellm.completion(model=model, messages=messages, drop_params=True, **arguments)
