"""Stand-in for tau2.evaluator.evaluator_nl_assertions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

DEFAULT_LLM_NL_ASSERTIONS = "the default judge"
DEFAULT_LLM_NL_ASSERTIONS_ARGS: dict[str, Any] = {"temperature": 0.0}


def generate(model: str, **arguments: Any) -> SimpleNamespace:
    """A judge's reply that cost 100 tokens in and 10 out."""
    return SimpleNamespace(usage={"prompt_tokens": 100, "completion_tokens": 10}, model=model, arguments=arguments)


def judge() -> SimpleNamespace:
    """Call `generate` as tau2 does, with the module's own globals."""
    return generate(model=DEFAULT_LLM_NL_ASSERTIONS, call_name="nl_assertions_eval", **DEFAULT_LLM_NL_ASSERTIONS_ARGS)
