"""LiteLLM's tables: parameters that models refuse, and limits and prices of models, read without network access."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from draco_ray.config.schema import FILES_PREFIX, RULE_JUDGE


def import_litellm_quietly() -> Any:
    """Import LiteLLM, which takes seconds, without its downloads of a price list and of Anthropic's headers."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"):
        os.environ.setdefault(name, "True")
    import litellm

    # Setting a level is slow: it clears the caches of all loggers.
    if "LITELLM_LOG" not in os.environ and litellm.verbose_logger.level != logging.CRITICAL:
        # Errors are also raised, and reported in our own words.
        litellm.verbose_logger.setLevel(logging.CRITICAL)
    # LiteLLM would ask huggingface.co for a model's context length.
    litellm.utils._get_max_position_embeddings = lambda model_name: None
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def refused_parameters(model: str, api_base: str | None, **parameters: Any) -> str | None:
    """Why LiteLLM would refuse a request with these parameters; None if it would not, or does not know the model.

    Args:
        model: LiteLLM's name of the model, provider prefix included.
        api_base: endpoint; None: the provider's own.
        parameters: the parameters of the request.
    """
    litellm = import_litellm_quietly()
    try:
        name, provider, _, _ = litellm.get_llm_provider(model, api_base=api_base)
        litellm.utils.get_optional_params(model=name, custom_llm_provider=provider, **parameters)
    except litellm.UnsupportedParamsError as error:
        return str(error)
    except litellm.BadRequestError:
        return None  # The request itself will fail with this error.
    return None


def model_limit(model: str, kind: Literal["max_input_tokens", "max_output_tokens"]) -> int | None:
    """A limit of an API model, in tokens; None for a model that the table does not have.

    Args:
        model: LiteLLM's name of the model, provider prefix included.
        kind: limit of prompts or of replies.
    """
    known = litellm_model_info(model).get(kind)
    return known if isinstance(known, int) and known > 0 else None


def litellm_model_info(model: str) -> Mapping[str, Any]:
    """The row of LiteLLM's price table for a model; empty for a model that is not listed.

    The file is read without LiteLLM, whose import takes seconds and is only needed for names that it rewrites.
    """
    if model == RULE_JUDGE or model.startswith(FILES_PREFIX):
        return {}
    if os.environ.get("LITELLM_LOCAL_MODEL_COST_MAP", "True").lower() == "true":
        table = _table()
        provider, _, name = model.partition("/")
        if (row := table.get(model)) or (
            (row := table.get(name)) and str(row.get("litellm_provider")).startswith(provider)
        ):
            return row
    litellm = import_litellm_quietly()
    try:
        key = litellm.get_model_info(model)["key"]
    except Exception:  # LiteLLM raises a plain Exception for an unknown model.
        return {}
    listed: Mapping[str, Any] = litellm.model_cost.get(key, {})
    return listed


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    spec = importlib.util.find_spec("litellm")
    folder = Path(spec.origin or "").parent if spec else Path()
    file = folder / "model_prices_and_context_window_backup.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
