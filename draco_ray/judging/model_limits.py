"""LiteLLM, kept quiet and offline, and what its table says of how much a model reads and writes."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from draco_ray.config.schema import FILES, RULES


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
    known = listed_model(model).get(kind)
    return known if isinstance(known, int) and known > 0 else None


def listed_model(model: str) -> Mapping[str, Any]:
    """The row of LiteLLM's price table for a model; empty for one that it does not have.

    The file is read without importing LiteLLM, which takes seconds, and is only needed for names that it rewrites.
    """
    if model == RULES or model.startswith(FILES):
        return {}
    if os.environ.get("LITELLM_LOCAL_MODEL_COST_MAP", "True").lower() == "true":
        table = _table()
        provider, _, name = model.partition("/")
        if (row := table.get(model)) or (
            (row := table.get(name)) and str(row.get("litellm_provider")).startswith(provider)
        ):
            return row
    litellm = quiet_litellm()
    try:
        key = litellm.get_model_info(model)["key"]
    except Exception:  # It raises a plain one for a model it does not know.
        return {}
    listed: Mapping[str, Any] = litellm.model_cost.get(key, {})
    return listed


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    spec = importlib.util.find_spec("litellm")
    folder = Path(spec.origin or "").parent if spec else Path()
    file = folder / "model_prices_and_context_window_backup.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
