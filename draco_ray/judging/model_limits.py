"""LiteLLM, kept quiet and offline, and what its table says of how much a model reads and writes."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Literal


def quiet_litellm() -> Any:
    """Import LiteLLM: it takes seconds, and would fetch its price list and Anthropic's headers unless told not to."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"):
        os.environ.setdefault(name, "True")
    import litellm

    if "LITELLM_LOG" not in os.environ:
        # What goes wrong is raised as well, and said in our words.
        litellm.verbose_logger.setLevel(logging.CRITICAL)
    # It would ask huggingface.co how much a model reads.
    litellm.utils._get_max_position_embeddings = lambda model_name: None
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


@functools.cache
def refuses_temperature(model: str, api_base: str | None, temperature: float) -> bool:
    """Whether LiteLLM knows a model to take no such temperature; told to, it leaves it out without a word.

    Args:
        model: LiteLLM's name of it, provider prefix included.
        api_base: endpoint; None: the provider's own.
        temperature: that would be sent.
    """
    litellm = quiet_litellm()
    try:
        name, provider, _, _ = litellm.get_llm_provider(model, api_base=api_base)
        litellm.utils.get_optional_params(model=name, custom_llm_provider=provider, temperature=temperature)
    except litellm.UnsupportedParamsError:
        return True
    except litellm.BadRequestError:
        return False  # It does not know the provider; the request will say so.
    return False


def model_limit(model: str, kind: Literal["max_input_tokens", "max_output_tokens"]) -> int | None:
    """A limit of an API model, tokens; None for a model that the table does not have.

    Args:
        model: LiteLLM's name of it, provider prefix included.
        kind: of prompts or of replies.
    """
    try:
        known = quiet_litellm().get_model_info(model).get(kind)
    except Exception:  # It raises a plain one for a model it does not know.
        return None
    return known if isinstance(known, int) and known > 0 else None
