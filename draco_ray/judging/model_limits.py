"""LiteLLM, kept quiet and offline, and what its table says of how much a model reads and writes."""

from __future__ import annotations

import os
from typing import Any, Literal


def quiet_litellm() -> Any:
    """Import LiteLLM: it takes seconds, and would fetch its price list unless told not to."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


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
