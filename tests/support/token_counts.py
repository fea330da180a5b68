"""Token counts by the tokenizer of OpenAI's models that comes with LiteLLM."""

from __future__ import annotations

import functools
from typing import Any

from draco_ray.judging.tokens import import_litellm_quietly


@functools.cache
def _encoding() -> Any:
    import_litellm_quietly()
    import tiktoken
    from litellm.litellm_core_utils import default_encoding  # noqa: F401 (sets the folder of the tokenizer)

    return tiktoken.get_encoding("o200k_base")


def count_tokens(text: str) -> int:
    """Tokens of a text."""
    return len(_encoding().encode_ordinary(text))
